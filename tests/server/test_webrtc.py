"""Calls: aiortc as the peer, the `openai` package for the offer."""

import asyncio
import json
from fractions import Fraction

import av
import httpx
import numpy as np
import openai
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamTrack

from tests.server.harness import DEADLINE, Client, RunningServer, connected, eventually
from tests.server.scripted import ScriptedHost, pitch, tone, watermark
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.audio_formats import to_mono

RATE = 48_000


class Microphone(MediaStreamTrack):
    """Says what it is given, in its time, and silence otherwise."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self.waiting = np.zeros(0, np.float32)
        self._sent = 0
        self._began: float | None = None

    async def recv(self):
        loop = asyncio.get_running_loop()
        self._began = self._began or loop.time()
        await asyncio.sleep(max(self._began + self._sent * 0.02 - loop.time(), 0))
        samples, self.waiting = self.waiting[:960], self.waiting[960:]
        pcm = np.round(np.pad(samples, (0, 960 - len(samples))) * 32767).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), self._sent * 960
        self._sent += 1
        return frame


class Peer(Client):
    """A caller: the events of its data channel, and the sound it hears."""

    def __init__(self) -> None:
        super().__init__(None)
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.microphone = Microphone()
        self.connection.addTrack(self.microphone)
        self.channel = self.connection.createDataChannel("oai-events")
        self.heard: list[np.ndarray] = []
        self._messages: asyncio.Queue[str] = asyncio.Queue()
        self.channel.on("message", self._messages.put_nowait)
        self.connection.on("track", lambda track: self._tasks.append(asyncio.ensure_future(self._listen(track))))
        self._tasks: list[asyncio.Future] = []

    async def offer(self) -> str:
        await self.connection.setLocalDescription(await self.connection.createOffer())
        return self.connection.localDescription.sdp

    async def accept(self, answer: str) -> None:
        await self.connection.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        await eventually(lambda: self.channel.readyState == "open", "the data channel opens")

    async def send(self, type: str, **fields) -> None:
        self.channel.send(json.dumps({"type": type, **fields}))

    async def next(self) -> dict:
        self.events.append(json.loads(await asyncio.wait_for(self._messages.get(), DEADLINE)))
        return self.events[-1]

    async def _listen(self, track) -> None:
        while True:
            self.heard.append(to_mono(await track.recv()))

    def loud_seconds(self) -> float:
        return sum(np.abs(piece).max() > 0.05 for piece in self.heard) * 0.02

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.connection.close()


@pytest.fixture
async def peer():
    peer = Peer()
    yield peer
    await peer.close()


@pytest.fixture
async def client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="unused") as client:
        yield client


async def test_an_audio_turn_over_a_call(client, peer):
    response = await client.realtime.calls.create(sdp=await peer.offer())
    assert response.response.status_code == 201
    assert response.response.headers["location"].startswith("/v1/realtime/calls/rtc_")
    await peer.accept(response.text)
    assert (await peer.next())["type"] == "session.created"
    peer.microphone.waiting = tone(500, 0.6, RATE)
    await peer.until("output_audio_buffer.started")
    await peer.until("response.done")
    await peer.until("output_audio_buffer.stopped")
    assert not peer.of_type("response.output_audio.delta")
    answer = peer.of_type("response.done")[0]["response"]["output"][0]["content"][0]["transcript"]
    await eventually(lambda: peer.loud_seconds() >= 0.3, "the reply is heard")
    sound = np.concatenate([piece for piece in peer.heard if np.abs(piece).max() > 0.05])
    assert abs(pitch(sound, RATE) - watermark(answer)) < 30


async def test_a_session_comes_with_the_offer_and_a_sideband_looks_on(server, client, peer):
    session = {"type": "realtime", "instructions": "Whisper.", "output_modalities": ["text"]}
    response = await client.realtime.calls.create(sdp=await peer.offer(), session=session)
    await peer.accept(response.text)
    created = await peer.until("session.created")
    assert created["session"]["instructions"] == "Whisper."
    call_id = response.response.headers["location"].rpartition("/")[2]
    async with connected(server, f"?call_id={call_id}") as sideband:
        assert (await sideband.next())["session"]["id"] == created["session"]["id"]
        await sideband.send("session.update", session={"instructions": "Shout."})
        assert (await peer.until("session.updated"))["session"]["instructions"] == "Shout."
        said = await peer.say("hello")
        assert (await sideband.until("response.done"))["response"]["id"] == said["id"]
    assert len(server.sessions) == 1  # the call goes on without its sideband
    assert (await peer.say("again"))["status"] == "completed"


async def test_interruption_on_a_call_truncates_by_itself(client, peer):
    response = await client.realtime.calls.create(sdp=await peer.offer())
    await peer.accept(response.text)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a long one"}]}
    await peer.send("conversation.item.create", item=item)
    await peer.send("response.create")
    await peer.until("output_audio_buffer.started")
    await eventually(lambda: peer.loud_seconds() > 0.2, "the reply is heard")
    await peer.send("response.cancel")
    await peer.send("output_audio_buffer.clear")
    await peer.until("output_audio_buffer.cleared")
    truncated = await peer.until("conversation.item.truncated", "response.done")
    if truncated["type"] == "response.done":
        truncated = await peer.until("conversation.item.truncated")
    assert 100 < truncated["audio_end_ms"] < 10_000
    assert not peer.of_type("output_audio_buffer.stopped")


async def test_a_tool_over_a_call_and_the_words_of_an_interrupted_reply(client, peer):
    tool = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}
    response = await client.realtime.calls.create(sdp=await peer.offer(), session={"type": "realtime", "tools": [tool]})
    await peer.accept(response.text)
    call = (await peer.say("the weather, please"))["output"][0]
    assert (call["name"], call["arguments"]) == ("weather", '{"place": "here"}')
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a long rain" + " and rain" * 100}
    await peer.send("conversation.item.create", item=output)
    await peer.send("response.create")
    await eventually(lambda: peer.loud_seconds() > 0.4, "some words of the reply are heard")
    peer.microphone.waiting = tone(700, 0.3, RATE)
    done = await peer.until("response.done")
    assert done["response"]["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
    assert done["response"]["output"][0]["content"][0]["transcript"].startswith("You said: a long")


def candidates(sdp: str) -> set[str]:
    """The addresses of the candidates of a description."""
    return {line.split()[4] for line in sdp.splitlines() if line.startswith("a=candidate:")}


async def test_candidates_are_at_the_address_that_is_bound(running, official, peer):
    server = await running()
    answer = await official(f"{server.http}/v1", "unused").realtime.calls.create(sdp=await peer.offer())
    assert candidates(answer.text) == {"127.0.0.1"}
    await peer.accept(answer.text)
    key, other = "sk-test-1234567890", Peer()
    async with RunningServer(ScriptedHost(), ServerOptions(host="0.0.0.0", api_keys=(key,))) as everywhere:
        client = official(f"{everywhere.http}/v1", key)
        answer = await client.realtime.calls.create(sdp=await other.offer())
        of_machine = {each for each in candidates(await other.offer()) if ":" not in each}
        assert candidates(answer.text) == {"127.0.0.1"} | of_machine
    await other.close()


async def test_a_call_is_negotiated_again_and_goes_on(server, client, peer):
    call = await client.realtime.calls.create(sdp=await peer.offer())
    await peer.accept(call.text)
    assert (await peer.say("one"))["status"] == "completed"
    peer.connection.getTransceivers()[0].direction = "recvonly"  # its microphone is switched off
    address = f"{server.http}{call.response.headers['location']}"
    headers = {"Content-Type": "application/sdp"}
    async with httpx.AsyncClient(headers=headers) as http:
        answer = await http.post(address, content=await peer.offer())
        assert answer.status_code == 200 and "a=sendonly" in answer.text
        await peer.connection.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        heard = peer.loud_seconds()
        assert (await peer.say("two"))["status"] == "completed"
        await eventually(lambda: peer.loud_seconds() > heard, "the next reply is heard")
        stranger = Peer()  # other ICE credentials: it would be a restart
        refused = await http.post(address, content=await stranger.offer())
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_sdp"
        await stranger.close()
        gone = await http.post(f"{server.http}/v1/realtime/calls/rtc_unknown", content=answer.text)
        assert gone.status_code == 404
    assert (await peer.say("three"))["status"] == "completed"


async def test_hanging_up_ends_the_session(server, client, peer):
    response = await client.realtime.calls.create(sdp=await peer.offer())
    await peer.accept(response.text)
    call_id = response.response.headers["location"].rpartition("/")[2]
    await client.realtime.calls.hangup(call_id)
    await eventually(lambda: not server.sessions and not server.host.alive, "the session is over")
    with pytest.raises(openai.NotFoundError):
        await client.realtime.calls.hangup(call_id)


async def test_a_browser_key_hangs_up_its_own_calls_only(running, official, peer):
    server = await running(api_keys=("sk-test-1234567890",))
    url = f"{server.http}/v1"
    owner = official(url, "sk-test-1234567890")
    own, other = [official(url, (await owner.realtime.client_secrets.create()).value) for _ in range(2)]
    call = await own.realtime.calls.create(sdp=await peer.offer())
    call_id = call.response.headers["location"].rpartition("/")[2]
    with pytest.raises(openai.NotFoundError):
        await other.realtime.calls.hangup(call_id)
    assert len(server.sessions) == 1
    await own.realtime.calls.hangup(call_id)
    await eventually(lambda: not server.sessions, "the session is over")


async def test_a_caller_that_vanishes_ends_the_session(server, client, peer):
    response = await client.realtime.calls.create(sdp=await peer.offer())
    await peer.accept(response.text)
    assert len(server.sessions) == 1
    await peer.close()
    await eventually(lambda: not server.sessions, "the session is over")


@pytest.mark.parametrize("offer", ["", "nonsense", "v=0\r\n", "v=0\r\no=- 0 0 IN IP4 0.0.0.0\r\ns=-\r\nt=0 0\r\n"])
async def test_a_bad_offer_is_refused_and_leaves_nothing(server, offer):
    async with httpx.AsyncClient() as http:
        headers = {"Content-Type": "application/sdp"}
        answer = await http.post(f"{server.http}/v1/realtime/calls", content=offer, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_sdp"
    await eventually(lambda: not server.sessions and not server.host.alive, "nothing is left")


async def test_a_page_elsewhere_may_call_and_read_where(running):
    server = await running(allowed_origins=("https://shop.example",))
    headers = {"Origin": "https://shop.example", "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization,content-type,x-openai-agents-sdk"
    async with httpx.AsyncClient() as http:
        preflight = await http.options(f"{server.http}/v1/realtime/calls", headers=headers)
        assert preflight.headers["access-control-allow-origin"] == "https://shop.example"
        assert "x-openai-agents-sdk" in preflight.headers["access-control-allow-headers"]
        listed = await http.get(f"{server.http}/v1/models", headers={"Origin": "https://shop.example"})
        assert "Location" in listed.headers["access-control-expose-headers"]
        refused = await http.get(f"{server.http}/v1/models", headers={"Origin": "https://evil.example"})
        assert refused.status_code == 403
