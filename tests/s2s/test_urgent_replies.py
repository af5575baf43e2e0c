"""Replies that begin are urgent work until their first sound is made, and long passes of the vocoder wait for them."""

import asyncio
import threading
import time

import numpy as np
import pytest

from tests.dialogue.voices import silence, talk
from tests.s2s.small_parts import SpeechParts, small_speech
from tests.s2s.test_local_codec import codes, prompt
from tests.s2s.test_moss_speech import Caller, asked
from vivavoce.dialogue.conversation import ReplyRequest
from vivavoce.dialogue.events import ReplyAudio, ReplyDone, ReplyStarted
from vivavoce.dialogue.items import Message, TextPart
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.minis.untrained import untrained_codec
from vivavoce.models.moss_speech.codec import GraphedCodec
from vivavoce.runtime.urgent_work import UrgentWork
from vivavoce.s2s import local_codec as module
from vivavoce.s2s.local_codec import PASS_SECONDS, SOON_SECONDS, LocalCodec

PATIENCE = 30.0


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> SpeechParts:
    return small_speech(tmp_path_factory.mktemp("untrained"))


def test_urgent_work_is_waited_for_until_the_last_of_it_is_done():
    ends = []
    work = UrgentWork(lambda: ends.append(len(work)))
    work.wait(PATIENCE)  # there is none
    work.add("one")
    work.add("two")
    started, released = threading.Event(), threading.Event()

    def wait():
        started.set()
        work.wait(PATIENCE)
        released.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert started.wait(PATIENCE)
    work.discard("one")
    work.discard("one")
    assert not released.is_set()
    assert not ends
    work.discard("two")
    assert released.wait(PATIENCE)
    thread.join()
    assert ends == [0]


def test_a_wait_ends_in_time():
    work = UrgentWork()
    work.add("never done")
    started = time.monotonic()
    work.wait(-1.0)
    work.wait(0.05)
    assert 0.05 <= time.monotonic() - started < PATIENCE


class Noted(UrgentWork):
    """Knows how much of it there was."""

    def __init__(self, after):
        super().__init__(after)
        self.most = 0

    def add(self, member):
        super().add(member)
        self.most = max(self.most, len(self))


def noted(pipeline):
    """The pipeline with its urgent work counted."""
    urgent = Noted(pipeline.local_codec._wake_vocoder)
    pipeline.urgent = pipeline.local_codec.urgent = pipeline.vocoder._urgent = urgent
    return urgent


async def test_a_reply_is_urgent_until_its_first_sound_is_made(parts):
    async with parts.pipeline() as pipeline:
        urgent = noted(pipeline)
        caller = Caller.on(pipeline, settings=ConversationSettings(max_output_tokens=60))
        await caller.hear(asked())
        await caller.until(ReplyAudio)
        assert urgent.most == 1
        assert len(urgent) == 0
        assert not caller.all(ReplyDone), "the reply goes on"
        await caller.close()


async def test_a_reply_in_writing_is_not_urgent(parts):
    async with parts.pipeline() as pipeline:
        urgent = noted(pipeline)
        caller = Caller.on(pipeline, settings=ConversationSettings(modality="text", max_output_tokens=10))
        caller.conversation.add(Message("user", (TextPart("Hello"),)))
        caller.conversation.reply()
        await caller.until(ReplyDone)
        assert urgent.most == 0
        await caller.close()


async def test_a_dropped_held_reply_is_urgent_no_more(parts):
    said = np.concatenate([silence(0.32), talk(0.8, 1), silence(0.128), talk(0.8, 2), silence(0.32)])
    async with parts.pipeline() as pipeline:
        urgent = noted(pipeline)
        caller = Caller.on(pipeline)
        await caller.hear(said)
        await caller.until(ReplyDone)
        assert urgent.most >= 1
        assert len(urgent) == 0
        await caller.close()


@pytest.mark.parametrize("ends", ["cancelled", "closed", "failed"])
async def test_a_reply_that_ends_before_its_first_sound_is_urgent_no_more(parts, ends, monkeypatch):
    async with parts.pipeline() as pipeline:
        urgent, begun = noted(pipeline), asyncio.Event()

        async def never(*job):
            begun.set()
            if ends == "failed":
                raise RuntimeError("the vocoder failed")
            await asyncio.Event().wait()

        monkeypatch.setattr(pipeline.vocoder, "do", never)
        caller = Caller.on(pipeline)
        caller.conversation.add(Message("user", (TextPart("Hello"),)))
        caller.conversation.reply(ReplyRequest())
        await caller.until(ReplyStarted)
        async with asyncio.timeout(PATIENCE):
            await begun.wait()
        assert urgent.most == 1
        if ends == "cancelled":
            caller.conversation.cancel()
        if ends != "closed":
            await caller.until(ReplyDone)
            await caller.settled()
            assert len(urgent) == 0
        await caller.close()
        assert len(urgent) == 0


@pytest.fixture
def long_passes(monkeypatch):
    """A codec whose passes of one job call `between` between two parts, and a job for it."""
    codec = GraphedCodec(untrained_codec("cpu"))
    local_codec, step_batch = LocalCodec(codec, 3, max_vocoder_batch=1), codec.step_batch

    def of(between):
        def step_in_two_parts(*batch):
            between(local_codec)
            return step_batch(*batch)

        monkeypatch.setattr(codec, "step_batch", step_in_two_parts)
        monkeypatch.setattr(module, "MAX_PAUSE_SECONDS", PATIENCE)
        local_codec.vocoder.start()
        return local_codec, (codec.flow.voice(prompt()), codes(8, 1), False)

    return of


async def test_a_long_pass_waits_for_a_reply_that_begins_meanwhile(long_passes):
    loop, order = asyncio.get_running_loop(), []

    def end(urgent):
        order.append("the reply has its first sound")
        urgent.discard("a reply")

    def between(local_codec):
        local_codec.urgent.add("a reply")
        loop.call_soon_threadsafe(end, local_codec.urgent)
        local_codec._wait_for_urgent_work()
        order.append("the pass goes on")

    local_codec, job = long_passes(between)
    started = time.monotonic()
    await local_codec.vocoder.do(job, 2 * PATIENCE)
    await local_codec.vocoder.close()
    assert order == ["the reply has its first sound", "the pass goes on"]
    assert time.monotonic() - started < PATIENCE


async def test_a_long_pass_waits_no_longer_than_its_deadline_allows(long_passes):
    waited = []

    def between(local_codec):
        local_codec.urgent.add("a reply without an end")
        before = time.monotonic()
        local_codec._wait_for_urgent_work()
        waited.append(time.monotonic() - before)

    local_codec, job = long_passes(between)
    await local_codec.vocoder.do(job, SOON_SECONDS)
    await local_codec.vocoder.close()
    assert 0 < waited[0] <= SOON_SECONDS - PASS_SECONDS + 0.1
