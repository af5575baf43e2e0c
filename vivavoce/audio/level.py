"""Levels: measuring loudness, gain control, limiting, and trimming silence at the start."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from vivavoce.audio.io import Sound, check_finite
from vivavoce.audio.resample import resample

Samples = NDArray[np.float32]

SILENCE_DBFS = -120.0
BLOCK_SECONDS = 0.02
PAUSE_DB = 25.0  # a block this far under the loudest is a pause, not speech
TRUE_PEAK_DBFS = -1.0  # headroom for inter-sample peaks


def peak(samples: Samples) -> float:
    """The largest absolute sample."""
    return float(np.abs(samples).max(initial=0.0))


def true_peak(samples: Samples, rate: int) -> float:
    """The largest absolute value including inter-sample peaks, by fourfold oversampling."""
    return max(peak(samples), peak(resample(samples, rate, 4 * rate))) if np.size(samples) else 0.0


def rms_dbfs(samples: Samples) -> float:
    """Root mean square in dB of full scale; silence is SILENCE_DBFS."""
    return to_db(float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))) if np.size(samples) else SILENCE_DBFS


def speech_dbfs(sound: Sound) -> float:
    """Root mean square of the speech in a sound, its pauses left out, in dB of full scale."""
    size = max(1, round(BLOCK_SECONDS * sound.rate))
    power = np.square(sound.mono().samples[0], dtype=np.float64)
    if power.size < size:
        return rms_dbfs(sound.mono().samples)
    blocks = power[: power.size - power.size % size].reshape(-1, size).mean(axis=1)
    speech = blocks[blocks >= blocks.max() * 10 ** (-PAUSE_DB / 10)]
    return to_db(float(np.sqrt(speech.mean())))


def normalise_speech(sound: Sound, target_dbfs: float = -23.0, max_gain_db: float = 18.0) -> Sound:
    """The sound raised by one gain towards the target, as far as its true peak allows; never turned down."""
    wanted = target_dbfs - speech_dbfs(sound)
    headroom = TRUE_PEAK_DBFS - to_db(true_peak(sound.samples, sound.rate))
    gain = from_db(max(0.0, min(wanted, headroom, max_gain_db)))
    return sound if gain == 1.0 else Sound(sound.samples * np.float32(gain), sound.rate)


def to_db(amplitude: float) -> float:
    """An amplitude in dB of full scale, not under SILENCE_DBFS."""
    return max(SILENCE_DBFS, 20.0 * math.log10(max(amplitude, 1e-30)))


def from_db(decibel: float) -> float:
    """The amplitude of a level in dB."""
    return float(10.0 ** (decibel / 20.0))


@dataclass(frozen=True)
class SpeechGainState:
    """Gain control state of one stream."""

    gain_db: float  # at the end of the last whole block
    slope_db: float  # change of the gain over the running block
    speech_power: float  # running mean over speech; 0 before the first
    block_power: float  # sum over the samples of the running block
    filled: int  # samples of the running block so far


class SpeechGain:
    """Slow automatic gain control: brings a stream of speech to a target level without delay and without pumping.

    The gain moves at most `slope_db_per_second`, only while there is speech, and towards the level of the last
    seconds of speech; pauses leave it unchanged. A `Limiter` should follow, for peaks that it raises too far.
    """

    MEMORY_SECONDS = 3.0  # time constant of the speech level
    FORGET_SECONDS = 8.0  # its decay over sound far under it
    GATE_DBFS = -50.0  # sound under this is not speech

    def __init__(
        self,
        rate: int,
        target_dbfs: float = -23.0,
        max_gain_db: float = 12.0,
        slope_db_per_second: float = 3.0,
        min_gain_db: float | None = None,
    ) -> None:
        self.rate, self.target_dbfs, self.max_gain_db = rate, target_dbfs, max_gain_db
        self.min_gain_db = -max_gain_db if min_gain_db is None else min_gain_db
        self.block = max(1, round(BLOCK_SECONDS * rate))
        self.step_db = slope_db_per_second * self.block / rate

    def initial_state(self) -> SpeechGainState:
        """The state before the first sample."""
        return SpeechGainState(0.0, 0.0, 0.0, 0.0, 0)

    def step(self, state: SpeechGainState, samples: Samples) -> tuple[Samples, SpeechGainState]:
        """The samples with the gain applied, as many as came in.  # [channel, time] → [channel, time]"""
        check_finite(samples)
        if self._is_pause(state, samples):
            return self._raised(state, samples), state
        outputs, begin = [], 0
        while begin < samples.shape[1]:
            piece = samples[:, begin : begin + self.block - state.filled]
            outputs.append(self._raised(state, piece))
            state = self._measure_block(state, piece)
            begin += piece.shape[1]
        if len(outputs) == 1:
            return outputs[0], state
        return np.concatenate([samples[:, :0], *outputs], axis=1), state

    def forward(self, samples: Samples) -> Samples:
        """The whole sound as a stream would give it.  # [channel, time] → [channel, time]"""
        return self.step(self.initial_state(), samples)[0]

    def _is_pause(self, state: SpeechGainState, samples: Samples) -> bool:
        """Whether these samples are one whole block under the gate, which leaves the state unchanged."""
        is_block = samples.shape[1] == self.block and not state.filled and not state.slope_db
        return is_block and float(np.vdot(samples, samples)) < samples.size * 10 ** (self.GATE_DBFS / 10)

    def _raised(self, state: SpeechGainState, piece: Samples) -> Samples:
        if not state.gain_db and not state.slope_db:
            return piece
        if not state.slope_db:
            return piece * np.float32(from_db(state.gain_db))
        progress = (state.filled + 1 + np.arange(piece.shape[1])) / self.block
        gain = 10.0 ** ((state.gain_db + state.slope_db * progress) / 20.0)
        return np.asarray(piece * gain, np.float32)

    def _measure_block(self, state: SpeechGainState, piece: Samples) -> SpeechGainState:
        power = state.block_power + float(np.square(piece, dtype=np.float64).mean(axis=0).sum())
        filled = state.filled + piece.shape[1]
        if filled < self.block:
            return SpeechGainState(state.gain_db, state.slope_db, state.speech_power, power, filled)
        gain_db, power = state.gain_db + state.slope_db, power / self.block
        if power < 10 ** (self.GATE_DBFS / 10):
            return SpeechGainState(gain_db, 0.0, state.speech_power, 0.0, 0)
        if power < state.speech_power * 10 ** (-PAUSE_DB / 10):
            # After a shout, normal speech must not count as a pause forever.
            fading = math.exp(-BLOCK_SECONDS / self.FORGET_SECONDS)
            return SpeechGainState(gain_db, 0.0, state.speech_power * fading, 0.0, 0)
        keep = math.exp(-BLOCK_SECONDS / self.MEMORY_SECONDS) if state.speech_power else 0.0
        speech_power = keep * state.speech_power + (1 - keep) * power
        wanted = min(max(self.target_dbfs - to_db(speech_power**0.5), self.min_gain_db), self.max_gain_db)
        slope = min(max(wanted - gain_db, -self.step_db), self.step_db)
        return SpeechGainState(gain_db, slope, speech_power, 0.0, 0)


Decibels = NDArray[np.float64]


@dataclass(frozen=True)
class LimiterState:
    """Limiter state of one stream: the delayed samples, and the gain reductions they depend on."""

    held: Samples  # [channel, time]: at most the look-ahead
    reductions: Decibels  # [time], ≤ 0, with the release applied; the last is the newest


class Limiter:
    """A look-ahead limiter with one gain for all channels.

    The gain reaches a peak's reduction by a smooth ramp within the look-ahead before it, and returns at
    `release_db_per_second`. A stream lags by the look-ahead; `flush` gives the rest.
    """

    def __init__(
        self,
        rate: int,
        ceiling_dbfs: float = -1.0,
        lookahead_seconds: float = 0.002,
        release_db_per_second: float = 60.0,
    ) -> None:
        self.ceiling = from_db(ceiling_dbfs)
        self.lookahead = max(1, round(lookahead_seconds * rate))
        self.release_db = release_db_per_second / rate

    def initial_state(self, channels: int = 1) -> LimiterState:
        """The state before the first sample: nothing held, nothing turned down."""
        return LimiterState(np.zeros((channels, 0), np.float32), np.zeros(2 * self.lookahead))

    def step(self, state: LimiterState, samples: Samples) -> tuple[Samples, LimiterState]:
        """The samples that are ready, `lookahead` behind the input.  # [channel, time] → [channel, time]"""
        check_finite(samples)
        return self._advance(state, samples, samples.shape[1])

    def flush(self, state: LimiterState) -> Samples:
        """The delayed samples at the end of the sound.  # [channel, time]"""
        waiting = state.held.shape[1]
        silence = np.zeros((len(state.held), self.lookahead), np.float32)
        return self._advance(state, silence, self.lookahead)[0][:, :waiting]

    def forward(self, samples: Samples) -> Samples:
        """The whole sound, limited, without delay.  # [channel, time] → [channel, time]"""
        output, state = self.step(self.initial_state(len(samples)), samples)
        return np.concatenate([output, self.flush(state)], axis=1)

    def _advance(self, state: LimiterState, samples: Samples, count: int) -> tuple[Samples, LimiterState]:
        if count == 0:
            return samples, state
        joined = np.concatenate([state.held, samples], axis=1)
        ready = max(0, joined.shape[1] - self.lookahead)
        if peak(samples) <= self.ceiling and not state.reductions.any():
            return joined[:, :ready], LimiterState(joined[:, ready:].copy(), state.reductions)
        reductions = np.concatenate([state.reductions, self._released(state.reductions[-1], samples)])
        gains = 10.0 ** (
            self._smoothed(reductions) / 20.0
        )  # one for each new sample, applied to the sample `lookahead` before it
        output = joined[:, :ready] * gains[gains.size - ready :]
        # Rounding alone can pass the ceiling by the last bit.
        limited = np.clip(output, -self.ceiling, self.ceiling).astype(np.float32)
        return limited, LimiterState(joined[:, ready:].copy(), reductions[count:].copy())

    def _released(self, last: float, samples: Samples) -> Decibels:
        """The reduction of each sample: what it needs, or the rest of an earlier reduction during release."""
        loudness = np.abs(samples, dtype=np.float64).max(axis=0)
        needed = -20.0 * np.log10(np.maximum(loudness / self.ceiling, 1.0))
        # r[n] = min(needed[n], r[n-1] + release) without a loop: a running minimum of what is tilted by the release
        tilt = self.release_db * np.arange(1, needed.size + 1)
        tilted = np.minimum.accumulate(np.concatenate([[last], needed - tilt]))[1:]
        return np.minimum(tilted + tilt, 0.0)

    def _smoothed(self, reductions: Decibels) -> Decibels:
        """Smooth ramps that reach each peak in time: a moving mean over a moving minimum."""
        window = self.lookahead + 1
        if not reductions.any():
            return np.zeros(reductions.size - 2 * self.lookahead)
        lowest = sliding_window_view(reductions, window).min(axis=-1)
        return np.asarray(sliding_window_view(lowest, window).mean(axis=-1))


ONSET_BLOCK_SECONDS = 0.005


@dataclass(frozen=True)
class OnsetState:
    """State of the gate: the sound held back before the onset."""

    held: Samples
    dropped: int = 0
    """Samples trimmed."""
    is_open: bool = False


class OnsetGate:
    """Trims the start of a sound under `threshold_dbfs`, except for `margin` seconds, at most `max_seconds`."""

    def __init__(
        self, rate: int, threshold_dbfs: float = -48.0, margin: float = 0.01, max_seconds: float = 0.4
    ) -> None:
        self._block = max(1, round(ONSET_BLOCK_SECONDS * rate))
        self._power = 10.0 ** (threshold_dbfs / 10)
        self._margin = round(margin / ONSET_BLOCK_SECONDS) * self._block
        self._max_samples = round(max_seconds * rate)

    def initial_state(self) -> OnsetState:
        """The state before the first sample."""
        return OnsetState(np.zeros(0, np.float32))

    def step(self, state: OnsetState, samples: Samples, final: bool = False) -> tuple[Samples, OnsetState]:
        """The samples from the onset on; a `final` step holds nothing back.  # [time]"""
        if state.is_open:
            return samples, state
        joined = np.concatenate([state.held, samples])
        whole = len(joined) // self._block * self._block
        power = np.square(joined[:whole], dtype=np.float64).reshape(-1, self._block).mean(axis=1)
        loud = np.flatnonzero(power > self._power)
        first = int(loud[0]) * self._block if loud.size else whole
        trimmed = max(0, min(first - self._margin, self._max_samples - state.dropped))
        state = OnsetState(joined[trimmed:], state.dropped + trimmed)
        if loud.size or final or state.dropped >= self._max_samples:
            return state.held, replace(state, held=joined[:0], is_open=True)
        return joined[:0], state


HARMONICS = 20


def buzz(seconds: float, rate: int, seed: int = 0) -> Sound:
    """A buzz whose pitch wanders around 120 Hz, in four syllables a second."""
    noise = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.7 * time + noise.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    syllables = 0.55 + 0.45 * np.sin(2 * np.pi * 4 * time + noise.uniform(0, 6))
    voiced = sum(np.sin(harmonic * phase) / harmonic for harmonic in range(1, HARMONICS))
    return Sound((0.1 * syllables * voiced).astype(np.float32), rate)
