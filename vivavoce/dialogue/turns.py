"""When the user's turn begins, when it is likely over, and when it is: pure logic on chances of speech, 32 ms each.

Speech is entered at a threshold and left 0.15 under it. A pause first makes the end *likely*, so that a reply can be
begun and held; then it is confirmed by silence alone, or by a model of turn ends that was asked at the likely end.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto

from vivavoce.dialogue.events import TurnSettings

WINDOW_MS = 32
HYSTERESIS = 0.15
LIKELY_END_MS = 72
MIN_SPEECH_MS = 64
# After how much silence a turn that the model thinks unfinished is over all the same.
PATIENCE_MS = {"low": 8000, "medium": 4000, "high": 2000, "auto": 4000}
# Without a model, eagerness stretches the silence.
STRETCH = {"low": 2.5, "medium": 1.0, "high": 0.8, "auto": 1.0}
# How sure the model must be that a turn is finished.
SURE = {"low": 0.7, "medium": 0.5, "high": 0.35, "auto": 0.5}


class TurnEvent(Enum):
    """What a window changed."""

    BEGAN = auto()
    """Enough speech to be a turn."""
    LIKELY_OVER = auto()
    WENT_ON = auto()
    """Speech after a likely end: it was none."""
    OVER = auto()


@dataclass(frozen=True)
class TurnState:
    """Where the turn stands. Times in milliseconds of sound heard so far."""

    heard_ms: int = 0
    is_speech: bool = False
    """Whether the last window was speech, by hysteresis."""
    voiced_ms: int = 0
    """Speech since the first window of a turn that has not begun, or may not have."""
    speech_from_ms: int = 0
    """Where the turn's speech began."""
    speech_until_ms: int = 0
    """Where its last speech ended."""
    has_begun: bool = False
    is_likely_over: bool = False

    @property
    def silence_ms(self) -> int:
        """How long it has been silent."""
        return self.heard_ms - self.speech_until_ms


class TurnTaker:
    """Steps a `TurnState` by the chance of speech of the next window."""

    def __init__(self, settings: TurnSettings, likely_end_ms: int = LIKELY_END_MS) -> None:
        self.settings = settings
        stretch = STRETCH[settings.eagerness] if settings.detector == "semantic" else 1.0
        self.silence = windows(round(settings.silence_duration_ms * stretch))
        self.likely_ms = min(likely_end_ms, max(1, self.silence - 1) * WINDOW_MS)
        self.min_windows = windows(MIN_SPEECH_MS)

    def step(
        self, state: TurnState, chance: float, finished: float | None = None, quiet_ms: int = 0
    ) -> tuple[TurnEvent | None, TurnState]:
        """What this window changed. `finished`: how surely the turn is finished, if a turn model has been asked.

        `quiet_ms` of the window's end are surely silent, whatever the chance says of all of it.
        """
        heard = state.heard_ms + WINDOW_MS
        threshold = self.settings.threshold - (HYSTERESIS if state.is_speech else 0.0)
        is_speech = chance >= max(threshold, 0.01)
        state = replace(state, heard_ms=heard, is_speech=is_speech)
        if is_speech:
            return self._speech(state, quiet_ms)
        return self._silence(state, state.silence_ms, finished)

    def peek(
        self, state: TurnState, quiet_ms: int, finished: float | None = None
    ) -> tuple[TurnEvent | None, TurnState]:
        """What silence changes that came after the last window and makes no whole one yet."""
        if state.is_speech or not state.has_begun:
            return None, state
        return self._silence(state, state.silence_ms + quiet_ms, finished)

    def _speech(self, state: TurnState, quiet_ms: int) -> tuple[TurnEvent | None, TurnState]:
        first = state.voiced_ms == 0 and not state.has_begun
        state = replace(
            state,
            voiced_ms=state.voiced_ms + WINDOW_MS,
            speech_from_ms=state.heard_ms - WINDOW_MS if first else state.speech_from_ms,
            speech_until_ms=state.heard_ms - min(quiet_ms, WINDOW_MS),
        )
        if not state.has_begun and state.voiced_ms >= self.min_windows * WINDOW_MS:
            return TurnEvent.BEGAN, replace(state, has_begun=True)
        if state.is_likely_over:
            return TurnEvent.WENT_ON, replace(state, is_likely_over=False)
        return None, state

    def _silence(self, state: TurnState, silent_ms: int, finished: float | None) -> tuple[TurnEvent | None, TurnState]:
        if not state.has_begun:
            forgotten = silent_ms >= self.likely_ms
            return None, replace(state, voiced_ms=0) if forgotten else state
        if silent_ms >= self._wanted(finished) * WINDOW_MS:
            return TurnEvent.OVER, ended(state)
        if silent_ms >= self.likely_ms and not state.is_likely_over:
            return TurnEvent.LIKELY_OVER, replace(state, is_likely_over=True)
        return None, state

    def _wanted(self, finished: float | None) -> int:
        """Windows of silence that end the turn."""
        if self.settings.detector != "semantic" or finished is None:
            return self.silence
        if finished >= SURE[self.settings.eagerness]:
            return max(windows(self.likely_ms) + 1, self.silence - 2)
        return max(self.silence, windows(PATIENCE_MS[self.settings.eagerness]))


def ended(state: TurnState) -> TurnState:
    """The state after a turn; the time goes on."""
    return TurnState(heard_ms=state.heard_ms)


def windows(milliseconds: int) -> int:
    """The whole windows nearest to a time, at least one; halves go down, because waiting is what people notice."""
    return max(1, -(-(2 * milliseconds - WINDOW_MS) // (2 * WINDOW_MS)))
