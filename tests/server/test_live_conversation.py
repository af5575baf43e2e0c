"""The wire on the real conversation: voice activity, turns, overlap and history are the house's own.

Only the mind is small: a cascade that repeats what was written or spoken, in tones.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.dialogue.voices import hum, silence, talk
from tests.server.harness import DEADLINE, connected, eventually
from tests.server.scripted import pitch, tone, watermark
from vivavoce.audio.resample import LiveResampler
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatCall, ChatEnd, ChatText
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.front_end_service import FrontEndService
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, TurnSettings
from vivavoce.errors import InputError
from vivavoce.server.host import ModelCard
from vivavoce.server.realtime.audio_formats import WireFormat, decode, encode

RATE = 24_000


@dataclass
class Listener:
    heard: str = "something spoken"

    async def transcribe(self, samples, rate, language=None):
        if language == "xx":
            raise InputError("this language is not known here")
        return self.heard


class Chat:
    async def reply(self, messages, settings):
        last = messages[-1]
        if last["role"] == "user" and "weather" in last["content"] and settings.tools:
            yield ChatCall(0, "call_1", settings.tools[0].name, '{"place":')
            yield ChatCall(0, None, None, ' "here"}')
            yield ChatEnd("tool_calls", 5, 7)
            return
        for word in f"You said: {last['content']}.".split(" "):
            yield ChatText(f"{word} ")
        yield ChatEnd("stop", 5, 7)


class Voice:
    """A tone that rises and falls as long as the text is, a fifth of a second a word."""

    rate = RATE

    async def speak(self, text, voice, speed):
        words = text.split()
        for _ in range(6 if "long" in text else 1):
            for word in words:
                await asyncio.sleep(0)
                yield tone(watermark(word), 0.2, RATE, amplitude=0.1)


@dataclass
class LiveHost:
    settings: ConversationSettings = field(
        default_factory=lambda: ConversationSettings(turn=TurnSettings(silence_duration_ms=300))
    )
    is_ready: bool = True
    models: Sequence[ModelCard] = (ModelCard("cascade"),)
    voices: Sequence[str] = ()
    opened: list[LiveConversation] = field(default_factory=list)
    options: DialogueOptions = field(default_factory=DialogueOptions)
    heard: str = "something spoken"

    def open(self, settings, model):
        pipeline = CascadeBackend(WholeTurns(Listener(self.heard)), Chat(), Voice())
        self.opened.append(LiveConversation(pipeline, settings, self.options))
        return self.opened[-1]

    def gauges(self) -> Mapping[str, float]:
        return {}


class Microphone:
    """An open microphone: what it is given, in its time, and a quiet room otherwise."""

    def __init__(self, client) -> None:
        self.client = client
        self.waiting = np.zeros(0, np.float32)
        self._noise = np.random.default_rng(0)

    def say(self, samples: np.ndarray) -> None:
        self.waiting = np.concatenate([self.waiting, LiveResampler(16_000, RATE).forward(samples[None])[0]])

    async def run(self) -> None:
        loop, size = asyncio.get_running_loop(), RATE // 25
        began, sent = loop.time(), 0
        while True:
            piece, self.waiting = self.waiting[:size], self.waiting[size:]
            piece = np.pad(piece, (0, size - len(piece))) + 1e-4 * self._noise.standard_normal(size)
            data = base64.b64encode(encode(piece.astype(np.float32), WireFormat())).decode()
            await self.client.send("input_audio_buffer.append", audio=data)
            sent += 1
            await asyncio.sleep(max(began + sent * 0.04 - loop.time(), 0))


@contextlib.asynccontextmanager
async def speaking(client):
    microphone = Microphone(client)
    task = asyncio.create_task(microphone.run())
    yield microphone
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def live(running, request):
    """A running server; with the audio front end within its event loop, or beside it."""
    if getattr(request, "param", "inside") == "inside":
        yield await running(host=LiveHost())
    else:
        async with FrontEndService() as service:
            options = DialogueOptions(front_end=service)
            await service.warm_up(options.activity, options.echo)
            yield await running(host=LiveHost(options=options))


front_end_inside_and_beside = pytest.mark.parametrize("live", ["inside", "beside"], indirect=True)


async def ask(client, text: str, **response) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    await client.send("conversation.item.create", item=item)
    await client.send("response.create", **({"response": response} if response else {}))


@front_end_inside_and_beside
async def test_a_spoken_turn(live):
    async with connected(live) as client, speaking(client) as microphone:
        await client.send("session.update", session={"audio": {"input": {"transcription": {"model": "any"}}}})
        await client.until("session.updated")
        microphone.say(talk(1.2, seed=3))
        done = (await client.until("response.done"))["response"]
        types = [event["type"] for event in client.events]
        order = ["input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"]
        order += ["input_audio_buffer.committed", "response.created", "response.output_audio.delta", "response.done"]
        assert [types.index(kind) for kind in order] == sorted(types.index(kind) for kind in order)
        assert done["status"] == "completed"
        said = done["output"][0]["content"][0]
        assert said["type"] == "output_audio" and said["transcript"].strip() == "You said: something spoken."
        await eventually(lambda: not live.sessions or next(iter(live.sessions)).encoder.main.is_idle, "it was heard")
        sound = decode(client.sound(), WireFormat())
        assert len(sound) / RATE == pytest.approx(0.8, abs=0.01)
        assert abs(pitch(sound[: RATE // 5], RATE) - watermark("You")) < 15


async def test_a_failed_transcription_is_reported(live):
    async with connected(live) as client, speaking(client) as microphone:
        transcription = {"model": "any", "language": "xx"}
        await client.send("session.update", session={"audio": {"input": {"transcription": transcription}}})
        await client.until("session.updated")
        microphone.say(talk(1.2, seed=3))
        failed = await client.until("conversation.item.input_audio_transcription.failed")
        turn = client.of_type("input_audio_buffer.committed")[0]["item_id"]
        assert failed["item_id"] == turn and failed["content_index"] == 0
        assert failed["error"]["code"] == "transcription_failed" and "not known here" in failed["error"]["message"]


async def interrupted(client, microphone) -> str:
    """The item of a long reply that somebody begins to talk over."""
    await ask(client, "a long story")
    item = (await client.until("response.output_audio.delta"))["item_id"]
    heard = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() - heard < 0.8:
        await client.until("response.output_audio.delta", "response.output_audio_transcript.delta")
    microphone.say(talk(1.5, seed=5, level_dbfs=-18))
    await client.until("input_audio_buffer.speech_started")
    return item


@front_end_inside_and_beside
async def test_an_interruption_keeps_only_what_was_heard(live):
    async with connected(live) as client, speaking(client) as microphone:
        item = await interrupted(client, microphone)
        done = (await client.until("response.done"))["response"]
        assert done["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        truncated = client.of_type("conversation.item.truncated") or [await client.until("conversation.item.truncated")]
        sent = len(decode(client.sound(), WireFormat())) / RATE
        assert truncated[0]["item_id"] == item and 500 < truncated[0]["audio_end_ms"] <= sent * 1000 + 1
        assert sent < 4.5  # of six
        await client.send("conversation.item.retrieve", item_id=item)
        kept = await client.until("conversation.item.retrieved")
        sound = decode(base64.b64decode(kept["item"]["content"][0]["audio"]), WireFormat())
        assert len(sound) / RATE * 1000 == pytest.approx(truncated[0]["audio_end_ms"], abs=5)
        assert (await client.until("response.done"))["response"]["status"] == "completed"  # the answer to it


async def test_a_turn_that_goes_on_is_one_item(running):
    host = LiveHost(options=DialogueOptions(echo=None), heard="a long story")
    async with connected(await running(host=host)) as client, speaking(client) as microphone:
        await client.send("session.update", session={"audio": {"input": {"transcription": {"model": "any"}}}})
        microphone.say(np.concatenate([talk(1.0, seed=3), silence(0.8), talk(1.0, seed=5)]))  # 300 ms end a turn
        early = (await client.until("response.output_audio.delta"))["item_id"]
        first = client.of_type("input_audio_buffer.committed")[0]["item_id"]
        await client.until("input_audio_buffer.speech_started")
        # Stock clients truncate what they play, and retrieve what was transcribed.
        await client.send("conversation.item.truncate", item_id=early, content_index=0, audio_end_ms=0)
        await client.send("conversation.item.retrieve", item_id=first)
        whole = await client.until("input_audio_buffer.committed")
        assert whole["item_id"] != first and whole["previous_item_id"] is None
        await client.until("response.output_audio.delta")
        cut = client.of_type("response.done")[0]["response"]
        assert cut["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        assert [event["item_id"] for event in client.of_type("conversation.item.deleted")] == [early, first]
        types = [event["type"] for event in client.events]
        assert types.index("response.done") < types.index("conversation.item.deleted")
        assert types.count("conversation.item.truncated") == 1 and "error" not in types
        assert client.of_type("conversation.item.retrieved")[0]["item"]["id"] == first
        await client.send("conversation.item.retrieve", item_id=whole["item_id"])
        kept = (await client.until("conversation.item.retrieved"))["item"]
        sound = decode(base64.b64decode(kept["content"][0]["audio"]), WireFormat())
        assert len(sound) / RATE > 2.8, "both parts, and the pause between them"


async def test_a_truncation_by_the_client_is_confirmed_once(live):
    async with connected(live) as client, speaking(client) as microphone:
        item = await interrupted(client, microphone)
        await client.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=300)
        assert (await client.until("conversation.item.truncated"))["audio_end_ms"] == 300
        while len(client.of_type("response.done")) < 2:  # the reply, and the answer to the interruption
            await client.until("response.done")
        assert client.of_type("response.done")[1]["response"]["status"] == "completed"
        assert len(client.of_type("conversation.item.truncated")) == 1


async def test_a_hum_stops_nothing(live):
    async with connected(live) as client, speaking(client) as microphone:
        await ask(client, "a long story")
        for _ in range(round(1.2 / 0.04)):  # pieces: a reply that has hardly begun yields to any speech
            await client.until("response.output_audio.delta")
        microphone.say(hum(0.4))
        for _ in range(round(1.4 / 0.04)):  # until long after any verdict
            await client.until("response.output_audio.delta")
        types = {event["type"] for event in client.events}
        assert not types & {"input_audio_buffer.speech_started", "output_audio_buffer.cleared", "response.done"}


async def test_tool_call_cancel_truncate_and_errors_with_the_openai_client(live, official):
    client = official(f"{live.http}/v1", "unused")
    tool = {"type": "function", "name": "weather", "description": "", "parameters": {"type": "object"}}

    async def until(connection, kind):
        async with asyncio.timeout(DEADLINE):
            async for event in connection:
                if event.type == kind:
                    return event

    async def say(connection, text):
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        await connection.conversation.item.create(item=item)
        await connection.response.create()

    async with client.realtime.connect(model="gpt-realtime") as connection:
        await connection.session.update(session={"type": "realtime", "tools": [tool]})
        await until(connection, "session.updated")
        await say(connection, "the weather?")
        call = (await until(connection, "response.done")).response.output[0]
        assert (call.name, json.loads(call.arguments)) == ("weather", {"place": "here"})
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        await connection.conversation.item.create(item=output)
        await connection.response.create()
        assert (
            await until(connection, "response.output_audio_transcript.done")
        ).transcript.strip() == "You said: rain."
        await until(connection, "response.done")
        await say(connection, "a long story")
        item = (await until(connection, "response.output_audio.delta")).item_id
        await connection.response.cancel()
        cancelled = (await until(connection, "response.done")).response
        assert cancelled.status_details.reason == "client_cancelled"
        await connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=50)
        assert (await until(connection, "conversation.item.truncated")).audio_end_ms == 50
        await connection.response.cancel()
        assert (await until(connection, "error")).error.code == "response_cancel_not_active"
        await connection.input_audio_buffer.commit()
        assert (await until(connection, "error")).error.code == "input_audio_buffer_commit_empty"


async def test_a_client_cut_off_in_the_middle_of_a_reply_hears_all_of_it(live):
    async with connected(live) as client:
        created = (await client.until("session.created"))["session"]
        await ask(client, "please")
        await client.until("response.output_audio.delta")
        client.socket.transport.abort()
    await eventually(lambda: not any(session.connections for session in live.sessions), "the server noticed")
    token, last = created["viva"]["resume_token"], client.events[-1]["event_id"]
    query = f"?session_id={created['id']}&resume_token={token}&last_event_id={last}"
    async with connected(live, query) as again:
        await again.until("response.done")
        sound = decode(client.sound() + again.sound(), WireFormat())
        assert len(sound) / RATE == pytest.approx(0.6, abs=0.01)


async def test_eight_at_once_and_nothing_is_left(live):
    async def one(number: int) -> None:
        async with connected(live) as client:
            await ask(client, f"number {number}", output_modalities=["text"])
            done = (await client.until("response.done"))["response"]
            assert done["output"][0]["content"][0]["text"].strip() == f"You said: number {number}."

    await asyncio.gather(*(one(number) for number in range(8)))
    await eventually(lambda: not live.sessions, "all left")
    assert all(conversation._is_closed for conversation in live.host.opened)
