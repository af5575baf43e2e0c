"""Greetings, webhooks and recordings, with the unmodified `openai` package as client and as receiver."""

import asyncio
import base64
import contextlib
import json
import stat
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import openai
import pytest
import soundfile

from tests.dialogue.voices import talk
from tests.server.harness import DEADLINE, connected, eventually
from tests.server.scripted import pitch, watermark
from tests.server.test_live_conversation import RATE, LiveHost, Voice, speaking
from tests.server.test_openai_python import says, until
from vivavoce.dialogue.items import Item, Message, TextPart
from vivavoce.errors import InputError
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.audio_formats import WireFormat, decode
from vivavoce.server.recording import SessionRecording

SECRET = "whsec_" + base64.b64encode(b"a secret of both servers").decode()


class GreetingHost(LiveHost):
    """A cascade whose voice speaks given words too."""

    def announce(self, text, voice, speed):
        return Voice().speak(text, voice, speed)


async def test_a_session_is_greeted_in_given_words(running, official):
    server = await running(host=GreetingHost(), greeting="Good evening, this call is recorded.")
    async with official(f"{server.http}/v1", "unused").realtime.connect(model="any") as connection:
        seen = []
        done = (await until(connection, "response.done", seen)).response
        assert done.status == "completed"
        assert done.output[0].content[0].transcript == "Good evening, this call is recorded."
        deltas = [base64.b64decode(each.delta) for each in seen if each.type == "response.output_audio.delta"]
        sound = decode(b"".join(deltas), WireFormat())
        assert len(sound) / RATE == pytest.approx(1.2, abs=0.01)  # six words
        assert abs(pitch(sound[: RATE // 5], RATE) - watermark("Good")) < 15
        await connection.conversation.item.create(item=says("hello"))  # and it is part of the history
        await connection.response.create()
        await until(connection, "response.done")
        first = server.host.opened[0].items[0]
        assert first.content.role == "assistant" and first.id == done.output[0].id


async def test_the_model_greets_by_itself(running, official):
    server = await running(greeting_instructions="Welcome the guest.")  # scripted: it answers to nothing
    async with official(f"{server.http}/v1", "unused").realtime.connect(model="any") as connection:
        done = (await until(connection, "response.done")).response
        assert done.output[0].content[0].transcript == "You said: nothing"


async def test_a_client_that_begins_by_itself_is_not_greeted(running, official):
    server = await running(host=GreetingHost(), greeting="Good evening.")
    async with official(f"{server.http}/v1", "unused").realtime.connect(model="any") as connection:
        await connection.conversation.item.create(item=says("hello"))
        await connection.response.create()
        first = (await until(connection, "response.done")).response
        assert first.output[0].content[0].transcript.strip() == "You said: hello."


@pytest.mark.parametrize("may_be_interrupted", [True, False])
async def test_a_greeting_may_be_interrupted_or_not(running, may_be_interrupted):
    words = "a long greeting"  # of 3.6 seconds
    server = await running(host=GreetingHost(), greeting=words, greeting_may_be_interrupted=may_be_interrupted)
    async with connected(server) as client, speaking(client) as microphone:
        await client.until("response.output_audio.delta")
        await asyncio.sleep(0.6)
        microphone.say(talk(1.2, seed=5, level_dbfs=-18))
        done = (await client.until("response.done"))["response"]
        expected = "cancelled" if may_be_interrupted else "completed"
        assert done["status"] == expected
        if not may_be_interrupted:  # what was said over it is answered afterwards
            answer = (await client.until("response.done"))["response"]
            assert answer["output"][0]["content"][0]["transcript"].strip() == "You said: something spoken."


def test_greetings_that_cannot_be_given_are_refused_at_the_start():
    with pytest.raises(InputError, match="--greeting-instructions"):
        build_app(LiveHost(), ServerOptions(greeting="hello"))
    with pytest.raises(InputError, match="not both"):
        ServerOptions(greeting="a", greeting_instructions="b").check()
    with pytest.raises(InputError, match="--webhook-secret"):
        ServerOptions(webhook_url="http://127.0.0.1").check()


class Receiver(ThreadingHTTPServer):
    """Receives webhooks; the first request is refused, so that it must come again."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ReceiverHandler)
        self.received: list[tuple[bytes, dict[str, str]]] = []
        self.refused = 0


class ReceiverHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_first = self.server.refused == 0
        self.server.refused += is_first
        if not is_first:
            self.server.received.append((body, dict(self.headers)))
        self.send_response(503 if is_first else 204)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        """Quiet."""


@pytest.fixture
def receiver():
    with Receiver() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_webhooks_are_signed_and_tried_again(running, official, receiver, monkeypatch):
    monkeypatch.setattr("vivavoce.server.webhooks.RETRY_SECONDS", (0.05, 0.05))
    url = f"http://127.0.0.1:{receiver.server_port}/hooks?of=viva"
    server = await running(webhook_url=url, webhook_secret=SECRET)
    client = official(f"{server.http}/v1", "unused")
    async with client.realtime.connect(model="any") as connection:
        session = (await connection.recv()).session
    await eventually(lambda: len(receiver.received) == 2, "both events come")
    for body, headers in receiver.received:
        client.webhooks.verify_signature(body, headers, secret=SECRET)
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.verify_signature(body + b" ", headers, secret=SECRET)
    started, ended = (json.loads(body) for body, _ in receiver.received)
    assert (started["type"], ended["type"]) == ("session.started", "session.ended")
    assert started["data"] == {"id": started["data"]["id"], "model": "scripted-1", "transport": "websocket"}
    assert ended["data"]["id"] == started["data"]["id"] == session.to_dict()["id"]
    assert ended["data"]["duration_seconds"] >= 0 and ended["data"]["close_code"] == 1000


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_both_sides_are_aligned_in_a_recording(tmp_path):
    clock = HandClock()
    recording = SessionRecording(tmp_path / "calls", "sess_1", (16_000, 24_000), clock)
    loud = np.full(1600, 0.5, np.float32)
    for _ in range(10):  # the user speaks in pieces of 100 ms that come a little late, each by another time
        clock.now += 0.1
        clock.now, jitter = clock.now + 0.03, 0.03
        recording.heard(loud)
        clock.now -= jitter
    clock.now += 0.5
    recording.said(np.full(24_000, 0.25, np.float32))  # a second, sent at 1.5 s
    clock.now += 0.4
    recording.cut()  # interrupted at 1.9 s
    clock.now += 0.6
    recording.finish([Item("item_1", Message("user", (TextPart("hello"),)))])
    sound, rate = soundfile.read(recording.file)
    assert rate == 24_000 and len(sound) / rate == pytest.approx(2.5, abs=0.001)
    user, reply = (np.flatnonzero(np.abs(sound[:, side]) > 0.1) / rate for side in (0, 1))
    assert user[0] == pytest.approx(0.0, abs=0.04) and user[-1] == pytest.approx(1.0, abs=0.04)
    assert reply[0] == pytest.approx(1.5, abs=0.02) and reply[-1] == pytest.approx(1.9, abs=0.02)
    assert json.loads((tmp_path / "calls" / "sess_1.json").read_text())[0]["text"] == "hello"
    assert stat.S_IMODE(recording.file.stat().st_mode) == 0o600


async def test_a_session_is_recorded_when_switched_on(running, official, tmp_path):
    server = await running(record=str(tmp_path))
    client = official(f"{server.http}/v1", "unused")
    assert (await client.get(f"{server.http}/about", cast_to=object))["is_recorded"]
    async with client.realtime.connect(model="any") as connection:
        id = (await connection.recv()).session.to_dict()["id"]
        await connection.conversation.item.create(item=says("hello"))
        await connection.response.create()
        await until(connection, "response.done")
        async with asyncio.timeout(DEADLINE):
            while not next(iter(server.sessions)).encoder.main.is_idle:
                await asyncio.sleep(0.02)
    await eventually(lambda: not server.sessions, "the session is over")
    sound, rate = soundfile.read(tmp_path / f"{id}.wav")
    reply = np.flatnonzero(np.abs(sound[:, 1]) > 0.1) / rate
    assert reply[-1] - reply[0] == pytest.approx(0.4, abs=0.02)
    assert not np.any(sound[:, 0])
    words = json.loads((tmp_path / f"{id}.json").read_text())
    assert [(line["role"], line["text"]) for line in words] == [("user", "hello"), ("assistant", "You said: hello")]


async def test_nothing_is_recorded_by_default(running, official, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = await running()
    client = official(f"{server.http}/v1", "unused")
    assert not (await client.get(f"{server.http}/about", cast_to=object))["is_recorded"]
    async with client.realtime.connect(model="any") as connection:
        await connection.recv()
        with contextlib.suppress(StopIteration):
            assert next(iter(server.sessions)).encoder.recording is None
    assert list(tmp_path.iterdir()) == []
