"""Sound made over a reply: the reply is ducked, the sound is judged, and the reply stops or plays on.

`barge_in.py` or `model_barge_in.py` judges what the sound is, `speaker.py` whose voice it is.
"""

from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np

from vivavoce.audio.vad import WINDOW_MS
from vivavoce.dialogue.barge_in import OverlapVerdict, UserLevel, WatchedOverlap
from vivavoce.dialogue.events import OverlapJudged, OverlapKind
from vivavoce.dialogue.front_end import AudioWindow
from vivavoce.dialogue.listening_options import ListeningOptions
from vivavoce.dialogue.replies import ConversationContext, Replies
from vivavoce.dialogue.speaker import SpeakerVerdict
from vivavoce.dialogue.turn_taker import TurnState

TRANSCRIBED_AT_MS = 224  # into an overlap, where a transcriber is available


class OverlapOutcome(Enum):
    """What a window of a sound over a reply changes."""

    LASTS = "lasts"
    TURN = "turn"
    """The user takes the turn."""
    ENDED = "ended"
    """The sound has ended and was no turn."""


class ReplyOverlaps:
    """Follows one sound after another; `goes_on` says whether the user goes on with the turn before the reply."""

    def __init__(
        self,
        context: ConversationContext,
        replies: Replies,
        options: ListeningOptions,
        goes_on: Callable[[WatchedOverlap], bool],
    ) -> None:
        self._context, self._replies, self._options, self._goes_on = context, replies, options, goes_on
        self._watch: WatchedOverlap | None = None

    @property
    def is_open(self) -> bool:
        """Whether a sound lasts that was no turn so far."""
        return self._watch is not None

    def step(self, recent: Sequence[AudioWindow], turn: TurnState, levels: UserLevel) -> OverlapOutcome:
        """Judge by the last of these windows too; `turn`: the state of turn detection after it."""
        window = recent[-1]
        if self._watch is None:
            self._watch = self._options.classifier.watch(recent[:-1], levels)
        watch, voices = self._watch, self._options.speaker
        watch.step(window.samples, window.probability, window.echo, turn.is_speech, levels)
        outlasts = watch.verdict is None and not self._replies.is_audible(window.ended_at)
        is_late_turn = outlasts and turn.has_started and watch.may_be_turn
        is_interruption = watch.verdict is OverlapVerdict.INTERRUPTION or is_late_turn
        interrupts = is_interruption or (turn.has_started and self._goes_on(watch))
        speaker = SpeakerVerdict.USER if voices is None or not interrupts else voices.over_reply(watch.is_over)
        if interrupts and speaker is SpeakerVerdict.USER:
            self._context.emit(OverlapJudged("interruption" if is_interruption else "continuation"))
            return OverlapOutcome.TURN
        if watch.is_over and speaker is not SpeakerVerdict.UNSURE:
            if turn.has_started:
                self._context.emit(OverlapJudged("other_speaker" if interrupts else _kind_of(watch.verdict)))
            self.end()
            if voices is not None:
                voices.clear()
            return OverlapOutcome.ENDED
        is_undecided = watch.verdict is None or speaker is SpeakerVerdict.UNSURE
        self._replies.set_gain(self._options.ducked_gain if is_undecided else 1.0)
        if watch.lasted_ms == TRANSCRIBED_AT_MS and self._options.request_words is not None:
            overlap = recent[-watch.lasted_ms // WINDOW_MS - 2 :]
            self._options.request_words(watch, np.concatenate([each.samples for each in overlap]))
        return OverlapOutcome.LASTS

    def end(self) -> None:
        """Forget the sound; replies have their full level again."""
        self._watch = None
        self._replies.set_gain(1.0)


def _kind_of(verdict: OverlapVerdict | None) -> OverlapKind:
    return (verdict or OverlapVerdict.NOISE).value
