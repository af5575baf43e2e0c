"""Weights in fewer bits as TensorRT-LLM's kernels want them: int8 and int4 per output channel, fp8 per matrix.

Weight-only kernels read a matrix [in, out] whose rows are shuffled so that a tensor core finds its operands side by
side. The order depends on the GPU: `WeightLayout.of(sm)`. A stored int8 tensor is taken as laid out already, so an
engine has to be built for the GPU that the checkpoint was written for.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vivavoce.errors import InputError

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
