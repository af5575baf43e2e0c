"""What `UserTurns` is given: its limits, what judges sounds, and what it calls."""

from collections.abc import Callable
from dataclasses import dataclass

from vivavoce.dialogue.barge_in import OverlapJudge, WatchedOverlap
from vivavoce.dialogue.items import Item, Samples
from vivavoce.dialogue.joined_turns import AnsweredTurn, OpenTurn
from vivavoce.dialogue.speaker import SpeakerWatch


@dataclass(frozen=True)
class ListeningOptions:
    """Options and callbacks of `UserTurns`."""

    likely_end_ms: int
    join_within_ms: int
    holds_replies: bool
    ducked_gain: float
    classifier: OverlapJudge
    request_words: Callable[[WatchedOverlap, Samples], None] | None
    """Requests a transcript of an overlap."""
    request_turn_model: Callable[[OpenTurn | AnsweredTurn], None] | None
    """Requests the turn model for a turn that is likely over, or that the user may be going on with."""
    committed: Callable[[Item, Samples], None]
    """Called with every spoken turn."""
    grew: Callable[[OpenTurn], None] | None = None
    """Called when audio was added to the open turn."""
    ignored: Callable[[], None] | None = None
    """Called when the open turn was ignored."""
    speaker: SpeakerWatch | None = None
    """Knows the user's voice; None: all voices are the user's."""
    ignores_side_talk: bool = True
    """Whether turns in silence that the classifier takes for a bystander's are dropped."""
