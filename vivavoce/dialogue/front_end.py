"""Audio front end of a conversation: resampling, echo cancellation, silence and voice activity detection.

Audio of any size and rate comes in, 32 ms windows at 16 kHz come out, with the features that barge-in detection needs.
`OutputTimeline` keeps the last seconds of output as the echo reference.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vivavoce.audio.level import rms_dbfs
from vivavoce.audio.resample import LiveResampler
from vivavoce.audio.vad import RATE, WINDOW, VoiceActivity
from vivavoce.dialogue.events import Samples
from vivavoce.errors import InputError

BLOCK = RATE // 250  # samples: 4 ms
SETTLED_WINDOWS = 16  # windows of silence after which the voice activity detector is not run


@dataclass(frozen=True)
class AudioWindow:
    """32 ms of the user's audio at 16 kHz, after echo cancellation, and its probability of speech."""

    samples: Samples
    probability: float
    echo: float = 0.0
    """Share of echo in the microphone signal, 0 to 1."""
    quiet_ms: int = 0
    """Milliseconds of certain silence at its end."""


class EchoRemover(Protocol):
    """Removes the loudspeaker's sound from the microphone's."""

    def initial_state(self) -> Any:
        """The state before the first window."""
        ...

    def step(self, state: Any, microphone: Samples, reference: Samples) -> tuple[Samples, float, Any]:
        """The microphone's sound without echo, and the share of echo in it.  # [512], [512]"""
        ...


@dataclass
class SilenceDetector:
    """Detects the end of speech by level, as voice activity detectors lag by 100 ms; works in quiet rooms."""

    floor_db: float = -60.0
    peak_db: float = -36.0
    SOFTEST_PEAK_DB = -36.0  # lowest peak that speech near the microphone has
    UNDER_PEAK_DB, OVER_FLOOR_DB = 28.0, 8.0
    SURELY_UNDER_PEAK_DB = 32.0  # in any room: a breath, or the tail of a consonant
    FORGET_DB, RISE_DB = 0.2, 0.15  # per window

    def step(self, level_db: float) -> bool:
        """Whether a window of this level is certainly silence."""
        self.peak_db = max(level_db, self.peak_db - self.FORGET_DB, self.SOFTEST_PEAK_DB)
        self.floor_db = min(level_db, self.floor_db + self.RISE_DB)
        return level_db < self.limit_db

    @property
    def limit_db(self) -> float:
        """The level below which sound counts as silence."""
        room_limit = min(self.peak_db - self.UNDER_PEAK_DB, max(self.floor_db, -75.0) + self.OVER_FLOOR_DB)
        return max(room_limit, self.peak_db - self.SURELY_UNDER_PEAK_DB)

    def quiet_ms(self, samples: Samples) -> int:
        """Milliseconds of silence at the end of 16 kHz samples, in blocks of 4 ms."""
        blocks = samples[len(samples) % BLOCK :].reshape(-1, BLOCK)
        power = np.square(blocks, dtype=np.float64).mean(axis=1)
        loud = np.flatnonzero(power >= 10.0 ** (self.limit_db / 10))
        return (len(blocks) - (int(loud[-1]) + 1 if loud.size else 0)) * BLOCK * 1000 // RATE


class AudioFrontEnd:
    """Turns microphone audio into windows. `reference` reads the output from a moment on, to cancel its echo."""

    def __init__(
        self,
        rate: int,
        activity: VoiceActivity,
        echo: EchoRemover | None,
        reference: Callable[[float, int], Samples],
    ) -> None:
        self.rate = rate
        self._resampler = LiveResampler(rate, RATE)
        self._resampled = self._resampler.initial_state()
        self._activity, self._activity_state = activity, activity.initial_state()
        self._echo, self._echo_state = echo, echo.initial_state() if echo is not None else None
        self._reference = reference
        self._held = np.zeros(0, np.float32)
        self._silence_detector = SilenceDetector()
        self._silent_windows = 0  # consecutive
        self._skipped: Samples | None = None  # the last window not passed to the detector
        self._heard = 0  # samples at 16 kHz
        self._offsets: deque[float] = deque(maxlen=64)

    def hear(self, samples: Samples, now: float) -> list[AudioWindow]:
        """The windows that these samples complete; `now` is the capture time of the last sample, or later."""
        samples = np.asarray(samples)
        if samples.ndim != 1 or samples.dtype.kind != "f":
            raise InputError(f"sound is float samples [time], not {samples.dtype} {list(samples.shape)}")
        if not np.isfinite(samples).all():
            raise InputError("the sound holds NaN or infinite samples")
        sound, self._resampled = self._resampler.step(self._resampled, samples.astype(np.float32)[None])
        self._held = np.concatenate([self._held, sound[0]])
        self._offsets.append(now - (self._heard + len(self._held)) / RATE)
        windows = []
        while len(self._held) >= WINDOW:
            windows.append(self._window(self._held[:WINDOW]))
            self._held = self._held[WINDOW:]
        return windows

    @property
    def quiet_ms(self) -> int:
        """Milliseconds of silence after the last window; 0 where there is any sound."""
        quiet = self._silence_detector.quiet_ms(self._held)
        return quiet if quiet * RATE // 1000 > len(self._held) - BLOCK else 0

    def _window(self, samples: Samples) -> AudioWindow:
        share = 0.0
        if self._echo is not None:
            # Arrival is late by a varying delay: the smallest recent offset is the best estimate of the capture time.
            spoken = self._heard / RATE + min(self._offsets)
            reference = self._reference(spoken, WINDOW)
            samples, share, self._echo_state = self._echo.step(self._echo_state, samples, reference)
        self._heard += WINDOW
        is_silent = self._silence_detector.step(rms_dbfs(samples))
        self._silent_windows = self._silent_windows + 1 if is_silent else 0
        probability = self._speech_probability(samples)
        return AudioWindow(samples, 0.0 if is_silent else probability, share, self._silence_detector.quiet_ms(samples))

    def _speech_probability(self, samples: Samples) -> float:
        """Probability of speech. In long silence the detector is not run, which saves most of its cost."""
        if self._silent_windows > SETTLED_WINDOWS:
            self._skipped = samples
            return 0.0
        if self._skipped is not None:  # the detector needs the window before speech as context
            _, self._activity_state = self._activity.step(self._activity_state, self._skipped)
            self._skipped = None
        probability, self._activity_state = self._activity.step(self._activity_state, samples)
        return probability


BANDS = np.array([100, 300, 500, 800, 1200, 1700, 2400, 3400, 5000, 7500])
LOWEST_PITCH, HIGHEST_PITCH = 70, 400


@dataclass(frozen=True)
class WindowFeatures:
    """Acoustic features of a window."""

    level_db: float
    periodicity: float
    """Normalised autocorrelation at the pitch period, 0 to 1."""
    pitch: float
    brightness: float
    """Share of its power above 1200 Hz."""
    flatness: float
    """1 is white noise, 0 a tone."""
    shape: tuple[float, ...]
    """Level of each band in dB relative to the total."""


_HANN = np.hanning(WINDOW).astype(np.float32)
_FREQUENCIES = np.fft.rfftfreq(2 * WINDOW, 1 / RATE)
_EDGES = np.searchsorted(_FREQUENCIES, BANDS)


def window_features(samples: Samples) -> WindowFeatures:
    """The features of 512 samples at 16 kHz."""
    level = 10.0 * float(np.log10(np.square(samples, dtype=np.float64).mean() + 1e-10))
    power = np.square(np.abs(np.fft.rfft(samples * _HANN, 2 * WINDOW))).astype(np.float64) + 1e-9
    bands = np.add.reduceat(power, _EDGES)[:-1]
    total = float(bands.sum())
    inside = power[_EDGES[0] : _EDGES[-1]]
    periodicity, pitch = _periodicity(power)
    return WindowFeatures(
        level_db=level,
        periodicity=periodicity,
        pitch=pitch,
        brightness=float(bands[4:].sum()) / total,
        flatness=float(np.exp(np.log(inside).mean()) / inside.mean()),
        shape=tuple(float(value) for value in 10.0 * np.log10(bands / total)),
    )


def spectral_change(first: WindowFeatures, second: WindowFeatures) -> float:
    """Weighted spectral difference of two windows in dB a band; loud bands weigh more."""
    one, two = np.array(first.shape), np.array(second.shape)
    weight = 10.0 ** (np.maximum(one, two) / 20.0)
    return float((np.abs(np.maximum(one, -40) - np.maximum(two, -40)) * weight).sum() / weight.sum())


def _periodicity(power: np.ndarray) -> tuple[float, float]:
    correlation = np.fft.irfft(power)[:WINDOW]
    taper = np.fft.irfft(np.square(np.abs(np.fft.rfft(_HANN, 2 * WINDOW))))[:WINDOW]
    min_lag, max_lag = RATE // HIGHEST_PITCH, RATE // LOWEST_PITCH
    normal = correlation[min_lag:max_lag] / correlation[0] / np.maximum(taper[min_lag:max_lag] / taper[0], 0.05)
    best = int(np.argmax(normal))
    return float(np.clip(normal[best], 0.0, 1.0)), RATE / (min_lag + best)


STORED_SECONDS = 8.0
SMALLEST_GAP = 0.02  # seconds: a shorter gap counts as none


class OutputTimeline:
    """The last seconds of output at another rate, by the time at which they are played.

    Sound is resampled on reading, so that it costs nothing without echo cancellation.
    """

    def __init__(self, output_rate: int, rate: int) -> None:
        self.rate = rate
        self._resampler = LiveResampler(output_rate, rate)
        self._state = self._resampler.initial_state()
        self._sound = np.zeros(0, np.float32)
        self._start = 0  # of `_sound`, on the clock, in samples
        self._gains: list[tuple[int, float]] = [(0, 1.0)]  # since which sample of the clock
        self._played: deque[tuple[float, Samples]] = deque()  # start time and samples, not resampled yet

    def set_gain(self, moment: float, gain: float) -> None:
        """Set the gain of the output from this moment on."""
        self._gains.append((round(moment * self.rate), gain))

    def play(self, moment: float, samples: Samples, now: float) -> None:
        """Add samples that are played from this moment on, or after the samples before them."""
        self._played.append((moment, samples))
        while self._played[0][0] < now - 2 * STORED_SECONDS:
            self._played.popleft()

    def stop(self, moment: float) -> None:
        """Drop the output from this moment on."""
        self._catch_up()
        length = max(0, round(moment * self.rate) - self._start)
        self._sound = self._sound[:length]
        self._state = self._resampler.initial_state()

    def read(self, moment: float, samples: int) -> Samples:
        """The output from this moment on; silence where there is none."""
        self._catch_up()
        output = np.zeros(samples, np.float32)
        offset = round(moment * self.rate) - self._start
        first = max(0, offset)
        piece = self._sound[first : max(first, offset + samples)]
        output[first - offset : first - offset + len(piece)] = piece
        self._drop_before(round((moment - STORED_SECONDS) * self.rate))
        return self._with_gain(output, round(moment * self.rate))

    @property
    def _end(self) -> int:
        return self._start + len(self._sound)

    def _catch_up(self) -> None:
        while self._played:
            self._take(*self._played.popleft())

    def _take(self, moment: float, samples: Samples) -> None:
        begin = round((moment - self._resampler.lag_seconds) * self.rate)
        if begin > self._end + SMALLEST_GAP * self.rate:
            self._append_silence_until(begin)
            self._state = self._resampler.initial_state()
        sound, self._state = self._resampler.step(self._state, samples[None])
        self._sound = np.concatenate([self._sound, sound[0]])

    def _with_gain(self, samples: Samples, begin: int) -> Samples:
        while len(self._gains) > 1 and self._gains[1][0] <= begin - STORED_SECONDS * self.rate:
            del self._gains[0]
        gains = np.ones(len(samples), np.float32)
        for start, gain in self._gains:
            gains[max(0, start - begin) :] = gain
        return samples * gains

    def _append_silence_until(self, sample: int) -> None:
        missing = sample - self._end
        if missing > STORED_SECONDS * self.rate:
            self._sound, self._start = np.zeros(0, np.float32), sample
        elif missing > 0:
            self._sound = np.concatenate([self._sound, np.zeros(missing, np.float32)])

    def _drop_before(self, sample: int) -> None:
        old = min(sample - self._start, len(self._sound))
        if old > self.rate:  # in large pieces, to copy rarely
            self._sound, self._start = self._sound[old:].copy(), self._start + old
