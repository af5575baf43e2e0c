"""Weights in fewer bits as TensorRT-LLM's kernels want them: int8 and int4 per output channel, fp8 per matrix.

Weight-only kernels read a matrix [in, out] whose rows are shuffled so that a tensor core finds its operands side by
side. The order depends on the GPU: `WeightLayout.of(sm)`. A stored int8 tensor is taken as laid out already, so an
engine has to be built for the GPU that the checkpoint was written for.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.models.interface import Row
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch

FP8_PEAK = 448.0
INT8_PEAK = 127.0
TILE_ROWS = 64  # inputs that interleaved columns keep together
BYTE_ORDER = (0, 2, 1, 3)
NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class RoundedWeight(NamedTuple):
    """Codes and what they are to be multiplied with."""

    codes: Tensor  # int8 [in, out], in int4's range for 4 bits
    scales: Tensor  # [out]


def round_per_channel(weight: Tensor, bits: int) -> RoundedWeight:
    """Signed codes of a matrix, scaled by each output's largest value.  # [out, in] → [in, out]"""
    steps = 1 << (bits - 1)
    wide = weight.float()
    scales = wide.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / steps
    codes = (wide / scales[:, None]).round().clamp(-steps, steps - 1)
    return RoundedWeight(codes.T.to(torch.int8).contiguous(), scales)


def round_to_fp8(weight: Tensor, peak: float) -> Tensor:
    """A matrix over `peak / 448`, in float8.  # [out, in]"""
    return (weight.float() * (FP8_PEAK / peak)).clamp(-FP8_PEAK, FP8_PEAK).to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class WeightLayout:
    """How one generation of GPUs wants the codes of a weight-only product."""

    interleaves_columns: bool

    @classmethod
    def of(cls, sm: int) -> "WeightLayout":
        """Hopper wants columns one after the other; Ampere, Ada and RTX 50 want tiles of several of them in turn."""
        if sm in (100, 103):
            raise InputError(
                f"versions of TensorRT-LLM differ in how they lay out int8 and int4 for an sm {sm}; take --quantise fp8"
            )
        return cls(interleaves_columns=sm != 90)

    def arrange(self, codes: Tensor, bits: int) -> Tensor:
        """Codes in the order of the kernels.  # int8 [in, out] → int8 [in, out], two to a byte for 4 bits"""
        check_arrangeable(codes.shape, bits, self)
        inputs, outputs = codes.shape
        columns = codes[_row_order(inputs, bits)].T.contiguous()  # [out, in]: what follows is column-major
        if self.interleaves_columns:
            together = 16 // bits
            tiles = columns.view(outputs // together, together, inputs // TILE_ROWS, TILE_ROWS)
            columns = tiles.transpose(1, 2)
        order = BYTE_ORDER if bits == 8 else NIBBLE_ORDER  # so that a converter takes pairs apart by masks
        dealt = columns.reshape(-1, len(order))[:, list(order)].reshape(-1)
        return _packed(dealt, bits).view(inputs, outputs * bits // 8)


def _row_order(inputs: int, bits: int) -> Tensor:
    """Inside each block of 16 (int8) or 32 (int4) inputs, pairs are dealt out as the lanes of a warp take them."""
    block = 128 // bits
    pairs = torch.arange(block).view(block // 8, 4, 2)  # four pairs to a run of eight
    within = pairs.transpose(0, 1).reshape(-1)
    return (torch.arange(0, inputs, block)[:, None] + within).reshape(-1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes, made positive, as bytes; of two 4-bit codes the first is the low half."""
    positive = codes.to(torch.int16) + (1 << (bits - 1))
    if bits == 4:
        positive = positive[::2] | positive[1::2] << 4
    return positive.to(torch.uint8).view(torch.int8)


def check_arrangeable(shape: "torch.Size | tuple[int, ...]", bits: int, layout: WeightLayout) -> None:
    """Raise if a matrix [in, out] has a size that the kernels cannot take."""
    inputs, outputs = shape
    rows = TILE_ROWS if layout.interleaves_columns else 128 // bits
    columns = max(8, 16 // bits)
    if inputs % rows or outputs % columns:
        raise InputError(
            f"a matrix of {inputs} inputs and {outputs} outputs has no int{bits} layout: inputs must be a multiple of "
            f"{rows} and outputs of {columns}; take a smaller --tp or leave --quantise out"
        )


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
