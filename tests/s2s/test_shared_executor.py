"""MOSS-Speech, a local recogniser and a local chat model on one device share its executor, and fail and close alone."""

import asyncio

import numpy as np
import pytest
import torch

from tests.dialogue.voices import talk
from tests.s2s.small_parts import SpeechParts, small_asr, small_chat, small_speech
from vivavoce.cascade.local_chat import LocalChat
from vivavoce.cascade.local_recogniser import LocalRecogniser
from vivavoce.dialogue.backend import Ended, ReplyPlan, Spoke
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.runtime.executor import DeadlineExecutor, executor_for
from vivavoce.s2s.moss_speech import MossSpeechBackend

SHORT = ConversationSettings(max_output_tokens=12)
SOUND = talk(0.5).astype(np.float32)
LOUD = 4.0  # a sample above this is a planted fault of the recogniser
CPU = torch.device("cpu")


class PlantedError(Exception):
    """The fault of these tests."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> SpeechParts:
    return small_speech(tmp_path_factory.mktemp("speech"))


@pytest.fixture
def recogniser(tmp_path) -> LocalRecogniser:
    """One whose pass fails where the sound is too loud."""
    loaded = LocalRecogniser.load(str(small_asr(tmp_path)), device="cpu")
    segments = loaded.listener.segments

    def faulty(samples, options=None):
        if samples.max() > LOUD:
            raise PlantedError
        return segments(samples, options)

    loaded.listener.segments = faulty
    return loaded


async def reply_of(backend: MossSpeechBackend) -> tuple[int, Ended]:
    """The samples of a spoken reply, and how it ended."""
    conversation = backend.open(lambda item, text, is_final: None)
    conversation.set_history((), SHORT)
    conversation.listen(SOUND)
    reply = conversation.reply(ReplyPlan("item_1", SHORT, played=lambda: 0.0))
    pieces = [piece async for piece in reply.pieces()]
    reply.drop()
    await conversation.close()
    return sum(len(piece.samples) for piece in pieces if isinstance(piece, Spoke)), pieces[-1]


async def test_all_models_of_a_device_are_tasks_of_one_executor(parts, recogniser, tmp_path_factory):
    shared = executor_for(CPU)
    chat = LocalChat.load(str(small_chat(tmp_path_factory.mktemp("chat"))), "cpu")
    async with parts.pipeline() as backend, recogniser, chat:
        tasks = [backend.engine, backend.speech_encoder, *backend.vocoder.ways, recogniser._turns, chat.engine]
        assert all(task in shared.tasks for task in tasks)
        (samples, end), text = await asyncio.gather(reply_of(backend), recogniser.transcribe(SOUND, 16_000))
        assert samples and end.reason != "failed" and isinstance(text, str)
    assert not any(task in shared.tasks for task in tasks)


async def test_a_failing_turn_of_the_recogniser_fails_alone(parts, recogniser):
    async with parts.pipeline() as backend, recogniser:
        expected = await recogniser.transcribe(SOUND, 16_000)
        (samples, end), failed, text = await asyncio.gather(
            reply_of(backend),
            recogniser.transcribe(2 * LOUD * np.ones(8000, np.float32), 16_000),
            recogniser.transcribe(SOUND, 16_000),
            return_exceptions=True,
        )
        assert isinstance(failed, PlantedError)
        assert samples and end.reason != "failed" and text == expected


async def test_a_failing_vocoder_pass_fails_its_reply_alone(parts, recogniser):
    async with parts.pipeline() as backend, recogniser:
        expected, text = await reply_of(backend), await recogniser.transcribe(SOUND, 16_000)
        (way,) = backend.vocoder.ways
        work = way.work

        def faulty(jobs):
            raise PlantedError

        way.work = faulty
        (samples, end), heard = await asyncio.gather(reply_of(backend), recogniser.transcribe(SOUND, 16_000))
        assert (samples, end.reason) == (0, "failed") and heard == text
        way.work = work
        assert await reply_of(backend) == expected


@pytest.mark.parametrize("first", ["backend", "recogniser"])
async def test_closing_one_leaves_the_other_running(parts, recogniser, first):
    backend = parts.pipeline()
    await backend.__aenter__()
    await recogniser.__aenter__()
    await (backend if first == "backend" else recogniser).__aexit__()
    assert executor_for(CPU).is_open
    if first == "backend":
        assert isinstance(await recogniser.transcribe(SOUND, 16_000), str)
        await recogniser.__aexit__()
    else:
        samples, end = await reply_of(backend)
        assert samples and end.reason != "failed"
        await backend.__aexit__()


async def test_a_passed_executor_is_used_instead_and_left_open(parts, recogniser):
    executor = DeadlineExecutor("viva-test")
    executor.start()
    base = parts.pipeline()
    backend = MossSpeechBackend(
        base.core, base.codec, base.prompt, base.tokenizer, base.voices, base.options, executor=executor
    )
    async with backend:
        assert backend.engine in executor.tasks and backend.engine not in executor_for(CPU).tasks
        samples, _ = await reply_of(backend)
        assert samples
    assert executor.is_open and executor.tasks == []
    executor.close()
