"""Audio front end of a conversation: resampling, echo cancellation, noise suppression, silence and voice activity.

Audio of any size and rate comes in, 32 ms windows at 16 kHz come out, with the features that barge-in detection needs.
`front_end_batch.py` computes the same for many conversations at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from vivavoce.audio.denoise import DELAY, DELAY_MS, NoiseSuppressor
from vivavoce.audio.level import rms_dbfs
from vivavoce.audio.resample import LiveResampler
from vivavoce.audio.vad import RATE, WINDOW, VoiceActivity
from vivavoce.dialogue.capture_clock import CaptureClock
from vivavoce.dialogue.items import Samples
from vivavoce.errors import InputError

BLOCK = RATE // 250  # samples: 4 ms
SETTLED_WINDOWS = 16  # windows of silence after which the voice activity detector is not run


class AudioWindow(NamedTuple):
    """32 ms of the user's audio at 16 kHz, without echo and perhaps without noise, and its probability of speech."""

    samples: Samples
    probability: float
    level_db: float
    echo: float = 0.0
    """Share of echo in the microphone signal, 0 to 1."""
    quiet_ms: int = 0
    """Milliseconds of certain silence at its end."""
    ended_at: float = 0.0
    """When its last sample was captured, by the conversation's clock: decisions follow it, however late it arrived."""
    late_ms: int = 0
    """Milliseconds by which its sound was captured before that of the window as it came in."""


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


def checked(samples: Samples) -> Samples:
    """The samples as float32; `InputError` where they are no sound."""
    samples = np.asarray(samples)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise InputError(f"sound is float samples [time], not {samples.dtype} {list(samples.shape)}")
    if not np.isfinite(samples).all():
        raise InputError("the sound holds NaN or infinite samples")
    return np.ascontiguousarray(samples, np.float32)


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
        self._suppressor: NoiseSuppressor | None = None
        self._noise_strength = np.zeros(1, np.float32)
        self._noise_state, self._late = np.zeros(0, np.float32), np.zeros(0, np.float32)
        self._held = np.zeros(0, np.float32)
        self._silence_detector = SilenceDetector()
        self._silent_windows = 0  # consecutive
        self._skipped: Samples | None = None  # the last window not passed to the detector
        self._heard = 0  # samples at 16 kHz
        self._capture = CaptureClock()

    def hear(self, samples: Samples, now: float) -> list[AudioWindow]:
        """The windows that these samples complete; `now` is the capture time of the last sample, or later."""
        sound, self._resampled = self._resampler.step(self._resampled, checked(samples)[None])
        self._held = np.concatenate([self._held, sound[0]])
        self._capture.note(now, (self._heard + len(self._held)) / RATE)
        windows = []
        while len(self._held) >= WINDOW:
            windows.append(self._window(self._held[:WINDOW]))
            self._held = self._held[WINDOW:]
        return windows

    def reduce_noise(self, strength: float | None) -> None:
        """Suppress noise from the next window on, by a strength from 0 to 1; None: not at all."""
        if strength is None:
            self._suppressor, self._late = None, np.zeros(0, np.float32)
            return
        self._noise_strength = np.array([strength], np.float32)
        if self._suppressor is None:
            self._suppressor = NoiseSuppressor()
            self._noise_state = self._suppressor.initial_states(1)

    @property
    def quiet_ms(self) -> int:
        """Milliseconds of silence after the last window; 0 where there is any sound."""
        after = np.concatenate([self._late, self._held])
        quiet = self._silence_detector.quiet_ms(after)
        return quiet if quiet * RATE // 1000 > len(after) - BLOCK else 0

    def _window(self, samples: Samples) -> AudioWindow:
        share = 0.0
        began_at = self._capture.moment(self._heard / RATE)
        if self._echo is not None:
            reference = self._reference(began_at, WINDOW)
            samples, share, self._echo_state = self._echo.step(self._echo_state, samples, reference)
        self._heard += WINDOW
        speech = samples
        if self._suppressor is not None:
            self._late = samples[-DELAY:]
            row = np.zeros(1, np.intp)
            denoised = self._suppressor.step(self._noise_state, row, samples[None], self._noise_strength)
            speech, samples = denoised.speech[0], denoised.mixed[0]
        level_db = rms_dbfs(speech)
        is_silent = self._silence_detector.step(level_db)
        self._silent_windows = self._silent_windows + 1 if is_silent else 0
        probability = self._speech_probability(speech)
        quiet_ms = self._silence_detector.quiet_ms(speech)
        late_ms = 0 if self._suppressor is None else DELAY_MS
        ended_at = began_at + WINDOW / RATE - late_ms / 1e3
        probability = 0.0 if is_silent else probability
        return AudioWindow(samples, probability, level_db, share, quiet_ms, ended_at, late_ms)

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


Deliver = Callable[[list[AudioWindow], int], None]
"""Takes the windows that a chunk of audio completes, and the milliseconds of silence after the last of them."""


class FrontEnd(Protocol):
    """The front end of a conversation: its windows are delivered, at once or later."""

    def hear(self, samples: Samples, now: float) -> None:
        """Take the next samples; `now` is the capture time of the last, or later."""
        ...

    def reduce_noise(self, strength: float | None) -> None:
        """Suppress noise from now on, by a strength from 0 to 1; None: not at all."""
        ...

    @property
    def unprocessed_seconds(self) -> float:
        """Seconds of audio that are still to be processed."""
        ...

    async def drain(self, max_seconds: float = 0.0) -> None:
        """Wait until no more than these seconds of audio are still to be processed."""
        ...

    def close(self) -> None:
        """Drop what is pending."""
        ...


@dataclass
class InlineFrontEnd:
    """Computes and delivers windows within `hear`."""

    front_end: AudioFrontEnd
    deliver: Deliver

    def hear(self, samples: Samples, now: float) -> None:
        """Take the next samples; `now` is the capture time of the last, or later."""
        self.deliver(self.front_end.hear(samples, now), self.front_end.quiet_ms)

    def reduce_noise(self, strength: float | None) -> None:
        """Suppress noise from now on, by a strength from 0 to 1; None: not at all."""
        self.front_end.reduce_noise(strength)

    @property
    def unprocessed_seconds(self) -> float:
        """None."""
        return 0.0

    async def drain(self, max_seconds: float = 0.0) -> None:
        """Return: nothing is pending."""

    def close(self) -> None:
        """Nothing is pending."""


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
