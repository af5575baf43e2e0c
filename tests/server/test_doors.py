"""A server behind door processes: the wire is the same, and a door that dies takes no session with it."""

import asyncio
import base64
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections import deque
from pathlib import Path

import httpx
import numpy as np
import pytest
import pytest_asyncio
from websockets.exceptions import ConnectionClosed

from tests.server.harness import Client, RunningServer, connected, eventually
from tests.server.scripted import ScriptedHost, pitch, tone, watermark
from tests.server.test_audio_api import ToneListener, ToneMaker, recording
from tests.server.test_binary_frames import opened
from tests.server.test_resume import numbers, resuming, started, vanish
from vivavoce import cores
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.doors import sockets, supervisor
from vivavoce.server.realtime.audio_formats import A_LAW, OpusReader, OpusWriter, WireFormat, decode, encode

pytestmark = pytest.mark.asyncio(loop_scope="module")

RATE = 24_000
QUESTION = np.concatenate([tone(500, 0.5, RATE), np.zeros(RATE // 2, np.float32)])
KEY = "a-key-of-this-server"


class ServerBehindDoors(RunningServer):
    """Two doors, and everything that has an HTTP route."""

    def __init__(self, host: ScriptedHost, options: ServerOptions) -> None:
        super().__init__(host, options)
        self.use(build_app(host, self.options, ToneMaker(), ToneListener()))

    def door_of(self, session: str) -> int:
        """The number of the door through which a session is connected."""
        connection = next(iter(self.sessions.find(session).connections))
        return next(each.door for each in self.doors.links if connection._door in each.channels.values())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    options = ServerOptions(
        doors=2, api_keys=(KEY,), opens_per_minute=1e6, max_sessions=40, stall_seconds=2.0, max_upload_bytes=1 << 20
    )
    async with ServerBehindDoors(ScriptedHost(), options) as server:
        yield server


def at(server: ServerBehindDoors, query: str = "?model=any", **options):
    return connected(server, query, key=KEY, **options)


async def opened_at(server: ServerBehindDoors, stack, door: int) -> tuple[Client, str]:
    """A client whose connection is at this door, and its session. The kernel chooses the door of a connection."""
    while True:
        client = await stack.enter_async_context(at(server, close_timeout=0.2))
        session = (await client.until("session.created"))["session"]
        if server.door_of(session["id"]) == door:
            return client, session["id"]
        await client.socket.close()


@pytest.mark.parametrize(
    ("quota", "doors"), [("200000 100000", 0), ("800000 100000", 2), ("1600000 100000", 6), ("max 100000", 8)]
)
async def test_the_number_of_doors_follows_the_cores(monkeypatch, tmp_path, quota, doors):
    file = tmp_path / "cpu.max"
    file.write_text(f"{quota}\n")
    monkeypatch.setattr(cores, "CPU_QUOTA", file)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert ServerOptions().door_count == doors
    assert ServerOptions(doors=3).door_count == 3


async def test_a_spoken_turn_through_each_door(server, stack):
    for door in range(2):
        client, _ = await opened_at(server, stack, door)
        await client.speak(QUESTION)
        await client.until("response.done")
        sound = decode(client.sound(), WireFormat())
        assert len(sound) == round(0.4 * RATE)
        assert abs(pitch(sound, RATE) - watermark("You said: tone 500")) < 5
        assert numbers(client) == list(range(1, len(client.events) + 1))


@pytest.mark.parametrize("piece_ms", [7, 40, 950])
async def test_audio_arrives_as_it_was_sent(server, stack, piece_ms):
    client, session = await opened_at(server, stack, 0)
    await client.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
    await client.speak(QUESTION, piece_ms=piece_ms)
    await client.send("input_audio_buffer.commit", event_id="last")
    await client.until("input_audio_buffer.committed")
    heard = server.sessions.find(session).conversation.items[0].content.parts[0].samples
    assert len(heard) == pytest.approx(16_000, abs=60)  # but for the resampler's lag
    assert abs(pitch(heard[:8000], 16_000) - 500) < 5
    assert server.sessions.find(session).last_client_event == "last"


async def test_formats_change_in_order(server, stack):
    """Audio sent right behind a session.update is decoded in the new format."""
    client, session = await opened_at(server, stack, 1)
    for format in (WireFormat(A_LAW, 8_000), WireFormat()):
        audio = {"input": {"format": {"type": format.type, "rate": format.rate}, "turn_detection": None}}
        await client.send("session.update", session={"audio": audio})
        await client.speak(tone(700, 0.5, format.rate), format)
        await client.send("input_audio_buffer.commit")
        await client.until("input_audio_buffer.committed")
        heard = server.sessions.find(session).conversation.items[-1].content.parts[0].samples
        assert len(heard) == pytest.approx(8_000, abs=120)
        assert abs(pitch(heard[200:], 16_000) - 700) < 10


async def test_opus_both_ways(server, stack):
    client = await stack.enter_async_context(at(server, subprotocols=["viva.opus", "realtime"]))
    assert client.socket.subprotocol == "viva.opus"
    writer, reader = OpusWriter(RATE), OpusReader(RATE)
    for packet in writer.write(QUESTION) + writer.flush():
        await client.socket.send(packet)
    await client.until("response.done")
    frames = [opened(frame) for frame in client.frames]
    order = [number for _, _, number, _ in frames]
    assert order == sorted(set(order))
    answer = client.of_type("response.done")[0]["response"]["output"][0]["content"][0]["transcript"]
    sound = np.concatenate([reader.read(packet) for *_, packet in frames])
    assert abs(pitch(sound[2400:-2400], RATE) - watermark(answer)) < 10


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("not json", "invalid_json"),
        ('{"type": "input_audio_buffer.append", "audio": "%%%"}', "invalid_value"),
        ('{"type": "input_audio_buffer.append", "audio": "AAAA", "event_id": "odd"}', "invalid_audio"),
        ('{"type": "conversation.item.delete", "item_id": "none", "event_id": "odd"}', None),
        (b"\x00" * 10, "binary_not_negotiated"),
    ],
)
async def test_a_refused_event_is_answered(server, stack, message, code):
    client, _ = await opened_at(server, stack, 0)
    await client.socket.send(message)
    error = await client.error()
    assert code in (None, error["code"])
    assert (error.get("event_id") == "odd") == ("odd" in str(message))
    assert (await client.say("go on", output_modalities=["text"]))["status"] == "completed"


async def test_uploads_downloads_and_pages(server):
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.http, headers=headers) as http:
        name, data = recording()
        heard = await http.post("/v1/audio/transcriptions", files={"file": (name, data)}, data={"model": "x"})
        assert heard.json()["text"].split() == ["400", "800"]
        speech = {"model": "x", "voice": "ada", "input": "hello", "response_format": "pcm"}
        assert len((await http.post("/v1/audio/speech", json=speech)).content) == RATE
        events = (await http.post("/v1/audio/speech", json=speech | {"stream_format": "sse"})).text
        assert events.count("data: ") > 4
        large = {"file": (name, data + bytes(2 << 20))}
        assert (await http.post("/v1/audio/transcriptions", files=large, data={"model": "x"})).status_code == 413
        assert (await http.get("/readyz")).status_code == 200
        assert "text/html" in (await http.get("/")).headers["content-type"]
        assert (await http.get("/v1/nothing")).status_code == 404
        await eventually_async(
            lambda: http.get("/metrics"), lambda page: 'viva_door_connections{door="1"}' in page.text
        )
        http.headers.pop("Authorization")
        assert (await http.get("/v1/models")).status_code == 401


async def eventually_async(get, condition) -> None:
    async with asyncio.timeout(20):
        while not condition(await get()):
            await asyncio.sleep(0.1)


async def test_keys_and_limits_hold_at_every_door(server, stack):
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.http, headers=headers) as http:
        secret = (await http.post("/v1/realtime/client_secrets", json={})).json()["value"]
    for _ in range(8):  # each connection may be at either door
        async with connected(server, key=secret) as browser:
            await browser.until("session.created")
        with pytest.raises(Exception, match="401"):
            async with connected(server, key="not a key"):
                pass
    held = [await stack.enter_async_context(at(server)) for _ in range(40)]
    for client in held:
        await client.until("session.created")
    assert set(server.sessions._rate._buckets) == {"127.0.0.1"}  # the address of the clients, not of the doors
    async with at(server) as refused:
        assert (await refused.error())["code"] == "session_limit_reached"
        assert await refused.closed() == 1013
    for client in held:
        await client.socket.close()
    await eventually(lambda: not server.sessions, "the sessions end")


async def test_a_client_that_does_not_read_stalls_only_itself(server, stack):
    deaf, session = await opened_at(server, stack, 0)
    good, _ = await opened_at(server, stack, 0)
    deaf.socket.transport.pause_reading()
    text = "long " + "x" * 20_000
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    for index in range(400):  # each answer quotes it
        await deaf.send("conversation.item.create", item=item | {"id": f"item{index}"})
    reading = asyncio.create_task(good.say("hello"))
    assert (await reading)["status"] == "completed"
    await eventually(lambda: not server.sessions.find(session).connections, "it is dropped")
    assert server.sessions.find(session).log.stored_bytes > 1 << 20
    deaf.socket.transport.resume_reading()


async def test_a_client_that_floods_stalls_only_itself(server, stack):
    flooding, session = await opened_at(server, stack, 1)
    good, _ = await opened_at(server, stack, 1)
    second = base64.b64encode(encode(np.zeros(RATE, np.float32), WireFormat())).decode()
    append = json.dumps({"type": "input_audio_buffer.append", "audio": second})
    sent_at: deque[float] = deque(maxlen=20)

    async def flood() -> None:
        while True:
            await flooding.socket.send(append)
            sent_at.append(asyncio.get_running_loop().time())

    task = asyncio.create_task(flood())
    await eventually(lambda: server.sessions.find(session).clock.received_ms > 380_000, "it used up its burst")
    channel = next(iter(server.sessions.find(session).connections))._door
    assert (await good.say("hello"))["status"] == "completed"
    now = asyncio.get_running_loop().time
    await eventually(lambda: now() - sent_at[0] > 0.5, "the socket accepts all")  # once the kernel's buffers are full
    in_engine = sum(size for _, size in channel._received)
    assert in_engine < 1 << 20, "the door reads on"
    task.cancel()


async def test_a_door_that_is_killed_loses_no_session(server, stack):
    others = [await opened_at(server, stack, 1) for _ in range(2)]

    async def speaking() -> tuple[Client, str, str]:
        client, session = await opened_at(server, stack, 0)
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"a long {session}"}]}
        await client.send("conversation.item.create", item=item)
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        return client, session, server.sessions.find(session).resume_token

    async def resume(client: Client, session: str, token: str) -> None:
        again = await stack.enter_async_context(at(server, resuming(session, token, client.events[-1]["event_id"])))
        resumed = await again.next()
        assert (resumed["type"], resumed["lost_events"]) == ("viva.session.resumed", 0)
        for _ in range(5):
            await again.until("response.output_audio.delta")
        both = numbers(client) + numbers(again)
        assert both == list(range(1, len(both) + 1))
        sound = decode(client.sound() + again.sound(), WireFormat())
        assert abs(pitch(sound, RATE) - watermark(f"You said: a long {session}")) < 5

    lost = [each for _ in range(8) for each in await asyncio.gather(*(speaking() for _ in range(4)))]
    os.kill(server.doors.processes[0].pid, signal.SIGKILL)
    assert set(await asyncio.gather(*(client.closed() for client, _, _ in lost))) == {1006}
    for other, _ in others:
        assert (await other.say("hello"))["status"] == "completed"
    await asyncio.gather(*(resume(*each) for each in lost))
    await eventually(lambda: len(server.doors.links) == 2, "the door is started again")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_door_loads_no_torch(server, stack):
    await opened_at(server, stack, 1)
    assert "libtorch" not in Path(f"/proc/{server.doors.processes[1].pid}/maps").read_text()


async def test_a_session_is_resumed_at_another_door(server, stack):
    client, session = await opened_at(server, stack, 0)
    _, token = session, server.sessions.find(session).resume_token
    vanish(client)
    last = client.events[-1]["event_id"]
    while True:
        await eventually(lambda: not server.sessions.find(session).connections, "the server noticed")
        again = await stack.enter_async_context(at(server, resuming(session, token, last)))
        assert (await again.next())["lost_events"] == 0
        if server.door_of(session) == 1:
            break
        vanish(again)
    assert (await again.say("hello", output_modalities=["text"]))["status"] == "completed"
    assert numbers(client) + numbers(again) == list(range(1, len(client.events) + len(again.events)))


async def test_a_door_that_is_stuck_is_replaced(monkeypatch, stack):
    monkeypatch.setattr(supervisor, "WATCH_SECONDS", 0.2)
    options = ServerOptions(doors=1, stall_seconds=600)
    async with ServerBehindDoors(ScriptedHost(), options) as server:
        client = await stack.enter_async_context(connected(server))
        session, token = await started(client, "a long one")
        stuck = server.doors.processes[0]
        stuck.send_signal(signal.SIGSTOP)
        assert await client.closed() == 1006
        await eventually(lambda: server.doors.processes.get(0) not in (None, stuck), "it is started again")
        await eventually(lambda: len(server.doors.links) == 1, "it listens")
        async with connected(server, resuming(session, token, client.events[-1]["event_id"])) as again:
            await again.until("response.output_audio.delta")
            assert numbers(client) + numbers(again) == list(range(1, len(client.events) + len(again.events)))


ENGINE = """
import asyncio
from tests.server.harness import RunningServer
from tests.server.scripted import ScriptedHost
from vivavoce.server.config import ServerOptions

async def main():
    async with RunningServer(ScriptedHost(), ServerOptions(doors=2)) as server:
        print(*(process.pid for process in server.doors.processes.values()), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_doors_end_with_their_engine():
    root = Path(__file__).parents[2]
    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", ENGINE, stdout=PIPE, cwd=root)
    doors = [Path("/proc") / pid for pid in (await engine.stdout.readline()).decode().split()]
    assert len(doors) == 2 and all(door.exists() for door in doors)
    engine.kill()
    await engine.wait()
    await eventually(lambda: not any(door.exists() for door in doors), "the doors end")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every test does it")
async def test_doors_that_share_a_listening_socket(monkeypatch):
    monkeypatch.setattr(supervisor, "IS_BALANCED", False)
    monkeypatch.setattr(sockets, "IS_BALANCED", False)
    async with ServerBehindDoors(ScriptedHost(), ServerOptions(doors=2)) as server, connected(server) as client:
        assert (await client.say("hello"))["status"] == "completed"


async def test_clients_get_close_code_1012_when_the_server_stops():
    options = ServerOptions(doors=1)
    async with ServerBehindDoors(ScriptedHost(), options) as server, connected(server) as client:
        await started(client, "a long one")
        server._server.should_exit = True
        assert await client.closed() == 1012
        processes = list(server.doors.processes.values())
    assert not server.sessions and [process.returncode for process in processes] == [0]
    with pytest.raises((OSError, ConnectionClosed)):
        async with connected(server):
            pass
