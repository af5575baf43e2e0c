"""The front end beside the event loop: conversations go as they do with it inside, and none disturbs another."""

import asyncio
import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from tests.dialogue.stage import RATE, Stage, answered, spoken
from tests.dialogue.voices import silence, talk
from vivavoce.audio.vad import WINDOW, EnergyActivity
from vivavoce.dialogue.front_end_service import FrontEndService
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.errors import InputError


@pytest.fixture
async def service():
    async with FrontEndService(workers=2) as service:
        yield service


class Blocked(EnergyActivity):
    """A detector that waits to be allowed, and counts its windows."""

    def __init__(self):
        super().__init__()
        self.allowed, self.asked = threading.Event(), 0

    def step(self, state, samples):
        assert self.allowed.wait(20.0)
        self.asked += 1
        return super().step(state, samples)


async def interrupted(options: DialogueOptions) -> Stage:
    """The user asks, interrupts the reply, hums over the next one, and is answered."""
    stage = Stage.set(spoken(6.0, "One. "), spoken(4.0, "Two. "), options=options)
    await answered(stage, 1.0)
    await stage.hear(np.concatenate([talk(1.2, seed=6), silence(1.0)]))
    await stage.hear(np.concatenate([talk(0.25, seed=7, level_dbfs=-40.0), silence(4.0)]))
    await stage.close()
    return stage


async def test_a_conversation_goes_as_with_the_front_end_inside(service):
    alone = await interrupted(DialogueOptions())
    options = DialogueOptions(front_end=service)
    several = await asyncio.gather(*(interrupted(options) for _ in range(5)))
    for stage in several:
        stage.check()
        assert stage.names() == alone.names()
        assert stage.times == alone.times
    assert {"SpeechStarted", "TurnCommitted", "OutputCleared", "ReplyDone"} <= set(alone.names())


async def test_a_call_after_draining_follows_all_audio_before_it(service):
    stage = Stage.set(options=DialogueOptions(front_end=service))
    conversation = stage.conversation
    conversation.update(lambda settings: settings.__class__(turn=settings.turn.__class__(detector="none")))
    for start in range(0, 64 * WINDOW, WINDOW):
        conversation.hear(talk(64 * WINDOW / RATE, seed=1)[start : start + WINDOW])
    await conversation.drain_input()
    item = conversation.commit()
    assert len(item.content.parts[0].samples) == 64 * WINDOW
    await stage.close()


async def test_bad_samples_are_refused_where_they_are_given_and_others_are_heard(service):
    first, second = (Stage.set(options=DialogueOptions(front_end=service)) for _ in range(2))
    for wrong in (np.full(512, np.nan, "f"), np.zeros((2, 512), "f"), np.zeros(512, np.int16)):
        with pytest.raises(InputError):
            first.conversation.hear(wrong)
    for stage in (first, second):
        await answered(stage)
        await stage.close()
        assert "ReplyStarted" in stage.names()


async def test_much_audio_waits_until_it_is_processed():
    activity = Blocked()
    async with FrontEndService() as service:
        stage = Stage.set(options=DialogueOptions(front_end=service, activity=activity))
        stage.conversation.hear(talk(3.0))
        slowed = asyncio.ensure_future(stage.conversation.drain_input(1.0))
        await asyncio.wait([slowed], timeout=0.05)
        assert not slowed.done()
        await stage.conversation.drain_input(5.0)  # less is pending than may be
        activity.allowed.set()
        await slowed
        await stage.conversation.drain_input()
        assert activity.asked > 80
        await stage.close()


async def test_what_is_pending_of_a_closed_conversation_is_dropped():
    activity = Blocked()
    async with FrontEndService() as service:
        options = DialogueOptions(front_end=service, activity=activity)
        first, second = Stage.set(options=options), Stage.set(options=options)
        first.conversation.hear(talk(0.1))  # the worker takes it, and waits
        for _ in range(20):
            first.conversation.hear(talk(0.5))
        barrier = asyncio.ensure_future(first.conversation.drain_input())
        await asyncio.sleep(0)
        await first.close()
        await barrier
        activity.allowed.set()
        await second.hear(talk(0.2))
        assert activity.asked < 40 and not first.events
        await second.close()


async def test_a_detector_that_fails_in_one_conversation_fails_that_one_alone(service, caplog):
    class Refusing(EnergyActivity):
        def step(self, state, samples):
            if samples[0] == 0.5:
                raise ArithmeticError("0.5")
            return super().step(state, samples)

    options = DialogueOptions(front_end=service, activity=Refusing(), echo=None)
    stages = [Stage.set(options=options) for _ in range(4)]
    marked = talk(2 * WINDOW / RATE).copy()
    marked[0] = 0.5
    for number, stage in enumerate(stages):
        stage.conversation.hear(marked if number == 1 else talk(2 * WINDOW / RATE))
    with pytest.raises(ArithmeticError):
        await stages[1].conversation.drain_input()
    with pytest.raises(ArithmeticError):
        stages[1].conversation.hear(marked)
    for number in (0, 2, 3):
        await stages[number].hear(talk(0.3))
    for stage in stages:
        await stage.close()
    assert "front end of a conversation failed" in caplog.text


async def test_numpy_multiplies_on_one_thread_and_gets_its_threads_back():
    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if "numpy" in pool["filepath"]]

    before = threads()
    assert before, "numpy has no thread pool of its own here"
    async with FrontEndService():
        assert threads() == [1] * len(before)
    assert threads() == before
