"""Items of the history, from the wire and to it."""

import base64
from collections.abc import Callable
from typing import Any

import numpy as np

from vivavoce.dialogue.events import AudioPart, Content, Item, Message, Role, TextPart, ToolCall, ToolOutput
from vivavoce.server.realtime.audio_formats import WireFormat, converted, decode, encode, sound_bytes
from vivavoce.server.wire_error import WireError
from vivavoce.server.wire_legacy import PART_TYPES
from vivavoce.server.wire_settings import one_of, text

Wire = dict[str, Any]
LONGEST_ID = 64
ROLES: dict[Any, Role] = {"system": "system", "user": "user", "assistant": "assistant", "developer": "system"}


def parse_id(value: Any, param: str) -> str:
    """An id that a client chose or names."""
    if not text(value, param) or len(value) > LONGEST_ID:
        raise WireError(f"{param} must have 1 to {LONGEST_ID} characters", param=param)
    return str(value)


def parse_content(item: Any, format: WireFormat, rate: int, param: str = "item") -> Content:
    """What a client put into an item; its sound is brought to `rate`."""
    if not isinstance(item, dict):
        raise WireError(f"{param} must be an object, not {type(item).__name__}", "invalid_type", param)
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        return _parse_message(item, format, rate, param)
    if kind == "function_call":
        fields = [text(item.get(name, ""), f"{param}.{name}") for name in ("call_id", "name", "arguments")]
        return ToolCall(*fields)
    if kind == "function_call_output":
        call_id = parse_id(item.get("call_id"), f"{param}.call_id")
        return ToolOutput(call_id, text(item.get("output"), f"{param}.output"))
    raise WireError(f"{kind!r} is not one of message, function_call, function_call_output", param=f"{param}.type")


def _parse_message(item: Wire, format: WireFormat, rate: int, param: str) -> Message:
    role = ROLES[one_of(item.get("role"), ROLES, f"{param}.role")]
    content = item.get("content")
    if not isinstance(content, list) or not content:
        raise WireError(f"{param}.content must be a list of at least one part", param=f"{param}.content")
    parts = [_parse_part(part, format, rate, f"{param}.content[{index}]") for index, part in enumerate(content)]
    return Message(role, tuple(parts))


def _parse_part(part: Any, format: WireFormat, rate: int, param: str) -> TextPart | AudioPart:
    if not isinstance(part, dict):
        raise WireError(f"{param} must be an object, not {type(part).__name__}", "invalid_type", param)
    kind = part.get("type")
    kind = PART_TYPES.get(kind, kind) if isinstance(kind, str) else kind
    if kind in ("input_text", "output_text"):
        return TextPart(text(part.get("text"), f"{param}.text"))
    if kind in ("input_audio", "output_audio"):
        transcript = part.get("transcript")
        if transcript is not None:
            text(transcript, f"{param}.transcript")
        if kind == "output_audio" and part.get("audio") is None:
            return TextPart(transcript or "")  # a history brought along: what was said, without its sound
        samples = decode(sound_bytes(part.get("audio"), f"{param}.audio"), format)
        return AudioPart(converted(samples, format.rate, rate), rate, transcript)
    raise WireError(f"{kind!r} parts are not understood here; text and audio are", param=f"{param}.type")


def parse_input(
    value: Any, format: WireFormat, rate: int, find: Callable[[str], Item], param: str = "response.input"
) -> list[Content]:
    """The items a reply is asked to look at, some of them named by their id alone."""
    if not isinstance(value, list):
        raise WireError(f"{param} must be a list, not {type(value).__name__}", "invalid_type", param)
    found: list[Content] = []
    for index, item in enumerate(value):
        place = f"{param}[{index}]"
        if isinstance(item, dict) and item.get("type") == "item_reference":
            found.append(find(parse_id(item.get("id"), f"{place}.id")).content)
        else:
            found.append(parse_content(item, format, rate, place))
    return found


def wire_item(item: Item, status: str | None = None, sound: tuple[WireFormat, WireFormat] | None = None) -> Wire:
    """An item as clients see it; with its sound where formats (of the user's and of our sound) are given.

    A field that does not apply is left out: stock clients take no null there. Only a transcript must be there.
    """
    common = {"id": item.id, "object": "realtime.item"}
    state = {"status": status or ("completed" if item.is_complete else "incomplete")}
    content = item.content
    if isinstance(content, ToolCall):
        call = {"name": content.name, "call_id": content.call_id, "arguments": content.arguments}
        return common | {"type": "function_call"} | state | call
    if isinstance(content, ToolOutput):
        output = {"call_id": content.call_id, "output": content.output}
        return common | {"type": "function_call_output"} | state | output
    parts = [_wire_part(content.role, part, sound) for part in content.parts]
    return common | {"type": "message"} | state | {"role": content.role, "content": parts}


def _wire_part(role: str, part: TextPart | AudioPart, sound: tuple[WireFormat, WireFormat] | None) -> Wire:
    is_ours = role == "assistant"
    if isinstance(part, TextPart):
        return {"type": "output_text" if is_ours else "input_text", "text": part.text}
    wire: Wire = {"type": "output_audio" if is_ours else "input_audio", "transcript": part.transcript}
    if sound is not None:
        format = sound[1 if is_ours else 0]
        samples = np.clip(converted(np.asarray(part.samples, np.float32), part.rate, format.rate), -1, 1)
        wire["audio"] = base64.b64encode(encode(samples, format)).decode("ascii")
    return wire


def sound_ms(item: Item) -> int | None:
    """How long the sound of an item lasts; None where it has none."""
    parts = item.content.parts if isinstance(item.content, Message) else ()
    spoken = [part for part in parts if isinstance(part, AudioPart)]
    return round(sum(len(part.samples) / part.rate for part in spoken) * 1000) if spoken else None
