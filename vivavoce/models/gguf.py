"""GGUF files: settings by key, and tensors by name, which are memory-mapped and read as floats or as packed blocks."""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from vivavoce.errors import CheckpointError
from vivavoce.nn.block_formats import FORMATS
from vivavoce.nn.block_linear import BlockMatrix

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # number of the format → dtype
MAX_ENTRIES = 10_000_000  # of any list: more means a damaged file
MAX_DIMENSIONS = 8
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class StoredTensor:
    """Location and format of a tensor in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the last dimension in the file."""
        if self.kind in FLOATS:
            return self.shape[-1] * FLOATS[self.kind].itemsize
        return FORMATS[self.kind].row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows * self.row_bytes


class GGUF:
    """An open GGUF file: `settings` by key, tensors by name."""

    def __init__(self, file: str | Path) -> None:
        self.path = Path(file)
        try:
            with self.path.open("rb") as opened:
                self.settings, self.tensors, self._data = _header(opened)
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch warns of read-only memory
        except (OSError, struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.path} cannot be read as a GGUF file ({error}); fetch it again") from error
        for name, tensor in self.tensors.items():
            self._check(name, tensor)

    def packed(self, name: str) -> BlockMatrix | None:
        """A matrix as it is stored, in the memory-mapped file; None if its format is not one of blocks."""
        stored = self.tensors[name]
        if stored.kind in FLOATS:
            return None
        return BlockMatrix(self._bytes(stored).view(-1, stored.row_bytes), FORMATS[stored.kind])

    def tensor(self, name: str) -> Tensor:
        """A tensor as float32 in torch's axis order."""
        stored = self.tensors[name]
        if stored.kind in FLOATS:
            return self._bytes(stored).view(FLOATS[stored.kind]).float().view(stored.shape)
        return FORMATS[stored.kind].dequantised(self._bytes(stored)).view(stored.shape)

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the model's architecture, e.g. `block_count`; an error if it is missing and has no default."""
        name = f"{self.architecture}.{key}"
        if name not in self.settings and default is None:
            raise CheckpointError(f"{self.path} lacks the setting {name!r}; is it a Llama-type model?")
        return self.settings.get(name, default)

    @property
    def architecture(self) -> str:
        """The model's architecture, e.g. `qwen2`."""
        return str(self.settings.get("general.architecture", "unknown"))

    def _bytes(self, stored: StoredTensor) -> Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8, count=stored.nbytes, offset=self._data + stored.offset)

    def _check(self, name: str, tensor: StoredTensor) -> None:
        if tensor.kind not in FLOATS and tensor.kind not in FORMATS:
            known = ", ".join(["F32", "F16", "BF16", *(each.name for each in FORMATS.values())])
            raise CheckpointError(f"{self.path}: {name} has format number {tensor.kind}; {known} can be read")
        if tensor.kind in FORMATS and tensor.shape[-1] % FORMATS[tensor.kind].weights:
            raise CheckpointError(f"{self.path}: {name} has rows of {tensor.shape[-1]} weights, not of whole blocks")
        if self._data + tensor.offset + tensor.nbytes > len(self._map):
            raise CheckpointError(f"{self.path} ends inside {name}: it was cut short, fetch it again")


def _header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, StoredTensor], int]:
    if file.read(4) != MAGIC:
        raise ValueError("it does not start with GGUF")
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
        dimensions = _scalar(file, "I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = [_scalar(file, "Q") for _ in range(dimensions)]
        tensors[name] = StoredTensor(tuple(reversed(shape)), _scalar(file, "I"), _scalar(file, "Q"))
    alignment = settings.get("general.alignment", DEFAULT_ALIGNMENT)
    return settings, tensors, -(-file.tell() // alignment) * alignment


def _scalar(file: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))[0]


def _length(file: BinaryIO) -> int:
    length: int = _scalar(file, "Q")
    if length > MAX_ENTRIES:
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
        entry, length = _scalar(file, "I"), _length(file)
        if entry in SCALARS:
            content = file.read(length * struct.calcsize(f"<{SCALARS[entry]}"))
            return list(struct.unpack(f"<{length}{SCALARS[entry]}", content))
        return [_value(file, entry) for _ in range(length)]
    return _scalar(file, SCALARS[kind])
