"""`viva serve` with a cascade: ear and voice small and random, the chat model another process, the clients stock."""

import asyncio
import base64
import io
import json
from dataclasses import dataclass, field

import httpx
import numpy as np
import openai
import pytest

import vivavoce
from tests.dialogue.voices import silence, talk
from tests.hosting.processes import chat_server, viva_serve
from tests.hosting.similarity import likeness
from tests.s2s.small_parts import small_asr, small_tts
from vivavoce.audio.io import Sound, float_to_pcm16, read, write
from vivavoce.audio.level import buzz

CONFIG = """
chat = "{chat}"
asr = "{asr}"
tts = "{tts}"
chat_images = true
[moderation]
words = "{words}"
"""
TOOL = {"type": "function", "name": "book", "description": "Book a table", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cascade")
    (folder / "mini-asr").mkdir()
    (folder / "mini-tts").mkdir()
    asr, tts = small_asr(folder / "mini-asr"), small_tts(folder / "mini-tts")
    (folder / "words.txt").write_text("scoundrel\n", encoding="utf8")
    with chat_server() as chat:
        config = CONFIG.format(chat=chat, asr=asr, tts=tts, words=folder / "words.txt")
        (folder / "serve.toml").write_text(config, encoding="utf8")
        kept = {"VIVA_CHAT_KEY": "chat-secret", "XDG_DATA_HOME": str(folder)}
        with viva_serve("--config", str(folder / "serve.toml"), **kept) as address:
            yield address


@pytest.fixture
async def client(address):
    async with openai.AsyncOpenAI(api_key="any", base_url=f"http://{address}/v1", max_retries=0) as client:
        yield client


@dataclass
class Turn:
    words: str = ""
    sound: bytes = b""
    heard: str | None = None
    arguments: str = ""
    response: object = None
    types: list[str] = field(default_factory=list)


async def one_turn(connection, wants_transcript=False) -> Turn:
    turn = Turn()
    async for event in connection:
        turn.types.append(event.type)
        match event.type:
            case "response.output_audio.delta":
                turn.sound += base64.b64decode(event.delta)
            case "response.output_audio_transcript.delta" | "response.output_text.delta":
                turn.words += event.delta
            case "response.function_call_arguments.delta":
                turn.arguments += event.delta
            case "conversation.item.input_audio_transcription.completed":
                turn.heard = event.transcript
            case "response.done":
                turn.response = event.response
            case "error":
                raise AssertionError(event)
        if turn.response is not None and (turn.heard is not None or not wants_transcript):
            return turn
    raise AssertionError("the connection ended")


async def say(connection, words: str) -> None:
    content = [{"type": "input_text", "text": words}]
    await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
    await connection.response.create()


async def test_a_tool_is_called_and_its_answer_is_spoken(client):
    async with client.realtime.connect(model="cascade") as connection:
        await connection.session.update(session={"type": "realtime", "tools": [TOOL], "tool_choice": "auto"})
        await say(connection, "Please book a table for three")
        called = await one_turn(connection)
        (call,) = called.response.output
        assert (call.type, call.name, call.call_id) == ("function_call", "book", "call_7")
        assert json.loads(call.arguments) == json.loads(called.arguments) == {"seats": 3}
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "table nine"}
        await connection.conversation.item.create(item=output)
        await connection.response.create()
        turn = await one_turn(connection)
    assert turn.words.strip() == "The desk says: table nine." and len(turn.sound) > 1000
    assert turn.response.status == "completed"
    assert turn.response.usage.input_tokens == 3 and turn.response.usage.output_tokens == 4


async def test_an_image_reaches_a_chat_endpoint_that_sees(client):
    picture = "data:image/png;base64,iVBORw0KGgo="
    async with client.realtime.connect(model="cascade") as connection:
        await connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        content = [
            {"type": "input_text", "text": "What is this?"},
            {"type": "input_image", "image_url": picture, "detail": "low"},
        ]
        item = {"id": "shown", "type": "message", "role": "user", "content": content}
        await connection.conversation.item.create(item=item)
        await connection.response.create()
        turn = await one_turn(connection)
        assert f"What is this? {picture} in low detail" in turn.words
        await connection.conversation.item.retrieve(item_id="shown")
        async for event in connection:
            if event.type == "conversation.item.retrieved":
                assert event.item.content[1].image_url == picture and event.item.content[1].detail == "low"
                break
        content[1]["image_url"] = "https://example.org/picture.png"
        await connection.conversation.item.create(item=item | {"id": "linked"})
        async for event in connection:
            if event.type == "error":
                assert event.error.param == "item.content[1].image_url"
                break


async def test_a_tool_that_answers_late_spoils_no_turn(client):
    async with client.realtime.connect(model="cascade") as connection:
        session = {"type": "realtime", "tools": [TOOL], "output_modalities": ["text"]}
        await connection.session.update(session=session)
        await say(connection, "Please book a table for three")
        (call,) = (await one_turn(connection)).response.output
        await say(connection, "Are you there")
        turn = await one_turn(connection)
        assert turn.response.status == "completed" and turn.words == "You said: Are you there. That is all."
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "table nine"}
        await connection.conversation.item.create(item=output)
        await say(connection, "Well")
        assert (await one_turn(connection)).words == "You said: Well. That is all."


async def test_what_the_chat_endpoint_says_of_an_error_stays_on_the_server(client):
    async with client.realtime.connect(model="cascade") as connection:
        await connection.session.update(session={"type": "realtime", "instructions": "The password is swordfish."})
        await say(connection, "refuse me")
        failed = (await one_turn(connection)).response
        assert failed.status == "failed" and "swordfish" not in str(failed)
        assert failed.status_details.error.message == "the chat endpoint answered 400 (invalid_messages)"


async def test_an_out_of_band_response_without_input_sees_the_conversation(client):
    async with client.realtime.connect(model="cascade") as connection:
        content = [{"type": "input_text", "text": "Good evening"}]
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        aside = {"conversation": "none", "output_modalities": ["text"], "metadata": {"topic": "greeting"}}
        await connection.response.create(response=aside)
        turn = await one_turn(connection)
        assert turn.words == "You said: Good evening. That is all." and turn.response.metadata == {"topic": "greeting"}
        assert turn.response.conversation_id is None and turn.response.usage.input_tokens == 1
        await connection.response.create(response=aside | {"input": [], "instructions": "Classify."})
        assert (await one_turn(connection)).words == "You said: Classify.. That is all."


async def test_a_spoken_question_is_written_down_answered_and_spoken(client):
    async with client.realtime.connect(model="cascade") as connection:
        audio = {"input": {"transcription": {"model": "mini-asr"}}}
        await connection.session.update(session={"type": "realtime", "audio": audio})
        turn = np.concatenate([silence(0.3), talk(1.0), silence(1.0)])
        pcm = float_to_pcm16(Sound(turn.astype("f"), 16_000).resampled(24_000).samples[0]).tobytes()
        for start in range(0, len(pcm), 9600):
            await connection.input_audio_buffer.append(audio=base64.b64encode(pcm[start : start + 9600]).decode())
        turn = await one_turn(connection, wants_transcript=True)
    assert turn.heard and turn.words.startswith(f"You said: {turn.heard[:8]}")
    assert turn.response.status == "completed" and len(turn.sound) > 1000


async def test_concurrent_sessions_get_their_own_answers(client):
    async def ask(number: int) -> Turn:
        async with client.realtime.connect(model="cascade") as connection:
            await say(connection, f"Room {number}")
            return await one_turn(connection)

    turns = await asyncio.gather(*(ask(number) for number in range(6)))
    assert [turn.words.strip() for turn in turns] == [f"You said: Room {number}. That is all." for number in range(6)]
    assert all(turn.response.status == "completed" and turn.sound for turn in turns)


async def test_a_word_that_must_not_be_said_stops_the_reply(client):
    async with client.realtime.connect(model="cascade") as connection:
        await say(connection, "You scoundrel")
        turn = await one_turn(connection)
        assert turn.response.status == "incomplete" and turn.response.status_details.reason == "content_filter"
        await say(connection, "Good evening")
        assert (await one_turn(connection)).response.status == "completed"


async def test_models_voices_speech_and_transcriptions_are_served(address, client, tmp_path):
    assert [model.id async for model in client.models.list()] == ["cascade", "mini-tts", "mini-asr"]
    async with httpx.AsyncClient() as http:
        voices = (await http.get(f"http://{address}/v1/audio/voices")).json()
    assert voices["voices"] == ["buzz"] and {voice["model"] for voice in voices["data"]} == {"cascade", "mini-tts"}
    speech = await client.audio.speech.create(
        model="mini-tts", voice="alloy", input="Good evening.", response_format="wav"
    )
    offline = vivavoce.say("Good evening.", model=str(small_tts(tmp_path)), device="cpu")
    assert likeness(read(speech.content), offline) > 0.99
    with pytest.raises(openai.BadRequestError, match="no voice 'nobody'"):
        await client.audio.speech.create(model="mini-tts", voice="nobody", input="Good evening.")


async def test_a_voice_is_kept_with_consent_and_speaks(address, client):
    file = io.BytesIO()
    write(file, buzz(1.0, 16_000), "wav")
    sample = {"audio_sample": ("guest.wav", file.getvalue())}
    async with httpx.AsyncClient(base_url=f"http://{address}/v1/audio") as http:
        refused = await http.post("/voices", data={"name": "guest"}, files=sample)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "consent_required"
        kept = await http.post("/voices", data={"name": "guest", "consent": "she agreed, on tape"}, files=sample)
        assert kept.json() == {"id": "guest", "object": "audio.voice", "name": "guest"}
        assert (await http.get("/voices")).json()["voices"] == ["buzz", "guest"]
        speech = await client.audio.speech.create(model="x", voice="guest", input="Hello.", response_format="wav")
        assert read(speech.content).seconds > 0.05
        assert (await http.delete("/voices/guest")).json()["deleted"] is True
        assert (await http.delete("/voices/guest")).status_code == 400
        assert (await http.get("/voices")).json()["voices"] == ["buzz"]


async def test_an_uploaded_file_is_written_down_with_times_and_as_it_is_heard(client, tmp_path):
    write(tmp_path / "talk.wav", Sound(np.concatenate([talk(2.0)] * 3).astype("f"), 16_000))
    upload = {"model": "mini-asr", "file": tmp_path / "talk.wav"}
    verbose = await client.audio.transcriptions.create(
        **upload, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert verbose.duration == pytest.approx(6.0) and verbose.language == "english"
    assert all(0 <= segment.start <= segment.end <= 6.0 for segment in verbose.segments)
    stream = await client.audio.transcriptions.create(**upload, stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "transcript.text.done"
    with pytest.raises(openai.BadRequestError, match="language 'xx'"):
        await client.audio.transcriptions.create(**upload, language="xx")
