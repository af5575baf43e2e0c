"""A conversation and its tools as chat completion endpoints take them."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from vivavoce.dialogue.history import written
from vivavoce.dialogue.items import HostedCall, ImagePart, Item, Message, ToolCall, ToolOutput
from vivavoce.dialogue.settings import Tool

PENDING_OUTPUT = "(There is no result yet.)"
DENIED_OUTPUT = "(The call was not approved, and was not made.)"


def chat_messages(past: Sequence[Item], instructions: str, spoken: dict[str, str]) -> list[dict[str, Any]]:
    """A history as chat messages; `spoken` has the transcripts of spoken items.

    Endpoints require parallel calls in one message, and the output of each directly after it: an output that came later
    moves there, and a call without one gets a placeholder.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    calls = [each for item in past if (each := _whole_call(item)) is not None]
    called = {call.call_id for call in calls}
    outputs: dict[str, list[str]] = {}
    for item in past:
        if isinstance(item.content, ToolOutput):
            outputs.setdefault(item.content.call_id, []).append(item.content.output)
        elif (call := _whole_call(item)) is not None and call.hosted is not None:
            outputs.setdefault(call.call_id, []).append(_hosted_output(call.hosted))
    for kind, group in groupby(past, key=lambda item: type(item.content)):
        if kind is ToolCall:
            messages += _call_messages([each for item in group if (each := _whole_call(item)) is not None], outputs)
            continue
        for item in group:
            if isinstance(item.content, Message):
                content = _with_images(item.content, spoken.get(item.id) or written(item))
                if content:
                    messages.append({"role": item.content.role, "content": content})
            elif isinstance(item.content, ToolOutput) and item.content.call_id not in called:
                messages.append({"role": "system", "content": f"Output of a function: {item.content.output}"})
    return messages


def _with_images(message: Message, text: str) -> str | list[dict[str, Any]]:
    """The content of a chat message: its text, or a list of parts where it has pictures."""
    images = [part for part in message.parts if isinstance(part, ImagePart)]
    if not images:
        return text
    pictures = [{"type": "image_url", "image_url": {"url": each.url, "detail": each.detail}} for each in images]
    return [*([{"type": "text", "text": text}] if text else []), *pictures]


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def tool_schema(tool: Tool) -> dict[str, Any]:
    """A function as chat models are told of it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _whole_call(item: Item) -> ToolCall | None:
    """The call of an item; None for another item, for a call whose arguments were cut, and for one only asked for."""
    if not isinstance(item.content, ToolCall) or not item.is_complete:
        return None
    is_request = item.content.hosted is not None and item.content.hosted.state in ("asked", "approved")
    return None if is_request else item.content


def _hosted_output(call: HostedCall) -> str:
    if call.state == "denied":
        return DENIED_OUTPUT
    if call.error is not None:
        return f"Error: {call.error[2]}"
    return PENDING_OUTPUT if call.output is None else call.output


def _call_messages(calls: Sequence[ToolCall], outputs: dict[str, list[str]]) -> list[dict[str, Any]]:
    """One message with parallel calls, and a message with the output of each, which is taken out of `outputs`."""
    if not calls:
        return []

    def output(call: ToolCall) -> str:
        waiting = outputs.get(call.call_id)
        return waiting.pop(0) if waiting else PENDING_OUTPUT

    functions = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    answers = [{"role": "tool", "tool_call_id": call.call_id, "content": output(call)} for call in calls]
    return [{"role": "assistant", "content": None, "tool_calls": functions}, *answers]
