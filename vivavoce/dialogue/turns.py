"""The user's side of a conversation: turns as they start, pause and end.

`UserTurns` applies turn detection (`turn_taker.py`), the judgement of sound over a reply (`reply_overlaps.py`), the
joining of turns that were ended too early (`joined_turns.py`) and the recognition of the user's voice (`speaker.py`) to
the audio of a conversation.
"""

import logging
import math
from collections import deque
from dataclasses import replace

import numpy as np

from vivavoce.audio.vad import RATE, WINDOW_MS
from vivavoce.dialogue.addressed_turns import AddressedTurns
from vivavoce.dialogue.barge_in import ECHO_SHARE, WatchedOverlap
from vivavoce.dialogue.events import (
    IgnoredReason,
    SpeechStarted,
    SpeechStopped,
    TurnCommitted,
    TurnIgnored,
    TurnTimedOut,
    Warned,
)
from vivavoce.dialogue.front_end import AudioWindow
from vivavoce.dialogue.history import new_id
from vivavoce.dialogue.items import AudioPart, Item, Message, Samples
from vivavoce.dialogue.joined_turns import AnsweredTurn, OpenTurn
from vivavoce.dialogue.listening_options import ListeningOptions
from vivavoce.dialogue.replies import ConversationContext, Replies
from vivavoce.dialogue.reply_overlaps import OverlapOutcome, ReplyOverlaps
from vivavoce.dialogue.speaker import SpeakerWatch
from vivavoce.dialogue.turn_taker import TurnEvent, TurnState, TurnTaker, ended
from vivavoce.errors import InputError

logger = logging.getLogger(__name__)

RECENT_WINDOWS = 96  # about three seconds: covers the prefix of a turn and an undecided overlap
MAX_TURN_SECONDS = 180.0


class UserTurns:
    """Processes audio windows: emits turns, starts held replies, ducks and interrupts."""

    def __init__(self, context: ConversationContext, replies: Replies, options: ListeningOptions) -> None:
        self._context, self._replies, self._options = context, replies, options
        self._recent: deque[AudioWindow] = deque(maxlen=RECENT_WINDOWS)
        self._addressed = AddressedTurns(options.classifier, options.ignores_side_talk)
        self._turn = TurnState()
        self._pending: deque[AudioWindow] = deque()  # not processed, as the turn model is being asked
        self._quiet_ms = 0  # after the last of them
        self._asked: OpenTurn | AnsweredTurn | None = None  # the turn that the model is asked about
        self._moment = -math.inf  # when the last window was captured
        self._late_ms = 0  # by which its sound is later than the windows count
        self._open: OpenTurn | None = None
        self._answered: AnsweredTurn | None = None  # the last turn, if it was answered
        self._overlaps = ReplyOverlaps(context, replies, options, self._goes_on)
        self._finished: float | None = None
        self._idle_ms = 0
        self._speaker = options.speaker
        self.settle()

    def settle(self) -> None:
        """Apply changed settings."""
        turn = self._context.settings.turn
        self._taker = TurnTaker(turn, self._options.likely_end_ms)
        if turn.detector == "none":
            self.drop_held()

    def take(self, windows: list[AudioWindow], quiet_ms: int) -> None:
        """Process the next windows of the user's audio, and the silence after the last of them.

        While the turn model or the speaker's embedding is computed, windows wait for it: they would be judged without
        it on a busy machine.
        """
        self._pending.extend(windows)
        self._quiet_ms = quiet_ms
        self.go_on()

    def go_on(self) -> None:
        """Process what waits, unless an answer is still missing."""
        while self._pending and not self._is_waiting:
            self._window(self._pending.popleft())
        if not self._is_waiting and self._open is not None and self._context.settings.turn.detector != "none":
            event, self._turn = self._taker.peek(self._turn, self._quiet_ms, self._finished)
            self._pause(self._open, event)

    @property
    def _is_waiting(self) -> bool:
        return self._asked is not None or (self._speaker is not None and self._speaker.is_asked)

    def _process_unasked(self) -> None:
        """Process what waits for an answer: the client has decided itself."""
        while self._pending:
            self._asked = None
            self._window(self._pending.popleft())
        self._asked = None
        if self._speaker is not None:
            self._speaker.clear()

    def commit(self) -> Item:
        """End the open turn on the client's request."""
        self._process_unasked()
        if self._open is None:
            raise InputError("there is no audio since the last turn, so there is nothing to commit")
        self.drop_held()
        item = self._commit(self._open)
        self._context.conversation_state.commit_turn(item.id)
        self._context.set_history()
        return item

    def clear(self) -> None:
        """Discard the audio since the last turn."""
        self._process_unasked()
        self.drop_held()
        if self._open is not None:
            self._open = None
            self._context.conversation_state.discard_turn()
        self._addressed.accept()
        self._overlaps.end()
        self._turn = ended(self._turn)

    @property
    def is_user_speaking(self) -> bool:
        """Whether a turn is open whose end will be detected."""
        return self._open is not None and self._context.settings.turn.detector != "none"

    def drop_held(self) -> None:
        """Drop the held reply and pass on the audio that waited for it."""
        self._replies.drop_held()
        if self._open is not None and self._open.waiting:
            self._pass_on(self._open)

    def set_finished_probability(self, turn: OpenTurn | AnsweredTurn, probability: float | None) -> None:
        """Set the turn model's answer for the turn that it was asked about; None: it has none."""
        if self._asked is not turn:
            return
        self._asked = None
        if isinstance(turn, OpenTurn):
            self._finished = probability
        elif self._answered is turn:  # where the model fails, the sound alone decides
            self._answered = replace(turn, finished=1.0 if probability is None else probability)
        self.go_on()

    def _window(self, window: AudioWindow) -> None:
        self._recent.append(window)
        self._moment, self._late_ms = window.ended_at, window.late_ms
        if self._context.settings.turn.detector == "none":
            heard_ms = self._turn.heard_ms + WINDOW_MS
            self._turn = TurnState(heard_ms=heard_ms, speech_until_ms=heard_ms)
            self._listen(self._open or self._open_turn(prefix=0), window.samples)
            return
        event, self._turn = self._taker.step(self._turn, window.probability, self._finished, window.quiet_ms)
        # A reply is heard longer than it is played: its echo comes back later.
        is_audible = self._replies.is_audible(self._moment) or window.echo >= ECHO_SHARE
        if not is_audible and not self._overlaps.is_open:
            self._addressed.hear(window, self._turn)
        if self._speaker is not None and self._turn.is_speech and window.echo < ECHO_SHARE:
            self._speaker.hear(window.samples, window.level_db)
        if self._open is not None:
            self._in_turn(self._open, event, window)
        elif self._overlaps.is_open or (is_audible and self._turn.is_speech and self._may_interrupt):
            self._in_overlap()
        elif event is TurnEvent.BEGAN:
            is_in_silence = not is_audible and self._replies.generating is None
            self._begin_turn()
            if is_in_silence:
                self._addressed.begin(list(self._recent))
        else:
            self._idle(is_audible)

    @property
    def _may_interrupt(self) -> bool:
        return self._context.settings.turn.interrupt_response and not self._replies.is_protected(self._moment)

    @property
    def _speech_start(self) -> float:
        """When the speech that may be a turn began."""
        return self._moment - (self._turn.heard_ms - self._turn.speech_from_ms) / 1e3

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
        turn.pause = len(turn.windows)
        if settings.detector == "semantic":
            self._ask_turn_model(turn)
        if self._speaker is not None:
            self._speaker.pause_turn(len(turn.windows))
        if self._options.holds_replies and settings.create_response:
            self._replies.hold()

    def _ask_turn_model(self, turn: OpenTurn | AnsweredTurn) -> None:
        """Ask whether a turn is finished; later windows wait for the answer."""
        if self._options.request_turn_model is not None:
            self._asked = turn
            self._options.request_turn_model(turn)

    def _listen(self, turn: OpenTurn, samples: Samples) -> None:
        """Add audio to the turn; while a reply is held it waits, as the reply may already have the whole turn."""
        turn.windows.append(samples)
        turn.waiting.append(samples)
        if not self._replies.is_held:
            self._pass_on(turn)
        if self._options.grew is not None:
            self._options.grew(turn)
        if len(turn.windows) * WINDOW_MS > MAX_TURN_SECONDS * 1e3:
            self._context.emit(Warned("turn_too_long", f"the turn was ended after {MAX_TURN_SECONDS:.0f} s"))
            self._end_turn(turn)

    def _pass_on(self, turn: OpenTurn) -> None:
        self._context.conversation_state.listen(np.concatenate(turn.waiting))
        turn.waiting.clear()

    def _in_overlap(self) -> None:
        """Judge sound made while a reply plays."""
        outcome = self._overlaps.step(list(self._recent), self._turn, self._addressed.levels)
        if outcome is OverlapOutcome.TURN:
            self._begin_turn()
        elif outcome is OverlapOutcome.ENDED:
            self._turn = ended(self._turn)

    def _goes_on(self, watch: WatchedOverlap) -> bool:
        """Whether the user goes on with the turn before a reply that was hardly heard, and which came too soon then."""
        ask = None if self._options.request_turn_model is None else self._ask_turn_model
        return self._replies.has_hardly_started(self._speech_start) and watch.goes_on(self._turn_before, ask)

    @property
    def _turn_before(self) -> AnsweredTurn | None:
        """The last turn, if it was answered and what is said now may be a part of it."""
        before, start_ms, within_ms = self._answered, self._turn.speech_from_ms, self._options.join_within_ms
        if before is None or not before.goes_on(start_ms, self._speech_start, within_ms, self._context.history):
            return None
        return before

    def _idle(self, is_audible: bool) -> None:
        if is_audible or self._replies.generating is not None or self._turn.voiced_ms:
            self._idle_ms = 0
            return
        self._idle_ms += WINDOW_MS
        if self._speaker is not None and self._speaker.speech_ms:
            self._speaker.clear()  # too little for a turn
        limit = self._context.settings.turn.idle_timeout_ms
        if limit is not None and self._idle_ms >= limit:
            self._time_out(limit)

    def _begin_turn(self) -> None:
        """Start a turn, interrupting replies where that is allowed."""
        padding = self._context.settings.turn.prefix_padding_ms
        since = self._turn.heard_ms - self._turn.speech_from_ms + padding
        turn = self._open_turn(prefix=-(-since // WINDOW_MS))
        self._context.emit(SpeechStarted(turn.item, max(0, self._turn.speech_from_ms - padding - self._late_ms)))
        if self._may_interrupt:
            self._interrupt(turn)
        self._overlaps.end()
        if self._speaker is not None:
            self._speaker.begin_turn(turn.joined)
        for samples in turn.prefix:
            self._listen(turn, samples)
        if self._turn.is_likely_over:
            self._likely_over(turn)

    def _interrupt(self, turn: OpenTurn) -> None:
        """Stop the replies; where the turn before goes on, take back its reply and begin with its sound."""
        before = self._turn_before
        self._answered = None
        if before is None:
            self._replies.interrupt()
            return
        self._replies.interrupt(retracts=True)
        self._context.retract(before.item)
        self._context.set_history()
        since = (self._turn.heard_ms - before.ended_ms) // WINDOW_MS  # also what seemed to be a backchannel
        turn.prefix = [*before.windows, *(window.samples for window in list(self._recent)[-since:])]
        turn.joined = len(before.windows)

    def _open_turn(self, prefix: int) -> OpenTurn:
        recent = list(self._recent)[-prefix:] if prefix else []
        self._open = OpenTurn(new_id("item"), [window.samples for window in recent])
        self._finished, self._idle_ms = None, 0
        return self._open

    def _end_turn(self, turn: OpenTurn) -> None:
        """Commit the turn, and release the held reply or request one."""
        stopped = SpeechStopped(turn.item, self._turn.heard_ms - self._late_ms, self._turn.silence_ms)
        self._context.emit(stopped)
        if not self._addressed.end():
            self._ignore(turn, "not_addressed")
            return
        if self._speaker is not None and not self._leave_others_out(turn, self._speaker):
            return
        ended_ms, finished, earlier_reply = self._turn.heard_ms, self._finished, self._replies.generating
        item = self._commit(turn)
        if not self._replies.release_held(item.id):
            self._answer(item)
        reply = self._replies.generating
        if reply is not None and reply is not earlier_reply:
            self._answered = AnsweredTurn(item.id, turn.windows, ended_ms, reply, turn.pause, finished)

    def _leave_others_out(self, turn: OpenTurn, speaker: SpeakerWatch) -> bool:
        """Drop what others said in a turn, or the whole turn; whether anything of it is left."""
        foreign = speaker.end_turn(turn.joined)
        if foreign == []:
            return True
        if foreign is None:
            self._ignore(turn, "other_speaker")
            return False
        self.drop_held()
        self._context.conversation_state.discard_turn()
        dropped = {index for begin, end in foreign for index in range(begin, end)}
        turn.windows = [window for index, window in enumerate(turn.windows) if index not in dropped]
        self._context.conversation_state.listen(turn.sound)
        return True

    def _ignore(self, turn: OpenTurn, reason: IgnoredReason) -> None:
        """Drop a turn that has ended."""
        logger.info("a turn of %.1f s is ignored: %s", len(turn.sound) / RATE, reason)
        self.drop_held()
        self._context.conversation_state.discard_turn()
        self._open, self._finished = None, None
        self._turn = ended(self._turn)
        if self._speaker is not None:
            self._speaker.clear()
        self._context.emit(TurnIgnored(turn.item, reason))
        if self._options.ignored is not None:
            self._options.ignored()

    def _answer(self, item: Item) -> None:
        self._context.conversation_state.commit_turn(item.id)
        self._context.set_history()
        if self._context.settings.turn.create_response:
            self._replies.request()

    def _commit(self, turn: OpenTurn) -> Item:
        """Make the open turn an item of the history."""
        self._open, self._finished, self._answered = None, None, None
        self._turn = ended(self._turn)
        self._addressed.accept()
        item, previous = self._context.history.add(Message("user", (AudioPart(turn.sound, RATE),)), turn.item)
        self._context.emit(TurnCommitted(item, previous))
        self._options.committed(item, turn.sound)
        return item

    def _time_out(self, limit: int) -> None:
        """Commit the silence as a turn, so that the model can ask whether the user is still there."""
        turn = self._open_turn(prefix=min(RECENT_WINDOWS, limit // WINDOW_MS))
        now_ms = self._turn.heard_ms
        self._context.emit(TurnTimedOut(turn.item, max(0, now_ms - limit), now_ms))
        for samples in turn.prefix:
            self._listen(turn, samples)
        self._answer(self._commit(turn))
