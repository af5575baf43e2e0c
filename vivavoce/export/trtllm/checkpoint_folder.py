"""A checkpoint folder: planned, written under another name and moved into place whole, and recognised if it is not."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from vivavoce.errors import CheckpointError, InputError
from vivavoce.export.trtllm.cutting import Shard
from vivavoce.export.trtllm.rank_plan import RankPlan
from vivavoce.export.trtllm.tensor_file import write_tensor_file

MANIFEST = "export.json"


@dataclass(frozen=True)
class CheckpointFolder:
    """One checkpoint that `trtllm-build` takes: its config, the plan of every rank's file, and what lies beside."""

    name: str  # below the export's folder; empty: the folder itself
    config: Mapping[str, Any]
    plan: Callable[[Shard], RankPlan]
    network: tuple[str, str] | None = None
    """File and class of a definition that TensorRT-LLM does not have."""
    extras: Mapping[str, Callable[[], Mapping[str, Tensor]]] = field(default_factory=dict)
    prompt_table: int = 0
    """Rows of prompt embeddings a request may bring."""

    def write(self, folder: Path, tp: int) -> None:
        """Rank by rank, then what describes them."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(tp):
            write_tensor_file(folder / f"rank{rank}.safetensors", self.plan(Shard(rank, tp)).parts)
        for name, tensors in self.extras.items():
            save_file({key: tensor.contiguous() for key, tensor in tensors().items()}, folder / name)
        if self.network is not None:
            source = files("vivavoce.export.trtllm").joinpath(self.network[0])
            (folder / self.network[0]).write_text(source.read_text(encoding="utf8"), encoding="utf8")
        (folder / "config.json").write_text(json.dumps(self.config, indent=2), encoding="utf8")


def write_export(out: Path, writers: Sequence[Callable[[Path], None]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Let the writers fill a folder beside `out`, list what they wrote, and only then give it its name."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not an empty folder; name another, or remove it")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for write in writers:
        write(partial)
    written = sorted(path for path in partial.rglob("*") if path.is_file())
    manifest = {**about, "files": {str(path.relative_to(partial)): path.stat().st_size for path in written}}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf8")
    if out.is_dir():
        out.rmdir()
    partial.rename(out)
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a finished export says of itself; one that is not whole is named as such."""
    file = folder / MANIFEST
    if not file.is_file():
        if folder.name.endswith(".partial"):
            raise CheckpointError(f"{folder} is a half-written export; remove it and export again")
        raise CheckpointError(f"{folder} has no {MANIFEST}, so it is no finished export; export again")
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
        sizes = dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); export again") from error
    for name, size in sizes.items():
        here = (folder / name).stat().st_size if (folder / name).is_file() else None
        if here != size:
            state = "is missing" if here is None else f"has {here} of {size} bytes"
            raise CheckpointError(f"{folder} is not whole: {name} {state}; export again")
    return manifest
