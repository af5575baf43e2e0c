"""The manifest of a quantised folder, `quantisation.json`: source, method, versions and file hashes."""

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vivavoce import __version__
from vivavoce.errors import CheckpointError
from vivavoce.models.quantised import VERSION

NAME = "quantisation.json"
CHUNK = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """Contents of `quantisation.json`."""

    method: str
    kind: str
    policy: dict[str, Any]
    source: dict[str, str]
    """File → SHA-256 of the source weights."""
    files: dict[str, str]
    """File → SHA-256 of the quantised weights."""
    tensors: dict[str, int]
    """Scheme → number of matrices."""
    bytes_before: int
    bytes_after: int
    calibration: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    format: int = VERSION
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "vivavoce": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    )

    def write(self, folder: Path) -> None:
        (folder / NAME).write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False), encoding="utf8")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        try:
            return cls(**json.loads((folder / NAME).read_text(encoding="utf8")))
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} is no folder that `viva quantize` wrote: it has no {NAME}") from error
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder / NAME} is not a manifest of a quantised model ({error})") from error


def is_quantised(folder: Path) -> bool:
    """Whether a folder was written by `viva quantize`."""
    return (folder / NAME).is_file()


def verify(folder: Path) -> Manifest:
    """Check format and file hashes of a quantised folder; returns its manifest."""
    manifest = Manifest.read(folder)
    if manifest.format != VERSION:
        made_by = manifest.versions.get("vivavoce", "another version")
        raise CheckpointError(
            f"{folder} has format {manifest.format}, written by {made_by}; this version reads {VERSION}"
        )
    for name, wanted in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder} lacks {name}, which its manifest names; quantise the model again")
        if file_hash(file) != wanted:
            raise CheckpointError(f"{file} differs from the file that was written (SHA-256); quantise the model again")
    return manifest


def file_hash(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
