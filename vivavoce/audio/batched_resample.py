"""Low-latency resampling of many streams: the numbers of `LiveResampler` by one matrix product for all of them.

The outputs of a short stretch are a product of the inputs around it and a banded matrix, the same for every stretch.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vivavoce.audio.resample import LiveResampler, LiveResamplerState
from vivavoce.audio.rows import FEW
from vivavoce.nn.modules import scripted

Samples = NDArray[np.float32]


class BatchedResampler:
    """Resamples streams of one channel between the rates of a `LiveResampler`. The state of each is a value."""

    def __init__(self, resampler: LiveResampler) -> None:
        self._resampler = resampler
        stretch = resampler.stretch
        self._kernel: Any = scripted(ResampleKernel(torch.from_numpy(stretch.matrix), stretch.hop))

    def step(
        self, states: Sequence[LiveResamplerState], samples: Sequence[Samples]
    ) -> tuple[list[Samples], list[LiveResamplerState]]:
        """The output that these samples complete, and the states after them.  # [time] each → [time] each"""
        resampler = self._resampler
        if resampler.up == resampler.down:
            return list(samples), list(states)
        alike: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
        for number, (state, piece) in enumerate(zip(states, samples, strict=True)):
            periods = state.emitted // resampler.up
            received, emitted = state.received - periods * resampler.down, state.emitted - periods * resampler.up
            alike[len(piece), state.held.shape[1], received, emitted].append(number)
        outputs: list[Samples] = [samples[0]] * len(samples)
        after = list(states)
        for numbers in alike.values():
            parts = [part for number in numbers for part in (states[number].held.data, samples[number].data)]
            inputs = np.frombuffer(bytearray().join(parts), np.float32).reshape(len(numbers), -1)
            sounds, begin, received, until = self._advance(states[numbers[0]], inputs)
            for row, number in enumerate(numbers):
                outputs[number] = sounds[row]
                state = states[number]
                held = inputs[row : row + 1, begin:]
                after[number] = LiveResamplerState(held, state.received + received, state.emitted + until)
        return outputs, after

    def _advance(self, state: LiveResamplerState, inputs: Samples) -> tuple[Samples, int, int, int]:
        """The output, the first input that is still needed, and by how much the counts increase."""
        resampler = self._resampler
        up, down, reach = resampler.up, resampler.down, resampler.reach
        more = inputs.shape[1] - state.held.shape[1]
        received = state.received + more
        until = max(-(-(received - reach) * up // down), state.emitted)
        origin = received - inputs.shape[1]
        first_needed = max(until * down // up - reach + 1 - origin, 0)
        if until == state.emitted:
            return np.zeros((len(inputs), 0), np.float32), first_needed, more, 0
        aligned = state.emitted // up * up
        begin = aligned // up * down - reach + 1 - origin
        stretches = -(-(until - aligned) // resampler.stretch.outputs)
        if len(inputs) < FEW:
            made = resampler.stretch.apply(inputs, begin, stretches)
        else:
            made = self._kernel(torch.from_numpy(inputs), begin, stretches).numpy()
        return made[:, state.emitted - aligned : until - aligned], first_needed, more, until - state.emitted


class ResampleKernel(nn.Module):
    """As `StretchFilter.apply`, for many streams."""

    matrix: Tensor

    def __init__(self, matrix: Tensor, hop: int) -> None:
        super().__init__()
        self.hop: int = hop
        self.register_buffer("matrix", matrix)

    def forward(self, inputs: Tensor, begin: int, stretches: int) -> Tensor:
        """# [stream, time] → [stream, stretches · outputs]; zeros stand for inputs that are not given"""
        span = self.matrix.size(0)
        end = begin + (stretches - 1) * self.hop + span
        inputs = torch.nn.functional.pad(inputs, [-begin, end - inputs.size(1)])
        return torch.matmul(inputs.unfold(1, span, self.hop), self.matrix).flatten(1)
