"""Whisper's weights under one set of names, from Hugging Face's safetensors or OpenAI's `.pt`."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivavoce.errors import CheckpointError
from vivavoce.models.checkpoint import Checkpoint, is_pickled
from vivavoce.models.whisper_config import WhisperConfig

OF_OPENAI = (
    (r"\bblocks\.", "layers."),
    (r"\bcross_attn_ln\.", "encoder_attn_layer_norm."),
    (r"\battn_ln\.", "self_attn_layer_norm."),
    (r"\bcross_attn\.", "encoder_attn."),
    (r"\battn\.", "self_attn."),
    (r"\b(query|key|value)\.", lambda found: f"{found[1][0]}_proj."),
    (r"_attn\.out\.", "_attn.out_proj."),
    (r"\bmlp\.0\.", "fc1."),
    (r"\bmlp\.2\.", "fc2."),
    (r"\bmlp_ln\.", "final_layer_norm."),
    (r"\b(ln_post|ln)\.", "layer_norm."),
    (r"\bpositional_embedding$", "embed_positions.weight"),
    (r"\btoken_embedding\.", "embed_tokens."),
)


class OpenAICheckpoint(Checkpoint):
    """One of OpenAI's files: `dims` and `model_state_dict`."""

    def __init__(self, file: Path) -> None:
        self.source = file
        try:
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            first = str(error).strip().partition("\n")[0][:200]
            raise CheckpointError(f"{file} cannot be read as a torch weights file ({first})") from error
        if not isinstance(content, dict) or "dims" not in content or "model_state_dict" not in content:
            raise CheckpointError(f"{file} is not one of OpenAI's Whisper files: it lacks dims or model_state_dict")
        self.config = WhisperConfig.from_dims(content["dims"])
        self._weights: dict[str, Tensor] = content["model_state_dict"]
        self._tensors = {name: tensor.detach for name, tensor in self._weights.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}

    def close(self) -> None:
        """Forget the tensors."""
        self._tensors.clear()
        self._weights = {}


def open_whisper(source: str | Path) -> tuple[WhisperConfig, Checkpoint]:
    """The config of a published Whisper and its tensors by this house's names."""
    source = Path(source)
    if source.is_file() and is_pickled(source):
        opened = OpenAICheckpoint(source)
        return opened.config, opened.renamed(from_openai)
    folder = source.parent if source.is_file() else source
    config = WhisperConfig.read(folder)
    return config, Checkpoint(source).renamed(from_hugging_face)


def from_openai(name: str) -> str | None:
    """The name of one of OpenAI's tensors here."""
    for pattern, ours in OF_OPENAI:
        name = re.sub(pattern, ours, name)
    return name


def from_hugging_face(name: str) -> str | None:
    """The name of one of Hugging Face's tensors here; the head is the embedding again."""
    return None if name == "proj_out.weight" else name.removeprefix("model.")
