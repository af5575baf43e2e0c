"""Which turns in silence are spoken to the machine; those of another voice, or of the user's turned away, are dropped.

The judge of sounds over a reply decides, which knows how the user usually sounds; whatever would stop a reply is a
turn. A voice is dropped only where it surely is a bystander's, and nobody is locked out: the first turns are always
taken, after a dropped turn it takes more to drop the next, and after two in a row the next is taken.
"""

from collections import deque
from collections.abc import Sequence

from vivavoce.audio.vad import WINDOW_MS
from vivavoce.dialogue.barge_in import END_WINDOWS, OverlapJudge, OverlapVerdict, UserLevel, WatchedTurn
from vivavoce.dialogue.front_end import AudioWindow
from vivavoce.dialogue.speaker import AS_LOUD_DB, REFUSED_IN_A_ROW
from vivavoce.dialogue.turn_taker import TurnState

KNOWN_MS = 1000
"""Of the user's loud speech, before which every turn is taken."""
MAX_START_WINDOWS = 8  # until there is enough speech for a turn
ENOUGH = 1.0
"""Log-odds of a bystander from which on a turn is dropped."""
ENOUGH_AGAIN = 2.0
"""The same for the turn after a dropped one."""


class AddressedTurns:
    """Learns how the user usually sounds, and says which turns are the user's."""

    def __init__(self, judge: OverlapJudge, is_on: bool = True) -> None:
        self.levels = UserLevel()
        """How the user usually sounds."""
        self._judge, self._is_on = judge, is_on
        self._before = UserLevel()  # before the sound that may become a turn
        self._alone = UserLevel()  # of that sound alone, after a dropped turn
        # Its first windows, and which of them are speech.
        self._sound: deque[tuple[AudioWindow, bool]] = deque(maxlen=MAX_START_WINDOWS)
        self._watch: WatchedTurn | None = None
        self._dropped = 0  # turns in a row

    def hear(self, window: AudioWindow, turn: TurnState) -> None:
        """Add a window while no reply is heard, and the state of turn detection after it."""
        if turn.is_speech:
            if turn.voiced_ms == WINDOW_MS and not turn.has_started:
                self._before, self._alone = self.levels.copy(), UserLevel()
                self._sound.clear()
            self.levels.update(window.level_db, window.samples)
            if self._dropped:
                self._alone.update(window.level_db, window.samples)
        if self._watch is not None:
            if turn.silence_ms <= END_WINDOWS * WINDOW_MS:
                self._step(self._watch, window, turn.is_speech)
        else:
            self._sound.append((window, turn.is_speech))

    def begin(self, recent: Sequence[AudioWindow]) -> None:
        """The sound has become a turn in silence; `recent`: the last windows."""
        if not self._is_on or len(self._before.loud) * WINDOW_MS < KNOWN_MS:
            return
        self._watch = self._judge.watch_turn(recent[: -len(self._sound)], self._before)
        for window, is_speech in self._sound:
            if self._watch is not None:
                self._step(self._watch, window, is_speech)

    def _step(self, watch: WatchedTurn, window: AudioWindow, is_speech: bool) -> None:
        watch.step(window.samples, window.probability, window.echo, is_speech, self._before)
        if watch.verdict is OverlapVerdict.INTERRUPTION:
            self._watch = None

    def end(self) -> bool:
        """Whether the turn that has ended is the user's; otherwise it is dropped."""
        watch, self._watch = self._watch, None
        if watch is None or watch.verdict is not OverlapVerdict.BYSTANDER:
            return True
        if self._is_sure(watch):
            self._dropped += 1
            self.levels = self._before
            return False
        if self._dropped:  # the user, who has moved away, or another one: from now on this is how the user sounds
            self.levels = self._alone
        return True

    def _is_sure(self, watch: WatchedTurn) -> bool:
        if not self._dropped:
            return watch.bystander_odds > ENOUGH
        is_soft = watch.relative_db < AS_LOUD_DB
        return self._dropped < REFUSED_IN_A_ROW and is_soft and watch.bystander_odds > ENOUGH_AGAIN

    def accept(self) -> None:
        """A turn was taken, or its sound was cleared."""
        self._watch, self._dropped = None, 0
