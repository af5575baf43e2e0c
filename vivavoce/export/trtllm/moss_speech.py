"""MOSS-Speech for TensorRT-LLM: whole, or its shared trunk as a Qwen3 decoder.

Both have one vocabulary: text ids, then audio codes. That is exact, because a row's embedding is a choice between the
two tables, and one channel of a generated row determines it (see `joint_id`). Whole, the model has 40 layers in the
order of our cache (shared, text tail, audio tail), two norms and two heads; no published architecture matches, so
its folder has the definition, `moss_speech_network.py`. The trunk is a plain Qwen3 whose hidden states *before* the
last norm feed our tails; that norm is all ones, and the heads are included only because Qwen3 requires one.
"""

import json
import os
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

from vivavoce.errors import InputError
from vivavoce.export.trtllm.decoder import RankPlan, Shard, calibrated_names, check_divisible, plan_layer, qwen_config
from vivavoce.export.trtllm.folder import CheckpointFolder
from vivavoce.export.trtllm.options import TrtLlmOptions
from vivavoce.models.checkpoint import INDEX_NAME, Checkpoint, weight_files
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.model import AUDIO, TEXT, MossSpeechConfig
from vivavoce.nn.decoder import TrunkSizes

ARCHITECTURE = "MossSpeechForCausalLM"
NETWORK_FILE = "moss_speech_network.py"
HEADS = ("text_lm_head", "audio_lm_head")


def joint_id(config: MossSpeechConfig, row: Row) -> int:
    """The joint id of a row: its text id, or its audio code offset by the text vocabulary."""
    return row[TEXT] if row[TEXT] != config.modality_pad_token_id else config.vocab_size + row[AUDIO]


def row_of(config: MossSpeechConfig, joint: int) -> Row:
    """The row of a joint id; a text row's unused audio channel holds the pad code."""
    if joint < config.vocab_size:
        return joint, config.audio_pad_token_id
    return config.modality_pad_token_id, joint - config.vocab_size


def sizes_of(config: MossSpeechConfig, layers: int) -> TrunkSizes:
    """The decoder's sizes with the joint vocabulary."""
    return TrunkSizes(
        config.vocab_size + config.audio_vocab_size,
        config.hidden_size,
        config.intermediate_size,
        layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.max_position_embeddings,
        config.rms_norm_eps,
        config.rope_theta,
        qk_norm=True,
    )


def layer_prefixes(config: MossSpeechConfig) -> list[str]:
    """Our layers in the order of the cache: shared, text tail, audio tail."""
    counts = {
        "shared_block": config.num_shared_layers,
        "text_block": config.num_modality_layers,
        "audio_block": config.num_modality_layers,
    }
    return [f"model.{block}.layers.{index}" for block, count in counts.items() for index in range(count)]


def module_names(config: MossSpeechConfig) -> dict[str, tuple[str, ...]]:
    """Our linear modules → the checkpoint's linears of the same input, for calibration."""
    named: dict[str, tuple[str, ...]] = {}
    for index, ours in enumerate(layer_prefixes(config)):
        named |= calibrated_names(ours, f"transformer.layers.{index}")
    return named


def moss_speech_folder(source: Path, checkpoint: Checkpoint, options: TrtLlmOptions, part: str) -> CheckpointFolder:
    """The folder of the `whole` model or of its `trunk`."""
    config = MossSpeechConfig.read(source)
    check_divisible(options.tp, config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    if not options.format.has_qwen3:
        raise InputError(
            f"TensorRT-LLM {options.version} has no decoder with norms on queries and keys; "
            "take --trt-version 1.0.0 or newer"
        )
    if part not in ("whole", "trunk"):
        raise InputError(f"MOSS-Speech has no part {part}; it has whole, trunk")
    if config.vocab_size % options.tp or config.audio_vocab_size % options.tp:
        raise InputError(
            f"vocabularies of {config.vocab_size} and {config.audio_vocab_size} cannot be divided among {options.tp} "
            "ranks; take a smaller --tp"
        )
    return _trunk(checkpoint, config, options) if part == "trunk" else _whole(checkpoint, config, options)


def _trunk(checkpoint: Checkpoint, config: MossSpeechConfig, options: TrtLlmOptions) -> CheckpointFolder:
    sizes = sizes_of(config, config.num_shared_layers)

    def plan(shard: Shard) -> RankPlan:
        planned = _embedded(checkpoint, shard, options)
        for index, ours in enumerate(layer_prefixes(config)[: config.num_shared_layers]):
            plan_layer(planned, ours, f"transformer.layers.{index}", sizes)
        planned.ones("transformer.ln_f.weight", config.hidden_size)
        heads = [planned.part(f"{head}.weight") for head in HEADS]
        planned.plain("lm_head.weight", *heads, view=shard.vocabulary)
        return planned

    return CheckpointFolder("", qwen_config(sizes, options, "qwen3"), plan, network=(NETWORK_FILE, "MossSpeechTrunk"))


def _whole(checkpoint: Checkpoint, config: MossSpeechConfig, options: TrtLlmOptions) -> CheckpointFolder:
    prefixes = layer_prefixes(config)
    sizes = sizes_of(config, len(prefixes))

    def plan(shard: Shard) -> RankPlan:
        planned = _embedded(checkpoint, shard, options)
        for index, ours in enumerate(prefixes):
            plan_layer(planned, ours, f"transformer.layers.{index}", sizes)
        for tail in ("text", "audio"):
            planned.plain(f"transformer.{tail}_ln_f.weight", planned.part(f"model.{tail}_norm.weight"))
        for head in HEADS:
            planned.plain(f"{head}.weight", planned.part(f"{head}.weight", shard.vocabulary))
        return planned

    return CheckpointFolder("", _whole_config(config, sizes, options), plan, network=(NETWORK_FILE, ARCHITECTURE))


def _embedded(checkpoint: Checkpoint, shard: Shard, options: TrtLlmOptions) -> RankPlan:
    planned = RankPlan(checkpoint, shard, options)
    tables = [planned.part(f"model.{name}.weight") for name in ("embed_tokens", "audio_embed")]
    planned.plain("transformer.vocab_embedding.weight", *tables)
    return planned


def _whole_config(config: MossSpeechConfig, sizes: TrunkSizes, options: TrtLlmOptions) -> dict[str, Any]:
    own = {
        "architecture": ARCHITECTURE,
        "text_vocab_size": config.vocab_size,
        "audio_vocab_size": config.audio_vocab_size,
        "num_shared_layers": config.num_shared_layers,
        "num_modality_layers": config.num_modality_layers,
    }
    quantised = list(HEADS) if options.quantise != "none" else None
    return qwen_config(sizes, options, "qwen3", quantised) | own


DEFINITION = "moss_speech_pytorch.py"
BESIDE_THE_WEIGHTS = (INDEX_NAME, "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_torch_backend(source: Path, options: TrtLlmOptions, folder: Path) -> None:
    """Fill a folder for `LLM(model=FOLDER)`, to be used after importing its definition."""
    config = MossSpeechConfig.read(source)
    for file in (*weight_files(source), *(source / name for name in BESIDE_THE_WEIGHTS)):
        if file.is_file():
            _link(file, folder / file.name)
    definition = files("vivavoce.export.trtllm").joinpath(DEFINITION)
    (folder / DEFINITION).write_text(definition.read_text(encoding="utf8"), encoding="utf8")
    content = {
        "architectures": [ARCHITECTURE],
        "model_type": "moss_speech",
        "torch_dtype": options.dtype,
        "vocab_size": config.vocab_size + config.audio_vocab_size,
        "text_vocab_size": config.vocab_size,
        "audio_vocab_size": config.audio_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_shared_layers + 2 * config.num_modality_layers,
        "num_shared_layers": config.num_shared_layers,
        "num_modality_layers": config.num_modality_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2), encoding="utf8")


def _link(file: Path, target: Path) -> None:
    """Hard link if possible, else copy."""
    try:
        os.link(file.resolve(), target)
    except OSError:
        shutil.copyfile(file, target)
