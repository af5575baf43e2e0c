"""Items and responses in Realtime events."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from vivavoce.server.realtime.session_types import AudioFormat, Maybe, Modality, ResponseOptions

Milliseconds = Annotated[int, Meta(ge=0, lt=1 << 40)]
ItemId = Annotated[str, Meta(min_length=1, max_length=64)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


# Items


class InputText(Struct, tag_field="type", tag="input_text"):
    text: str


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str


class InputAudio(Struct, tag_field="type", tag="input_audio"):
    """The transcript is sent even where there is none: stock clients fail without the key."""

    transcript: str | None = None
    audio: Maybe[bytes] = UNSET


class OutputAudio(Struct, tag_field="type", tag="output_audio"):
    transcript: str | None = None
    audio: Maybe[bytes] = UNSET


class BetaText(OutputText, tag_field="type", tag="text"):
    """The beta protocol's name of `output_text`."""


class BetaAudio(OutputAudio, tag_field="type", tag="audio"):
    """The beta protocol's name of `output_audio`."""


ContentPart = InputText | OutputText | InputAudio | OutputAudio | BetaText | BetaAudio
Role = Literal["system", "user", "assistant"]
Status = Literal["in_progress", "completed", "incomplete"]
PARTS_OF: dict[Role, tuple[type, ...]] = {
    "system": (InputText, BetaText),
    "user": (InputText, InputAudio),
    "assistant": (OutputText, OutputAudio),
}


class BaseItem(Struct, kw_only=True, tag_field="type"):
    """Fields that do not apply are left out: stock clients take no null there."""

    id: Maybe[ItemId] = UNSET
    object: Maybe[Literal["realtime.item"]] = UNSET
    status: Maybe[Status] = UNSET


class MessageItem(BaseItem, kw_only=True, tag="message"):
    role: Role
    content: list[ContentPart]

    def __post_init__(self) -> None:
        for part in self.content:
            if not isinstance(part, PARTS_OF[self.role]):
                raise ValueError(f"a {self.role} message has no {part.__struct_config__.tag} parts")


class FunctionCallItem(BaseItem, kw_only=True, tag="function_call"):
    name: str
    arguments: str
    call_id: Maybe[str] = UNSET


class FunctionCallOutputItem(BaseItem, kw_only=True, tag="function_call_output"):
    call_id: ItemId
    output: str


class ItemReference(Struct, tag_field="type", tag="item_reference"):
    """An item of the history, in the input of a response."""

    id: ItemId


ConversationItem = MessageItem | FunctionCallItem | FunctionCallOutputItem


# Responses


class ResponseParams(ResponseOptions, kw_only=True):
    conversation: Maybe[Literal["auto", "none"]] = UNSET
    input: Maybe[list[ConversationItem | ItemReference]] = UNSET
    metadata: Maybe[Metadata] = UNSET


class ErrorDetail(Struct, kw_only=True):
    type: str
    code: str | None = None
    message: str
    param: Maybe[str] = UNSET
    event_id: Maybe[str] = UNSET


class StatusDetails(Struct, kw_only=True):
    type: Literal["completed", "cancelled", "incomplete", "failed"]
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
    status: Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
    status_details: StatusDetails | None
    output: list[ConversationItem]
    conversation_id: str | None
    output_modalities: list[Modality]
    max_output_tokens: int | Literal["inf"]
    metadata: dict[str, str] | None
    usage: ResponseUsage | None
    audio: ResponseAudio | UnsetType = UNSET
