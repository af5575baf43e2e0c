"""CosyVoice's language model for TensorRT-LLM: a Qwen2 decoder whose vocabulary is the speech ids.

What it writes is speech, so only speech ids are embedded and scored inside the engine. Text, and version 2's start and
task, come as a prompt-embedding table, of which `prompt.safetensors` has the rows. Version 2's head has a bias, which a
logits processor adds (`BiasRule`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.export.trtllm.checkpoint_folder import CheckpointFolder
from vivavoce.export.trtllm.cutting import Shard, check_divisible
from vivavoce.export.trtllm.decoder import calibrated_names, plan_layer, qwen_config
from vivavoce.export.trtllm.options import TrtLlmOptions
from vivavoce.export.trtllm.rank_plan import RankPlan
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.models.cosyvoice_lm import CosyVoiceLMConfig
from vivavoce.models.interface import Row
from vivavoce.nn.decoder_trunk import TrunkSizes

TRUNK = "llm.model.model"
PROMPT_FILE = "prompt.safetensors"


def sizes_of(checkpoint: Checkpoint, config: CosyVoiceLMConfig) -> TrunkSizes:
    """The decoder's sizes, with the speech ids for a vocabulary and as many layers as the file has."""
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
    """Rows of `CosyVoiceLM.prompt` as an engine takes them: ids, of which those past the speech ids count the table."""
    ids: list[int] = []
    embedded: list[Tensor] = []
    for text, speech in rows:
        if text == config.speech_mark:
            ids.append(speech)
            continue
        ids.append(config.speech_rows + len(embedded))
        special = text - config.speech_mark - 1  # start and task stand behind the mark of speech
        embedded.append(tables["text"][text] if special < 0 else tables["special"][special])
    return ids, torch.stack(embedded) if embedded else None


def _prompt_tables(checkpoint: Checkpoint, dtype: torch.dtype) -> Mapping[str, Tensor]:
    names = {"text": f"{TRUNK}.embed_tokens.weight", "special": "llm_embedding.weight"}
    tables = {ours: checkpoint.tensor(name).to(dtype) for ours, name in names.items() if name in checkpoint}
    if "llm_decoder.bias" in checkpoint:
        tables["head_bias"] = checkpoint.tensor("llm_decoder.bias").float()
    return tables
