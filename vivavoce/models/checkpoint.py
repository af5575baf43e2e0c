"""Loading of published weights: files are memory-mapped, tensors checked by name and shape, and copied once.

A checkpoint is a folder with sharded or single safetensors, or one `.safetensors`, `.bin`, `.pt` or `.ckpt` file.
Pickled files are read with `weights_only=True`, so nothing in them is executed.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vivavoce.errors import CheckpointError
from vivavoce.models.quantised import (
    PACKED_SCALE,
    PACKING,
    PackedMatrix,
    QuantisedNames,
    ReadQuantised,
    install,
    low_bit_matrices,
    widen,
)
from vivavoce.nn.linear import postponed

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLED = {".bin", ".pt", ".pth", ".ckpt"}
ZIP_MAGIC = b"PK\x03\x04"


@runtime_checkable
class PacksParameters(Protocol):
    """A module that stores several published tensors in one (fused QKV, gate and up)."""

    def published_tensors(self) -> Mapping[str, Tensor]:
        """Name relative to the module's parent → its view of the packed tensor."""
        ...


class Checkpoint:
    """Names, shapes and tensors of a published checkpoint; tensors are read lazily.

    Matrices of a quantised checkpoint read as floats; `quantised` has the stored ones. Within its context, linear
    layers are created without memory, because `load_weights` replaces them.
    """

    quantised: Mapping[str, ReadQuantised] = MappingProxyType({})

    def __init__(self, source: str | Path) -> None:
        self.source = Path(source)
        self._stack = ExitStack()
        self._tensors: dict[str, Callable[[], Tensor]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in weight_files(self.source):
            if is_pickled(file):
                self._add_pickled(file)
            else:
                self._add_safetensors(file)

    def __enter__(self) -> "Checkpoint":
        if self.quantised:
            self._stack.enter_context(postponed())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def close(self) -> None:
        """Unmap the files."""
        self._tensors.clear()
        self._stack.close()

    def names(self) -> list[str]:
        """Every tensor name, in file order."""
        return list(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """One tensor; for safetensors a view of the mapped file."""
        return self._tensors[name]()

    def renamed(self, rename: Callable[[str], str | None]) -> "Checkpoint":
        """Rename tensors in place; a name mapped to None is dropped."""
        names = {old: new for old in self._tensors if (new := rename(old)) is not None}
        self._tensors = {new: self._tensors[old] for old, new in names.items()}
        self.shapes = {new: self.shapes[old] for old, new in names.items()}
        self.quantised = {new: self.quantised[old] for old, new in names.items() if old in self.quantised}
        return self

    def _add_safetensors(self, file: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(str(file), framework="pt"))
            names = set(handle.keys())
            metadata = handle.metadata() or {}
            is_packed, quantised = PACKING in metadata, QuantisedNames(metadata, file)
            low_bits = low_bit_matrices(metadata)
            for name in quantised:
                read = quantised.reader(name, names, handle.get_tensor)
                self._add(name, quantised.shape(name), partial(_dequantised, read), file)
                self.quantised = {**self.quantised, name: read}
            for name in handle.keys():  # noqa: SIM118 - safe_open is not a mapping
                if name in quantised or quantised.is_companion(name):
                    continue
                shape = tuple(handle.get_slice(name).get_shape())
                if not is_packed:
                    self._add(name, shape, partial(handle.get_tensor, name), file)
                elif not name.endswith(PACKED_SCALE):
                    scale = partial(handle.get_tensor, name + PACKED_SCALE) if name + PACKED_SCALE in names else None
                    packed, low_bits_entry = partial(handle.get_tensor, name), low_bits.get(name)
                    self._add(
                        name,
                        low_bits_entry.shape if low_bits_entry else shape,
                        partial(_widened, packed, scale, low_bits_entry),
                        file,
                    )
        except (SafetensorError, OSError, struct.error) as error:
            raise CheckpointError(
                f"{file} cannot be read as safetensors ({error}); it is damaged or was cut short: fetch it again"
            ) from error

    def _add_pickled(self, file: Path) -> None:
        content = read_torch_file(file)
        for container in ("state_dict", "generator", "model"):
            if isinstance(content, dict) and isinstance(content.get(container), dict):
                content = content[container]
        if not isinstance(content, dict):
            raise CheckpointError(f"{file} has a {type(content).__name__}, not named tensors")
        for name, value in content.items():
            if isinstance(value, Tensor):
                self._add(name, tuple(value.shape), value.detach, file)

    def _add(self, name: str, shape: tuple[int, ...], read: Callable[[], Tensor], file: Path) -> None:
        if name in self._tensors:
            raise CheckpointError(f"{name} is in two files of {self.source}, one of them {file.name}")
        self._tensors[name] = read
        self.shapes[name] = shape


def _widened(tensor: Callable[[], Tensor], scale: Callable[[], Tensor] | None, low_bits: PackedMatrix | None) -> Tensor:
    return widen(tensor(), scale() if scale is not None else None, low_bits)


def _dequantised(read: ReadQuantised) -> Tensor:
    return read().dequantised()


def is_pickled(file: Path) -> bool:
    """Whether a file is pickled: by its suffix, else by torch's zip header."""
    if file.suffix in PICKLED | {".safetensors"}:
        return file.suffix in PICKLED
    with file.open("rb") as opened:
        return opened.read(len(ZIP_MAGIC)) == ZIP_MAGIC


def weight_files(source: Path) -> list[Path]:
    """The weight files of a folder, or the file itself."""
    if source.is_file():
        return [source]
    if source.suffix in PICKLED and source.with_suffix(".safetensors").is_file():
        return [source.with_suffix(".safetensors")]  # quantised models replace pickled files by these
    if not source.is_dir():
        raise CheckpointError(f"{source} does not exist; give a folder with {SINGLE_NAME} or {INDEX_NAME}")
    index = source / INDEX_NAME
    if index.is_file():
        names = _indexed_files(index)
        absent = [name for name in names if not (source / name).is_file()]
        if absent:
            raise CheckpointError(f"{source} lacks {_list_some(absent)} named in {INDEX_NAME}; fetch the model again")
        return [source / name for name in names]
    for name in (SINGLE_NAME, "pytorch_model.bin"):
        if (source / name).is_file():
            return [source / name]
    raise CheckpointError(f"{source} has no weights: neither {INDEX_NAME}, {SINGLE_NAME} nor pytorch_model.bin")


def _indexed_files(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf8"))["weight_map"]
        return sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index ({error}); fetch it again") from error


def published_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every published tensor name of a module → its parameter or buffer, or its view of a packed one."""
    return dict(_walk(module, ""))


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, child in module.named_children():
        if isinstance(child, PacksParameters):
            for part, tensor in child.published_tensors().items():
                yield f"{prefix}{part}", tensor
        else:
            yield from _walk(child, f"{prefix}{name}.")
    for name, parameter in module.named_parameters(recurse=False):
        yield f"{prefix}{name}", parameter
    hidden = module._non_persistent_buffers_set
    for name, buffer in module.named_buffers(recurse=False):
        if name not in hidden:
            yield f"{prefix}{name}", buffer


def check_names(expected: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint, allow_extra: bool = False) -> None:
    """Raise `CheckpointError` naming missing, extra or misshapen tensors."""
    missing = [name for name in expected if name not in checkpoint.shapes]
    extra = [] if allow_extra else [name for name in checkpoint.shapes if name not in expected]
    misshapen = [
        f"{name} is {list(checkpoint.shapes[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in checkpoint.shapes and checkpoint.shapes[name] != tuple(shape)
    ]
    problems = [
        f"{len(names)} {kind}: {_list_some(names)}"
        for kind, names in (("missing", missing), ("not of this model", extra), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.source} does not fit its config: " + "; ".join(problems))


@torch.no_grad()
def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    allow_extra: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Copy a checkpoint into a module on its device, one tensor at a time."""
    targets = published_tensors(module)
    check_names({name: tuple(tensor.shape) for name, tensor in targets.items()}, checkpoint, allow_extra)
    installed = install(module, checkpoint.quantised, checkpoint.tensor) if checkpoint.quantised else set()
    targets = {name: tensor for name, tensor in published_tensors(module).items() if name not in installed}
    for done, (name, target) in enumerate(targets.items(), start=1):
        source = checkpoint.tensor(name)
        if source.is_floating_point() != target.is_floating_point():
            raise CheckpointError(
                f"{name} in {checkpoint.source} is {source.dtype}, which is not a float weight; "
                "a quantised checkpoint needs the manifest it was saved with"
            )
        target.copy_(source)
        if progress is not None:
            progress(done, len(targets))


@torch.no_grad()
def save_weights(module: nn.Module, folder: str | Path, shard_bytes: int = 5_000_000_000) -> None:
    """Write a module's published tensors as safetensors, in shards with an index if larger than `shard_bytes`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in published_tensors(module).items():
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += nbytes
    if len(shards) == 1:
        _save_shard(shards[0], folder / SINGLE_NAME)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save_shard(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.numel() * tensor.element_size() for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf8")


def _save_shard(tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


def read_torch_file(file: Path) -> Any:
    """The content of a torch weights file, mapped where its format allows it; nothing in it is executed."""
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickles fail in many ways
        raise CheckpointError(f"{file} cannot be read as a torch weights file ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """The first line of an error message, shortened."""
    return str(error).strip().split("\n", maxsplit=1)[0][:200]


def _list_some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


WEIGHT_NORM_SUFFIXES = (
    (".weight_g", ".weight_v"),
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
)


class _Pair(NamedTuple):
    weight: str
    magnitude: str
    direction: str


def folded_weight(magnitude: Tensor, direction: Tensor) -> Tensor:
    """magnitude · direction / ‖direction‖, normed over the dimensions that the magnitude lacks."""
    dims = [dim for dim, size in enumerate(magnitude.shape) if size == 1]
    exact = direction.float()
    folded: Tensor = magnitude.float() * exact / torch.linalg.vector_norm(exact, dim=dims, keepdim=True)
    return folded.to(direction.dtype)


class FoldedCheckpoint(Checkpoint):
    """A checkpoint whose weight-normed pairs appear as `….weight`, folded lazily."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.source = checkpoint.source
        self._stack = ExitStack()
        self._stack.callback(checkpoint.close)
        self._tensors: dict[str, Callable[[], Tensor]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in checkpoint.names():
            pair = _pair(name)
            if pair is None:
                self._add(name, checkpoint.shapes[name], partial(checkpoint.tensor, name), checkpoint.source)
            elif name == pair.direction:
                read = partial(_read_folded, checkpoint, pair)
                self._add(pair.weight, checkpoint.shapes[name], read, checkpoint.source)
            if pair is not None:
                _require(pair.magnitude, name, checkpoint)
                _require(pair.direction, name, checkpoint)


def fold_weight_norm(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with plain weights in place of weight-normed pairs. Closing it closes the original."""
    return FoldedCheckpoint(checkpoint)


def _read_folded(checkpoint: Checkpoint, pair: _Pair) -> Tensor:
    return folded_weight(checkpoint.tensor(pair.magnitude), checkpoint.tensor(pair.direction))


def _pair(name: str) -> _Pair | None:
    for magnitude, direction in WEIGHT_NORM_SUFFIXES:
        for ending in (magnitude, direction):
            if name.endswith(ending):
                module = name.removesuffix(ending)
                return _Pair(module + ".weight", module + magnitude, module + direction)
    return None


def _require(partner: str, name: str, checkpoint: Checkpoint) -> None:
    if partner not in checkpoint:
        raise CheckpointError(f"{checkpoint.source} has {name} but not {partner}, its other half; fetch it again")
