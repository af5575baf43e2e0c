"""We accept and refuse what the types of the `openai` package do; each difference has a reason."""

import asyncio
import json
import re

import msgspec
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
from vivavoce.server.realtime.prompts import PromptFolder
from vivavoce.server.realtime.server_events import ServerEvent
from vivavoce.server.realtime.session import Opening
from vivavoce.server.realtime.session_config import Configuration
from vivavoce.server.realtime.session_settings import DIARIZE
from vivavoce.server.realtime.session_types import SessionObject, SessionParams
from vivavoce.server.wire import WireError

WE_REFUSE = {  # where in an event, and why, although the type accepts it
    r"tools\[\]<(Mcp|RealtimeResponseCreateMcpTool)>": "no MCP server is allowed here",
    r"(item|input\[\])<RealtimeMcp": "MCP items are made by the server",
    r"content\[\]<Content>\.(audio|transcript|detail|image_url|text)": "a field of another kind of part",
    r"\.prompt<ResponsePrompt>\.variables": "the stored prompt of this test has no variables",
    r"content\[\]<Content>\.type=\w+_(audio|image)": "a sample of audio or of an image with a text",
    r"\.voice:str": "there is no such voice",
    r"voice<\w+>": "there is no such voice",
    r"content\[\]<Content>\.(type|text):NoneType": "a part without its type or its text says nothing",
    r"<RealtimeFunctionTool>\.name:NoneType": "a tool without a name cannot be called",
    r"\.conversation:str": "the documented values are auto and none",
}
WE_ACCEPT = {  # although the type refuses it
    r"^session(<\w+>\.type missing| = \{)": "the beta protocol's session has no type",
    r"turn_detection(<\w+>\.type missing| = \{)": "an update may change one field of the detector in force",
    r"<RealtimeMcpApprovalResponse>\.id( missing| = None)": "stock clients leave it out",
}
NEVER_SENT = {
    "conversation.item.created": "the beta protocol's name of conversation.item.added",
}
CODES = re.compile(
    r"invalid_value|invalid_type|missing_required_parameter|unknown_parameter|empty_\w+|\w+_(max|min)_\w+"
)
EXTENSIONS = {
    *("viva.played", "transcription_session.update", "viva.session.resumed", "viva.warning", "viva.call.started"),
    "viva.call.progress",
    "viva.call.answered_by",
    "viva.call.ended",
}


@pytest.fixture(scope="module", autouse=True)
def prompts(tmp_path_factory):
    """Stored prompts by the id and the version that samples have."""
    folder = tmp_path_factory.mktemp("prompts")
    for name in ("text.md", "text@text.md"):
        (folder / name).write_text(f"The instructions in {name}.", encoding="utf8")
    Stored.folder = PromptFolder(folder)


class Stored:
    folder: PromptFolder


def configuration(change: dict | None = None) -> Configuration:
    params = None if change is None else msgspec.convert(change, SessionParams)
    return Configuration(ScriptedHost(), "scripted-1", "realtime", params, Stored.folder)


def taken(event: dict, before: dict | None = None) -> SessionObject | None:
    """Decode an event and apply its parameters; the session after it."""
    decoded = decode_client_event(json.dumps(event))
    if isinstance(decoded, SessionUpdate):
        return configuration(before).changed(decoded.session)
    if isinstance(decoded, ResponseCreate) and isinstance(decoded.response, ResponseParams):
        return configuration(before).changed(decoded.response, "response")
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


OTHERWISE = {  # a session none of whose parameters has its default: what sets a default has an effect on it
    "instructions": "Be kind.",
    "output_modalities": ["text"],
    "tools": [{"type": "function", "name": "look"}],
    "tool_choice": {"type": "function", "name": "look"},
    "parallel_tool_calls": False,
    "max_output_tokens": 9,
    "reasoning": {"effort": "xhigh"},
    "truncation": "disabled",
    "tracing": {"group_id": "other", "workflow_name": "other", "metadata": {"other": 1}},
    "prompt": {"id": "text", "version": "text"},
    "include": ["item.input_audio_transcription.logprobs"],
    "audio": {
        "input": {
            "format": {"type": "audio/pcmu"},
            "transcription": {"language": "fr", "prompt": "Other.", "keywords": ["other"], "delay": "xhigh"},
            "turn_detection": {
                "type": "server_vad",
                "threshold": 0.7,
                "prefix_padding_ms": 100,
                "silence_duration_ms": 900,
                "idle_timeout_ms": 5000,
                "create_response": False,
                "interrupt_response": False,
            },
        },
        "output": {"format": {"type": "audio/pcma"}, "voice": "ben", "speed": 0.75},
    },
}
EFFECTLESS = {  # accepted although nothing changes, and why that is what the client asked for
    r"^event_id": "it is repeated in errors",
    r"^(session|response)(<\w+>|:NoneType)$": "an object without fields changes nothing",
    r"\.turn_detection<ServerVad>$": "the name of the detector in force, whose parameters stay",
    r"\.(audio|input|output|reasoning|tracing)<\w+>$": "an object without fields changes nothing",
    r"\.(audio|input|output|turn_detection|tools|voice|speed|format)(<\w+>)?(\.\w+)*:NoneType$": (
        "null leaves a parameter of an object as it is"
    ),
    r"^session<\w+>\.model[:=]": "a session keeps the model that it was opened with; stock clients repeat its name",
    r"transcription<AudioTranscription>\.model[:=](?!.*diarize)": "the recogniser that is served transcribes",
    r"^response<\w+>\.(conversation|input|metadata)": "not a parameter of the session; tested by itself",
}


def effect(session: SessionObject) -> object:
    """All that the server does otherwise because of the session's parameters."""
    made = configuration()
    made.session = session
    tracing, transcription = getattr(session, "tracing", None), session.audio.input.transcription
    is_diarized = transcription is not None and str(transcription.model).endswith(DIARIZE)
    return made.settings(), made.input_format, made.output_format, type(session), tracing, session.viva, is_diarized


@pytest.mark.parametrize("kind", ["session.update", "response.create"])
def test_no_parameter_is_swallowed(kind):
    """Each one of the types is refused, or changes what the server does, or has a reason why there is nothing to do."""
    swallowed, honoured = [], 0
    for sample in accepted(CLIENT_EVENTS[kind]):
        if not is_accepted(sample.value) or sample.path == "":
            continue
        sessions = [(configuration(before).session, taken(sample.value, before)) for before in (None, OTHERWISE)]
        if any(changed is not None and effect(changed) != effect(present) for present, changed in sessions):
            honoured += 1
        else:
            swallowed.append(sample.path)
    assert honoured > 50
    assert not unexplained(swallowed, EFFECTLESS)


def test_every_reason_for_no_effect_is_needed():
    paths = [sample.path for kind in ("session.update", "response.create") for sample in accepted(CLIENT_EVENTS[kind])]
    assert all(any(re.search(place, path) for path in paths) for place in EFFECTLESS)


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
    mcp = {kind for kind in SENT if "mcp_" in kind}  # which test_mcp.py checks
    assert {event["type"] for event in events} == SENT.keys() - EXTENSIONS - mcp
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
