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

    def extend(self, keys_values: Tensor) -> Tensor:
        """All keys and values the next attention layer may look at.  # [2, row, head, time, dim] → [.., key, dim]"""
        ...

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The next convolution, continued from its last inputs.  # [row, channel, time]"""
        ...


class Silence:
    """Nothing came before: the whole signal is given at once."""

    def extend(self, keys_values: Tensor) -> Tensor:
        """The keys and values themselves."""
        return keys_values

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The convolution from zeros."""
        return conv(x)


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
        contexts: Sequence[Tensor],  # per convolution: [row, channel, context]
        next_windows: Tensor | None = None,  # where the next windows go, if they are to grow; else in place
    ) -> None:
        self._prefixes = prefixes
        self._prefix_slots = max(prefix.shape[-2] for prefix in prefixes)
        self._windows = windows
        self._next_windows = windows if next_windows is None else next_windows
        self._layers = iter(range(windows.shape[0]))
        self._contexts = iter(contexts)

    def extend(self, keys_values: Tensor) -> Tensor:
        """Prefix, window and the new keys and values in one tensor; the window moves on."""
        layer = next(self._layers)
        new = keys_values.unflatten(1, self._windows.shape[2:4])
        joined = torch.cat([self._prefix(layer), self._windows[layer], new], dim=-2)
        kept = self._next_windows[layer]
        kept.copy_(joined[..., joined.shape[-2] - kept.shape[-2] :, :])
        return joined.flatten(1, 2)

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The convolution continued; its context moves on."""
        context = next(self._contexts)
        y, last = conv.step(context, x)
        context.copy_(last)
        return y

    def _prefix(self, layer: int) -> Tensor:  # [2, stream, row of the stream, head, prefix, dim]
        if len(self._prefixes) == 1:
            return self._prefixes[0][layer].unsqueeze(1).expand(-1, self._windows.shape[2], -1, -1, -1, -1)
        padded = [
            functional.pad(prefix[layer], (0, 0, 0, self._prefix_slots - prefix.shape[-2])) for prefix in self._prefixes
        ]
        return torch.stack(padded, dim=1)
