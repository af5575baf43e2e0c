"""Replies that are complete long before they have been played: what the wire says when they are stopped."""

import asyncio
import base64

import pytest

from tests.dialogue.voices import talk
from tests.server.harness import connected
from tests.server.test_live_conversation import RATE, LiveHost, ask, speaking
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.session import LiveConversation
from vivavoce.server.realtime.audio_formats import WireFormat, decode

STORY = "a long story"


@pytest.fixture
async def live(running):
    return await running(host=LiveHost())


def sent_transcript(client, item: str) -> str:
    deltas = client.of_type("response.output_audio_transcript.delta")
    return "".join(event["delta"] for event in deltas if event["item_id"] == item)


async def test_an_interrupted_reply_keeps_the_words_that_were_heard(live):
    async with connected(live) as client, speaking(client) as microphone:
        await ask(client, "a long tale. And more")
        item = (await client.until("response.output_audio.delta"))["item_id"]
        while len(decode(client.sound(), WireFormat())) / RATE < 1.2:
            await client.until("response.output_audio.delta")
        (conversation,) = live.host.opened
        assert conversation.items[-1].is_complete, "it was made as a whole"
        microphone.say(talk(1.5, seed=5, level_dbfs=-18))
        done = (await client.until("response.done"))["response"]
        assert done["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        (output,) = done["output"]
        assert output["status"] == "incomplete"
        heard = output["content"][0]["transcript"]
        assert heard and sent_transcript(client, item).startswith(heard) and "more" not in sent_transcript(client, item)
        assert client.of_type("response.output_audio_transcript.done")[0]["transcript"] == heard
        await client.send("conversation.item.retrieve", item_id=item)
        kept = (await client.until("conversation.item.retrieved"))["item"]["content"][0]
        assert kept["transcript"] == heard


async def test_a_reply_is_refused_until_the_one_before_was_sent(live):
    async with connected(live) as client:
        await ask(client, STORY)
        await client.until("response.output_audio.delta")
        await client.send("response.create")
        error = (await client.until("error"))["error"]
        assert error["code"] == "conversation_already_has_active_response"
        await client.send("response.create", response={"conversation": "none", "output_modalities": ["text"]})
        assert (await client.until("response.done"))["response"]["conversation_id"] is None, "this one runs beside"
        assert (await client.until("response.done"))["response"]["status"] == "completed"
        await client.send("response.create")
        await client.until("response.created")


async def test_a_cancelled_reply_is_truncated_to_what_was_played(live):
    async with connected(live) as client:
        await ask(client, STORY)
        item = (await client.until("response.output_audio.delta"))["item_id"]
        await asyncio.sleep(0.8)
        await client.send("response.cancel")
        done = (await client.until("response.done"))["response"]
        assert done["status_details"]["reason"] == "client_cancelled"
        await client.send("conversation.item.retrieve", item_id=item)
        kept = (await client.until("conversation.item.retrieved"))["item"]["content"][0]
        seconds = len(decode(base64.b64decode(kept["audio"]), WireFormat())) / RATE
        sent = len(decode(client.sound(), WireFormat())) / RATE
        assert 0.5 < seconds <= sent < 3.0
        assert not client.of_type("conversation.item.truncated"), "a client that plays by itself says where it stopped"


async def test_speech_is_made_only_a_few_seconds_before_it_is_played(running):
    made = []

    class EndlessVoice:
        rate = RATE

        async def speak(self, text, voice, speed):
            for number in range(1000):
                await asyncio.sleep(0)
                made.append(number)
                yield talk(0.5, seed=number)[:8000].repeat(3)[::2][: RATE // 2]

    class Chat:
        async def reply(self, messages, settings):
            from vivavoce.cascade.interfaces import ChatText

            yield ChatText("Without end. ")

    class Host(LiveHost):
        def open(self, settings, model):
            return LiveConversation(CascadeBackend(WholeTurns(None), Chat(), EndlessVoice()), settings)

    async with connected(await running(host=Host())) as client:
        await ask(client, "go on")
        while len(client.of_type("response.output_audio.delta")) < 20:
            await client.until("response.output_audio.delta")
        sent = len(decode(client.sound(), WireFormat())) / RATE
        assert sent < len(made) / 2 <= sent + 6.6
