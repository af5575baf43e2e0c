"""The past of streams by its addresses on the device: nothing is gathered before a pass and nothing copied after it.

Since the addresses are data, a pass captured in a CUDA graph serves any streams and voices of the same sizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vivavoce.nn import kernels
from vivavoce.nn.conv import CausalConv1d
from vivavoce.nn.past import product_over_taps

LONGEST_CONTEXT = 3  # of the fused convolution; longer ones are rare and large enough for the libraries


@dataclass(frozen=True)
class KeyValueAddresses:
    """Where the keys and values of all layers lie, per stream."""

    prefixes: Tensor  # int64 [stream]: of [layer, 2, row of the stream, head, length, dim]
    lengths: Tensor  # int64 [stream]
    windows: Tensor  # int64 [stream]: of [layer, 2, row of the stream, head, slot, dim]; 0 where a stream keeps none
    next_windows: Tensor  # int64 [stream]: likewise
    window_strides: tuple[int, int]  # of layer, and of keys to values
    prefix_slots: int  # of the longest prefix, or more
    slots: int


class AddressedPast:
    """A `StreamPast` on addresses. What comes next goes to memory of its own."""

    def __init__(
        self,
        addresses: KeyValueAddresses,
        layers: Iterator[int],
        contexts: Sequence[Tensor],  # per convolution: [row, context, channel]
        next_contexts: Sequence[Tensor],
        arrived: Tensor,  # int32 [row × head], zero
    ) -> None:
        self._addresses = addresses
        self._layers = layers
        self._contexts = iter(zip(contexts, next_contexts, strict=True))
        self._arrived = arrived

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Attention to prefix, window and what is new; the next window is made."""
        past = self._addresses
        return kernels.chunk_attention(
            query,
            keys_values,
            bias,
            past.prefixes,
            past.lengths,
            past.windows,
            past.next_windows,
            past.window_strides,
            past.slots,
            past.prefix_slots,
            next(self._layers),
            self._arrived,
        )

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The convolution continued; its next context is made."""
        context, next_context = next(self._contexts)
        if conv.groups == 1 and conv.context <= min(LONGEST_CONTEXT, x.shape[1]):
            return kernels.stream_conv(x, context, next_context, conv.weight, conv.bias)
        joined = torch.cat([context, x], dim=1)
        next_context.copy_(joined[:, joined.shape[1] - conv.context :])
        return product_over_taps(conv, joined)


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Where tensors begin, told to the device without waiting for it.  # int64 [tensor]"""
    device = tensors[0].device
    return torch.stack([torch.full((), each.data_ptr(), dtype=torch.int64, device=device) for each in tensors])
