"""Who hears a reply while it is made, and by when they need more of it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PlaybackDeadline:
    """Somebody who waits for the sound of a reply. Times are seconds of the scheduler's clock."""

    row_seconds: float
    """Of sound that one row becomes."""
    first_rows: int
    """Rows that the first sound is made of."""
    since: float
    """When the wait began."""
    playing: float | None = None
    """When the reply's beginning was played; later, by as much, if the player ran dry. None: nothing was heard yet."""

    def awaits_sound(self, rows: int) -> bool:
        """Whether so many rows are too few for a first sound."""
        return self.playing is None and rows < self.first_rows

    def is_voiced(self, rows: int) -> bool:
        """Whether so many rows are enough for a first sound, of which nothing was heard yet."""
        return self.playing is None and rows >= self.first_rows

    def runs_dry(self, rows: int) -> float:
        """When so many rows will have been played; before anything was, as if it had been from the beginning."""
        return (self.since if self.playing is None else self.playing) + rows * self.row_seconds

    def heard(self, now: float, seconds: float) -> "PlaybackDeadline":
        """The same listener, who by now has played so much of the reply."""
        return replace(self, playing=now - seconds)


@dataclass(frozen=True)
class AheadPolicy:
    """How far replies run ahead of those who hear them."""

    furthest: float = 6.0
    """Seconds ahead at which a reply rests: what is made further ahead is lost if the listener interrupts."""
    calm: float = 4.0
    """Seconds ahead at which a reply no longer presses: it is served when a step is due anyway."""
    pace: float = 0.06
    """Seconds from step to step where nobody presses: reading the weights for many costs hardly more than for one."""
    spare: float = 2.2
    """Seconds ahead at which a reply lets a step be shorter, for those who have heard nothing yet."""
    haste: float = 0.5
    """Of the pace, from step to step, while somebody is neither calm nor short of sound."""
    voicing: float = 0.1
    """Seconds for which a reply rests once its first sound can be made: the voice has the device for itself."""


ON_GRAPHS = AheadPolicy(calm=5.0, spare=4.0)
"""Where a voice makes many replies' sound in one pass: with codes enough waiting it is given long hops, which cost a
third of short ones, and a crowd that begins at once gets ahead of its listeners."""
