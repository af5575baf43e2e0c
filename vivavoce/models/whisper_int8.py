"""A Whisper in int8 for CPUs: every projection and the table that spells tokens, rounded as it stands in memory.

What comes out of a norm is of one size in all rows and is rounded by one scale; query, key and value are one product.
"""

import torch
from torch import Tensor, nn

from vivavoce.device import int8_is_fast_here
from vivavoce.errors import InputError
from vivavoce.models.whisper import CrossAttention, Whisper
from vivavoce.nn.int8_linear import FEW_ROWS, MANY_ROWS, Int8Linear, int8_product
from vivavoce.nn.whisper_layer import WhisperAttention, WhisperLayer


class AfterNorm(Int8Linear):
    """An `Int8Linear` whose inputs come out of a norm: one scale for all rows of a call."""

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return int8_product(x.float(), self.packed, False).to(x.dtype)


def to_int8(model: Whisper) -> Whisper:
    """The model with int8 products, in place; convolutions, norms and tables of positions stay as they are."""
    if not int8_is_fast_here():
        raise InputError("int8 products need a CPU with VNNI, which this one lacks; take auto or float32")
    for half, kernels in ((model.encoder, MANY_ROWS), (model.decoder, FEW_ROWS)):
        for module in list(half.modules()):
            if isinstance(module, WhisperLayer):
                first = AfterNorm.of_weight(module.fc1.weight, module.fc1.bias, kernels)
                setattr(module, "fc1", first)  # noqa: B010 - another type
            if isinstance(module, WhisperAttention) and not isinstance(module, CrossAttention):
                module.packed = _packed(module, kernels)
        _round_below(half, kernels)
    model.decoder.spelling = AfterNorm.of_weight(model.decoder.embed_tokens.weight)
    return model


def _packed(attention: WhisperAttention, kernels: str) -> Int8Linear:
    """Query, key and value projections as one."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    zeros = torch.zeros_like(attention.q_proj.bias)
    biases: list[Tensor] = [zeros if part.bias is None else part.bias for part in parts]
    return AfterNorm.of_weight(torch.cat([part.weight for part in parts]), torch.cat(biases), kernels)


def _round_below(module: nn.Module, kernels: str) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, Int8Linear.of_weight(child.weight, child.bias, kernels))
        else:
            _round_below(child, kernels)
