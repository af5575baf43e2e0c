"""Sample-rate conversion by libsoxr; a stream in any pieces gives the offline result, sample for sample.

libsoxr filters in FFT blocks: a stream of it lags by up to 40 ms between 16 and 48 kHz and by up to 175 ms at 8 kHz.
For low latency, `LiveResampler` lags by 3 to 6 ms.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd
from typing import Any, Literal, get_args

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from vivavoce.errors import InputError

Quality = Literal["HQ", "VHQ"]  # 20 and 28 bits of precision in libsoxr's terms

LOWEST_RATE, HIGHEST_RATE = 1_000, 384_000


class StreamingResampler:
    """One stream's resampler: feed pieces of any size to `step`, then `flush` once.

    It never clips: a filter's overshoot past ±1 stays in the float samples. libsoxr keeps the state, so a running
    stream cannot be copied.
    """

    def __init__(self, from_rate: int, to_rate: int, channels: int = 1, quality: Quality = "HQ") -> None:
        check_rate(from_rate)
        check_rate(to_rate)
        check_quality(quality)
        self.from_rate, self.to_rate, self.channels = from_rate, to_rate, channels
        self._stream = None if from_rate == to_rate else _soxr_stream(from_rate, to_rate, channels, quality)
        self._ended = False

    def step(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The output that these samples complete; may be empty.  # [channel, time] or [time], as given"""
        return self._next(samples, last=False)

    def flush(self) -> NDArray[np.float32]:
        """The rest of the output, at the end of the sound; the stream is over then.  # [channel, time]"""
        return self._next(np.zeros((self.channels, 0), np.float32), last=True)

    def _next(self, samples: NDArray[np.float32], last: bool) -> NDArray[np.float32]:
        if self._ended:
            raise InputError("this resampler was flushed, its stream is over; make a new one for the next sound")
        self._ended = last
        rows = np.atleast_2d(np.asarray(samples, dtype=np.float32))
        if rows.ndim != 2 or rows.shape[0] != self.channels:
            raise InputError(f"the resampler has {self.channels} channel(s), the samples are {list(np.shape(samples))}")
        if self._stream is not None:
            interleaved = np.ascontiguousarray(rows.T)
            rows = np.ascontiguousarray(self._stream.resample_chunk(interleaved, last=last).T)
        return rows[0] if np.ndim(samples) == 1 else rows


def resample(
    samples: NDArray[np.float32], from_rate: int, to_rate: int, quality: Quality = "HQ"
) -> NDArray[np.float32]:
    """The samples at another rate.  # [channel, time] or [time], as given"""
    channels = 1 if np.ndim(samples) == 1 else np.shape(samples)[0]
    stream = StreamingResampler(from_rate, to_rate, channels, quality)
    return np.concatenate([stream.step(samples), stream.flush().reshape(*np.shape(samples)[:-1], -1)], axis=-1)


def check_rate(rate: int) -> None:
    """Raise InputError for a rate out of range."""
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise InputError(f"a sample rate of {rate} Hz is out of range; {LOWEST_RATE} to {HIGHEST_RATE} Hz can be used")


def check_quality(quality: str) -> None:
    """Raise InputError for a quality that does not exist."""
    if quality not in get_args(Quality):
        raise InputError(f"resampling quality {quality!r} does not exist; use one of {', '.join(get_args(Quality))}")


def _soxr_stream(from_rate: int, to_rate: int, channels: int, quality: Quality) -> Any:
    import soxr

    return soxr.ResampleStream(from_rate, to_rate, channels, dtype="float32", quality=quality)


BLOCK = 4096  # outputs computed at once, which bounds memory for long inputs
FEW_PHASES = 8
MIN_OUTPUTS = 32  # of a stretch: fewer make slim products, more make a matrix with more zeros


@dataclass(frozen=True)
class FilterShape:
    """A windowed sinc. The stop band begins at the lower Nyquist frequency."""

    zero_crossings: int = 48
    """On each side, counted at the lower rate: determines the lag."""
    cutoff: float = 0.947
    """Of the lower Nyquist frequency."""
    kaiser_beta: float = 7.857
    """80 dB of stop band."""


TELEPHONE = FilterShape(24, 0.925, 5.65)  # 8 kHz: passes 3.4 kHz, 60 dB of stop band, 3 ms of lag


@dataclass(frozen=True)
class LiveResamplerState:
    """State of one stream: the inputs that later outputs need, and the numbers of samples in and out."""

    held: NDArray[np.float32]  # [channel, time]
    received: int
    emitted: int


class LiveResampler:
    """Low-latency resampling between two rates; the filters are shared by all streams, the state is a value."""

    def __init__(self, from_rate: int, to_rate: int, shape: FilterShape | None = None) -> None:
        check_rate(from_rate)
        check_rate(to_rate)
        shape = shape or FilterShape()
        self.from_rate, self.to_rate = from_rate, to_rate
        divisor = gcd(from_rate, to_rate)
        self.up, self.down = to_rate // divisor, from_rate // divisor
        self.reach = ceil(shape.zero_crossings * max(1.0, from_rate / to_rate))  # inputs on each side of an output
        bandwidth = shape.cutoff * min(1.0, to_rate / from_rate)
        self.filters = _sinc_filters(self.up, self.reach, bandwidth, shape.kaiser_beta)  # [phase, tap]

    @cached_property
    def stretch(self) -> "StretchFilter":
        """The filters of a short stretch of outputs as one matrix."""
        return StretchFilter(self)

    @property
    def lag_seconds(self) -> float:
        """Delay of the output."""
        return 0.0 if self.up == self.down else self.reach / self.from_rate

    def initial_state(self, channels: int = 1) -> LiveResamplerState:
        """The state before the first sample: silence."""
        return LiveResamplerState(np.zeros((channels, self.reach - 1), np.float32), 0, 0)

    def step(
        self, state: LiveResamplerState, samples: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], LiveResamplerState]:
        """The output that these samples complete, and the state after them.  # [channel, time] → [channel, time]"""
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
        """The rest of the output, as if silence followed.  # [channel, time]"""
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
            make = self._by_stretch if self.up <= FEW_PHASES else self._by_output
            outputs += [
                make(inputs, origin, begin, min(begin + BLOCK, until)) for begin in range(state.emitted, until, BLOCK)
            ]
        first_needed = until * self.down // self.up - self.reach + 1
        held = inputs[:, max(first_needed - origin, 0) :].copy()
        return np.concatenate(outputs, axis=-1), LiveResamplerState(held, received, until)

    def _by_stretch(self, inputs: NDArray[np.float32], origin: int, begin: int, end: int) -> NDArray[np.float32]:
        """Outputs `begin` to `end`."""
        aligned = begin // self.up * self.up
        first = aligned // self.up * self.down - self.reach + 1 - origin
        made = self.stretch.apply(inputs, first, -(-(end - aligned) // self.stretch.outputs))
        return made[:, begin - aligned : end - aligned]

    def _by_output(self, inputs: NDArray[np.float32], origin: int, begin: int, end: int) -> NDArray[np.float32]:
        """As `_by_stretch`, for many phases, whose matrix would be large: one gather and product for all outputs."""
        windows = sliding_window_view(inputs, 2 * self.reach, axis=-1)  # [channel, start, tap]
        whole, phase = np.divmod(np.arange(begin, end) * self.down, self.up)
        taken = windows[:, whole - self.reach + 1 - origin]
        return np.asarray(np.einsum("cnt,nt->cn", taken, self.filters[phase]), np.float32)


class StretchFilter:
    """Outputs of a short stretch: a product of the inputs around it and a banded matrix, the same for every stretch."""

    def __init__(self, resampler: LiveResampler) -> None:
        up, down, taps = resampler.up, resampler.down, 2 * resampler.reach
        repeats = -(-MIN_OUTPUTS // up)
        self.outputs, self.hop = up * repeats, down * repeats
        self.matrix = np.zeros(((self.outputs - 1) * down // up + taps, self.outputs), np.float32)
        for output in range(self.outputs):
            whole, phase = divmod(output * down, up)
            self.matrix[whole : whole + taps, output] = resampler.filters[phase]

    def apply(self, inputs: NDArray[np.float32], begin: int, stretches: int) -> NDArray[np.float32]:
        """Successive stretches, the first from input `begin` on; zeros stand for inputs that are not given."""
        span = len(self.matrix)
        padded = np.zeros((len(inputs), (stretches - 1) * self.hop + span), np.float32)
        given = inputs[:, max(begin, 0) : begin + padded.shape[1]]
        first = max(-begin, 0)
        padded[:, first : first + given.shape[1]] = given
        shape = len(inputs), stretches, span
        # A view made by hand: numpy's sliding_window_view takes longer than the product.
        windows = np.ndarray(shape, np.float32, padded, 0, (padded.strides[0], 4 * self.hop, 4))
        return (np.ascontiguousarray(windows) @ self.matrix).reshape(len(inputs), -1)


def _sinc_filters(phases: int, reach: int, bandwidth: float, beta: float) -> NDArray[np.float32]:
    taps = np.arange(-reach + 1, reach + 1, dtype=np.float64)
    distance = taps - np.arange(phases)[:, None] / phases  # [phase, tap], in input samples
    window = np.i0(beta * np.sqrt(np.clip(1 - (distance / reach) ** 2, 0, None))) / np.i0(beta)
    filters = np.sinc(bandwidth * distance) * window
    filters /= filters.sum(axis=1, keepdims=True)  # a constant stays that constant in every phase
    return filters.astype(np.float32)
