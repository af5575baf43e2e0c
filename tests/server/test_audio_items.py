"""Spoken items that a client adds: recognised at the rate of the wire, also where a session was restored elsewhere."""

import base64
import json

import pytest

from tests.server.harness import connected
from tests.server.scripted import pitch, tone
from tests.server.test_live_conversation import Chat, LiveHost, Voice
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.session import LiveConversation
from vivavoce.server.cluster.session_mirror import SessionMirror
from vivavoce.server.realtime.audio_formats import WireFormat, encode

PCM = {"type": "audio/pcm", "rate": 24_000}
HEARD = "300 Hz for 2.0 s"


class PitchRecogniser:
    """Writes down the pitch and the length of what was said."""

    async def transcribe(self, samples, rate, language=None):
        return f"{round(pitch(samples, rate), -1):.0f} Hz for {len(samples) / rate:.1f} s"


class PitchHost(LiveHost):
    def open(self, settings, model):
        return LiveConversation(CascadeBackend(WholeTurns(PitchRecogniser()), Chat(), Voice()), settings)


@pytest.fixture
async def host(running):
    return await running(host=PitchHost())


def spoken(format: WireFormat) -> dict:
    data = encode(tone(300, 2.0, format.rate), format)
    part = {"type": "input_audio", "audio": base64.b64encode(data).decode()}
    return {"id": "spoken", "type": "message", "role": "user", "content": [part]}


def input_format(format: dict) -> dict:
    return {"type": "realtime", "output_modalities": ["text"], "audio": {"input": {"format": format}}}


async def reply_text(client) -> str:
    await client.send("response.create")
    response = (await client.until("response.done"))["response"]
    assert response["status"] == "completed", response
    return response["output"][0]["content"][0]["text"].strip()


@pytest.mark.parametrize(
    ("wire", "format"),
    [
        (PCM, WireFormat()),
        ({"type": "audio/pcm", "rate": 48_000}, WireFormat("audio/pcm", 48_000)),
        ({"type": "audio/pcmu"}, WireFormat("audio/pcmu", 8_000)),
    ],
)
async def test_an_item_of_a_client_is_recognised_at_the_rate_of_its_format(host, wire, format):
    async with connected(host) as client:
        await client.send("session.update", session=input_format(wire))
        await client.send("conversation.item.create", item=spoken(format))
        assert await reply_text(client) == f"You said: {HEARD}."


@pytest.mark.parametrize("later", [None, {"type": "audio/pcmu"}])
async def test_a_restored_session_hears_its_spoken_items_as_they_were(host, later):
    """Also where the client changed its format after the item was added."""
    mirror = SessionMirror(kept_sound_seconds=60)
    async with connected(host) as client:

        async def send(message: str) -> None:
            mirror.client_sent(message)
            await client.socket.send(message)

        async def read_until(kind: str) -> None:
            """Until this event has come and everything that the mirror asked for because of it."""
            has_come = False
            while not (has_come and mirror.is_quiet):
                event = await client.next()
                has_come |= event["type"] == kind
                for message in mirror.replica_sent(json.dumps(event, separators=(",", ":"))).to_replica:
                    await client.socket.send(message)

        await send(json.dumps({"type": "session.update", "session": input_format(PCM)}))
        await send(json.dumps({"type": "conversation.item.create", "item": spoken(WireFormat())}))
        await read_until("conversation.item.done")
        if later is not None:
            await send(json.dumps({"type": "session.update", "session": input_format(later)}))
            await read_until("session.updated")
    async with connected(host) as client:
        for message in mirror.history():
            await client.socket.send(message)
        assert await reply_text(client) == f"You said: {HEARD}."
