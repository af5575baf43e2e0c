"""Sample-rate conversion for a live stream: a windowed sinc of few milliseconds, its state a value.

Passes 89 % of the lower Nyquist frequency and stops what would alias by 80 dB, lagging 48 samples of the lower rate:
3 ms at 16 kHz, 6 ms at 8 kHz.
"""

from dataclasses import dataclass
from math import ceil, gcd

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from vivavoce.audio.resample import check_rate
from vivavoce.errors import InputError

ZERO_CROSSINGS = 48  # on each side, counted at the lower rate: what the lag is made of
CUTOFF = 0.947  # of the lower Nyquist frequency, so that the stop band begins just at it
KAISER_BETA = 7.857  # 80 dB of stop band
BLOCK = 4096  # outputs computed at once, which bounds memory for long inputs
FEW_PHASES = 8


@dataclass(frozen=True)
class LiveResamplerState:
    """Where one stream stands: the inputs that coming outputs need, and how many went in and came out."""

    held: NDArray[np.float32]  # [channel, time]
    received: int
    emitted: int


class LiveResampler:
    """The filters between two rates, shared by all streams; each stream's state is its own value."""

    def __init__(self, from_rate: int, to_rate: int) -> None:
        check_rate(from_rate)
        check_rate(to_rate)
        self.from_rate, self.to_rate = from_rate, to_rate
        divisor = gcd(from_rate, to_rate)
        self.up, self.down = to_rate // divisor, from_rate // divisor
        self.reach = ceil(ZERO_CROSSINGS * max(1.0, from_rate / to_rate))  # input samples on each side of an output
        self._filters = _sinc_filters(self.up, self.reach, min(1.0, to_rate / from_rate))  # [phase, tap]

    @property
    def lag_seconds(self) -> float:
        """How far behind its input a stream's output is."""
        return 0.0 if self.up == self.down else self.reach / self.from_rate

    def initial_state(self, channels: int = 1) -> LiveResamplerState:
        """The state before the first sample: silence."""
        return LiveResamplerState(np.zeros((channels, self.reach - 1), np.float32), 0, 0)

    def step(
        self, state: LiveResamplerState, samples: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], LiveResamplerState]:
        """What these samples allow to be said, and the state after them.  # [channel, time] → [channel, time]"""
        if np.ndim(samples) != 2 or np.shape(samples)[0] != state.held.shape[0]:
            raise InputError(
                f"the stream has {state.held.shape[0]} channel(s), the samples are {list(np.shape(samples))}"
            )
        if self.up == self.down:
            return np.asarray(samples, np.float32), state
        received = state.received + samples.shape[-1]
        ready = -(-(received - self.reach) * self.up // self.down)  # outputs whose last tap has arrived
        return self._advance(state, np.asarray(samples, np.float32), received, max(ready, state.emitted))

    def flush(self, state: LiveResamplerState) -> NDArray[np.float32]:
        """What is left when the sound has ended, as if silence followed.  # [channel, time]"""
        silence = np.zeros((state.held.shape[0], self.reach + 1), np.float32)
        total = (2 * state.received * self.up + self.down) // (2 * self.down)
        return self._advance(state, silence, state.received + silence.shape[-1], max(total, state.emitted))[0]

    def forward(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The whole sound at the other rate.  # [channel, time] → [channel, time]"""
        output, state = self.step(self.initial_state(len(samples)), samples)
        return np.concatenate([output, self.flush(state)], axis=-1)

    def _advance(
        self, state: LiveResamplerState, samples: NDArray[np.float32], received: int, until: int
    ) -> tuple[NDArray[np.float32], LiveResamplerState]:
        inputs = np.concatenate([state.held, samples], axis=-1)
        origin = received - inputs.shape[-1]  # stream position of inputs[0]
        outputs = [np.zeros((len(inputs), 0), np.float32)]
        if until > state.emitted:
            make = self._by_phase if self.up <= FEW_PHASES else self._by_output
            outputs += [
                make(inputs, origin, begin, min(begin + BLOCK, until)) for begin in range(state.emitted, until, BLOCK)
            ]
        first_needed = until * self.down // self.up - self.reach + 1
        held = inputs[:, max(first_needed - origin, 0) :].copy()
        return np.concatenate(outputs, axis=-1), LiveResamplerState(held, received, until)

    def _by_phase(self, inputs: NDArray[np.float32], origin: int, begin: int, end: int) -> NDArray[np.float32]:
        """Outputs `begin` to `end`: those of one phase lie evenly, and are one product each."""
        outputs = np.empty((len(inputs), end - begin), np.float32)
        channel, sample = inputs.strides
        for first in range(begin, min(begin + self.up, end)):
            whole, phase = divmod(first * self.down, self.up)
            start = whole - self.reach + 1 - origin
            shape = (len(inputs), -(-(end - first) // self.up), 2 * self.reach)
            # A view made by hand: numpy's own way to one takes longer than the product.
            windows = np.ndarray(shape, np.float32, inputs, start * sample, (channel, self.down * sample, sample))
            outputs[:, first - begin :: self.up] = windows @ self._filters[phase]
        return outputs

    def _by_output(self, inputs: NDArray[np.float32], origin: int, begin: int, end: int) -> NDArray[np.float32]:
        """The same where there are many phases."""
        windows = sliding_window_view(inputs, 2 * self.reach, axis=-1)  # [channel, start, tap]
        whole, phase = np.divmod(np.arange(begin, end) * self.down, self.up)
        taken = windows[:, whole - self.reach + 1 - origin]
        return np.asarray(np.einsum("cnt,nt->cn", taken, self._filters[phase]), np.float32)


def _sinc_filters(phases: int, reach: int, bandwidth: float) -> NDArray[np.float32]:
    taps = np.arange(-reach + 1, reach + 1, dtype=np.float64)
    distance = taps - np.arange(phases)[:, None] / phases  # [phase, tap], in input samples
    window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (distance / reach) ** 2, 0, None))) / np.i0(KAISER_BETA)
    filters = np.sinc(CUTOFF * bandwidth * distance) * window
    filters /= filters.sum(axis=1, keepdims=True)  # a constant stays that constant in every phase
    return filters.astype(np.float32)
