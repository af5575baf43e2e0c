"""How large the inputs of linears and the cached keys and values get on given rows: what fp8 and int8 scales need."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.models.interface import Row
from vivavoce.nn.paged import CachePiece, PagedCache, RowBatch

PAGE = 64


@dataclass
class ListeningBatch(RowBatch):
    """A batch that remembers the largest key or value each layer wrote."""

    peaks: dict[int, float] = field(default_factory=dict)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store them, and look at them."""
        largest = float(torch.maximum(keys.abs().max(), values.abs().max()))
        self.peaks[layer] = max(self.peaks.get(layer, 0.0), largest)
        super().write(layer, keys, values)


@torch.no_grad()
def activation_peaks(
    model: nn.Module, names: Mapping[str, Sequence[str]], sequences: Iterable[Sequence[Row]]
) -> dict[str, float]:
    """The largest input of each linear of a checkpoint, and `….attention.kv` of each layer's cache.

    `names` says which linears of the checkpoint share the input of each of the model's modules.
    """
    peaks: dict[str, float] = {}
    modules = dict(model.named_modules())

    def listen(theirs: Sequence[str]) -> Any:
        def heard(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            largest = float(inputs[0].abs().max())
            peaks.update({name: max(peaks.get(name, 0.0), largest) for name in theirs})

        return heard

    hooks = [modules[ours].register_forward_pre_hook(listen(theirs)) for ours, theirs in names.items()]
    written: dict[int, float] = {}
    try:
        for rows in sequences:
            batch = whole_batch(model, len(rows))
            batch.peaks = written
            model(torch.tensor(rows), batch)
    finally:
        for hook in hooks:
            hook.remove()
    return peaks | {f"transformer.layers.{layer}.attention.kv": peak for layer, peak in written.items()}


def whole_batch(model: Any, rows: int) -> ListeningBatch:
    """All rows of one sequence at once, in a cache of their own."""
    weight = next(model.parameters())
    pages = -(-rows // PAGE)
    cache = PagedCache.allocate(model.kv_shape, pages, PAGE, weight.dtype, weight.device)
    table = torch.arange(pages, dtype=torch.int32)[None]
    positions = torch.arange(rows, dtype=torch.int32)
    piece = CachePiece(slice(0, rows), slot=0, position=0)
    return ListeningBatch(cache, table, torch.zeros_like(positions), positions, 0, (piece,))


def read_rows(file: Path, vocabularies: Sequence[int]) -> list[list[Row]]:
    """Sequences of rows from JSON: a list of sequences, each a list of rows, each one id per channel."""
    try:
        given = json.loads(file.read_text(encoding="utf8"))
        sequences = [[tuple(int(number) for number in row) for row in rows] for rows in given]
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"{file} holds no sequences of rows such as [[[5, 0], [7, 0]]] ({error})") from error
    rows = [row for sequence in sequences for row in sequence]
    if not rows or not all(sequences):
        raise InputError(f"{file} holds an empty sequence; give some rows to calibrate on")
    for row in rows:
        if len(row) != len(vocabularies) or not all(0 <= i < n for i, n in zip(row, vocabularies, strict=True)):
            raise InputError(f"{file} has the row {list(row)}; rows have ids below {list(vocabularies)}")
    return sequences
