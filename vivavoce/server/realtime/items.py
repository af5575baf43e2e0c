"""Items of the history, from the wire and to it."""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import UNSET

from vivavoce.dialogue import events as dialogue
from vivavoce.server.realtime.audio_formats import WireFormat, converted, decode, encode
from vivavoce.server.realtime.item_types import (
    ContentPart,
    ConversationItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputAudio,
    InputText,
    ItemReference,
    MessageItem,
    OutputAudio,
    OutputText,
    Status,
)
from vivavoce.server.wire_error import WireError


def content_of(item: ConversationItem, format: WireFormat, rate: int, param: str = "item") -> dialogue.Content:
    """What a client put into an item; its audio is brought to `rate`."""
    if isinstance(item, FunctionCallItem):
        return dialogue.ToolCall(item.call_id or "", item.name, item.arguments)
    if isinstance(item, FunctionCallOutputItem):
        return dialogue.ToolOutput(item.call_id, item.output)
    if not item.content:
        raise WireError(f"{param}.content must be a list of at least one part", param=f"{param}.content")
    parts = [_part_of(part, format, rate, f"{param}.content[{index}]") for index, part in enumerate(item.content)]
    return dialogue.Message(item.role, tuple(parts))


def _part_of(part: ContentPart, format: WireFormat, rate: int, param: str) -> dialogue.TextPart | dialogue.AudioPart:
    if isinstance(part, InputText | OutputText):
        return dialogue.TextPart(part.text)
    if part.audio is None or part.audio is UNSET:
        if isinstance(part, OutputAudio):
            return dialogue.TextPart(part.transcript or "")  # a history from elsewhere: the words without their audio
        raise WireError(f"Missing required parameter: '{param}.audio'.", "missing_required_parameter", f"{param}.audio")
    return dialogue.AudioPart(converted(decode(part.audio, format), format.rate, rate), rate, part.transcript)


def contents_of(
    items: Sequence[ConversationItem | ItemReference],
    format: WireFormat,
    rate: int,
    find: Callable[[str], dialogue.Item],
    param: str = "response.input",
) -> list[dialogue.Content]:
    """The items a response is asked to look at, some of them named by their id alone."""
    return [
        find(item.id).content
        if isinstance(item, ItemReference)
        else content_of(item, format, rate, f"{param}[{index}]")
        for index, item in enumerate(items)
    ]


def wire_item(
    item: dialogue.Item, status: Status | None = None, audio: tuple[WireFormat, WireFormat] | None = None
) -> ConversationItem:
    """An item as clients see it; with its audio where the formats (of the user's and of our audio) are given."""
    status = status or ("completed" if item.is_complete else "incomplete")
    content = item.content
    if isinstance(content, dialogue.ToolCall):
        return FunctionCallItem(
            id=item.id,
            object="realtime.item",
            status=status,
            name=content.name,
            call_id=content.call_id,
            arguments=content.arguments,
        )
    if isinstance(content, dialogue.ToolOutput):
        return FunctionCallOutputItem(
            id=item.id, object="realtime.item", status=status, call_id=content.call_id, output=content.output
        )
    parts = [_wire_part(content.role, part, audio) for part in content.parts]
    return MessageItem(id=item.id, object="realtime.item", status=status, role=content.role, content=parts)


def _wire_part(
    role: dialogue.Role,
    part: dialogue.TextPart | dialogue.AudioPart,
    audio: tuple[WireFormat, WireFormat] | None,
) -> ContentPart:
    is_ours = role == "assistant"
    if isinstance(part, dialogue.TextPart):
        return OutputText(part.text) if is_ours else InputText(part.text)
    kind = OutputAudio if is_ours else InputAudio
    if audio is None:
        return kind(part.transcript)
    format = audio[1 if is_ours else 0]
    samples = np.clip(converted(np.asarray(part.samples, np.float32), part.rate, format.rate), -1, 1)
    return kind(part.transcript, encode(samples, format))


def audio_ms(item: dialogue.Item) -> int | None:
    """How long the audio of an item lasts; None where it has none."""
    parts = item.content.parts if isinstance(item.content, dialogue.Message) else ()
    spoken = [part for part in parts if isinstance(part, dialogue.AudioPart)]
    return round(sum(len(part.samples) / part.rate for part in spoken) * 1000) if spoken else None
