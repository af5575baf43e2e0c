"""What the client has heard of a reply: as it reports, or, where it never does, as if it played at once and at pace."""

from dataclasses import dataclass, field

import numpy as np

from vivavoce.dialogue.events import Samples

LONGEST_GUESS_SECONDS = 0.2  # since a report, in which it is supposed that the client plays on


@dataclass
class Playback:
    """The sound of one reply that was sent, and when. Times in seconds of the conversation's clock."""

    rate: int
    pieces: list[Samples] = field(default_factory=list)
    sent: float = 0.0
    """Seconds of sound."""
    _reported: float | None = None
    _reported_at: float = 0.0
    _spans: list[tuple[float, float, float]] = field(default_factory=list)  # clock, position, seconds of each run
    _muted_from: float | None = None

    def send(self, now: float, samples: Samples) -> None:
        """The next samples leave now; they are played after those before, or now where these have been played."""
        seconds = len(samples) / self.rate
        if self._spans and now <= self.ends + 1e-9:
            start, position, length = self._spans[-1]
            self._spans[-1] = (start, position, length + seconds)
        else:
            self._spans.append((now, self.sent, seconds))
        self.pieces.append(samples)
        self.sent += seconds

    @property
    def ends(self) -> float:
        """When the last sample sent will have been played at pace."""
        if not self._spans:
            return -np.inf
        start, _, length = self._spans[-1]
        return start + length

    def report(self, seconds: float, now: float = 0.0) -> None:
        """The client says how much it has played by now. Reports never go back."""
        self._reported, self._reported_at = min(self.sent, max(seconds, self._reported or 0.0)), now

    def stop(self, now: float) -> None:
        """The client was told to be silent: nothing more is played."""
        self._muted_from = now if self._muted_from is None else min(self._muted_from, now)

    def heard(self, now: float) -> float:
        """Seconds of the reply that have been heard."""
        return self._paced(now) if self._reported is None else self._reported

    def reaches(self, now: float) -> float:
        """Seconds that have been heard if the client went on since it last told."""
        if self._reported is None:
            return self._paced(now)
        return min(self.sent, self._reported + min(max(0.0, now - self._reported_at), LONGEST_GUESS_SECONDS))

    def is_audible(self, now: float) -> bool:
        """Whether the client may be playing it now."""
        if self._muted_from is not None and now >= self._muted_from:
            return False
        if self._reported is not None and self._reported >= self.sent - 1e-3:
            return False
        return self.sent > 0 and now < self.ends + (0.0 if self._reported is None else 1.0)

    def sound(self, seconds: float | None = None) -> Samples:
        """The sound that was sent, or its beginning."""
        whole = np.concatenate(self.pieces) if self.pieces else np.zeros(0, np.float32)
        return whole if seconds is None else whole[: round(seconds * self.rate)]

    def _paced(self, now: float) -> float:
        now = now if self._muted_from is None else min(now, self._muted_from)
        for begun, position, length in reversed(self._spans):
            if now >= begun:
                return position + min(length, now - begun)
        return 0.0
