"""What causal layers remember of a stream: keys and values behind attention, last inputs behind convolutions.

A network written against `Past` is one implementation for both uses: offline it runs over a `Silence`, in a stream over
a `StreamPast`. Both are read in forward order, so each layer finds its own memory without knowing its number.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.nn.conv import CausalConv1d


class Past(Protocol):
    """The past of a batch, as the layers of one forward pass see it."""

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """The next attention layer, over the past and what is new.

        # query [row, head, time, dim], keys_values [2, row, head, time, dim], bias [row, 1 or head, time, key]
        """
        ...

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The next convolution, continued from its last inputs.  # [row, time, channel]"""
        ...


class Silence:
    """Nothing came before: the whole signal is given at once."""

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Attention to what is given alone."""
        keys, values = keys_values
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias)

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The convolution from zeros."""
        return product_over_taps(conv, functional.pad(x, (0, 0, conv.context, 0)))


class StreamPast:
    """The past of a batch of streams: a prefix per stream, shared by reference, then a window, then what is new.

    A stream has one or more rows in the batch (two under classifier-free guidance). Windows and contexts are
    overwritten while the layers read them, so the tensors given hold the past of the next pass afterwards.
    """

    def __init__(
        self,
        prefixes: Sequence[
            Tensor
        ],  # one for all streams, or one each: [layer, 2, row of the stream, head, prefix, dim]
        windows: Tensor,  # [layer, 2, stream, row of the stream, head, slot, dim], newest last
        contexts: Sequence[Tensor],  # per convolution: [row, context, channel]
        next_windows: Tensor | None = None,  # where the next windows go, if they are to grow; else in place
    ) -> None:
        self._prefixes = prefixes
        self._prefix_slots = max(prefix.shape[-2] for prefix in prefixes)
        self._windows = windows
        self._next_windows = windows if next_windows is None else next_windows
        self._layers = iter(range(windows.shape[0]))
        self._contexts = iter(contexts)

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Attention to prefix, window and what is new; the window moves on."""
        layer = next(self._layers)
        new = keys_values.unflatten(1, self._windows.shape[2:4])
        joined = torch.cat([self._prefix(layer), self._windows[layer], new], dim=-2)
        kept = self._next_windows[layer]
        kept.copy_(joined[..., joined.shape[-2] - kept.shape[-2] :, :])
        keys, values = joined.flatten(1, 2)
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias)

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The convolution continued; its context moves on."""
        context = next(self._contexts)
        joined = torch.cat([context, x], dim=1)
        context.copy_(joined[:, joined.shape[1] - conv.context :])
        return product_over_taps(conv, joined)

    def _prefix(self, layer: int) -> Tensor:  # [2, stream, row of the stream, head, prefix, dim]
        if len(self._prefixes) == 1:
            return self._prefixes[0][layer].unsqueeze(1).expand(-1, self._windows.shape[2], -1, -1, -1, -1)
        padded = [
            functional.pad(prefix[layer], (0, 0, 0, self._prefix_slots - prefix.shape[-2])) for prefix in self._prefixes
        ]
        return torch.stack(padded, dim=1)


def product_over_taps(conv: CausalConv1d, joined: Tensor) -> Tensor:
    """A dense convolution as one matrix product.  # [row, context + time, channel] → [row, time, channel]

    Attention and norms keep channels last, which convolution kernels do not: they would turn input, weight and output
    around in every one of the hundreds of calls of a step, at more cost than the convolution itself.
    """
    if conv.stride != (1,) or conv.dilation != (1,):
        raise ValueError(f"{conv} is not a plain convolution")
    if conv.groups != 1 and joined.is_cuda:
        return _product_of_groups(conv, joined)
    if conv.groups != 1:  # no one product: each group has channels of its own
        grouped = functional.conv1d(joined.transpose(1, 2), conv.weight, conv.bias, groups=conv.groups)
        return grouped.transpose(1, 2)
    taps = joined.unfold(1, conv.kernel_size[0], 1)  # [row, time, channel, tap]
    return functional.linear(taps.flatten(2), conv.weight.flatten(1), conv.bias)


def _product_of_groups(conv: CausalConv1d, joined: Tensor) -> Tensor:
    """A product for each group, all in one launch. CUDA's libraries convolve one group after the other.

    # [row, context + time, channel] → [row, time, channel]
    """
    taps = joined.unfold(1, conv.kernel_size[0], 1).unflatten(2, (conv.groups, -1))  # [row, time, group, channel, tap]
    inputs = taps.permute(2, 0, 1, 4, 3).flatten(1, 2).flatten(2)  # [group, row × time, tap × channel]
    weight = conv.weight.unflatten(0, (conv.groups, -1)).transpose(2, 3).flatten(2)  # [group, output, tap × channel]
    product = inputs @ weight.mT
    if conv.bias is not None:
        product = product + conv.bias.view(conv.groups, 1, -1)
    return product.unflatten(1, (joined.shape[0], -1)).permute(1, 2, 0, 3).flatten(2)
