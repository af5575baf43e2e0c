"""What a stock client sets for the transcription of the user, honoured by mini-asr behind sockets, or refused."""

import asyncio
import base64
import contextlib
import io
import math

import numpy as np
import openai
import pytest
import pytest_asyncio

from tests.hosting.test_remote_parts import KEY, served
from vivavoce.audio.io import float_to_pcm16, read, write
from vivavoce.cascade.remote import RemoteRecogniser
from vivavoce.dialogue.backend import Address
from vivavoce.dialogue.settings import RecognitionSettings
from vivavoce.hub import BUNDLED
from vivavoce.server.hosting import load_audio

LOGPROBS = "item.input_audio_transcription.logprobs"
COMPLETED = "conversation.item.input_audio_transcription.completed"
COMMITTED = "input_audio_buffer.committed"
DELTA = "conversation.item.input_audio_transcription.delta"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server():
    async with served(load_audio(asr="mini-asr", device="cpu")) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def question(name: str, rate: int = 24_000) -> np.ndarray:
    return read(BUNDLED / "questions" / f"{name}.opus", rate=rate).samples[0]


async def append(connection, samples: np.ndarray) -> None:
    await connection.input_audio_buffer.append(audio=base64.b64encode(float_to_pcm16(samples).tobytes()).decode())


async def until(connection, kind: str, seen: list | None = None):
    async with asyncio.timeout(60):
        async for event in connection:
            if seen is not None:
                seen.append(event)
            if event.type == kind:
                return event
            assert event.type != "error", event
    raise AssertionError(f"the connection ended before {kind}")


async def heard(client, name: str, transcription: dict | None = None, **session):
    """The transcript of a bundled question."""
    audio = {"input": {"turn_detection": None, "transcription": {"model": "any", **(transcription or {})}}}
    async with client.realtime.connect(model="any", extra_query={"intent": "transcription"}) as connection:
        await connection.session.update(session={"type": "transcription", "audio": audio, **session})
        await until(connection, "session.updated")
        await append(connection, question(name))
        await connection.input_audio_buffer.commit()
        return await until(connection, COMPLETED)


def check_logprobs(logprobs, text: str) -> None:
    assert b"".join(bytes(map(int, each.bytes)) for each in logprobs).decode().strip() == text
    assert "".join(each.token for each in logprobs).strip() == text
    assert all(each.logprob <= 0 for each in logprobs) and len({each.logprob for each in logprobs}) > 1


@pytest.mark.asyncio(loop_scope="module")
async def test_log_probabilities_are_those_of_the_tokens(client):
    event = await heard(client, "01-wake-up", include=[LOGPROBS])
    check_logprobs(event.logprobs, event.transcript)
    assert [each.code for each in event.languages] == ["en"]
    assert (await heard(client, "01-wake-up")).logprobs is None
    file = io.BytesIO()
    write(file, read(BUNDLED / "questions" / "01-wake-up.opus"), "wav")
    upload = {"model": "any", "file": ("q.wav", file.getvalue()), "include": ["logprobs"]}
    transcript = await client.audio.transcriptions.create(**upload)
    check_logprobs(transcript.logprobs, transcript.text)
    events = [event async for event in await client.audio.transcriptions.create(**upload, stream=True)]
    check_logprobs(events[-1].logprobs, transcript.text)
    mean = sum(each.logprob for each in transcript.logprobs) / len(transcript.logprobs)
    (segment,) = (
        await client.audio.transcriptions.create(
            model="any", file=("q.wav", file.getvalue()), response_format="verbose_json"
        )
    ).segments
    # The mean of a segment counts the end of the text and the timestamps too.
    assert math.isclose(mean, segment.avg_logprob, abs_tol=0.3)


@pytest.mark.asyncio(loop_scope="module")
async def test_prompt_and_keywords_change_what_is_heard(client):
    plain = (await heard(client, "00-decline")).transcript
    hinted = (await heard(client, "00-decline", {"keywords": ["curry"]})).transcript
    assert hinted != plain
    alone = await heard(client, "03-menu", include=[LOGPROBS])
    continued = await heard(client, "03-menu", {"prompt": "Good evening."}, include=[LOGPROBS])
    assert [each.logprob for each in alone.logprobs] != [each.logprob for each in continued.logprobs]


async def partly_spoken(client, delay: str | None) -> list:
    """The events of a turn whose audio comes in pieces, each after a second or the first words."""
    seen, samples = [], np.concatenate([question("05-price"), np.zeros(24_000, np.float32)])
    audio = {"input": {"transcription": {"model": "any", **({"delay": delay} if delay else {})}}}
    async with client.realtime.connect(model="any", extra_query={"intent": "transcription"}) as connection:
        await connection.session.update(session={"type": "transcription", "audio": audio})
        await until(connection, "session.updated")
        first, piece = 28_800, 2400
        await append(connection, samples[:first])
        # Turns know of no time but that of their audio: this one stays open until the last of it is sent.
        for begin in range(first, 48_000, piece):
            if delay and not any(event.type == DELTA for event in seen):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await until(connection, DELTA, seen)
            await append(connection, samples[begin : begin + piece])
        await append(connection, samples[48_000:])
        await until(connection, COMPLETED, seen)
    return seen


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("delay", [None, "minimal"])
async def test_a_delay_brings_words_while_the_user_speaks(client, delay):
    seen = await partly_spoken(client, delay)
    kinds = [event.type for event in seen]
    deltas, committed = [index for index, kind in enumerate(kinds) if kind == DELTA], kinds.index(COMMITTED)
    assert (deltas[0] < committed) == (delay is not None)
    assert seen[-1].transcript.startswith(seen[deltas[0]].delta)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_language_that_the_recogniser_does_not_know_is_refused(client):
    async with client.realtime.connect(model="any", extra_query={"intent": "transcription"}) as connection:
        for fields, param in (({"language": "fr"}, "language"), ({"languages": ["de", "fr"]}, "languages")):
            audio = {"input": {"transcription": {"model": "any", **fields}}}
            await connection.session.update(session={"type": "transcription", "audio": audio})
            async with asyncio.timeout(20):
                while (event := await connection.recv()).type != "error":
                    pass
            assert event.error.param == f"session.audio.input.transcription.{param}"
            assert "knows en" in event.error.message
    assert (await heard(client, "01-wake-up", {"languages": ["en", "fr"]})).transcript


@pytest.mark.asyncio(loop_scope="module")
async def test_a_remote_recogniser_is_sent_the_settings(server):
    samples = question("00-decline", 16_000)
    async with RemoteRecogniser(Address(f"{server.http}/v1", KEY)) as remote:
        plain = await remote.transcribe_turn(samples, 16_000, RecognitionSettings())
        asked = RecognitionSettings(("en", "fr"), keywords=("curry",), with_logprobs=True)
        hinted = await remote.transcribe_turn(samples, 16_000, asked)
        assert hinted.text != plain.text and not plain.logprobs
        assert b"".join(each.data for each in hinted.logprobs).decode().strip() == hinted.text
        assert hinted.languages == ("en",)
