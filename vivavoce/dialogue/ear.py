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


@dataclass(frozen=True)
class Window:
    """32 ms of what the user's side sounds like at 16 kHz, and how likely it is speech."""

    samples: Samples
    chance: float
    echo: float = 0.0
    """How much of it was our own sound, 0 to 1."""


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
    peak_db: float = -60.0
    UNDER_PEAK_DB, OVER_FLOOR_DB = 28.0, 8.0
    FORGET_DB, RISE_DB = 0.3, 0.15  # a window

    def step(self, level_db: float) -> bool:
        """Whether the window of this level is silence, surely."""
        self.peak_db = max(level_db, self.peak_db - self.FORGET_DB)
        self.floor_db = min(level_db, self.floor_db + self.RISE_DB)
        return level_db < min(self.peak_db - self.UNDER_PEAK_DB, max(self.floor_db, -75.0) + self.OVER_FLOOR_DB)


class Ear:
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
        self._heard = 0  # samples at 16 kHz that became windows
        self._offsets: deque[float] = deque(maxlen=64)

    def hear(self, samples: Samples, now: float) -> list[Window]:
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

    def _window(self, samples: Samples) -> Window:
        share = 0.0
        if self._echo is not None:
            # Sound that arrives late says nothing of when it was spoken; the soonest of late is the best guess.
            spoken = self._heard / RATE + min(self._offsets)
            reference = self._reference(spoken, WINDOW)
            samples, share, self._echo_state = self._echo.step(self._echo_state, samples, reference)
        self._heard += WINDOW
        chance, self._activity_state = self._activity.step(self._activity_state, samples)
        is_hush = self._hush.step(rms_dbfs(samples))
        return Window(samples, 0.0 if is_hush else chance, share)
