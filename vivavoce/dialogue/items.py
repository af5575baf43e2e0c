"""The history of a conversation: messages of text, sound and pictures, calls of tools and their outputs."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vivavoce.dialogue.settings import HostedTool

Samples = NDArray[np.float32]
"""Mono samples in [-1, 1]."""

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class TextPart:
    """Written words."""

    text: str


@dataclass(frozen=True)
class AudioPart:
    """Spoken words: the sound at `rate`, and what was said where it is known."""

    samples: Samples
    rate: int
    transcript: str | None = None


@dataclass(frozen=True)
class ImagePart:
    """A picture for models that see."""

    url: str
    """A data URI of a PNG or JPEG."""
    detail: Literal["auto", "low", "high"] = "auto"


Part = TextPart | AudioPart | ImagePart


@dataclass(frozen=True)
class Message:
    """A message of one role."""

    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class HostedCall:
    """How far a call that the server makes has come."""

    tool: HostedTool
    state: Literal["asked", "approved", "denied", "running", "completed", "failed"]
    """Where approval is needed, one item asks for it, and another is the call itself."""
    output: str | None = None
    error: tuple[str, int, str] | None = None
    """Its kind, code and message."""
    approval_request: str | None = None
    """The item that asked for it."""


@dataclass(frozen=True)
class ToolCall:
    """A function call by the model; `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str
    hosted: HostedCall | None = None


@dataclass(frozen=True)
class ToolOutput:
    """The result of a function call."""

    call_id: str
    output: str


Content = Message | ToolCall | ToolOutput


@dataclass(frozen=True)
class Item:
    """One entry of the history, in the order of the conversation."""

    id: str
    content: Content
    is_complete: bool = True
