"""What a built-in tool is: a function with a JSON schema, which the server calls for the model."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vivavoce.errors import InputError


class CallingSession(Protocol):
    """The session for which a tool is called."""

    def hang_up(self) -> None:
        """End the session when the next reply was heard."""
        ...


RunTool = Callable[[Mapping[str, Any], CallingSession], Awaitable[str]]
"""The output for some arguments; InputError, with a message for the model, where there is none."""


@dataclass(frozen=True)
class BuiltInTool:
    """A tool of the server."""

    name: str
    description: str
    schema: dict[str, Any]
    run: RunTool


def object_schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """The schema of arguments."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def text_argument(arguments: Mapping[str, Any], name: str, max_length: int, default: str | None = None) -> str:
    """A text among the arguments, which models may write as they like."""
    value = arguments.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} is a text that is not empty")
    if len(value) > max_length:
        raise InputError(f"{name} has {len(value)} characters; {max_length} are the limit")
    return value.strip()
