"""Turns over a real WebSocket: every event in the protocol's order."""

import numpy as np

from tests.server.harness import connected
from tests.server.scripted import pitch, tone, watermark
from vivavoce.server.realtime.audio_formats import A_LAW, MU_LAW, WireFormat, decode

RATE = 24_000
SPOKEN = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio_transcript.delta",
    "response.output_audio.delta",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]


def without_repeats(types):
    return [kind for index, kind in enumerate(types) if index == 0 or types[index - 1] != kind]


def question(frequency: float = 440.0) -> np.ndarray:
    return np.concatenate([tone(frequency, 0.5, RATE), np.zeros(RATE // 2, np.float32)])


async def test_the_first_event_is_the_session_with_every_field(server):
    async with connected(server) as client:
        event = await client.next()
        assert event["type"] == "session.created"
        session = event["session"]
        assert session["id"].startswith("sess_") and session["type"] == "realtime"
        assert session["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24000}
        assert session["audio"]["input"]["turn_detection"]["interrupt_response"] is True
        assert (await client.next())["type"] == "conversation.created"


async def test_a_spoken_turn_in_canonical_order(server):
    async with connected(server) as client:
        await client.until("session.created")
        await client.speak(question())
        await client.until("response.done")
        types = without_repeats([event["type"] for event in client.events])
        heard = types.index("input_audio_buffer.speech_started")
        assert types[heard:] == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            *SPOKEN,
        ]
        sound = decode(client.sound(), WireFormat())
        assert abs(len(sound) / RATE - 0.4) < 0.001
        assert abs(pitch(sound, RATE) - watermark("You said: tone 440")) < 5


async def test_a_text_turn_without_sound(server):
    async with connected(server) as client:
        response = await client.say("hello", output_modalities=["text"])
        assert response["output"][0]["content"] == [{"type": "output_text", "text": "You said: hello"}]
        assert response["status"] == "completed" and response["usage"]["total_tokens"] == 26
        assert not client.of_type("response.output_audio.delta")
        assert "".join(event["delta"] for event in client.of_type("response.output_text.delta")) == "You said: hello"


async def test_telephone_sound_both_ways(server):
    for kind in (MU_LAW, A_LAW):
        format = WireFormat(kind, 8000)
        async with connected(server) as client:
            audio = {"input": {"format": {"type": kind}}, "output": {"format": {"type": kind}}}
            await client.send("session.update", session={"type": "realtime", "audio": audio})
            updated = await client.until("session.updated")
            assert updated["session"]["audio"]["output"]["format"] == {"type": kind}
            samples = np.concatenate([tone(440, 0.5, 8000), np.zeros(4000, np.float32)])
            await client.speak(samples, format)
            await client.until("response.done")
            sound = decode(client.sound(), format)
            assert abs(pitch(sound, 8000) - watermark("You said: tone 440")) < 5
