"""Turn detection: pure logic on the speech probabilities of 32 ms windows.

Speech starts at a threshold and ends 0.15 under it. A pause first makes the end *likely*, so that a reply can be
started and held; then it is confirmed by silence alone, or by a turn model that runs at the likely end.
"""

from enum import Enum, auto
from typing import NamedTuple

from vivavoce.audio.vad import WINDOW_MS
from vivavoce.dialogue.settings import TurnSettings

HYSTERESIS = 0.15
LIKELY_END_MS = 72
MIN_SPEECH_MS = 64
# Silence that ends a turn which the model takes for finished; less is often a gap between words.
FINISHED_SILENCE_MS = {"low": 432, "medium": 304, "high": 304, "auto": 304}
# Silence that ends a turn which the model takes for unfinished.
PATIENCE_MS = {"low": 8000, "medium": 4000, "high": 2000, "auto": 4000}
# Silence that ends a turn about which the model is in doubt: longer than most pauses within sentences.
DOUBTFUL_SILENCE_MS = {"low": 1800, "medium": 1500, "high": 800, "auto": 1500}
# Without a model, factor on the silence that ends a turn.
STRETCH = {"low": 2.5, "medium": 1.0, "high": 0.8, "auto": 1.0}
# Probability of a finished turn from which on the model's answer shortens the silence.
SURE = {"low": 0.5, "medium": 0.5, "high": 0.35, "auto": 0.5}
# Probability from which on the model is in doubt; below it the turn is taken for unfinished.
DOUBTFUL = {"low": 0.2, "medium": 0.02, "high": 0.02, "auto": 0.02}


class TurnEvent(Enum):
    """The change that a window makes."""

    BEGAN = auto()
    """There is enough speech for a turn."""
    LIKELY_OVER = auto()
    WENT_ON = auto()
    """Speech after a likely end, so the turn goes on."""
    OVER = auto()


class TurnState(NamedTuple):
    """The state of turn detection. Times are milliseconds of input so far."""

    heard_ms: int = 0
    is_speech: bool = False
    """Whether the last window was speech, with hysteresis."""
    voiced_ms: int = 0
    """Speech since the first window of a turn that may not have started yet."""
    speech_from_ms: int = 0
    """Start of the turn's speech."""
    speech_until_ms: int = 0
    """End of its last speech."""
    has_started: bool = False
    is_likely_over: bool = False

    @property
    def silence_ms(self) -> int:
        """Silence since the last speech."""
        return self.heard_ms - self.speech_until_ms


class TurnTaker:
    """Steps a `TurnState` by the speech probability of the next window."""

    def __init__(self, settings: TurnSettings, likely_end_ms: int = LIKELY_END_MS) -> None:
        self.settings = settings
        stretch = STRETCH[settings.eagerness] if settings.detector == "semantic" else 1.0
        self.silence = windows(round(settings.silence_duration_ms * stretch))
        self.likely_ms = min(likely_end_ms, max(1, self.silence - 1) * WINDOW_MS)
        self.min_windows = windows(MIN_SPEECH_MS)

    def step(
        self, state: TurnState, probability: float, finished: float | None = None, quiet_ms: int = 0
    ) -> tuple[TurnEvent | None, TurnState]:
        """Step by one window. `finished`: the turn model's probability that the turn is finished, if known.

        The last `quiet_ms` of the window are certainly silent, whatever the probability of the whole window.
        """
        heard = state.heard_ms + WINDOW_MS
        threshold = self.settings.threshold - (HYSTERESIS if state.is_speech else 0.0)
        is_speech = probability >= max(threshold, 0.01)
        state = state._replace(heard_ms=heard, is_speech=is_speech)
        if is_speech:
            return self._speech(state, quiet_ms)
        return self._silence(state, state.silence_ms, finished)

    def peek(
        self, state: TurnState, quiet_ms: int, finished: float | None = None
    ) -> tuple[TurnEvent | None, TurnState]:
        """The change by `quiet_ms` of silence after the last window, less than a whole one."""
        if state.is_speech or not state.has_started:
            return None, state
        return self._silence(state, state.silence_ms + quiet_ms, finished)

    def _speech(self, state: TurnState, quiet_ms: int) -> tuple[TurnEvent | None, TurnState]:
        first = state.voiced_ms == 0 and not state.has_started
        state = state._replace(
            voiced_ms=state.voiced_ms + WINDOW_MS,
            speech_from_ms=state.heard_ms - WINDOW_MS if first else state.speech_from_ms,
            speech_until_ms=state.heard_ms - min(quiet_ms, WINDOW_MS),
        )
        if not state.has_started and state.voiced_ms >= self.min_windows * WINDOW_MS:
            return TurnEvent.BEGAN, state._replace(has_started=True)
        if state.is_likely_over:
            return TurnEvent.WENT_ON, state._replace(is_likely_over=False)
        return None, state

    def _silence(self, state: TurnState, silent_ms: int, finished: float | None) -> tuple[TurnEvent | None, TurnState]:
        if not state.has_started:
            is_discarded = state.voiced_ms and silent_ms >= self.likely_ms
            return None, state._replace(voiced_ms=0) if is_discarded else state
        if silent_ms >= self._needed_windows(finished) * WINDOW_MS:
            return TurnEvent.OVER, ended(state)
        if silent_ms >= self.likely_ms and not state.is_likely_over:
            return TurnEvent.LIKELY_OVER, state._replace(is_likely_over=True)
        return None, state

    def _needed_windows(self, finished: float | None) -> int:
        """Windows of silence needed to end the turn."""
        if self.settings.detector != "semantic" or finished is None:
            return self.silence
        eagerness = self.settings.eagerness
        if finished >= SURE[eagerness]:
            return max(windows(self.likely_ms) + 1, min(self.silence, windows(FINISHED_SILENCE_MS[eagerness])) - 2)
        is_doubtful = finished >= DOUBTFUL[eagerness]
        return max(self.silence, windows((DOUBTFUL_SILENCE_MS if is_doubtful else PATIENCE_MS)[eagerness]))


def ended(state: TurnState) -> TurnState:
    """The initial state after a turn, at the same time."""
    return TurnState(heard_ms=state.heard_ms, speech_until_ms=state.speech_until_ms)


def windows(milliseconds: int) -> int:
    """The number of windows nearest to a time, at least one; halves are rounded down, for a quicker answer."""
    return max(1, -(-(2 * milliseconds - WINDOW_MS) // (2 * WINDOW_MS)))
