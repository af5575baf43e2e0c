"""The events a client sends, and their decoding; a message that is not valid becomes an error of the protocol."""

from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, Struct

from vivavoce.server.realtime.items import ClientItem, ItemId, McpApprovalResponseItem, Milliseconds, ResponseParams
from vivavoce.server.realtime.refusals import invalid_json, refusal, unknown_event_type
from vivavoce.server.realtime.session_types import Maybe, SessionParams
from vivavoce.server.wire import WireError

Body = TypeVar("Body")

MAX_EVENT_ID = 512


class ClientEvent(Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    event_id: Annotated[str, Meta(max_length=MAX_EVENT_ID)] | None = None


class SessionUpdate(ClientEvent, tag="session.update"):
    session: SessionParams


class TranscriptionSessionUpdate(SessionUpdate, tag="transcription_session.update"):
    """The name of the event in the beta protocol."""


class InputAudioBufferAppend(ClientEvent, tag="input_audio_buffer.append"):
    audio: bytes


class InputAudioBufferCommit(ClientEvent, tag="input_audio_buffer.commit"):
    pass


class InputAudioBufferClear(ClientEvent, tag="input_audio_buffer.clear"):
    pass


class OutputAudioBufferClear(ClientEvent, tag="output_audio_buffer.clear"):
    pass


class ConversationItemCreate(ClientEvent, tag="conversation.item.create"):
    item: ClientItem | McpApprovalResponseItem
    previous_item_id: ItemId | None = None


class ConversationItemRetrieve(ClientEvent, tag="conversation.item.retrieve"):
    item_id: ItemId


class ConversationItemTruncate(ClientEvent, tag="conversation.item.truncate"):
    item_id: ItemId
    content_index: Literal[0]
    """An item has only one audio part."""
    audio_end_ms: Milliseconds


class ConversationItemDelete(ClientEvent, tag="conversation.item.delete"):
    item_id: ItemId


class ResponseCreate(ClientEvent, tag="response.create"):
    response: Maybe[ResponseParams] = UNSET


class ResponseCancel(ClientEvent, tag="response.cancel"):
    response_id: str | None = None


class VivaPlayed(ClientEvent, tag="viva.played"):
    """Our extension: the playback position of a response at the client."""

    response_id: str
    audio_ms: Milliseconds


AnyClientEvent = (
    SessionUpdate
    | TranscriptionSessionUpdate
    | InputAudioBufferAppend
    | InputAudioBufferCommit
    | InputAudioBufferClear
    | OutputAudioBufferClear
    | ConversationItemCreate
    | ConversationItemRetrieve
    | ConversationItemTruncate
    | ConversationItemDelete
    | ResponseCreate
    | ResponseCancel
    | VivaPlayed
)

CLIENT_EVENTS: dict[str, type] = {str(event.__struct_config__.tag): event for event in get_args(AnyClientEvent)}

_decoder = msgspec.json.Decoder(AnyClientEvent)


class Envelope(msgspec.Struct):
    """The common fields of a message, of any type, for the error about it."""

    type: Any = None
    event_id: Any = None


def decode_client_event(message: str | bytes) -> AnyClientEvent:
    """The event of a message; WireError, with the event id where there is one, for a message that is not valid."""
    try:
        return _decoder.decode(message)
    except msgspec.ValidationError as error:
        raise _refused_event(message, error) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise invalid_json(error) from None


def decode_object(text: str | bytes, kind: type[Body], param: str = "") -> Body:
    """A JSON object of this class; WireError names the field at fault, below `param`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise refusal(error, kind, param, text) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise invalid_json(error) from None


def _refused_event(message: str | bytes, error: msgspec.ValidationError) -> WireError:
    try:
        envelope = msgspec.json.decode(message, type=Envelope)
    except msgspec.ValidationError:
        return WireError(f"an event must be a JSON object: {error}", "invalid_event")
    except (msgspec.DecodeError, ValueError, RecursionError) as malformed:
        return invalid_json(malformed)
    kind, id = envelope.type, envelope.event_id
    if not isinstance(kind, str) or kind not in CLIENT_EVENTS:
        refused = unknown_event_type(kind, CLIENT_EVENTS)
    else:
        refused = refusal(error, CLIENT_EVENTS[kind], message=message)
    refused.event_id = id if isinstance(id, str) and len(id) <= MAX_EVENT_ID else None
    return refused
