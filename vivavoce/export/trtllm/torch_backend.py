"""A model folder for the PyTorch backend of newer TensorRT-LLM: published weights, a config it reads, a definition."""

import json
import os
import shutil
from importlib.resources import files
from pathlib import Path

from vivavoce.export.trtllm.moss_speech import ARCHITECTURE
from vivavoce.export.trtllm.options import TrtLlmOptions
from vivavoce.models.checkpoint import INDEX_NAME, weight_files
from vivavoce.models.moss_speech import MossSpeechConfig

DEFINITION = "moss_speech_pytorch.py"
BESIDE_THE_WEIGHTS = (INDEX_NAME, "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_torch_backend(source: Path, options: TrtLlmOptions, folder: Path) -> None:
    """Fill a folder that `LLM(model=FOLDER)` takes once its definition is imported."""
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
    """The same file under another name where the disk allows, else a copy."""
    try:
        os.link(file.resolve(), target)
    except OSError:
        shutil.copyfile(file, target)
