"""`viva serve` as a process of its own, spoken to by an unmodified client, and killed."""

import asyncio
import base64
import io
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.hosting.processes import viva_serve
from vivavoce.audio.io import float_to_pcm16, read, write
from vivavoce.evaluation.questions import QUESTIONS
from vivavoce.hub.languages import spoken_languages


@pytest.fixture(scope="module")
def address():
    with viva_serve() as address:
        yield address


def _question(intent):
    listed = json.loads((QUESTIONS / "questions.json").read_text(encoding="utf8"))
    entry = next(entry for entry in listed if entry["intent"] == intent)
    samples = read(QUESTIONS / entry["file"], rate=24_000).samples[0]
    quiet = np.zeros(24_000, np.float32)
    return float_to_pcm16(np.concatenate([quiet[:4800], samples, quiet]))


async def test_a_spoken_question_is_answered_in_speech(address):
    sound = _question("breakfast")
    client = AsyncOpenAI(api_key="any", base_url=f"http://{address}/v1")
    reply, words, heard = bytearray(), "", None
    async with client, client.realtime.connect(model="mini-speech") as connection:
        transcription = {"input": {"transcription": {"model": "mini-speech"}}}
        await connection.session.update(session={"type": "realtime", "audio": transcription})
        pcm = sound.tobytes() if hasattr(sound, "tobytes") else bytes(sound)
        for start in range(0, len(pcm), 9600):
            piece = base64.b64encode(pcm[start : start + 9600]).decode()
            await connection.input_audio_buffer.append(audio=piece)
        done = None
        async for event in connection:
            if event.type == "response.output_audio.delta":
                reply += base64.b64decode(event.delta)
            elif event.type == "response.output_audio_transcript.delta":
                words += event.delta
            elif event.type == "conversation.item.input_audio_transcription.completed":
                heard = event.transcript
            elif event.type == "response.done":
                done = event.response
            elif event.type == "error":
                raise AssertionError(event)
            if done is not None and heard is not None:
                break
    assert done.status == "completed"
    assert "breakfast" in heard.lower(), heard
    assert "seven until ten" in words, words
    assert 1.0 < len(reply) / 48_000 < 8.0
    assert np.abs(np.frombuffer(bytes(reply), np.int16)).max() > 1000


@pytest.mark.full
async def test_an_interrupted_reply_keeps_the_words_that_were_heard(address):
    """The caller hears 1.8 s of the answer and its first words, then asks something else."""
    loop = asyncio.get_running_loop()
    client = AsyncOpenAI(api_key="any", base_url=f"http://{address}/v1")
    async with client, client.realtime.connect(model="mini-speech") as connection:

        async def say(intent):
            pcm = _question(intent).tobytes()
            for start in range(0, len(pcm), 4800):  # as a microphone does, in its time
                await connection.input_audio_buffer.append(audio=base64.b64encode(pcm[start : start + 4800]).decode())
                await asyncio.sleep(0.1)

        speaking, began, deltas, done, kept = loop.create_task(say("breakfast")), None, "", None, None
        async for event in connection:
            assert event.type != "error", event
            if event.type == "response.output_audio.delta" and began is None:
                began, item = loop.time(), event.item_id
            elif event.type == "response.output_audio_transcript.delta" and done is None:
                deltas += event.delta
            elif event.type == "response.output_audio_transcript.done" and done is None:
                done = event.transcript
            elif event.type == "response.done":
                response = event.response
                await connection.conversation.item.retrieve(item_id=item)
            elif event.type == "conversation.item.retrieved":
                kept = event.item.content[0].transcript
                break
            if began is not None and speaking is not None and deltas and loop.time() - began > 1.8:
                await speaking
                speaking, interrupting = None, loop.create_task(say("wifi"))
        interrupting.cancel()
    assert response.status == "cancelled" and response.status_details.reason == "turn_detected"
    assert done == kept == response.output[0].content[0].transcript
    assert done.startswith("Breakfast") and deltas.startswith(done) and "morning" not in done, done


async def test_what_the_model_cannot_follow_is_refused_by_name(address):
    def transcription(**fields):
        return {"audio": {"input": {"transcription": {"model": "any", **fields}}}}

    place = "session.audio.input.transcription"
    refused = {
        "session.include": {"include": ["item.input_audio_transcription.logprobs"]},
        "session.prompt": {"prompt": {"id": "desk"}},
        f"{place}.prompt": transcription(prompt="Hotels."),
        f"{place}.keywords": transcription(keywords=["curry"]),
        f"{place}.delay": transcription(delay="low"),
        f"{place}.language": transcription(language="fr"),
    }
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    client = AsyncOpenAI(api_key="any", base_url=f"http://{address}/v1")
    async with client, client.realtime.connect(model="mini-speech") as connection:

        async def error():
            async with asyncio.timeout(20):
                while (event := await connection.recv()).type != "error":
                    pass
            return event.error

        for param, fields in refused.items():
            await connection.session.update(session={"type": "realtime", **fields})
            assert (await error()).param == param
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": [picture]})
        assert (await error()).param == "item.content[0]"
        await connection.session.update(session={"type": "realtime", **transcription(language="en")})
        while (await connection.recv()).type != "session.updated":
            pass


async def test_the_audio_endpoints_are_there_without_further_models(address):
    breakfast = io.BytesIO()
    write(breakfast, read(next(QUESTIONS.glob("*-breakfast.opus"))), "wav")
    async with AsyncOpenAI(api_key="any", base_url=f"http://{address}/v1", timeout=60) as client:
        kinds = {model.id: model.viva["kind"] async for model in client.models.list()}
        assert kinds == {"mini-speech": "realtime", "mini-tts": "speech", "mini-asr": "transcription"}
        upload = ("breakfast.wav", breakfast.getvalue())
        heard = await client.audio.transcriptions.create(
            model="whisper-1", file=upload, response_format="verbose_json", temperature=0
        )
        assert "breakfast" in heard.text and (heard.task, heard.language) == ("transcribe", "english")
        (segment,) = heard.segments
        assert segment.tokens and segment.avg_logprob < 0 and 0 < segment.no_speech_prob < 1
        assert segment.compression_ratio > 0
        translated = await client.audio.translations.create(
            model="whisper-1", file=upload, response_format="verbose_json"
        )
        assert translated.text == heard.text and translated.language == "english"
        sounds = []
        for voice in ("alloy", "ash", "ballad"):
            spoken = await client.audio.speech.create(
                model="tts-1", voice=voice, input="Good evening.", response_format="flac", instructions="Like a pirate."
            )
            sound = read(spoken.content)
            assert sound.rate == 24_000 and 0.3 < sound.seconds < 6
            sounds.append(sound.samples[0])
        first, second, third = sounds  # the first and the third name stand for one voice
        assert len(first) == len(third) and np.allclose(first, third, atol=0.01)
        assert len(first) != len(second) or not np.allclose(first, second, atol=0.01)
        with pytest.raises(BadRequestError, match="chinese; mini-tts speaks english"):
            await client.audio.speech.create(model="tts-1", voice="alloy", input="早安，今天好嗎？")


def test_the_page_the_models_and_the_metrics_are_there(address):
    with urllib.request.urlopen(f"http://{address}/v1/models") as answer:
        assert json.load(answer)["data"][0]["id"] == "mini-speech"
    with urllib.request.urlopen(f"http://{address}/about") as answer:
        (told,) = json.load(answer)["models"]
    assert (told["id"], tuple(told["languages"])) == ("mini-speech", spoken_languages("mini-speech"))
    assert told["introduction"].keys() == told["examples"].keys() == {"en", "zh-Hant", "zh-Hans"}
    assert 30e6 < told["parameters"] < 32e6  # as its card says
    assert (told["stack"], told["parts"]) == ("mini", ["mini-speech"])
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        assert b"viva_" in answer.read()
    with urllib.request.urlopen(f"http://{address}/") as answer:
        assert b"<html" in answer.read()


def test_other_machines_are_not_let_in_without_a_key():
    command = [Path(sys.executable).with_name("viva"), "serve", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--api-key" in done.stderr and done.stderr.count("\n") == 1
