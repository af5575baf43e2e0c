"""The ear of a conversation: sound of any size and rate in, 32 ms windows out, our own echo taken away."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vivavoce.audio.level import rms_dbfs
from vivavoce.audio.live_resample import LiveResampler
from vivavoce.audio.voice_activity import RATE, WINDOW, VoiceActivity
from vivavoce.dialogue.interface import Samples
from vivavoce.errors import InputError

BLOCK = RATE // 250  # samples: 4 ms
SETTLED_WINDOWS = 16  # of silence, after which more of it tells a detector nothing new


@dataclass(frozen=True)
class AudioWindow:
    """32 ms of what the user's side sounds like at 16 kHz, and how likely it is speech."""

    samples: Samples
    chance: float
    echo: float = 0.0
    """How much of it was our own sound, 0 to 1."""
    quiet_ms: int = 0
    """How much of its end is surely silent."""


class EchoRemover(Protocol):
    """Takes the sound of a loudspeaker out of a microphone's."""

    def initial_state(self) -> Any:
        """Nothing known of the room."""
        ...

    def step(self, state: Any, microphone: Samples, reference: Samples) -> tuple[Samples, float, Any]:
        """The microphone's sound without ours, and which share of it was ours.  # [512], [512]"""
        ...


@dataclass
class Hush:
    """Hears at once that a voice has stopped, where the room is quiet enough to tell: detectors linger for 100 ms."""

    floor_db: float = -60.0
    peak_db: float = -36.0
    SOFTEST_PEAK_DB = -36.0  # of a voice that is meant to be heard
    UNDER_PEAK_DB, OVER_FLOOR_DB = 28.0, 8.0
    FAR_UNDER_PEAK_DB = 32.0  # whatever the room is like: a breath, or what is left of a consonant
    FORGET_DB, RISE_DB = 0.2, 0.15  # a window

    def step(self, level_db: float) -> bool:
        """Whether the window of this level is silence, surely."""
        self.peak_db = max(level_db, self.peak_db - self.FORGET_DB, self.SOFTEST_PEAK_DB)
        self.floor_db = min(level_db, self.floor_db + self.RISE_DB)
        return level_db < self.limit_db

    @property
    def limit_db(self) -> float:
        """Below this level there is silence."""
        in_this_room = min(self.peak_db - self.UNDER_PEAK_DB, max(self.floor_db, -75.0) + self.OVER_FLOOR_DB)
        return max(in_this_room, self.peak_db - self.FAR_UNDER_PEAK_DB)

    def quiet_ms(self, samples: Samples) -> int:
        """How much of the end of 16 kHz samples is silence, by blocks of a few milliseconds."""
        blocks = samples[len(samples) % BLOCK :].reshape(-1, BLOCK)
        power = np.square(blocks, dtype=np.float64).mean(axis=1)
        loud = np.flatnonzero(power >= 10.0 ** (self.limit_db / 10))
        return (len(blocks) - (int(loud[-1]) + 1 if loud.size else 0)) * BLOCK * 1000 // RATE


class AudioFrontEnd:
    """Turns what is heard into windows. `reference` gives what was played from a moment on, for the echo."""

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
        self._hush = Hush()
        self._hushed = 0  # windows of silence up to now
        self._passed_over: Samples | None = None  # the last window that the detector was not asked about
        self._heard = 0  # samples at 16 kHz that became windows
        self._offsets: deque[float] = deque(maxlen=64)

    def hear(self, samples: Samples, now: float) -> list[AudioWindow]:
        """The windows that these samples complete; `now` is when their last was spoken, or later."""
        samples = np.asarray(samples)
        if samples.ndim != 1 or samples.dtype.kind != "f":
            raise InputError(f"sound is float samples [time], not {samples.dtype} {list(samples.shape)}")
        if not np.isfinite(samples).all():
            raise InputError("the sound holds NaN or infinite samples")
        sound, self._resampled = self._resampler.step(self._resampled, samples.astype(np.float32)[None])
        self._held = np.concatenate([self._held, sound[0]])
        self._offsets.append(now - (self._heard + len(self._held)) / RATE)
        found = []
        while len(self._held) >= WINDOW:
            found.append(self._window(self._held[:WINDOW]))
            self._held = self._held[WINDOW:]
        return found

    @property
    def quiet_ms(self) -> int:
        """How much silence came after the last window, if nothing but silence did."""
        quiet = self._hush.quiet_ms(self._held)
        return quiet if quiet * RATE // 1000 > len(self._held) - BLOCK else 0

    def _window(self, samples: Samples) -> AudioWindow:
        share = 0.0
        if self._echo is not None:
            # Sound that arrives late says nothing of when it was spoken; the soonest of late is the best guess.
            spoken = self._heard / RATE + min(self._offsets)
            reference = self._reference(spoken, WINDOW)
            samples, share, self._echo_state = self._echo.step(self._echo_state, samples, reference)
        self._heard += WINDOW
        is_hush = self._hush.step(rms_dbfs(samples))
        self._hushed = self._hushed + 1 if is_hush else 0
        chance = self._chance(samples)
        return AudioWindow(samples, 0.0 if is_hush else chance, share, self._hush.quiet_ms(samples))

    def _chance(self, samples: Samples) -> float:
        """How likely it is speech. In a long silence nobody is asked: it is what a detector costs most of the time."""
        if self._hushed > SETTLED_WINDOWS:
            self._passed_over = samples
            return 0.0
        if self._passed_over is not None:  # what came right before belongs to what is heard now
            _, self._activity_state = self._activity.step(self._activity_state, self._passed_over)
            self._passed_over = None
        chance, self._activity_state = self._activity.step(self._activity_state, samples)
        return chance
