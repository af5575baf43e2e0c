"""Items and responses in Realtime events: their types, and the conversion of items from and to the conversation's."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from vivavoce.dialogue.items import (
    AudioPart,
    Content,
    HostedCall,
    ImagePart,
    Item,
    Message,
    Part,
    Role,
    TextPart,
    ToolCall,
    ToolOutput,
)
from vivavoce.server.realtime.audio_formats import WireFormat, decode, encode, resample
from vivavoce.server.realtime.mcp_types import ListedTool, McpCallError
from vivavoce.server.realtime.session_types import AudioFormat, Maybe, Modality, ResponseOptions
from vivavoce.server.wire import ErrorDetail, JsonObject, WireError

Milliseconds = Annotated[int, Meta(ge=0, lt=1 << 40)]
ItemId = Annotated[str, Meta(min_length=1, max_length=64)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


# Items


class InputText(Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    text: str


class OutputText(Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    text: str


class InputAudio(Struct, tag_field="type", tag="input_audio", forbid_unknown_fields=True):
    """The transcript is sent even where there is none: stock clients fail without the key."""

    transcript: str | None = None
    audio: Maybe[bytes] = UNSET


class InputImage(Struct, tag_field="type", tag="input_image", forbid_unknown_fields=True):
    """A picture; its data is sent back with `conversation.item.retrieved` only."""

    image_url: Maybe[str] = UNSET
    detail: Maybe[Literal["auto", "low", "high"]] = UNSET


class OutputAudio(Struct, tag_field="type", tag="output_audio", forbid_unknown_fields=True):
    transcript: str | None = None
    audio: Maybe[bytes] = UNSET


class BetaText(OutputText, tag_field="type", tag="text", forbid_unknown_fields=True):
    """The beta protocol's name of `output_text`."""


class BetaAudio(OutputAudio, tag_field="type", tag="audio", forbid_unknown_fields=True):
    """The beta protocol's name of `output_audio`."""


ContentPart = InputText | OutputText | InputAudio | InputImage | OutputAudio | BetaText | BetaAudio
Status = Literal["in_progress", "completed", "incomplete"]
PARTS_OF: dict[Role, tuple[type, ...]] = {
    "system": (InputText, BetaText),
    "user": (InputText, InputAudio, InputImage),
    "assistant": (OutputText, OutputAudio),
}


class BaseItem(Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Fields that do not apply are omitted: stock clients do not accept null there."""

    id: Maybe[ItemId] = UNSET
    object: Maybe[Literal["realtime.item"]] = UNSET
    status: Maybe[Status] = UNSET


class MessageItem(BaseItem, kw_only=True, tag="message"):
    role: Role
    content: list[ContentPart]

    def __post_init__(self) -> None:
        for part in self.content:
            if not isinstance(part, PARTS_OF[self.role]):
                raise ValueError(f"a {self.role} message cannot have {part.__struct_config__.tag} parts")


class FunctionCallItem(BaseItem, kw_only=True, tag="function_call"):
    name: str
    arguments: str
    call_id: Maybe[str] = UNSET


class FunctionCallOutputItem(BaseItem, kw_only=True, tag="function_call_output"):
    call_id: ItemId
    output: str


class McpApprovalResponseItem(BaseItem, kw_only=True, tag="mcp_approval_response"):
    approval_request_id: ItemId
    approve: bool
    reason: Maybe[str] = UNSET


class McpApprovalRequestItem(BaseItem, kw_only=True, tag="mcp_approval_request"):
    server_label: str
    name: str
    arguments: str


class McpCallItem(BaseItem, kw_only=True, tag="mcp_call"):
    """Null fields are sent: stock clients fail without the key of the output."""

    server_label: str
    name: str
    arguments: str
    approval_request_id: str | None
    output: str | None
    error: McpCallError | None


class McpListToolsItem(BaseItem, kw_only=True, tag="mcp_list_tools"):
    server_label: str
    tools: list[ListedTool]


class ItemReference(Struct, tag_field="type", tag="item_reference", forbid_unknown_fields=True):
    """An item of the history, in the input of a response."""

    id: ItemId


ClientItem = MessageItem | FunctionCallItem | FunctionCallOutputItem
ConversationItem = ClientItem | McpApprovalResponseItem | McpApprovalRequestItem | McpCallItem | McpListToolsItem
"""An item of the server; clients create the first three, and approvals."""


# Responses

EndStatus = Literal["completed", "cancelled", "incomplete", "failed"]
ResponseStatus = Literal["in_progress", EndStatus]


class VivaResponseParams(Struct, forbid_unknown_fields=True):
    """Our extension of `response.create`."""

    json_schema: Maybe[JsonObject] = UNSET
    """A schema that a written response follows."""


class ResponseParams(ResponseOptions, kw_only=True):
    viva: Maybe[VivaResponseParams] = UNSET
    conversation: Maybe[Literal["auto", "none"]] = UNSET
    input: Maybe[list[ClientItem | ItemReference]] = UNSET
    metadata: Maybe[Metadata] = UNSET


class StatusDetails(Struct, kw_only=True):
    type: EndStatus
    reason: str | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET


class TokenDetails(Struct, kw_only=True):
    text_tokens: int = 0
    audio_tokens: int = 0


class CachedTokenDetails(TokenDetails, kw_only=True):
    image_tokens: int = 0


class InputTokenDetails(CachedTokenDetails, kw_only=True):
    cached_tokens: int = 0
    cached_tokens_details: CachedTokenDetails


class ResponseUsage(Struct, kw_only=True):
    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: InputTokenDetails
    output_token_details: TokenDetails


class ResponseAudioOutput(Struct):
    format: AudioFormat
    voice: str


class ResponseAudio(Struct):
    output: ResponseAudioOutput


class Response(Struct, kw_only=True):
    id: str
    object: Literal["realtime.response"] = "realtime.response"
    status: ResponseStatus
    status_details: StatusDetails | None
    output: list[ConversationItem]
    conversation_id: str | None
    output_modalities: list[Modality]
    max_output_tokens: int | Literal["inf"]
    metadata: dict[str, str] | None
    usage: ResponseUsage | None
    audio: ResponseAudio | UnsetType = UNSET


# Conversion


IMAGE_TYPES = ("data:image/png;base64,", "data:image/jpeg;base64,")


def content_of(item: ClientItem, format: WireFormat, rate: int, param: str = "item") -> Content:
    """The content of an item of a client; its audio is resampled to `rate`."""
    if isinstance(item, FunctionCallItem):
        return ToolCall(item.call_id or "", item.name, item.arguments)
    if isinstance(item, FunctionCallOutputItem):
        return ToolOutput(item.call_id, item.output)
    if not item.content:
        raise WireError(f"{param}.content must be a list of at least one part", param=f"{param}.content")
    parts = [_part_of(part, format, rate, f"{param}.content[{index}]") for index, part in enumerate(item.content)]
    return Message(item.role, tuple(parts))


def _part_of(part: ContentPart, format: WireFormat, rate: int, param: str) -> Part:
    if isinstance(part, InputText | OutputText):
        return TextPart(part.text)
    if isinstance(part, InputImage):
        return _image_of(part, param)
    if part.audio is None or part.audio is UNSET:
        if isinstance(part, OutputAudio):
            return TextPart(part.transcript or "")  # a history of another server: the text without the audio
        raise WireError(f"Missing required parameter: '{param}.audio'.", "missing_required_parameter", f"{param}.audio")
    return AudioPart(resample(decode(part.audio, format), format.rate, rate), rate, part.transcript)


def _image_of(part: InputImage, param: str) -> ImagePart:
    param = f"{param}.image_url"
    if not part.image_url:
        raise WireError(f"Missing required parameter: '{param}'.", "missing_required_parameter", param)
    if not part.image_url.startswith(IMAGE_TYPES):
        raise WireError(f"Invalid '{param}'. Expected a base64-encoded data URI of a PNG or JPEG image.", param=param)
    return ImagePart(part.image_url, part.detail or "auto")


def image_param(items: Sequence[ConversationItem | ItemReference], params: Sequence[str]) -> str | None:
    """Where the first picture in these items is; `params` has the path of each."""
    for item, param in zip(items, params, strict=True):
        for index, part in enumerate(item.content if isinstance(item, MessageItem) else ()):
            if isinstance(part, InputImage):
                return f"{param}.content[{index}]"
    return None


def contents_of(
    items: Sequence[ClientItem | ItemReference],
    format: WireFormat,
    rate: int,
    find: Callable[[str], Item],
    param: str = "response.input",
) -> list[Content]:
    """The contents of the input items of a response; `find` resolves references by id."""
    return [
        find(item.id).content
        if isinstance(item, ItemReference)
        else content_of(item, format, rate, f"{param}[{index}]")
        for index, item in enumerate(items)
    ]


def wire_item(
    item: Item, status: Status | None = None, audio: tuple[WireFormat, WireFormat] | None = None
) -> ConversationItem:
    """An item for clients; with its audio where `audio` has the formats of the user's audio and of ours."""
    status = status or ("completed" if item.is_complete else "incomplete")
    content = item.content
    if isinstance(content, ToolCall) and content.hosted is not None:
        return _hosted_item(item.id, status, content.arguments, content.hosted)
    if isinstance(content, ToolCall):
        return FunctionCallItem(
            id=item.id,
            object="realtime.item",
            status=status,
            name=content.name,
            call_id=content.call_id,
            arguments=content.arguments,
        )
    if isinstance(content, ToolOutput):
        return FunctionCallOutputItem(
            id=item.id, object="realtime.item", status=status, call_id=content.call_id, output=content.output
        )
    parts = [_wire_part(content.role, part, audio) for part in content.parts]
    return MessageItem(id=item.id, object="realtime.item", status=status, role=content.role, content=parts)


def _hosted_item(id: str, status: Status, arguments: str, call: HostedCall) -> McpApprovalRequestItem | McpCallItem:
    """A call that the server makes, or the request to approve it."""
    label, name = call.tool.server, call.tool.name
    if call.state in ("asked", "approved", "denied"):
        return McpApprovalRequestItem(id=id, object="realtime.item", server_label=label, name=name, arguments=arguments)
    error = None
    if call.error is not None:
        kind, code, message = call.error
        error = McpCallError(kind, message, UNSET if kind == "tool_execution_error" else code)
    return McpCallItem(
        id=id,
        object="realtime.item",
        server_label=label,
        name=name,
        status="in_progress" if call.state == "running" else status,
        arguments=arguments,
        approval_request_id=call.approval_request,
        output=call.output,
        error=error,
    )


def _wire_part(
    role: Role,
    part: Part,
    audio: tuple[WireFormat, WireFormat] | None,
) -> ContentPart:
    is_ours = role == "assistant"
    if isinstance(part, TextPart):
        return OutputText(part.text) if is_ours else InputText(part.text)
    if isinstance(part, ImagePart):
        return InputImage(UNSET if audio is None else part.url, part.detail)
    kind = OutputAudio if is_ours else InputAudio
    if audio is None:
        return kind(part.transcript)
    format = audio[1 if is_ours else 0]
    samples = np.clip(resample(np.asarray(part.samples, np.float32), part.rate, format.rate), -1, 1)
    return kind(part.transcript, encode(samples, format))


def audio_ms(item: Item) -> int | None:
    """Duration of the audio of an item; None without audio."""
    parts = item.content.parts if isinstance(item.content, Message) else ()
    spoken = [part for part in parts if isinstance(part, AudioPart)]
    return round(sum(len(part.samples) / part.rate for part in spoken) * 1000) if spoken else None
