"""The user's side of a conversation: turns as they start, pause and end, and sound made over a reply."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vivavoce.audio.level import rms_dbfs
from vivavoce.audio.vad import RATE
from vivavoce.dialogue.barge_in import OverlapClassifier, OverlapVerdict, OverlapWatch, UserLevel
from vivavoce.dialogue.events import (
    AudioPart,
    Item,
    Message,
    Samples,
    SpeechStarted,
    SpeechStopped,
    TurnCommitted,
    TurnTimedOut,
    Warned,
)
from vivavoce.dialogue.front_end import AudioFrontEnd, AudioWindow
from vivavoce.dialogue.history import new_id
from vivavoce.dialogue.replies import ConversationContext, Replies
from vivavoce.dialogue.turns import WINDOW_MS, TurnEvent, TurnState, TurnTaker, ended
from vivavoce.errors import InputError

RECENT_WINDOWS = 96  # about three seconds: the prefix of a turn, and what an undecided overlap may last
MAX_TURN_SECONDS = 180.0
WORDS_ASKED_MS = 224  # into an overlap, where a transcriber is available


@dataclass
class OpenTurn:
    """What the user is saying."""

    item: str
    prefix: list[Samples]
    windows: list[Samples] = field(default_factory=list)
    waiting: list[Samples] = field(default_factory=list)
    """Heard while a reply is held, and not passed on yet."""

    @property
    def sound(self) -> Samples:
        """All of it so far."""
        return np.concatenate([np.zeros(0, np.float32), *self.windows])


@dataclass(frozen=True)
class ListeningOptions:
    """How the user's side is taken."""

    likely_end_ms: int
    holds_replies: bool
    ducked_gain: float
    judge: OverlapClassifier
    asks_words: Callable[[OverlapWatch, Samples], None] | None
    """Requests a transcript of an overlap."""
    asks_turn_model: Callable[[OpenTurn], None] | None
    """Requests the turn model for a turn that is likely over."""
    committed: Callable[[Item, Samples], None]
    """Called with every spoken turn."""


class UserTurns:
    """Processes audio windows: emits turns, starts held replies, ducks and interrupts."""

    def __init__(
        self, context: ConversationContext, replies: Replies, front_end: AudioFrontEnd, options: ListeningOptions
    ) -> None:
        self._context, self._replies, self._front_end, self._options = context, replies, front_end, options
        self._recent: deque[AudioWindow] = deque(maxlen=RECENT_WINDOWS)
        self._user_level = UserLevel()
        self._turn = TurnState()
        self._open: OpenTurn | None = None
        self._overlap: OverlapWatch | None = None
        self._finished: float | None = None
        self._idle_ms = 0
        self.settle()

    def settle(self) -> None:
        """The settings have changed."""
        turn = self._context.settings.turn
        self._taker = TurnTaker(turn, self._options.likely_end_ms)
        if turn.detector == "none":
            self.drop_held()

    def hear(self, samples: Samples) -> None:
        """The next sound of the user."""
        for window in self._front_end.hear(samples, self._context.clock.now()):
            self._window(window)
        if self._open is not None and self._context.settings.turn.detector != "none":
            event, self._turn = self._taker.peek(self._turn, self._front_end.quiet_ms, self._finished)
            self._pause(self._open, event)

    def commit(self) -> Item:
        """End the turn by hand."""
        if self._open is None:
            raise InputError("nothing was heard since the last turn, so there is nothing to commit")
        self.drop_held()
        item = self._commit(self._open)
        self._context.conversation_state.commit_turn(item.id)
        self._context.set_history()
        return item

    def clear(self) -> None:
        """Forget what was heard since the last turn."""
        self.drop_held()
        if self._open is not None:
            self._open = None
            self._context.conversation_state.discard_turn()
        self._end_overlap()
        self._turn = ended(self._turn)

    def drop_held(self) -> None:
        """Drop the held reply and pass on the audio that waited for it."""
        self._replies.drop_held()
        if self._open is not None and self._open.waiting:
            self._pass_on(self._open)

    def set_finished_chance(self, turn: OpenTurn, chance: float) -> None:
        """What the turn model says of a turn that was likely over."""
        if self._open is turn and self._turn.is_likely_over:
            self._finished = chance

    def _window(self, window: AudioWindow) -> None:
        self._recent.append(window)
        if self._context.settings.turn.detector == "none":
            self._turn = TurnState(heard_ms=self._turn.heard_ms + WINDOW_MS)
            self._listen(self._open or self._open_turn(prefix=0), window.samples)
            return
        event, self._turn = self._taker.step(self._turn, window.chance, self._finished, window.quiet_ms)
        is_audible = self._replies.is_audible
        if self._turn.is_speech and not is_audible and self._overlap is None:
            self._user_level.hear(rms_dbfs(window.samples))
        if self._open is not None:
            self._in_turn(self._open, event, window)
        elif self._overlap is not None or (is_audible and self._turn.is_speech and self._may_interrupt):
            self._in_overlap(window)
        elif event is TurnEvent.BEGAN:
            self._begin_turn()
        else:
            self._idle(is_audible)

    @property
    def _may_interrupt(self) -> bool:
        return self._context.settings.turn.interrupt_response

    def _in_turn(self, turn: OpenTurn, event: TurnEvent | None, window: AudioWindow) -> None:
        if event is TurnEvent.WENT_ON:
            self._finished = None
            self.drop_held()
        self._listen(turn, window.samples)
        self._pause(turn, event)

    def _pause(self, turn: OpenTurn, event: TurnEvent | None) -> None:
        if event is TurnEvent.LIKELY_OVER:
            self._likely_over(turn)
        elif event is TurnEvent.OVER and self._open is turn:
            self._end_turn(turn)

    def _likely_over(self, turn: OpenTurn) -> None:
        settings = self._context.settings.turn
        if settings.detector == "semantic" and self._options.asks_turn_model is not None:
            self._options.asks_turn_model(turn)
        if self._options.holds_replies and settings.create_response:
            self._replies.hold()

    def _listen(self, turn: OpenTurn, samples: Samples) -> None:
        """Add audio to the turn; while a reply is held it waits, as the reply may already have the whole turn."""
        turn.windows.append(samples)
        turn.waiting.append(samples)
        if not self._replies.is_held:
            self._pass_on(turn)
        if len(turn.windows) * WINDOW_MS > MAX_TURN_SECONDS * 1e3:
            self._context.emit(Warned("turn_too_long", f"the turn was ended after {MAX_TURN_SECONDS:.0f} s"))
            self._end_turn(turn)

    def _pass_on(self, turn: OpenTurn) -> None:
        self._context.conversation_state.listen(np.concatenate(turn.waiting))
        turn.waiting.clear()

    def _in_overlap(self, window: AudioWindow) -> None:
        """Classify sound made while a reply plays: duck at once, then interrupt or play on."""
        if self._overlap is None:
            self._overlap = OverlapWatch(self._options.judge)
        watch, turn = self._overlap, self._turn
        watch.step(window.samples, window.chance, window.echo, turn.is_speech, self._user_level)
        came_too_soon = self._replies.has_hardly_started and turn.has_begun and not watch.is_ours
        disturbs_nothing = watch.verdict is None and not self._replies.is_audible and turn.has_begun
        if watch.verdict is OverlapVerdict.INTERRUPTION or came_too_soon or disturbs_nothing:
            self._begin_turn()
        elif watch.is_over:
            self._end_overlap()
            self._turn = ended(turn)
        else:
            self._replies.set_gain(self._options.ducked_gain if watch.verdict is None else 1.0)
            if watch.state.lasted_ms == WORDS_ASKED_MS and self._options.asks_words is not None:
                heard = list(self._recent)[-len(watch.state.windows) - 2 :]
                self._options.asks_words(watch, np.concatenate([each.samples for each in heard]))

    def _end_overlap(self) -> None:
        self._overlap = None
        self._replies.set_gain(1.0)

    def _idle(self, is_audible: bool) -> None:
        if is_audible or self._replies.generating is not None or self._turn.voiced_ms:
            self._idle_ms = 0
            return
        self._idle_ms += WINDOW_MS
        limit = self._context.settings.turn.idle_timeout_ms
        if limit is not None and self._idle_ms >= limit:
            self._time_out(limit)

    def _begin_turn(self) -> None:
        """Start a turn, interrupting replies where that is allowed."""
        padding = self._context.settings.turn.prefix_padding_ms
        since = self._turn.heard_ms - self._turn.speech_from_ms + padding
        turn = self._open_turn(prefix=-(-since // WINDOW_MS))
        self._context.emit(SpeechStarted(turn.item, max(0, self._turn.speech_from_ms - padding)))
        if self._may_interrupt:
            self._replies.interrupt()
        self._end_overlap()
        for samples in turn.prefix:
            self._listen(turn, samples)
        if self._turn.is_likely_over:
            self._likely_over(turn)

    def _open_turn(self, prefix: int) -> OpenTurn:
        recent = list(self._recent)[-prefix:] if prefix else []
        self._open = OpenTurn(new_id("item"), [window.samples for window in recent])
        self._finished, self._idle_ms = None, 0
        return self._open

    def _end_turn(self, turn: OpenTurn) -> None:
        """The user has finished."""
        self._context.emit(SpeechStopped(turn.item, self._turn.heard_ms))
        item = self._commit(turn)
        if not self._replies.release_held(item.id):
            self._answer(item)

    def _answer(self, item: Item) -> None:
        self._context.conversation_state.commit_turn(item.id)
        self._context.set_history()
        if self._context.settings.turn.create_response:
            self._replies.request()

    def _commit(self, turn: OpenTurn) -> Item:
        """The open turn becomes an item."""
        self._open, self._finished = None, None
        self._turn = ended(self._turn)
        item, previous = self._context.history.add(Message("user", (AudioPart(turn.sound, RATE),)), turn.item)
        self._context.emit(TurnCommitted(item, previous))
        self._options.committed(item, turn.sound)
        return item

    def _time_out(self, limit: int) -> None:
        """Commit the silence as a turn, so that the model may ask whether the user is still there."""
        turn = self._open_turn(prefix=min(RECENT_WINDOWS, limit // WINDOW_MS))
        heard = self._turn.heard_ms
        self._context.emit(TurnTimedOut(turn.item, max(0, heard - limit), heard))
        for samples in turn.prefix:
            self._listen(turn, samples)
        self._answer(self._commit(turn))
