"""GGUF files: settings, vocabulary and weights of a model in one file, as llama.cpp writes them.

Weights are read memory-mapped and widened to float32. Of the block formats, those that store 32 weights with one scale
are known: Q8_0, and Q4_0 and Q4_1, whose nibbles hold the first half of a block below the second.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.errors import CheckpointError, MissingDependencyError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCK = 32  # weights
F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8
BLOCK_BYTES = {Q4_0: 2 + 16, Q4_1: 4 + 16, Q8_0: 2 + 32}
MOST_ENTRIES = 10_000_000  # of any list: more means a damaged file, not a large one
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor stands in the file, and how."""

    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        count = int(np.prod(self.shape))
        if self.kind in (F32, F16):
            return count * (4 if self.kind == F32 else 2)
        return count // BLOCK * BLOCK_BYTES[self.kind]


class GGUF:
    """An opened file: `settings` by key, and tensors by name."""

    def __init__(self, file: str | Path) -> None:
        self.path = Path(file)
        try:
            with self.path.open("rb") as opened:
                self.settings, self.tensors, self._data = _header(opened)
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.path} cannot be read as a GGUF file ({error}); fetch it again") from error
        for name, tensor in self.tensors.items():
            if tensor.kind not in (F32, F16, *BLOCK_BYTES):
                raise CheckpointError(
                    f"{self.path}: {name} has format number {tensor.kind}; F32, F16, Q4_0, Q4_1 and Q8_0 can be read"
                )
            if self._data + tensor.offset + tensor.nbytes > len(self._map):
                raise CheckpointError(f"{self.path} ends inside {name}: it was cut short, fetch it again")

    def tensor(self, name: str) -> Tensor:
        """A tensor as float32, its shape as torch has it."""
        stored = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, stored.nbytes, self._data + stored.offset)
        return torch.from_numpy(_widen(raw, stored.kind).reshape(stored.shape))


def _header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, StoredTensor], int]:
    if file.read(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = _scalar(file, "I")
    if version not in VERSIONS:
        raise ValueError(f"version {version} is not known")
    tensor_count, setting_count = _length(file), _length(file)
    settings = {}
    for _ in range(setting_count):
        key = _string(file)
        settings[key] = _value(file, _scalar(file, "I"))
    tensors = {}
    for _ in range(tensor_count):
        name = _string(file)
        shape = [_scalar(file, "Q") for _ in range(_scalar(file, "I"))]
        tensors[name] = StoredTensor(tuple(reversed(shape)), _scalar(file, "I"), _scalar(file, "Q"))
    alignment = settings.get("general.alignment", DEFAULT_ALIGNMENT)
    return settings, tensors, -(-file.tell() // alignment) * alignment


def _scalar(file: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]


def _length(file: BinaryIO) -> int:
    length: int = _scalar(file, "Q")
    if length > MOST_ENTRIES:
        raise ValueError(f"a list of {length} entries")
    return length


def _string(file: BinaryIO) -> str:
    length = _length(file)
    content = file.read(length)
    if len(content) < length:
        raise ValueError("it ends inside a string")
    return content.decode("utf8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind == ARRAY:
        entry = _scalar(file, "I")
        return [_value(file, entry) for _ in range(_length(file))]
    return _scalar(file, SCALARS[kind])


def _widen(raw: NDArray[np.uint8], kind: int) -> NDArray[np.float32]:
    if kind in (F32, F16):
        return raw.view(np.float32 if kind == F32 else np.float16).astype(np.float32)
    blocks = raw.reshape(-1, BLOCK_BYTES[kind])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == Q8_0:
        return blocks[:, 2:].view(np.int8) * scale
    low, high = blocks[:, -16:] & 0x0F, blocks[:, -16:] >> 4
    steps = np.concatenate([low, high], axis=1).astype(np.float32)
    if kind == Q4_0:
        return (steps - 8) * scale
    return steps * scale + blocks[:, 2:4].copy().view(np.float16).astype(np.float32)


class OnnxFile:
    """Arrays in, the first output out."""

    def __init__(self, file: str | Path, what: str) -> None:
        """`what` it is needed for, as an error should say."""
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingDependencyError(f"{what} needs onnxruntime: pip install 'vivavoce[onnx]'") from error
        if not Path(file).is_file():
            raise CheckpointError(f"{file} does not exist; the codec's folder must hold it")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session: Any = onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own exceptions share no base class
            reason = str(error).strip().split("\n", maxsplit=1)[0][:200]
            raise CheckpointError(f"{file} cannot be read as ONNX ({reason}); fetch it again") from error
        self._inputs = [each.name for each in self._session.get_inputs()]

    def run(self, *arrays: NDArray[Any]) -> NDArray[Any]:
        """The first output for inputs in the file's order."""
        made = self._session.run(None, dict(zip(self._inputs, arrays, strict=True)))
        return np.asarray(made[0])
