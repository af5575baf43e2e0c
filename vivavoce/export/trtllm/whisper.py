"""Whisper and Breeze-ASR-25 for TensorRT-LLM: an encoder folder and a decoder folder."""

from typing import Any

from vivavoce.errors import InputError
from vivavoce.export.trtllm.checkpoint_folder import CheckpointFolder
from vivavoce.export.trtllm.cutting import Shard, check_divisible
from vivavoce.export.trtllm.options import TrtLlmOptions
from vivavoce.export.trtllm.rank_plan import RankPlan, TensorPart
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.models.whisper_config import WhisperConfig
from vivavoce.nn.sinusoids import sinusoids

FIRST_MULTILINGUAL_VOCABULARY = 51_865
VOCABULARY_WITHOUT_LANGUAGES = 51_765
LAYERNORM_TYPE_LAYER, LAYERNORM_POSITION_PRE = 0, 0


def whisper_folders(
    config: WhisperConfig, checkpoint: Checkpoint, options: TrtLlmOptions, part: str
) -> list[CheckpointFolder]:
    """Encoder and decoder, or one of them."""
    if options.quantise == "fp8" or options.kv_cache != "none":
        raise InputError("Whisper engines take --quantise int8, int4 or none, and no rounded cache")
    if config.decoder_ffn_dim != 4 * config.d_model or config.encoder_ffn_dim != 4 * config.d_model:
        raise InputError(f"Whisper engines have feed-forwards of 4 · {config.d_model} channels; this model has others")
    check_divisible(options.tp, config.encoder_attention_heads, config.encoder_attention_heads, config.encoder_ffn_dim)
    check_divisible(options.tp, config.decoder_attention_heads, config.decoder_attention_heads, config.decoder_ffn_dim)
    folders = {
        "encoder": CheckpointFolder(
            "encoder", _encoder_config(config, options), lambda shard: _encoder(config, checkpoint, shard, options)
        ),
        "decoder": CheckpointFolder(
            "decoder", _decoder_config(config, options), lambda shard: _decoder(config, checkpoint, shard, options)
        ),
    }
    if part not in ("whole", *folders):
        raise InputError(f"Whisper has no part {part}; it has encoder, decoder")
    return [folder for name, folder in folders.items() if part in ("whole", name)]


def _encoder(config: WhisperConfig, checkpoint: Checkpoint, shard: Shard, options: TrtLlmOptions) -> RankPlan:
    plan = RankPlan(checkpoint, shard, options)
    waves = sinusoids(config.max_source_positions, config.d_model)
    plan.plain("transformer.position_embedding.weight", TensorPart(tuple(waves.shape), lambda: waves, lambda: waves))
    for conv in ("conv1", "conv2"):
        plan.plain(f"transformer.{conv}.weight", plan.part(f"encoder.{conv}.weight"), view=lambda w: w.unsqueeze(-1))
        plan.plain(f"transformer.{conv}.bias", plan.part(f"encoder.{conv}.bias"))
    for index in range(config.encoder_layers):
        ours, theirs = f"encoder.layers.{index}", f"transformer.layers.{index}"
        _norm(plan, f"{ours}.self_attn_layer_norm", f"{theirs}.attention_layernorm")
        _attention(plan, f"{ours}.self_attn", f"{theirs}.attention")
        _feed_forward(plan, ours, theirs)
    _norm(plan, "encoder.layer_norm", "transformer.ln_f")
    return plan


def _decoder(config: WhisperConfig, checkpoint: Checkpoint, shard: Shard, options: TrtLlmOptions) -> RankPlan:
    plan = RankPlan(checkpoint, shard, options)
    plan.plain("transformer.vocab_embedding.weight", plan.part("decoder.embed_tokens.weight"))
    plan.plain("transformer.position_embedding.weight", plan.part("decoder.embed_positions.weight"))
    for index in range(config.decoder_layers):
        ours, theirs = f"decoder.layers.{index}", f"transformer.layers.{index}"
        _norm(plan, f"{ours}.self_attn_layer_norm", f"{theirs}.self_attention_layernorm")
        _attention(plan, f"{ours}.self_attn", f"{theirs}.self_attention")
        _norm(plan, f"{ours}.encoder_attn_layer_norm", f"{theirs}.cross_attention_layernorm")
        _attention(plan, f"{ours}.encoder_attn", f"{theirs}.cross_attention")
        _feed_forward(plan, ours, theirs)
    _norm(plan, "decoder.layer_norm", "transformer.ln_f")
    plan.plain("lm_head.weight", plan.part("decoder.embed_tokens.weight", shard.vocabulary))
    return plan


def _norm(plan: RankPlan, ours: str, theirs: str) -> None:
    for kind in ("weight", "bias"):
        plan.plain(f"{theirs}.{kind}", plan.part(f"{ours}.{kind}"))


def _attention(plan: RankPlan, ours: str, theirs: str) -> None:
    """Queries, keys and values as one product; keys have no bias, so theirs is zero."""
    outputs = plan.shard.outputs
    weights = [plan.part(f"{ours}.{name}_proj.weight", outputs) for name in "qkv"]
    query, value = (plan.part(f"{ours}.{name}_proj.bias", outputs) for name in "qv")
    plan.linear(f"{theirs}.qkv", weights, [query, plan.zeros(query), value])
    plan.linear(
        f"{theirs}.dense",
        [plan.part(f"{ours}.out_proj.weight", plan.shard.inputs)],
        [plan.part(f"{ours}.out_proj.bias")],  # whole: it is added once the ranks have been summed
    )


def _feed_forward(plan: RankPlan, ours: str, theirs: str) -> None:
    _norm(plan, f"{ours}.final_layer_norm", f"{theirs}.mlp_layernorm")
    outputs, inputs = plan.shard.outputs, plan.shard.inputs
    plan.linear(
        f"{theirs}.mlp.fc", [plan.part(f"{ours}.fc1.weight", outputs)], [plan.part(f"{ours}.fc1.bias", outputs)]
    )
    plan.linear(f"{theirs}.mlp.proj", [plan.part(f"{ours}.fc2.weight", inputs)], [plan.part(f"{ours}.fc2.bias")])


def _encoder_config(config: WhisperConfig, options: TrtLlmOptions) -> dict[str, Any]:
    is_multilingual = config.vocab_size >= FIRST_MULTILINGUAL_VOCABULARY
    return {
        "architecture": "WhisperEncoder",
        "dtype": options.dtype,
        "num_hidden_layers": config.encoder_layers,
        "num_attention_heads": config.encoder_attention_heads,
        "hidden_size": config.d_model,
        "max_position_embeddings": config.max_source_positions,
        "has_position_embedding": True,
        "n_mels": config.num_mel_bins,
        "vocab_size": config.vocab_size,
        "hidden_act": "gelu",
        "num_languages": config.vocab_size - VOCABULARY_WITHOUT_LANGUAGES - int(is_multilingual),
        "mapping": options.mapping(),
        "quantization": options.quantization(),
    }


def _decoder_config(config: WhisperConfig, options: TrtLlmOptions) -> dict[str, Any]:
    return {
        "architecture": "DecoderModel",
        "model_type": "whisper",
        "dtype": options.dtype,
        "logits_dtype": "float32",
        "num_hidden_layers": config.decoder_layers,
        "num_attention_heads": config.decoder_attention_heads,
        "hidden_size": config.d_model,
        "norm_epsilon": 1e-5,
        "vocab_size": config.vocab_size,
        "hidden_act": "gelu",
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "max_position_embeddings": config.max_target_positions,
        "use_prompt_tuning": False,
        "head_size": config.d_model // config.decoder_attention_heads,
        "has_position_embedding": True,
        "layernorm_type": LAYERNORM_TYPE_LAYER,
        "has_attention_qkvo_bias": True,
        "has_mlp_bias": True,
        "has_model_final_layernorm": True,
        "has_embedding_layernorm": False,
        "has_embedding_scale": False,
        "ffn_hidden_size": config.decoder_ffn_dim,
        "q_scaling": 1.0,
        "layernorm_position": LAYERNORM_POSITION_PRE,
        "relative_attention": False,
        "max_distance": 0,
        "num_buckets": 0,
        "rescale_before_lm_head": False,
        "encoder_hidden_size": config.d_model,
        "encoder_num_heads": config.encoder_attention_heads,
        "encoder_head_size": None,
        "skip_cross_kv": False,
        "mapping": options.mapping(),
        "quantization": options.quantization(),
        **options.format.general_keys,
    }
