"""Safetensors written shard by shard, so that a model of any size passes through little memory."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from vivavoce.models.checkpoint import INDEX_NAME, SINGLE_NAME
from vivavoce.models.quantised import described, tensors_of
from vivavoce.nn.quantised_weight import QuantisedWeight


class ShardWriter:
    """Takes tensors one after another; holds at most one shard of them.

    `target` is a folder, which gets `model.safetensors` or numbered shards and their index, or one `.safetensors`
    file, which is held whole.
    """

    def __init__(self, target: Path, shard_bytes: int, metadata: Mapping[str, str]) -> None:
        self.is_single = target.suffix == ".safetensors"
        self.folder = target.parent if self.is_single else target
        self.target, self.shard_bytes, self.metadata = target, shard_bytes, dict(metadata)
        self.bytes = 0
        self._held: dict[str, Tensor] = {}
        self._quantised: dict[str, QuantisedWeight] = {}
        self._held_bytes = 0
        self._written: list[tuple[Path, list[str]]] = []
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors as they are, which must stand in one file."""
        self._hold(tensors)

    def add_quantised(self, name: str, weight: QuantisedWeight) -> None:
        """A matrix, rounded."""
        self._hold(tensors_of(name, weight))
        self._quantised[name] = weight.to("meta")

    def finish(self) -> list[Path]:
        """Write what is left, and the index; the files."""
        self._flush()
        if self.is_single or len(self._written) == 1:
            name = self.target if self.is_single else self.folder / SINGLE_NAME
            return [self._written[0][0].rename(name)]
        return self._write_index()

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._held and not self.is_single and self._held_bytes + size > self.shard_bytes:
            self._flush()
        # Cloned, because a view of the mapped source would keep all of it in memory, and tied tensors are refused.
        self._held |= {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        self._held_bytes += size
        self.bytes += size

    def _flush(self) -> None:
        file = self.folder / f"part-{len(self._written)}.safetensors"
        metadata = self.metadata | (described(self._quantised) if self._quantised else {})
        save_file(self._held, file, metadata=metadata)
        self._written.append((file, list(self._held)))
        self._held, self._quantised, self._held_bytes = {}, {}, 0

    def _write_index(self) -> list[Path]:
        weight_map: dict[str, str] = {}
        files = []
        for number, (file, names) in enumerate(self._written, start=1):
            name = f"model-{number:05d}-of-{len(self._written):05d}.safetensors"
            files.append(file.rename(self.folder / name))
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
        (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf8")
        return files
