"""The interface between the server and the models it serves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vivavoce.dialogue.events import Conversation, ConversationSettings

STOCK_VOICES = ("alloy", "ash", "ballad", "coral", "echo", "sage", "shimmer", "verse", "marin", "cedar")
"""Names that stock clients send; they stand for the default voice where we have none of that name."""


@dataclass(frozen=True)
class ModelCard:
    """A model in `/v1/models`."""

    id: str
    created: int = 0
    owned_by: str = "vivavoce"


class Host(Protocol):
    """What the server needs of its models. The first model is served when a client names an unknown one."""

    @property
    def models(self) -> Sequence[ModelCard]:
        """The conversation models."""
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
        """The session settings of a client that sends none."""
        ...

    def open(self, settings: ConversationSettings, model: str) -> Conversation:
        """A new conversation; `CapacityError` where the models cannot take one more."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Current values for /metrics, such as queue_depth and kv_used_ratio."""
        ...
