"""WebRTC calls whose peers are in a door process."""

import os
import signal

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from aiortc import RTCSessionDescription

from tests.server.harness import RunningServer, connected, eventually
from tests.server.scripted import ScriptedHost, pitch, tone, watermark
from tests.server.test_webrtc import RATE, Peer, candidates
from vivavoce.server.config import ServerOptions

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    async with RunningServer(ScriptedHost(), ServerOptions(doors=1, opens_per_minute=1e6)) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def peer():
    peer = Peer()
    yield peer
    await peer.close()


async def test_an_audio_turn(server, client, peer):
    response = await client.realtime.calls.create(sdp=await peer.offer())
    await peer.accept(response.text)
    assert (await peer.next())["type"] == "session.created"
    peer.microphone.waiting = tone(500, 0.6, RATE)
    await peer.until("output_audio_buffer.started")
    await peer.until("response.done")
    await peer.until("output_audio_buffer.stopped")
    answer = peer.of_type("response.done")[0]["response"]["output"][0]["content"][0]["transcript"]
    await eventually(lambda: peer.loud_seconds() >= 0.3, "the reply is heard")
    sound = np.concatenate([piece for piece in peer.heard if np.abs(piece).max() > 0.05])
    assert abs(pitch(sound, RATE) - watermark(answer)) < 30
    call_id = response.response.headers["location"].rpartition("/")[2]
    async with connected(server, f"?call_id={call_id}") as sideband:
        await sideband.next()
        said = await peer.say("hello", output_modalities=["text"])
        assert (await sideband.until("response.done"))["response"]["id"] == said["id"]
    await client.realtime.calls.hangup(call_id)
    await eventually(lambda: not server.sessions and not server.host.alive, "the session is over")
    assert not server.doors.links[0].calls
    await eventually(lambda: peer.connection.connectionState == "closed", "the peer is closed")


async def test_a_call_is_negotiated_again(server, client, peer):
    call = await client.realtime.calls.create(sdp=await peer.offer())
    await peer.accept(call.text)
    assert candidates(call.text) == {"127.0.0.1"}
    peer.connection.getTransceivers()[0].direction = "recvonly"
    async with httpx.AsyncClient(headers={"Content-Type": "application/sdp"}) as http:
        address = f"{server.http}{call.response.headers['location']}"
        answer = await http.post(address, content=await peer.offer())
        assert answer.status_code == 200 and "a=sendonly" in answer.text
        await peer.connection.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
    assert (await peer.say("again"))["status"] == "completed"


async def test_what_was_not_played_is_dropped(client, peer):
    response = await client.realtime.calls.create(sdp=await peer.offer())
    await peer.accept(response.text)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a long one"}]}
    await peer.send("conversation.item.create", item=item)
    await peer.send("response.create")
    await peer.until("output_audio_buffer.started")
    await eventually(lambda: peer.loud_seconds() > 0.2, "the reply is heard")
    await peer.send("output_audio_buffer.clear")
    await peer.until("output_audio_buffer.cleared")
    truncated = await peer.until("conversation.item.truncated")
    assert 100 < truncated["audio_end_ms"] < 10_000


@pytest.mark.parametrize("offer", ["", "nonsense", "v=0\r\nm=audio 9 RTP/AVP 0\r\n"])
async def test_a_bad_offer_is_refused_and_leaves_nothing(server, offer):
    open_before = len(server.sessions)
    async with httpx.AsyncClient() as http:
        headers = {"Content-Type": "application/sdp"}
        answer = await http.post(f"{server.http}/v1/realtime/calls", content=offer, headers=headers, timeout=20)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_sdp"
    await eventually(lambda: len(server.sessions) <= open_before, "nothing is left")


async def test_a_caller_that_vanishes_and_a_door_that_is_killed_end_the_call(server, client, peer):
    response = await client.realtime.calls.create(sdp=await peer.offer())
    await peer.accept(response.text)
    await peer.close()
    await eventually(lambda: not server.sessions, "the session is over")
    second = Peer()
    response = await client.realtime.calls.create(sdp=await second.offer())
    await second.accept(response.text)
    os.kill(server.doors.processes[0].pid, signal.SIGKILL)
    await eventually(lambda: not server.sessions and not server.host.alive, "the session is over")
    await second.close()
