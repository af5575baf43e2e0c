"""A decoder layer of the Llama family (Qwen2, Qwen3) under TensorRT-LLM's names, and its config."""

from typing import Any

from vivavoce.export.trtllm.options import TrtLlmOptions
from vivavoce.export.trtllm.rank_plan import RankPlan
from vivavoce.nn.decoder_trunk import TrunkSizes


def plan_layer(plan: RankPlan, ours: str, theirs: str, sizes: TrunkSizes) -> None:
    """One layer; `ours` and `theirs` are its prefixes.

    Beware: their `fc` is the gate (it goes through SiLU) and their `gate` is what it is multiplied with, our `up`.
    """
    shard, attention = plan.shard, f"{ours}.self_attn"
    cuts = {
        "q_proj": shard.outputs,
        "k_proj": lambda weight: shard.key_heads(weight, sizes.num_key_value_heads),
        "v_proj": lambda weight: shard.key_heads(weight, sizes.num_key_value_heads),
    }
    plan.plain(f"{theirs}.input_layernorm.weight", plan.part(f"{ours}.input_layernorm.weight"))
    plan.linear(
        f"{theirs}.attention.qkv",
        [plan.part(f"{attention}.{name}.weight", cut) for name, cut in cuts.items()],
        [plan.part(f"{attention}.{name}.bias", cut) for name, cut in cuts.items() if sizes.attention_bias],
    )
    plan.linear(f"{theirs}.attention.dense", [plan.part(f"{attention}.o_proj.weight", shard.inputs)])
    if sizes.qk_norm:
        plan.plain(f"{theirs}.attention.q_layernorm.weight", plan.part(f"{attention}.q_norm.weight"))
        plan.plain(f"{theirs}.attention.k_layernorm.weight", plan.part(f"{attention}.k_norm.weight"))
    plan.key_value_scale(f"{theirs}.attention")
    plan.plain(f"{theirs}.post_layernorm.weight", plan.part(f"{ours}.post_attention_layernorm.weight"))
    plan.linear(f"{theirs}.mlp.fc", [plan.part(f"{ours}.mlp.gate_proj.weight", shard.outputs)])
    plan.linear(f"{theirs}.mlp.gate", [plan.part(f"{ours}.mlp.up_proj.weight", shard.outputs)])
    plan.linear(f"{theirs}.mlp.proj", [plan.part(f"{ours}.mlp.down_proj.weight", shard.inputs)])


def calibrated_names(ours: str, theirs: str) -> dict[str, tuple[str, ...]]:
    """Which linears of a checkpoint share the input of each of a layer's modules."""
    return {
        f"{ours}.self_attn.qkv_proj": (f"{theirs}.attention.qkv",),
        f"{ours}.self_attn.o_proj": (f"{theirs}.attention.dense",),
        f"{ours}.mlp.gate_up_proj": (f"{theirs}.mlp.fc", f"{theirs}.mlp.gate"),
        f"{ours}.mlp.down_proj": (f"{theirs}.mlp.proj",),
    }


def qwen_config(
    sizes: TrunkSizes, options: TrtLlmOptions, qwen_type: str, exclude: list[str] | None = None
) -> dict[str, Any]:
    """`config.json` of a Qwen2 or Qwen3 decoder."""
    return {
        "architecture": {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[qwen_type],
        "dtype": options.dtype,
        "logits_dtype": "float32",
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_size": sizes.head_dim,
        "hidden_act": "silu",
        "intermediate_size": sizes.intermediate_size,
        "norm_epsilon": sizes.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_embedding_dim": sizes.head_dim,
        "rotary_base": sizes.rope_theta,
        "rotary_scaling": None,
        "qk_layernorm": sizes.qk_norm,
        "attn_bias": sizes.attention_bias,
        "mlp_bias": False,
        "qwen_type": qwen_type,
        "seq_length": sizes.max_position_embeddings,
        "disable_weight_only_quant_plugin": False,
        "moe": {"num_experts": 0, "top_k": 0, "normalization_mode": 0},
        "moe_intermediate_size": 0,
        "moe_shared_expert_intermediate_size": 0,
        "num_labels": 1,
        "tie_word_embeddings": False,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": options.mapping(),
        "quantization": options.quantization(exclude),
        **options.format.general_keys,
        **options.format.qwen_keys,
    }
