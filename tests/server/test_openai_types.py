"""We accept and refuse what the types of the `openai` package do; each difference has a reason."""

import asyncio
import json
import re

import numpy as np
import pytest

from tests.server.harness import DEADLINE, connected
from tests.server.openai_types import CLIENT_EVENTS, SERVER_EVENTS, accepted, refused, required
from tests.server.phones import TwilioPhone
from tests.server.scripted import ScriptedHost, tone
from vivavoce.dialogue import events as dialogue
from vivavoce.server.realtime.client_events import CLIENT_EVENTS as OURS
from vivavoce.server.realtime.client_events import ResponseCreate, SessionUpdate, decode_client_event
from vivavoce.server.realtime.items import ResponseParams
from vivavoce.server.realtime.output import Pacing
from vivavoce.server.realtime.server_events import ServerEvent
from vivavoce.server.realtime.session import Opening
from vivavoce.server.realtime.session_config import Configuration
from vivavoce.server.realtime.session_types import SessionObject
from vivavoce.server.wire import WireError

WE_REFUSE = {  # where in an event, and why, although the type accepts it
    r"tools\[\]<(Mcp|RealtimeResponseCreateMcpTool)>": "MCP tools are not run yet",
    r"tool_choice<ToolChoiceMcp>": "MCP tools are not run yet",
    r"(item|input\[\])<RealtimeMcp": "there are no MCP items yet",
    r"content\[\]<Content>\.type=input_image": "no model here sees images",
    r"content\[\]<Content>\.(audio|transcript|detail|image_url|text)": "a field of another kind of part",
    r"\.prompt<": "there are no stored prompts",
    r"\.include": "transcripts have no log probabilities",
    r"noise_reduction<NoiseReduction>": "audio is not denoised",
    r"content\[\]<Content>\.type=\w+_audio": "a sample of audio with a text",
    r"transcription<AudioTranscription>\.(prompt|keywords|delay)": "the recogniser takes no hints",
    r"\.voice:str": "there is no such voice",
    r"voice<\w+>": "there is no such voice",
    r"content\[\]<Content>\.(type|text):NoneType": "a part without its type or its text says nothing",
    r"<RealtimeFunctionTool>\.name:NoneType": "a tool without a name cannot be called",
    r"\.conversation:str": "the documented values are auto and none",
}
WE_ACCEPT = {  # although the type refuses it
    r"^session(<\w+>\.type missing| = \{)": "the beta protocol's session has no type",
    r"turn_detection(<\w+>\.type missing| = \{)": "an update may change one field of the detector in force",
}
NEVER_SENT = {
    **dict.fromkeys(
        [
            *("mcp_list_tools.in_progress", "mcp_list_tools.completed", "mcp_list_tools.failed"),
            *("response.mcp_call_arguments.delta", "response.mcp_call_arguments.done"),
            *("response.mcp_call.in_progress", "response.mcp_call.completed", "response.mcp_call.failed"),
        ],
        "MCP tools are not run yet",
    ),
    "conversation.item.created": "the beta protocol's name of conversation.item.added",
}
CODES = re.compile(
    r"invalid_value|invalid_type|missing_required_parameter|unknown_parameter|empty_\w+|\w+_(max|min)_\w+"
)
EXTENSIONS = {
    *("viva.played", "transcription_session.update", "viva.session.resumed", "viva.warning", "viva.call.started"),
}


def configuration() -> Configuration:
    return Configuration(ScriptedHost(), "scripted-1")


def taken(event: dict) -> SessionObject | None:
    """Decode an event and apply its parameters; the session after it."""
    decoded = decode_client_event(json.dumps(event))
    if isinstance(decoded, SessionUpdate):
        return configuration().changed(decoded.session)
    if isinstance(decoded, ResponseCreate) and isinstance(decoded.response, ResponseParams):
        return configuration().changed(decoded.response, "response")
    return None


def is_accepted(event: dict) -> bool:
    try:
        taken(event)
    except WireError as error:
        if not CODES.fullmatch(error.code):
            raise
        return False
    return True


def is_theirs(kind: str, event: dict) -> bool:
    try:
        CLIENT_EVENTS[kind].model_validate(event)
    except ValueError:
        return False
    return True


def unexplained(paths: list[str], reasons: dict[str, str]) -> list[str]:
    return [path for path in paths if not any(re.search(place, path) for place in reasons)]


def test_we_know_their_client_events_and_they_ours():
    assert OURS.keys() - EXTENSIONS == CLIENT_EVENTS.keys()


@pytest.mark.parametrize("kind", CLIENT_EVENTS)
def test_what_their_types_accept_we_accept(kind):
    samples = accepted(CLIENT_EVENTS[kind])
    assert len(samples) > 1 and all(is_theirs(kind, sample.value) for sample in samples)
    assert not unexplained([sample.path for sample in samples if not is_accepted(sample.value)], WE_REFUSE)


@pytest.mark.parametrize("kind", CLIENT_EVENTS)
def test_what_their_types_refuse_we_refuse(kind):
    samples = [sample for sample in refused(CLIENT_EVENTS[kind]) if not is_theirs(kind, sample.value)]
    assert len(samples) > 5
    assert not unexplained([sample.path for sample in samples if is_accepted(sample.value)], WE_ACCEPT)


def test_every_reason_is_needed():
    lenient = [s.path for kind in CLIENT_EVENTS for s in accepted(CLIENT_EVENTS[kind]) if not is_accepted(s.value)]
    strict = [
        sample.path
        for kind in CLIENT_EVENTS
        for sample in refused(CLIENT_EVENTS[kind])
        if not is_theirs(kind, sample.value) and is_accepted(sample.value)
    ]
    assert all(any(re.search(place, path) for path in lenient) for place in WE_REFUSE)
    assert all(any(re.search(place, path) for path in strict) for place in WE_ACCEPT)


EFFECTLESS = {  # accepted although nothing changes, and why that is what the client asked for
    r"\.model:str|\.model=": "every name stands for the model that is served",
    r":NoneType$|=null$": "null is the default",
    r"format<AudioPCM>": "it is the default",
    r"=(auto|none|inf)$": "it is the default, or there are no tools to choose from",
    r"turn_detection<\w+>(\.(create_response|interrupt_response)=True)?$": "it is the default",
    r"\.(threshold|prefix_padding_ms):\w+$": "it is the default",
    r"format<AudioPCM[UA]>$": "a format without a type is PCM",
    r"\.voice=": "stock names stand for the default voice",
    r"^event_id": "it is repeated in errors",
    r"(output_modalities\[\]|modalities\[\])=audio": "it is the default",
    r"(audio|input|output|session|response|tools|reasoning|transcription|tracing)<\w+>$": "an object without fields",
    r"^response<\w+>\.(conversation|input|metadata)": "not a parameter of the session; tested by itself",
    r"tracing": "attributes of traces",
    r"tool_choice=\w+$": "it is passed on with the tools",
}


def effect(session: SessionObject) -> object:
    """All that the server does otherwise because of the session's parameters."""
    made = configuration()
    made.session = session
    tracing = getattr(session, "tracing", None)
    return made.settings(), made.input_format, made.output_format, type(session), tracing, session.viva


@pytest.mark.parametrize("kind", ["session.update", "response.create"])
def test_no_parameter_is_swallowed(kind):
    """Each one of the types is refused, or changes what the server does, or has a reason why there is nothing to do."""
    plain = effect(configuration().session)
    swallowed, honoured = [], 0
    for sample in accepted(CLIENT_EVENTS[kind]):
        if not is_accepted(sample.value) or sample.path == "":
            continue
        changed = taken(sample.value)
        if changed is not None and effect(changed) != plain:
            honoured += 1
        else:
            swallowed.append(sample.path)
    assert honoured > 15
    assert not unexplained(swallowed, EFFECTLESS)


@pytest.mark.parametrize("kind", CLIENT_EVENTS)
def test_a_field_that_does_not_exist_is_refused_by_name(kind):
    for sample in accepted(CLIENT_EVENTS[kind]):
        if is_accepted(sample.value):
            for event, path in with_unknown_fields(sample.value, ""):
                with pytest.raises(WireError) as refused:
                    taken(event)
                assert (refused.value.code, refused.value.param) == ("unknown_parameter", path), event


FREE = {"parameters", "metadata"}  # objects of the client's own


def with_unknown_fields(value, path: str):
    """The value with a field more, in each object in it; and the field's path."""
    if isinstance(value, dict):
        yield value | {"nonsense": 1}, f"{path}.nonsense".lstrip(".")
        for name, inner in value.items():
            if name not in FREE:
                for changed, place in with_unknown_fields(inner, f"{path}.{name}"):
                    yield value | {name: changed}, place
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            for changed, place in with_unknown_fields(inner, f"{path}[{index}]"):
                yield [*value[:index], changed, *value[index + 1 :]], place


def session(**fields) -> dict:
    return {"type": "session.update", "session": {"type": "realtime", **fields}}


def turn_detection(**fields) -> dict:
    return session(audio={"input": {"turn_detection": {"type": "server_vad", **fields}}})


@pytest.mark.parametrize(
    "event",
    [
        session(max_output_tokens=0),
        session(max_output_tokens=4097),
        session(output_modalities=[]),
        session(audio={"output": {"speed": 1.6}}),
        turn_detection(threshold=1.5),
        turn_detection(prefix_padding_ms=-1),
        turn_detection(silence_duration_ms=10_001),
        turn_detection(idle_timeout_ms=10),
        session(tools=[{"type": "function"}]),
        session(tools=[{"type": "function", "name": "look", "parameters": []}]),
        {"type": "response.create", "response": {"metadata": {"key": "x" * 513}}},
        {"type": "conversation.item.delete", "item_id": "x" * 65},
        {"type": "conversation.item.truncate", "item_id": "x", "content_index": 0, "audio_end_ms": -1},
        {"type": "conversation.item.truncate", "item_id": "x", "content_index": 1, "audio_end_ms": 0},
        {"type": "conversation.item.truncate", "item_id": "x", "content_index": 0, "audio_end_ms": "5"},
        {"type": "conversation.item.truncate", "item_id": "x", "content_index": 0, "audio_end_ms": 5.0},
    ],
)
def test_values_beyond_the_documented_ranges_are_refused_although_the_types_take_them(event):
    """Nor is text taken for a number, as pydantic does."""
    assert is_theirs(event["type"], event) and not is_accepted(event)


@pytest.mark.parametrize(
    "event",
    [
        session(audio={"input": {"format": {"type": "audio/pcm", "rate": 16_000}}}),
        session(audio={"input": {"format": "g711_ulaw"}}),
        {"type": "session.update", "session": {"modalities": ["text"], "input_audio_format": "pcm16"}},
        {"type": "response.create", "response": {"input": [{"type": "item_reference", "id": "item"}]}},
    ],
)
def test_extensions_and_the_beta_protocol_are_accepted_although_the_types_refuse_them(event):
    assert not is_theirs(event["type"], event) and is_accepted(event)


# Server events


def leaves(kind: type) -> list[type]:
    return [leaf for child in kind.__subclasses__() for leaf in (leaves(child) or [child])]


SENT = {str(event.__struct_config__.tag): event for event in leaves(ServerEvent)}


def test_every_server_event_of_theirs_is_one_of_ours_or_has_a_reason():
    assert SENT.keys() - EXTENSIONS == SERVER_EVENTS.keys() - NEVER_SENT.keys()
    for kind, model in SERVER_EVENTS.items():
        assert kind in NEVER_SENT or required(model) <= {"type", *SENT[kind].__struct_fields__}, kind


async def test_what_we_send_their_types_take_strictly(running):
    """A conversation with every event that we ever send."""
    server = await running(media_streams=True)
    events = [
        *await over_a_socket(server),
        *await over_a_call(server),
        *await a_transcription(server),
        *await on_the_telephone(server),
    ]
    assert {event["type"] for event in events} == SENT.keys() - EXTENSIONS
    for event in events:
        SERVER_EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)


async def over_a_socket(server) -> list[dict]:
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    async with connected(server) as client:
        await client.until("conversation.created")
        heard = {"transcription": {"model": "any", "language": "en"}}
        voice = {"voice": {"id": "ben"}}
        await client.send("session.update", session={"tools": [tool], "audio": {"input": heard, "output": voice}})
        await client.speak(np.concatenate([tone(500, 0.5, 24_000), np.zeros(12_000, np.float32)]))
        spoken = (await client.until("response.done"))["response"]["output"][0]["id"]
        await client.send("conversation.item.retrieve", item_id=spoken)
        await client.until("conversation.item.retrieved")
        await client.send("conversation.item.truncate", item_id=spoken, content_index=0, audio_end_ms=10)
        await client.until("conversation.item.truncated")
        await client.send("conversation.item.delete", item_id=spoken)
        await client.until("conversation.item.deleted")
        call = (await client.say("the weather, please"))["output"][0]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        await client.send("conversation.item.create", item=output)
        await client.say("go on", output_modalities=["text"], metadata={"topic": "x"}, max_output_tokens=9)
        await client.say("please fail")
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await client.send("output_audio_buffer.clear")
        await client.until("output_audio_buffer.cleared")
        conversation = server.host.opened[-1]
        conversation.emit(dialogue.TurnTimedOut("item", 1000, 6000))
        conversation.emit(dialogue.InputTranscriptFailed("item", "the recogniser failed"))
        await client.until("conversation.item.input_audio_transcription.failed")
        await client.send("conversation.item.delete", item_id="nobody", event_id="mine")
        await client.error()
        return client.events


async def over_a_call(server) -> list[dict]:
    session = server.sessions.open(Opening("scripted-1"), "here", "webrtc", Reader())
    cursor = session.attach(Reader(), 0)
    session.start()
    await session.receive_text(json.dumps({"type": "response.create"}))
    events: list[dict] = []
    async with asyncio.timeout(DEADLINE):
        while not events or events[-1]["type"] != "output_audio_buffer.stopped":
            entry = await cursor.next()
            cursor.advance(entry)
            events.append(json.loads(entry.payload))
    await session.close()
    return events


async def on_the_telephone(server) -> list[dict]:
    async with TwilioPhone(server) as phone, phone.sideband() as sideband:
        await phone.press("5")
        await sideband.until("input_audio_buffer.dtmf_event_received")
        return sideband.events


async def a_transcription(server) -> list[dict]:
    async with connected(server, "?intent=transcription") as client:
        await client.until("session.created")
        transcription = {"model": "gpt-4o-transcribe-diarize", "languages": ["en"]}
        await client.send(
            "session.update", session={"type": "transcription", "audio": {"input": {"transcription": transcription}}}
        )
        await client.speak(np.concatenate([tone(500, 0.5, 24_000), np.zeros(12_000, np.float32)]))
        await client.until("conversation.item.input_audio_transcription.completed")
        return client.events


class Reader:
    """A call without a connected client."""

    def drop(self, code: int, reason: str) -> None:
        """Nothing is to be closed."""

    def pacing(self, options) -> Pacing:
        """As if a client played it."""
        return Pacing.of_calls(options)

    def send(self, reply, piece) -> None:
        """Discard it."""

    def clear(self) -> None:
        """Nothing is waiting."""
