"""A bad line between the caller and the server: late packets, and lost ones."""

from dataclasses import dataclass, field

import numpy as np

AGAIN_SECONDS = 0.2  # after which TCP sends a lost packet again


@dataclass(frozen=True)
class Line:
    """How bad it is. Sound that is lost on its way up becomes silence, as behind a telephone gateway; a message lost on
    its way down is sent again, and everything behind it waits, as on a socket."""

    loss: float = 0.0
    jitter: float = 0.0
    """Seconds a message is late on average, exponentially distributed."""
    delay: float = 0.0
    """Seconds every message takes."""


PERFECT = Line()


@dataclass
class Way:
    """One direction of a line: never faster than the message before."""

    line: Line
    seed: int = 0
    _last: float = 0.0
    _source: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._source = np.random.default_rng(self.seed)

    def loses(self) -> bool:
        """Whether the next packet is lost."""
        return bool(self._source.random() < self.line.loss)

    def arrival(self, sent: float, resent: bool = False) -> float:
        """When a message sent at this time arrives; `resent`: lost ones are sent again."""
        late = self.line.delay + (self._source.exponential(self.line.jitter) if self.line.jitter else 0.0)
        if resent and self.loses():
            late += AGAIN_SECONDS
        self._last = max(self._last, sent + late)
        return self._last
