"""A player that exists only as arithmetic: when it starts, how far ahead it is fed, and when it runs dry."""

from dataclasses import dataclass

START_BUFFER_SECONDS = 0.08
ROUNDING_SECONDS = 1e-6  # sound that comes just when it is needed is not late


@dataclass
class SimulatedPlayer:
    """Plays as soon as `start_buffer` seconds are there, also after it ran dry. Times are seconds of any clock."""

    start_buffer: float = START_BUFFER_SECONDS
    started: float | None = None
    """When the first sample was played."""
    underruns: int = 0
    dry_seconds: float = 0.0
    _now: float = 0.0
    _buffered: float = 0.0
    _is_playing: bool = False
    _dry_since: float | None = None

    def feed(self, now: float, seconds: float) -> None:
        """Sound of this length arrives."""
        self.advance(now)
        self._buffered += seconds
        if not self._is_playing and self._buffered >= self.start_buffer:
            self._start(now)

    def advance(self, now: float) -> None:
        """Let the time go by until `now`, playing what there is."""
        if now < self._now:
            raise ValueError(f"time went back from {self._now} to {now}")
        elapsed, self._now = now - self._now, now
        if not self._is_playing:
            return
        if elapsed > self._buffered + ROUNDING_SECONDS:
            self._dry_since = now - (elapsed - self._buffered)
            self._buffered, self._is_playing = 0.0, False
            self.underruns += 1
        else:
            self._buffered = max(0.0, self._buffered - elapsed)

    def finish(self, now: float) -> None:
        """The reply is complete: what is buffered will be played, and running out now is no underrun."""
        self.advance(now)
        if not self._is_playing and self._buffered > 0:
            self._start(now)

    def lead(self, now: float) -> float:
        """Seconds of sound that are there and not yet played."""
        self.advance(now)
        return self._buffered

    def _start(self, now: float) -> None:
        self._is_playing = True
        if self.started is None:
            self.started = now
        if self._dry_since is not None:
            self.dry_seconds += now - self._dry_since
            self._dry_since = None
