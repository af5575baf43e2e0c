"""Published files of Whisper: Hugging Face's layout, OpenAI's `.pt` files, and CTranslate2's `model.bin`."""

import re
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.errors import CheckpointError
from vivavoce.models.checkpoint import Checkpoint, is_pickled, read_torch_file
from vivavoce.models.registry import CONVERTED_WHISPER, is_converted_whisper, openai_whisper_file
from vivavoce.models.whisper.config import WhisperConfig

OPENAI_PATTERNS = (
    (r"\bblocks\.", "layers."),
    (r"\bcross_attn_ln\.", "encoder_attn_layer_norm."),
    (r"\battn_ln\.", "self_attn_layer_norm."),
    (r"\bcross_attn\.", "encoder_attn."),
    (r"\battn\.", "self_attn."),
    (r"\b(query|key|value)\.", lambda match: f"{match[1][0]}_proj."),
    (r"_attn\.out\.", "_attn.out_proj."),
    (r"\bmlp\.0\.", "fc1."),
    (r"\bmlp\.2\.", "fc2."),
    (r"\bmlp_ln\.", "final_layer_norm."),
    (r"\b(ln_post|ln)\.", "layer_norm."),
    (r"\bpositional_embedding$", "embed_positions.weight"),
    (r"\btoken_embedding\.", "embed_tokens."),
)
CONVERTED_PATTERNS = (
    (r"/", "."),
    (r"\blayer_(\d+)\.", r"layers.\1."),
    (r"\.self_attention\.layer_norm\.", ".self_attn_layer_norm."),
    (r"\.attention\.layer_norm\.", ".encoder_attn_layer_norm."),
    (r"\.ffn\.layer_norm\.", ".final_layer_norm."),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"\.self_attention\.linear_0\.", ".self_attn.qkv."),
    (r"\.self_attention\.linear_1\.", ".self_attn.out_proj."),
    (r"\.attention\.linear_0\.", ".encoder_attn.q_proj."),
    (r"\.attention\.linear_1\.", ".encoder_attn.kv."),
    (r"\.attention\.linear_2\.", ".encoder_attn.out_proj."),
    (r"\.ffn\.linear_0\.", ".fc1."),
    (r"\.ffn\.linear_1\.", ".fc2."),
    (r"\bposition_encodings\.encodings$", "embed_positions.weight"),
    (r"\bembeddings\.", "embed_tokens."),
)
FUSED = re.compile(r"(.*_attn)\.(qkv|kv)\.(weight|bias)")
CONVERTED_TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
SCALE = "_scale"
CONVERTED_HEAD = "decoder/projection/"  # the embedding
StoredVariable = tuple[str, tuple[int, ...], int]
"""Type, shape and offset in the file."""


def open_whisper(source: str | Path) -> tuple[WhisperConfig, Checkpoint]:
    """The config of a published Whisper, and its tensors under our names."""
    source = Path(source)
    if is_converted_whisper(source):
        converted = ConvertedCheckpoint(source)
        return converted.config, converted
    source = openai_whisper_file(source) or source
    if source.is_file() and is_pickled(source):
        opened = OpenAICheckpoint(source)
        return opened.config, opened.renamed(from_openai)
    folder = source.parent if source.is_file() else source
    config = WhisperConfig.read(folder)
    return config, Checkpoint(source).renamed(from_hugging_face)


def read_sizes(source: Path) -> WhisperConfig | None:
    """The sizes of a Whisper in Hugging Face's or CTranslate2's layout; None for OpenAI's files, which must be read."""
    if is_converted_whisper(source):
        with ConvertedCheckpoint(source) as converted:
            return converted.config
    return WhisperConfig.read(source) if (source / "config.json").is_file() else None


def from_openai(name: str) -> str | None:
    """Our name of one of OpenAI's tensors."""
    return _renamed(name, OPENAI_PATTERNS)


def from_hugging_face(name: str) -> str | None:
    """Our name of one of Hugging Face's tensors; None for the head, which is the embedding."""
    return None if name == "proj_out.weight" else name.removeprefix("model.")


def _renamed(name: str, patterns: Any) -> str:
    for pattern, ours in patterns:
        name = re.sub(pattern, ours, name)
    return name


class OpenAICheckpoint(Checkpoint):
    """One of OpenAI's files: `dims` and `model_state_dict`."""

    def __init__(self, file: Path) -> None:
        self.source = file
        content = read_torch_file(file)
        if not isinstance(content, dict) or "dims" not in content or "model_state_dict" not in content:
            raise CheckpointError(f"{file} is not one of OpenAI's Whisper files: it lacks dims or model_state_dict")
        self.config = WhisperConfig.from_dims(content["dims"])
        self._weights: dict[str, Tensor] = content["model_state_dict"]
        self._tensors = {name: tensor.detach for name, tensor in self._weights.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}

    def close(self) -> None:
        """Free the tensors."""
        self._tensors.clear()
        self._weights = {}


class ConvertedCheckpoint(Checkpoint):
    """CTranslate2's `model.bin` of a Whisper: a memory map; float16, bfloat16 and float32, or int8 with scales.

    Queries, keys and values are one matrix there, and three here. Keys have a bias of zeros there, none here.
    """

    def __init__(self, folder: Path) -> None:
        self.source = folder / CONVERTED_WHISPER
        self._tensors: dict[str, Callable[[], Tensor]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            with self.source.open("rb") as stream:
                stored = _converted_variables(stream)
            self._bytes: NDArray[np.uint8] | None = np.memmap(self.source, np.uint8, "r")
            self.config = self._sizes(stored)
        except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
            raise CheckpointError(
                f"{self.source} is not a whole CTranslate2 Whisper ({error}); fetch it again"
            ) from error
        for name, (kind, shape, offset) in stored.items():
            scale = stored.get(name + SCALE)
            if shape and not name.endswith(SCALE):
                self._place(_renamed(name, CONVERTED_PATTERNS), shape, partial(self._read, kind, shape, offset, scale))

    def __enter__(self) -> "ConvertedCheckpoint":
        return self

    def close(self) -> None:
        """Unmap the file."""
        self._tensors.clear()
        self._bytes = None

    def _read(
        self, kind: str, shape: tuple[int, ...], offset: int, scale: tuple[str, tuple[int, ...], int] | None
    ) -> Tensor:
        assert self._bytes is not None
        stored = "int16" if kind == "bfloat16" else kind
        size = int(np.prod(shape)) * np.dtype(stored).itemsize
        values = torch.from_numpy(self._bytes[offset : offset + size].copy().view(stored).reshape(shape))
        if kind == "bfloat16":
            return values.view(torch.bfloat16)
        if scale is None:
            return values
        divisor = self._read(*scale, None).float()
        return values.float() / divisor.reshape(-1, *[1] * (values.ndim - 1))

    def _place(self, name: str, shape: tuple[int, ...], read: Callable[[], Tensor]) -> None:
        fused = FUSED.fullmatch(name)
        if fused is None:
            self._tensors[name], self.shapes[name] = read, shape
            return
        parts = ("q_proj", "k_proj", "v_proj") if fused[2] == "qkv" else ("k_proj", "v_proj")
        rows = shape[0] // len(parts)
        for number, part in enumerate(parts):
            if (part, fused[3]) != ("k_proj", "bias"):
                ours = f"{fused[1]}.{part}.{fused[3]}"
                self._tensors[ours] = partial(_rows, read, number * rows, (number + 1) * rows)
                self.shapes[ours] = (rows, *shape[1:])

    def _sizes(self, stored: dict[str, StoredVariable]) -> WhisperConfig:
        def shape(name: str) -> tuple[int, ...]:
            return stored[name][1]

        def count(side: str) -> int:
            return len({match[0] for name in stored if (match := re.match(rf"{side}/layer_\d+/", name))})

        def heads(side: str) -> int:
            kind, _, offset = stored[f"{side}/num_heads"]
            return int(self._read(kind, (1,), offset, None)[0])

        d_model, mels, _ = shape("encoder/conv1/weight")
        return WhisperConfig(
            d_model=d_model,
            encoder_layers=count("encoder"),
            encoder_attention_heads=heads("encoder"),
            encoder_ffn_dim=shape("encoder/layer_0/ffn/linear_0/weight")[0],
            decoder_layers=count("decoder"),
            decoder_attention_heads=heads("decoder"),
            decoder_ffn_dim=shape("decoder/layer_0/ffn/linear_0/weight")[0],
            num_mel_bins=mels,
            max_source_positions=shape("encoder/position_encodings/encodings")[0],
            max_target_positions=shape("decoder/position_encodings/encodings")[0],
            vocab_size=shape("decoder/embeddings/weight")[0],
        )


def _rows(read: Callable[[], Tensor], first: int, end: int) -> Tensor:
    return read()[first:end]


def _converted_variables(stream: BinaryIO) -> dict[str, StoredVariable]:
    """The variables of a `model.bin` by name; equal ones are stored once, and the others are aliases of it."""

    def number(kind: str) -> int:
        return int(struct.unpack(f"<{kind}", stream.read(struct.calcsize(kind)))[0])

    def text() -> str:
        return stream.read(number("H")).rstrip(b"\0").decode()

    size = stream.seek(0, 2)
    stream.seek(4)  # after the version of the format
    text()
    number("I")
    stored = {}
    for _ in range(number("I")):
        name = text()
        shape = tuple(number("I") for _ in range(number("B")))
        kind, length = CONVERTED_TYPES[number("B")], number("I")
        stored[name] = (kind, shape, stream.tell())
        if stream.seek(length, 1) > size:
            raise ValueError(f"it ends in {name}")
    for _ in range(number("I")):
        alias = text()
        stored[alias] = stored[text()]
    return {name: variable for name, variable in stored.items() if not name.startswith(CONVERTED_HEAD)}
