"""The events a client sends, and their decoding; a message that is not valid becomes an error of the protocol."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, inspect

from vivavoce.server.realtime.items import ConversationItem, ItemId, Milliseconds, ResponseParams
from vivavoce.server.realtime.session_types import Maybe, SessionParams
from vivavoce.server.wire import WireError

Body = TypeVar("Body")

MAX_EVENT_ID = 512


class ClientEvent(Struct, kw_only=True, tag_field="type"):
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
    item: ConversationItem
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

_PROBLEM = re.compile(r"(?P<problem>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_WRONG_TYPE = re.compile(r"Expected `(.*)`, got `(.*)`")
_WRONG_VALUE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)

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
        raise _no_json(error) from None


def decode_object(text: str | bytes, kind: type[Body], param: str = "") -> Body:
    """A JSON object of this class; WireError names the field at fault, below `param`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind, param) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _no_json(error) from None


def _no_json(error: Exception) -> WireError:
    if isinstance(error, RecursionError):
        return WireError("the message is nested too deeply", "invalid_json")
    return WireError(f"the message is not JSON: {error}", "invalid_json")


def _refused_event(message: str | bytes, error: msgspec.ValidationError) -> WireError:
    try:
        envelope = msgspec.json.decode(message, type=Envelope)
    except msgspec.ValidationError:
        return WireError(f"an event must be a JSON object: {error}", "invalid_event")
    except (msgspec.DecodeError, ValueError, RecursionError) as malformed:
        return _no_json(malformed)
    kind, id = envelope.type, envelope.event_id
    if not isinstance(kind, str) or kind not in CLIENT_EVENTS:
        known = ", ".join(CLIENT_EVENTS)
        refusal = WireError(f"the event type {kind!r} is unknown; known types: {known}", "unknown_event_type", "type")
    else:
        refusal = _refusal(error, CLIENT_EVENTS[kind])
    refusal.event_id = id if isinstance(id, str) and len(id) <= MAX_EVENT_ID else None
    return refusal


def _refusal(error: msgspec.ValidationError, kind: type, prefix: str = "") -> WireError:
    """The protocol error of a message of msgspec such as "Expected `str`, got `int` - at `$.item.id`"."""
    found = _PROBLEM.fullmatch(str(error))
    problem, path = (found["problem"], found["path"] or "") if found else (str(error), "")
    path = path.replace("[...]", "")
    param = ".".join(name for name in (prefix, path) if name)
    if missing := _MISSING.fullmatch(problem):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return WireError(f"Missing required parameter: '{param}'.", "missing_required_parameter", param)
    if wrong := _WRONG_TYPE.fullmatch(problem):
        subject = f"'{param}'" if param else "the JSON value"
        return WireError(f"Invalid type for {subject}: expected {wrong[1]}, got {wrong[2]}.", "invalid_type", param)
    if wrong := _WRONG_VALUE.fullmatch(problem):
        known = ", ".join(f"{value!r}" for value in _supported(kind, path))
        return WireError(f"Invalid value: {wrong[1]}. Supported values are: {known}.", param=param)
    code = "invalid_base64" if "base64" in problem else "invalid_value"
    return WireError(f"Invalid '{param}': {problem}.", code, param)


def _supported(kind: type, path: str) -> list[object]:
    """The literals that a type accepts at a path such as `session.tools[0].type`."""
    types = list(_alternatives(_type_info(kind)))
    for step in re.findall(r"\[|[^.\[\]]+(?!\])", path):
        types = [inner for type_ in types for inner in _inside(type_, step)]
    return [value for type_ in types if isinstance(type_, inspect.LiteralType) for value in type_.values]


@cache
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _alternatives(type_: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(type_, inspect.Metadata):
        yield from _alternatives(type_.type)
    elif isinstance(type_, inspect.UnionType):
        for each in type_.types:
            yield from _alternatives(each)
    else:
        yield type_


def _inside(type_: inspect.Type, step: str) -> Iterable[inspect.Type]:
    if isinstance(type_, inspect.ListType) and step == "[":
        return _alternatives(type_.item_type)
    if isinstance(type_, inspect.StructType):
        if step == type_.tag_field:
            return [inspect.LiteralType((type_.tag,))]
        return [inner for field in type_.fields if field.encode_name == step for inner in _alternatives(field.type)]
    return []
