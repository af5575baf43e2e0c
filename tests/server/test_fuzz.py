"""Whatever a client sends, and whenever it leaves: an error event or a clean close, and the others never notice."""

import asyncio
import base64
import contextlib
import json
import re

import websockets
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

from tests.server.harness import DEADLINE, Client, RunningServer, connected, eventually
from tests.server.openai_types import SERVER_EVENTS
from tests.server.scripted import ScriptedHost
from tests.server.test_live_conversation import LiveHost
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.client_events import CLIENT_EVENTS

MAX_BYTES = 200_000

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    *("session", "audio", "item", "item_id", "previous_item_id", "content_index", "audio_end_ms", "response"),
    *("response_id", "event_id", "audio_ms"),
]
NAMES = [
    *("type", "role", "content", "text", "transcript", "id", "call_id", "output", "input", "format", "rate", "voice"),
    *("turn_detection", "tools", "tool_choice", "instructions", "output_modalities", "conversation", "metadata"),
    *("viva", "binary", "speed", "threshold", "modalities", "input_audio_format", "max_output_tokens", "tracing"),
    *("transcription", "prompt", "include", "truncation", "parameters", "name"),
]
WORDS = [
    *("realtime", "transcription", "message", "function_call", "function_call_output", "item_reference", "user"),
    *("assistant", "system", "input_text", "input_audio", "output_audio", "audio/pcm", "audio/pcmu", "server_vad"),
    *("semantic_vad", "none", "auto", "text", "audio", "raw", "opus", "inf", "root", "AAAA", "AAA", "\ud800"),
]
names, words = st.sampled_from(NAMES), st.sampled_from(WORDS)
likely = st.recursive(
    words | json_values | st.integers(-5, 100_000),
    lambda inner: st.dictionaries(names, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=12,
)
events = st.builds(
    lambda kind, fields: {"type": kind, **fields},
    st.sampled_from(sorted(CLIENT_EVENTS)),
    st.dictionaries(st.sampled_from(FIELDS), likely, max_size=4),
)
sound = st.binary(max_size=3000).map(lambda data: base64.b64encode(data).decode())
appends = (sound | sound.map(lambda text: text[:-1])).map(
    lambda audio: json.dumps({"type": "input_audio_buffer.append", "audio": audio})
)
rates = st.integers(-1, 100_000).map(
    lambda rate: json.dumps(
        {"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/pcm", "rate": rate}}}}}
    )
)
messages = st.one_of(
    events.map(json.dumps),
    appends,
    rates,
    json_values.map(json.dumps),
    st.text(max_size=50),
    st.binary(max_size=2000),
    st.just("[" * 5000),
    st.just(json.dumps({"type": "input_audio_buffer.append", "audio": "A" * (MAX_BYTES + 4)})),
)


def in_a_server(test, host=ScriptedHost, answer_begins="You said: am I alone?"):
    """Run a test against a server, beside a client that must not notice."""

    async def one(server, given_value) -> None:
        async with connected(server) as bystander:
            await bystander.until("session.created")
            await test(server, given_value)
            answer = await bystander.say("am I alone?", output_modalities=["text"])
            assert answer["output"][0]["content"][0]["text"].startswith(answer_begins)
        await eventually(lambda: not [each for each in server.sessions if each.connections], "everybody left")

    def run(value) -> None:
        async def main() -> None:
            options = ServerOptions(max_event_bytes=MAX_BYTES, resume_seconds=0.0, opens_per_minute=1e6)
            async with RunningServer(host(), options) as server:
                await one(server, value)

        asyncio.run(main())

    return run


async def answered(client: Client) -> None:
    """The session still works."""
    await client.send("session.update", session={}, event_id="probe")
    while True:
        event = await client.next()
        if event["type"] == "session.updated":
            return


async def send_all(server: RunningServer, batch: list[str | bytes]) -> None:
    async with connected(server, close_timeout=0.2) as client:
        await client.until("session.created")
        for message in batch:
            await client.socket.send(message)
        await answered(client)
        codes = [event["error"]["code"] for event in client.events if event["type"] == "error"]
        assert "internal_error" not in codes and "session_failed" not in codes
        assert len(client.of_type("response.done")) <= len(client.of_type("response.created"))
        check_types(client.events)


def check_types(sent: list[dict]) -> None:
    """What the server sends is of the types of the `openai` package, whatever it was sent."""
    for event in sent:
        if event["type"] in SERVER_EVENTS and not OTHER_RATES.search(json.dumps(event)):
            SERVER_EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)


OTHER_RATES = re.compile(r'"rate": (8000|16000|48000)')  # an extension, which clients must ask for


fuzzed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def text_only(batch: list[str | bytes]) -> list[str | bytes]:
    """A text frame is UTF-8; half a surrogate pair cannot be sent at all."""
    return [message for message in batch if isinstance(message, bytes) or message.isascii() or _is_utf8(message)]


def _is_utf8(message: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        message.encode()
        return True
    return False


@fuzzed
@given(st.lists(messages, max_size=12).map(text_only))
@example([json.dumps({"type": "session.update", "session": {"viva": {"binary": "opus"}}}), b"\xff" * 40, b"", b"\x00"])
@example([json.dumps({"type": "session.update", "session": {"viva": {"binary": "raw"}}}), b"\xff" * 41, b"", b"\x00"])
@example(["null", "[]", "1e999", '"text"', "{", "", "NaN", "[" * 20_000])
@example([json.dumps({"type": "session.update", "session": {"tracing": "\ud800"}})])
@example(['{"type": "session.update", "session": {"tracing": 1e999}}', '{"type": "response.create", "x": NaN}'])
@example(
    ['{"type": "session.update", "session": {"tracing": %s}}' % ("[" * depth + "]" * depth) for depth in (90, 900)]
)
@example([json.dumps({"type": "response.create", "response": {"conversation": "none", "input": []}})] * 5)
def test_any_messages_in_any_order(batch):
    in_a_server(send_all)(batch)


@settings(fuzzed, max_examples=12)
@given(st.lists(messages, max_size=12).map(text_only))
@example([json.dumps({"type": "input_audio_buffer.append", "audio": "A" * 64_000})] * 3)
@example([json.dumps({"type": "conversation.item.create", "item": {"type": "function_call_output", "call_id": "x"}})])
def test_any_messages_to_the_real_conversation(batch):
    in_a_server(send_all, LiveHost)(batch)


async def garbage(server: RunningServer, data: bytes) -> None:
    """Bytes that are no WebSocket at all, before or after the handshake."""
    for shakes_hands in (False, True):
        if shakes_hands:
            async with websockets.connect(f"{server.ws}/v1/realtime", close_timeout=0.2) as socket:
                socket.transport.write(data)
                socket.transport.write_eof()
                with contextlib.suppress(ConnectionClosed):
                    while True:
                        await asyncio.wait_for(socket.recv(), DEADLINE)
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), DEADLINE)
            writer.close()


@settings(max_examples=15, deadline=None)
@given(st.binary(min_size=1, max_size=500))
@example(b"\x81\xff\xff\xff\xff\xff\xff\xff\xff\xff" + b"\x00" * 20)
@example(b"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n\r\n")
def test_bytes_that_are_no_websocket(data):
    in_a_server(garbage)(data)
