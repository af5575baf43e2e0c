"""The front end beside the event loop: conversations go as they do with it inside, and none disturbs another."""

import asyncio
import logging
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from tests.dialogue.stage import RATE, Stage, answered, spoken, with_turn
from tests.dialogue.voices import silence, talk
from vivavoce.audio.vad import WINDOW, EnergyActivity
from vivavoce.dialogue.front_end_service import FrontEndService
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.settings import NoiseSettings
from vivavoce.errors import InputError, VivaError

pytestmark = pytest.mark.asyncio(loop_scope="module")  # a process takes seconds to start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service():
    async with FrontEndService() as service:
        yield service


@dataclass
class Blocked:
    """A detector that waits for a file, and writes a byte for each window."""

    folder: Path

    def initial_state(self):
        return None

    def step(self, state, samples):
        deadline = time.monotonic() + 20.0
        while not (self.folder / "allowed").exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with (self.folder / "asked").open("ab") as file:
            file.write(b"w")
        return 0.0, None

    def allow(self):
        (self.folder / "allowed").touch()

    @property
    def asked(self) -> int:
        return (self.folder / "asked").stat().st_size


class Refusing(EnergyActivity):
    """A detector that fails on some windows."""

    def step(self, state, samples):
        if samples[0] == 0.5:
            raise ArithmeticError("0.5")
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


async def test_noise_is_suppressed_as_with_the_front_end_inside(service):
    settings = replace(with_turn(), noise_reduction=NoiseSettings())
    stages = [Stage.set(settings=settings, options=DialogueOptions(front_end=each)) for each in (None, service)]
    for stage in stages:
        await answered(stage)
        await stage.close()
    assert stages[1].names() == stages[0].names()
    assert stages[1].times == stages[0].times


async def test_a_call_after_draining_follows_all_audio_before_it(service):
    stage = Stage.set(settings=with_turn(detector="none"), options=DialogueOptions(front_end=service))
    sound = talk(64 * WINDOW / RATE, seed=1)
    for start in range(0, len(sound), WINDOW):
        stage.conversation.hear(sound[start : start + WINDOW])
    await stage.conversation.drain_input()
    item = stage.conversation.commit()
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


async def test_much_audio_waits_until_it_is_processed(service, tmp_path):
    activity = Blocked(tmp_path)
    stage = Stage.set(options=DialogueOptions(front_end=service, activity=activity))
    stage.conversation.hear(talk(3.0))
    slowed = asyncio.ensure_future(stage.conversation.drain_input(1.0))
    await asyncio.wait([slowed], timeout=0.05)
    assert not slowed.done()
    await stage.conversation.drain_input(5.0)  # less is pending than may be
    activity.allow()
    await slowed
    await stage.conversation.drain_input()
    assert activity.asked > 80
    await stage.close()


async def test_what_is_pending_of_a_closed_conversation_is_dropped(service, tmp_path):
    activity = Blocked(tmp_path)
    options = DialogueOptions(front_end=service, activity=activity)
    first, second = Stage.set(options=options), Stage.set(options=options)
    first.conversation.hear(talk(0.1))
    await asyncio.sleep(0)  # sent; the process waits in it
    for _ in range(20):
        first.conversation.hear(talk(0.5))
    barrier = asyncio.ensure_future(first.conversation.drain_input())
    await asyncio.sleep(0)
    await first.close()
    await barrier
    activity.allow()
    await second.hear(talk(0.2))
    assert activity.asked < 40 and not first.events
    await second.close()


async def test_a_detector_that_fails_in_one_conversation_fails_that_one_alone(service, caplog):
    options = DialogueOptions(front_end=service, activity=Refusing(), echo=None)
    stages = [Stage.set(options=options) for _ in range(4)]
    marked = talk(2 * WINDOW / RATE).copy()
    marked[0] = 0.5
    for number, stage in enumerate(stages):
        stage.conversation.hear(marked if number == 1 else talk(2 * WINDOW / RATE))
    with pytest.raises(VivaError, match="ArithmeticError"):
        await stages[1].conversation.drain_input()
    with pytest.raises(VivaError, match="front end"):
        stages[1].conversation.hear(marked)
    for number in (0, 2, 3):
        await stages[number].hear(talk(0.3))
    for stage in stages:
        await stage.close()
    assert "front end of a conversation failed" in caplog.text


async def test_conversations_go_on_with_another_process_if_theirs_dies(service, caplog):
    settings = replace(with_turn(), noise_reduction=NoiseSettings())
    stage = Stage.set(settings=settings, options=DialogueOptions(front_end=service))
    late = []
    take, stage.conversation._listening.take = (
        stage.conversation._listening.take,
        lambda windows, quiet_ms: (
            late.extend(window.late_ms for window in windows),
            take(windows, quiet_ms),
        ),
    )
    await stage.hear(talk(0.1))
    with caplog.at_level(logging.ERROR):
        os.kill(service.pids[0], signal.SIGKILL)
        while not caplog.records:
            stage.conversation.hear(silence(0.032))
            await stage.conversation.drain_input()  # does not wait for the dead process
            await asyncio.sleep(0.001)
    await answered(stage)
    await stage.close()
    assert "ReplyStarted" in stage.names()
    assert set(late) == {16}, "noise is suppressed by the other process too"
