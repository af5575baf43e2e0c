"""Sound in binary messages, agreed upon by subprotocol or by session.update."""

import numpy as np
import pytest

from tests.server.harness import connected
from tests.server.scripted import pitch, tone, watermark
from vivavoce.server.realtime.audio_events import FRAME_HEADER
from vivavoce.server.realtime.audio_formats import OpusReader, OpusWriter, WireFormat, decode, encode

RATE = 24_000
QUESTION = np.concatenate([tone(500, 0.5, RATE), np.zeros(RATE // 2, np.float32)])


def opened(frame: bytes) -> tuple[int, int, int, bytes]:
    """Kind, milliseconds, event number and sound of a frame."""
    kind, _, _, start_ms = FRAME_HEADER.unpack(frame[: FRAME_HEADER.size])
    body = frame[FRAME_HEADER.size :]
    return kind, start_ms, int.from_bytes(body[:4], "little"), body[4:]


async def test_raw_frames_by_subprotocol(server):
    async with connected(server, subprotocols=["viva.raw", "realtime"]) as client:
        assert client.socket.subprotocol == "viva.raw"
        data = encode(QUESTION, WireFormat())
        for begin in range(0, len(data), 4800):
            await client.socket.send(data[begin : begin + 4800])
        await client.until("response.done")
        frames = [opened(frame) for frame in client.frames]
        assert {kind for kind, *_ in frames} == {1}
        assert [start for _, start, *_ in frames] == sorted({start for _, start, *_ in frames})
        numbers = [number for _, _, number, _ in frames]
        sent = [int(event["event_id"].rpartition("_")[2]) for event in client.events]
        assert sorted(numbers + sent) == list(range(1, len(numbers) + len(sent) + 1))
        sound = decode(b"".join(sound for *_, sound in frames), WireFormat())
        assert abs(pitch(sound, RATE) - watermark("You said: tone 500")) < 5
        assert not client.of_type("response.output_audio.delta")


async def test_opus_both_ways_by_session_update(server):
    async with connected(server) as client:
        await client.send("session.update", session={"viva": {"binary": "opus"}})
        assert (await client.until("session.updated"))["session"]["viva"]["binary"] == "opus"
        writer, reader = OpusWriter(RATE), OpusReader(RATE)
        for packet in writer.write(QUESTION) + writer.flush():
            await client.socket.send(packet)
        await client.until("response.done")
        answer = client.of_type("response.done")[0]["response"]["output"][0]["content"][0]["transcript"]
        sound = np.concatenate([reader.read(opened(frame)[3]) for frame in client.frames])
        assert abs(pitch(sound[2400:-2400], RATE) - watermark(answer)) < 10
        await client.send("input_audio_buffer.append", audio="AAAA")
        assert (await client.error())["code"] == "binary_negotiated"


async def test_binary_without_agreement_is_an_error_and_no_end(server):
    async with connected(server) as client:
        await client.socket.send(b"\x00" * 100)
        assert (await client.error())["code"] == "binary_not_negotiated"
        await client.send("session.update", session={"viva": {"binary": "raw"}})
        await client.until("session.updated")
        await client.socket.send(b"\x00" * 101)
        assert (await client.error())["code"] == "invalid_audio"
        await client.send("session.update", session={"viva": {"binary": None}})
        assert (await client.until("session.updated"))["session"]["viva"]["binary"] is None
        assert (await client.say("hello"))["status"] == "completed"
        assert client.of_type("response.output_audio.delta")


@pytest.mark.parametrize("offered", [["realtime", "openai-insecure-api-key.abc", "openai-agents-sdk.1"], ["realtime"]])
async def test_browsers_get_the_protocol_they_insist_on(server, offered):
    async with connected(server, subprotocols=offered) as client:
        assert client.socket.subprotocol == "realtime"
        assert (await client.next())["type"] == "session.created"
