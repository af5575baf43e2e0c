"""Who a server serves: the models behind it, and a conversation for whoever connects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vivavoce.dialogue.events import Conversation, ConversationSettings

STOCK_VOICES = ("alloy", "ash", "ballad", "coral", "echo", "sage", "shimmer", "verse", "marin", "cedar")
"""Names that stock clients send; they stand for the default voice where we have none of that name."""


@dataclass(frozen=True)
class ModelCard:
    """A model as `/v1/models` tells of it."""

    id: str
    created: int = 0
    owned_by: str = "vivavoce"


class Host(Protocol):
    """What the wire needs of the house. The first model is the one served when a client names another."""

    @property
    def models(self) -> Sequence[ModelCard]:
        """The models that can be conversed with."""
        ...

    @property
    def voices(self) -> Sequence[str]:
        """Names of the voices, the default first."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether models are loaded and warm."""
        ...

    @property
    def settings(self) -> ConversationSettings:
        """What is in force for a client that asks for nothing."""
        ...

    def open(self, settings: ConversationSettings, model: str) -> Conversation:
        """A new conversation; `CapacityError` where there is no room for one more."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Figures of the moment for /metrics, such as queue_depth and kv_used_ratio."""
        ...
