"""Turns of a conversation as its screen and its `--json` tell them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TalkTurn:
    """One question and its reply."""

    item: str
    """The id of the question."""
    heard: str | None = None
    """The transcript; None: not known yet."""
    said: str = ""
    fillers: list[str] = field(default_factory=list)
    """What was spoken while the reply was awaited."""
    reply: str | None = None
    reply_item: str | None = None
    v2v_ms: float | None = None
    """From the last voiced sample heard to the first one played."""
    is_interrupted: bool = False
    error: str | None = None
    is_generated: bool = False
    is_played: bool = False
    voiced_until: float = field(default=0.0, repr=False)
    """When the last voiced sample was heard."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing about it changes any more."""
        return self.is_generated and self.is_played and self.heard is not None

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "heard": (self.heard or "").strip(),
            "said": self.said.strip(),
            "fillers": self.fillers,
            "v2v_ms": None if self.v2v_ms is None else round(self.v2v_ms),
            "is_interrupted": self.is_interrupted,
            "error": self.error,
        }
