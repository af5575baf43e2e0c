"""TensorRT-LLM checkpoints of Whisper (encoder and decoder folders) and of CosyVoice's language model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.export.trtllm.decoder import (
    RankPlan,
    Shard,
    TensorPart,
    calibrated_names,
    check_divisible,
    plan_layer,
    qwen_config,
)
from vivavoce.export.trtllm.folder import CheckpointFolder
from vivavoce.export.trtllm.options import TrtLlmOptions
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.models.cosyvoice.lm import CosyVoiceLMConfig
from vivavoce.models.interface import Row
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.nn.attention import sinusoids
from vivavoce.nn.decoder import TrunkSizes

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
    """Fused QKV; keys have no bias, so theirs is zero."""
    outputs = plan.shard.outputs
    weights = [plan.part(f"{ours}.{name}_proj.weight", outputs) for name in "qkv"]
    query, value = (plan.part(f"{ours}.{name}_proj.bias", outputs) for name in "qv")
    plan.linear(f"{theirs}.qkv", weights, [query, plan.zeros(query), value])
    plan.linear(
        f"{theirs}.dense",
        [plan.part(f"{ours}.out_proj.weight", plan.shard.inputs)],
        [plan.part(f"{ours}.out_proj.bias")],  # not sharded: added after the all-reduce
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


TRUNK = "llm.model.model"
PROMPT_FILE = "prompt.safetensors"


def sizes_of(checkpoint: Checkpoint, config: CosyVoiceLMConfig) -> TrunkSizes:
    """The decoder's sizes from the file, with speech ids as vocabulary."""
    layers = {name.split(".")[4] for name in checkpoint.shapes if name.startswith(f"{TRUNK}.layers.")}
    inner, hidden = checkpoint.shapes[f"{TRUNK}.layers.0.mlp.gate_proj.weight"]
    return TrunkSizes(
        checkpoint.shapes["speech_embedding.weight"][0],
        hidden,
        inner,
        len(layers),
        checkpoint.shapes[f"{TRUNK}.layers.0.self_attn.q_proj.weight"][0] // config.head_dim,
        checkpoint.shapes[f"{TRUNK}.layers.0.self_attn.k_proj.weight"][0] // config.head_dim,
        config.head_dim,
        config.max_position_embeddings,
        config.rms_norm_eps,
        config.rope_theta,
        attention_bias=True,
    )


def module_names(layers: int) -> dict[str, tuple[str, ...]]:
    """Our linear modules → the checkpoint's linears of the same input, for calibration."""
    named: dict[str, tuple[str, ...]] = {}
    for index in range(layers):
        named |= calibrated_names(f"{TRUNK}.layers.{index}", f"transformer.layers.{index}")
    return named


def cosyvoice_folder(
    checkpoint: Checkpoint, options: TrtLlmOptions, part: str, config: CosyVoiceLMConfig | None = None
) -> CheckpointFolder:
    """The folder of `llm.pt` or `llm.rl.pt` of either version."""
    if part not in ("whole", "lm"):
        raise InputError(f"CosyVoice's language model has no part {part}; leave --part out")
    is_second = "llm_embedding.weight" in checkpoint
    config = config or (CosyVoiceLMConfig.cosyvoice2() if is_second else CosyVoiceLMConfig.cosyvoice3())
    sizes = sizes_of(checkpoint, config)
    check_divisible(options.tp, sizes.num_attention_heads, sizes.num_key_value_heads, sizes.intermediate_size)

    def plan(shard: Shard) -> RankPlan:
        planned = RankPlan(checkpoint, shard, options)
        planned.plain("transformer.vocab_embedding.weight", planned.part("speech_embedding.weight"))
        for index in range(sizes.num_hidden_layers):
            plan_layer(planned, f"{TRUNK}.layers.{index}", f"transformer.layers.{index}", sizes)
        planned.plain("transformer.ln_f.weight", planned.part(f"{TRUNK}.norm.weight"))
        planned.plain("lm_head.weight", planned.part("llm_decoder.weight", shard.vocabulary))
        return planned

    return CheckpointFolder(
        "",
        qwen_config(sizes, options, "qwen2", ["lm_head"] if options.quantise == "fp8" else None),
        plan,
        extras={PROMPT_FILE: lambda: _prompt_tables(checkpoint, options.torch_dtype)},
        prompt_table=2048,
    )


def prompt_ids(
    config: CosyVoiceLMConfig, tables: Mapping[str, Tensor], rows: Sequence[Row]
) -> tuple[list[int], Tensor | None]:
    """Rows of `CosyVoiceLM.prompt` as engine input: ids, of which those beyond the speech ids index the table."""
    ids: list[int] = []
    embedded: list[Tensor] = []
    for text, speech in rows:
        if text == config.speech_mark:
            ids.append(speech)
            continue
        ids.append(config.speech_rows + len(embedded))
        special = text - config.speech_mark - 1  # start and task ids follow the speech mark
        embedded.append(tables["text"][text] if special < 0 else tables["special"][special])
    return ids, torch.stack(embedded) if embedded else None


def _prompt_tables(checkpoint: Checkpoint, dtype: torch.dtype) -> Mapping[str, Tensor]:
    names = {"text": f"{TRUNK}.embed_tokens.weight", "special": "llm_embedding.weight"}
    tables = {ours: checkpoint.tensor(name).to(dtype) for ours, name in names.items() if name in checkpoint}
    if "llm_decoder.bias" in checkpoint:
        tables["head_bias"] = checkpoint.tensor("llm_decoder.bias").float()
    return tables
