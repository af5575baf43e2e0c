"""A sequence of the engine: its rows, the pages of its keys and values, its reply, and the deadlines of its playback.

Also the measures of an engine under load (`Slack`) and the rule for admitting sessions (`Admission`).
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from vivavoce.engine.constraints import Matcher
from vivavoce.engine.sampling import Generation
from vivavoce.engine.sliding_maximum import Extreme
from vivavoce.engine.speculative import Speculation
from vivavoce.errors import CapacityError
from vivavoce.models.interface import Row


@dataclass(frozen=True)
class PlaybackDeadline:
    """When the playback of a reply needs its rows. Times are seconds of the scheduler's clock."""

    row_seconds: float
    """Seconds of audio that one row is decoded to."""
    first_rows: int
    """Rows needed for the first audio."""
    since: float
    """When the reply was requested."""
    started: float | None = None
    """When playback began, moved later by the length of gaps; None: it has not begun."""

    def awaits_first_audio(self, rows: int) -> bool:
        """Whether playback has not begun and this many rows are too few for the first audio."""
        return self.started is None and rows < self.first_rows

    def has_first_audio(self, rows: int) -> bool:
        """Whether playback has not begun and this many rows are enough for the first audio."""
        return self.started is None and rows >= self.first_rows

    def playback_end(self, rows: int) -> float:
        """When this many rows will have been played; before playback, as if it had begun with the request."""
        return (self.since if self.started is None else self.started) + rows * self.row_seconds

    def at(self, now: float, seconds: float) -> "PlaybackDeadline":
        """The deadline once playback has reached this many seconds of the reply."""
        return replace(self, started=now - seconds)

    def after_suspension(self, now: float, seconds: float) -> "PlaybackDeadline":
        """The deadline of a reply that goes on after a suspension, which was no gap; `seconds` have been played."""
        return replace(self, since=now, started=None if self.started is None else now - seconds)


@dataclass(frozen=True)
class PacingPolicy:
    """How far replies are generated ahead of their playback; all leads are in seconds."""

    max_lead: float = 6.0
    """At which a reply rests: audio further ahead is wasted if the user interrupts."""
    calm_lead: float = 4.0
    """At which a reply no longer hastens the next step."""
    pace: float = 0.06
    """Seconds between steps when all replies have a `calm_lead`: a batch costs hardly more than one sequence."""
    spare_lead: float = 2.2
    """At which a reply is left out of steps while another waits for its first audio."""
    short_lead: float = 2.2
    """Up to which a reply's next step follows the last one at once."""
    hurry: float = 0.5
    """Factor of `pace` while the smallest lead is between `spare_lead` and `calm_lead`."""
    brisk: float = 0.33
    """Factor of `pace` while it is between `short_lead` and `spare_lead`."""
    first_audio_rest: float = 0.1
    """Seconds for which a reply rests while its first audio is decoded, so that the decoder has the device."""
    others_rest: float = 0.0
    """Seconds for which replies with a `spare_lead` rest meanwhile."""


ON_GRAPHS = PacingPolicy(calm_lead=5.0, spare_lead=3.0, short_lead=1.5, others_rest=0.1)
"""For devices with CUDA graphs, whose codec decodes many replies in one pass: with larger leads it is given long hops,
which cost a third of short ones. Steps of few replies read all weights, and slow first chunks down."""


FinishReason = Literal["stop", "length", "context", "cancelled", "error"]


@dataclass(eq=False)
class Sequence:
    """Rows, of which the first `cached` have keys and values in `pages`."""

    id: int
    rows: list[Row] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    last_used: int = 0
    is_open: bool = True
    needs_prefill: bool = False
    """Whether added rows are to be prefilled. Eviction does not set it: idle sequences wait until they are used."""
    page_revision: int = 0
    """Incremented with every change of `pages`, so that copies of the page table are known to be stale."""
    row_revision: int = 0
    """Incremented with every rewind, so that what was derived from removed rows is known to be stale."""

    generation: Generation | None = None
    matcher: Matcher | None = None
    """The state of the generation's grammar."""
    generated: int = 0
    after: "Sequence | None" = None
    """The sequence whose first audio the reply gives way to."""
    mode: int = 0
    unread: int = 0
    """Generated rows that the consumer has not taken yet; at `max_unread` the reply pauses."""
    max_unread: int | None = None
    is_suspended: bool = False
    """Whether the reply waits because no client would hear it."""
    listener: PlaybackDeadline | None = None
    """The playback of the reply, if it is played while it is generated."""
    last_served: float = 0.0
    """Time of the last step with rows of this sequence."""
    first_audio_ready: float | None = None
    """When the rows of its first audio were complete."""
    speculation: Speculation | None = None
    hidden: Tensor | None = None
    """The hidden state from which the newest row was drawn, where `speculation` reads it."""
    states: list[Tensor] | None = None
    """Hidden states from which the rows of the reply were drawn, [row, …] each, if the caller sets a list."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_generating(self) -> bool:
        """Whether a reply is in progress."""
        return self.generation is not None

    @property
    def first_counted(self) -> int:
        """The first row that repetition penalties count."""
        if self.generation is None or self.generation.penalise_prompt:
            return 0
        return len(self.rows) - self.generated

    @property
    def is_paused(self) -> bool:
        """Whether the reply waits for its consumer to take rows."""
        return self.max_unread is not None and self.unread >= self.max_unread

    @property
    def awaits_first_audio(self) -> bool:
        """Whether the playback waits for the first rows of the reply."""
        return self.is_generating and self.listener is not None and self.listener.awaits_first_audio(self.generated)

    @property
    def playback_end(self) -> float | None:
        """When the playback will have used up all rows; None: there is no playback."""
        return None if self.listener is None else self.listener.playback_end(self.generated)

    @property
    def pending(self) -> int:
        """Rows without keys and values."""
        return len(self.rows) - self.cached

    @property
    def has_work(self) -> bool:
        """Whether a step should include it."""
        if self.is_generating:
            gives_way = self.after is not None and self.after.awaits_first_audio
            return not self.is_paused and not self.is_suspended and not gives_way
        return self.needs_prefill and self.pending > 0


def rows_in_common(first: list[Row], second: list[Row]) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])


class Slack:
    """Step times of an engine, and the slack of its playbacks: the audio left when a row arrives."""

    def __init__(self) -> None:
        self._lateness = Extreme()
        self.busy = 0.0
        """Total seconds of all steps."""
        self.max_step_seconds = 0.0
        self.min_slack: float | None = None

    def note(self, now: float, left: float) -> None:
        """A row arrived when its playback had this many seconds of audio left."""
        self._lateness.note(now, -left)
        self.min_slack = left if self.min_slack is None else min(self.min_slack, left)

    def note_step(self, seconds: float) -> None:
        """A step took this long."""
        self.busy, self.max_step_seconds = self.busy + seconds, max(self.max_step_seconds, seconds)

    def reset(self) -> None:
        """Reset the extremes, not `busy`."""
        self._lateness = Extreme()
        self.max_step_seconds, self.min_slack = 0.0, None

    def recent_min_slack(self, now: float) -> float | None:
        """The smallest slack of the last seconds; below 0 a playback had a gap. None: there was no playback."""
        lateness = self._lateness.largest(now)
        return None if lateness is None else -lateness


MAX_SPEECH_LOAD = 0.97  # threads also wait for each other, so that more time of the cores is left than this says


@dataclass(frozen=True)
class Admission:
    """Whether one more session may be admitted."""

    wanted_slack: float = 0.1
    """Slack in seconds that every playback must have had in the last seconds."""
    rows: int = 1024
    """Rows of cache that must be free for a session's history."""
    max_speech_load: float = MAX_SPEECH_LOAD
    """Share of the cores that replies may take if all sessions are answered at the same time."""

    def check(
        self,
        slack: float | None,
        free_rows: int,
        free_bytes: float,
        voice_bytes: float = 0.0,
        speech_load: float | None = None,
    ) -> None:
        """Raise CapacityError, naming what is short: slack, cores, cache rows, or memory for the voice."""
        if slack is not None and slack < self.wanted_slack:
            raise CapacityError(
                f"playbacks had {slack * 1e3:.0f} ms of audio left, a new session needs {self.wanted_slack * 1e3:.0f}"
            )
        if speech_load is not None and speech_load > self.max_speech_load:
            raise CapacityError(
                f"replies to all sessions at the same time would take {speech_load:.0%} of the cores with one more, "
                f"and the limit is {self.max_speech_load:.0%}"
            )
        if free_rows < self.rows:
            raise CapacityError(f"the cache has room for {free_rows} rows, and a new session needs {self.rows}")
        if free_bytes < voice_bytes:
            raise CapacityError(
                f"{free_bytes / 1e6:.0f} MB are free, and a session's voice needs {voice_bytes / 1e6:.0f} MB"
            )
