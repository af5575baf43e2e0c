"""How long the parts of a reply's first sound took."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar


@dataclass
class FirstSound:
    """When, on the event loop's clock, a reply came how far. 0: not yet."""

    asked: float
    heard: float = 0.0
    """All of the turn is codes."""
    begun: float = 0.0
    """The engine has taken it on."""
    written: float = 0.0
    """The codes of its first sound are there."""
    made: float = 0.0
    """The voice has made sound of them."""
    out: float = 0.0
    """It was let out."""

    PARTS: ClassVar = ("heard", "begun", "written", "made", "out")

    @property
    def seconds(self) -> dict[str, float]:
        """How long each part took."""
        times = [self.asked, *(getattr(self, part) for part in self.PARTS)]
        return {part: after - before for part, (before, after) in zip(self.PARTS, pairwise(times), strict=True)}
