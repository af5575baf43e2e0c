"""Check that the files of a model are present and intact."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

from vivavoce.errors import CheckpointError
from vivavoce.hub.catalogue import KnownModel, ModelFile
from vivavoce.hub.fetch import sha256

INDEX_NAME = "model.safetensors.index.json"
CHECKED = ("*.json", "*.safetensors", "*.bin", "*.pt", "*.onnx")
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class FileCheck:
    """One file of a model; `problem` is None if it is intact."""

    name: str
    bytes: int
    tensors: int
    problem: str | None


@dataclass(frozen=True)
class CheckReport:
    """The state of a model's files."""

    path: Path
    files: tuple[FileCheck, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each file that is missing or damaged."""
        return tuple(f"{file.name} {file.problem}" for file in self.files if file.problem)

    @property
    def ok(self) -> bool:
        """Whether every file is present and intact."""
        return not self.problems


def check(path: Path, model: KnownModel | None = None) -> CheckReport:
    """Check that a model's files are present and intact.

    Files with a known SHA-256 are read as a whole, of others only the headers of weights.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {str(path)!r} to check")
    if model is not None and model.listed:
        return CheckReport(path, tuple(_check_listed(path / file.name, file) for file in model.listed))
    names = set(model.files) if model else {"config.json"}
    names |= {str(file.relative_to(path)) for pattern in CHECKED for file in path.rglob(pattern)}
    tensors_of: dict[str, set[str]] = {}
    for index in sorted(path.rglob(INDEX_NAME)):
        for tensor, shard in _weight_map(index).items():
            tensors_of.setdefault(str(index.parent.relative_to(path) / shard), set()).add(tensor)
    ordered = sorted(names | set(tensors_of))
    return CheckReport(path, tuple(_check_file(path, name, tensors_of.get(name, set())) for name in ordered))


def _check_listed(file: Path, listed: ModelFile) -> FileCheck:
    if not file.is_file():
        return FileCheck(listed.name, 0, 0, "is missing")
    problem = None if sha256(file) == listed.sha256 else f"is not the published file: its SHA-256 is {sha256(file)}"
    return FileCheck(listed.name, file.stat().st_size, 0, problem)


def _check_file(folder: Path, name: str, placed: set[str]) -> FileCheck:
    file = folder / name
    if not file.is_file():
        return FileCheck(name, 0, 0, "is missing")
    size = file.stat().st_size
    try:
        tensors = _require_whole(file)
    except ValueError as error:
        return FileCheck(name, size, 0, str(error))
    absent = sorted(placed - tensors)
    problem = f"lacks {len(absent)} tensors that the index places in it, the first is {absent[0]}" if absent else None
    return FileCheck(name, size, len(tensors), problem)


def _require_whole(file: Path) -> set[str]:
    """The tensor names of an intact file, none if it is not safetensors; ValueError says what is wrong with it."""
    with file.open("rb") as stream:
        start = stream.read(len(LFS_POINTER))
    if not start:
        raise ValueError("is empty")
    if start == LFS_POINTER:
        raise ValueError("is a Git LFS pointer, not the file itself: run `git lfs pull` or fetch the model again")
    if file.suffix == ".safetensors":
        return _require_whole_safetensors(file)
    if file.suffix == ".json":
        _require_json(file)
    elif start.startswith(b"PK") and not zipfile.is_zipfile(file):
        raise ValueError(f"was cut short at {file.stat().st_size} bytes")
    return set()


def _require_json(file: Path) -> None:
    try:
        content = json.loads(file.read_text(encoding="utf8"))
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if file.name == INDEX_NAME and not (isinstance(content, dict) and isinstance(content.get("weight_map"), dict)):
        raise ValueError("has no weight_map")


def _require_whole_safetensors(file: Path) -> set[str]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if 8 + length > size:
            raise ValueError(f"was cut short at {size} bytes, or is not safetensors")
        try:
            header = json.loads(stream.read(length))
            ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError("has a damaged header") from error
    whole = 8 + length + max(ends.values(), default=0)
    if size != whole:
        raise ValueError(f"{'was cut short' if size < whole else 'is too long'}: {size} of {whole} bytes")
    return set(ends)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf8"))["weight_map"]
        return {str(tensor): str(shard) for tensor, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}  # `_require_json` reports the index itself
