"""What is decided about a sound depends on when it was made, not on when it arrives."""

import asyncio

import numpy as np
import pytest

from tests.dialogue.stage import RATE, WINDOW, Stage, answered, spoken, with_turn
from tests.dialogue.voices import hum, silence, talk
from vivavoce.dialogue.capture_clock import CaptureClock
from vivavoce.dialogue.events import ReplyDone, ReplyStarted, SpeechStarted, SpeechStopped
from vivavoce.dialogue.session import DialogueOptions

WINDOW_SECONDS = WINDOW / RATE


async def hear_late(stage: Stage, samples: np.ndarray, delays) -> None:
    """Feed audio in real time; each window arrives late by its delay, and never before the one before it."""
    start = stage.clock.now()
    for number in range(len(samples) // WINDOW):
        arrival = start + (number + 1) * WINDOW_SECONDS + delays(number)
        stage.clock.advance(max(0.0, arrival - stage.clock.now()))
        stage.conversation.hear(samples[number * WINDOW : (number + 1) * WINDOW].astype(np.float32))
        await stage.conversation.drain_input()
        await stage.settle()


def in_bursts(seconds: float):
    """All windows of this much audio arrive with the last of them."""
    count = round(seconds / WINDOW_SECONDS)
    return lambda number: (count - 1 - number % count) * WINDOW_SECONDS


def jitter(seconds: float):
    delays = np.random.default_rng(0).uniform(0, seconds, 1000)
    return lambda number: delays[number]


def decisions(stage: Stage) -> list[tuple]:
    started = [("SpeechStarted", each.audio_start_ms) for each in stage.all(SpeechStarted)]
    stopped = [("SpeechStopped", each.audio_end_ms) for each in stage.all(SpeechStopped)]
    return sorted(started + stopped, key=lambda each: each[1]) + [(each.reason,) for each in stage.all(ReplyDone)]


DELAYS = {
    "late": lambda number: 0.6,
    "in bursts": in_bursts(1.92),
    "with jitter": jitter(0.3),
    "after a stall": lambda number: max(0.0, 1.9 - number * WINDOW_SECONDS) if number >= 28 else 0.0,
}


async def over_the_end_of_a_reply(delays) -> list:
    """A backchannel shortly before the end of a reply."""
    stage = Stage.set(spoken(2.2), ahead=None)
    await answered(stage, 0.4)
    await hear_late(stage, np.concatenate([silence(0.96), hum(0.4, seed=2), silence(1.92)]), delays)
    await stage.close()
    stage.check()
    return decisions(stage)


async def two_turns_and_a_backchannel(delays) -> list:
    stage = Stage.set(spoken(0.4), spoken(3.0), options=DialogueOptions(echo=None), ahead=None)
    sound = [silence(0.5), talk(1.5, seed=5), silence(2.0), talk(0.8, seed=6), silence(1.8), hum(0.4, seed=2)]
    await hear_late(stage, np.concatenate([*sound, silence(2.5)]), delays)
    await stage.close()
    stage.check()
    return decisions(stage)


@pytest.mark.parametrize("delays", DELAYS.values(), ids=DELAYS)
async def test_a_backchannel_that_arrives_after_the_reply_was_made_over_it(delays):
    expected = await over_the_end_of_a_reply(lambda number: 0.0)
    assert [each[0] for each in expected] == ["SpeechStarted", "SpeechStopped", "completed"]
    assert await over_the_end_of_a_reply(delays) == expected


@pytest.mark.parametrize("delays", DELAYS.values(), ids=DELAYS)
async def test_turns_are_the_same_however_late_the_audio_arrives(delays):
    expected = await two_turns_and_a_backchannel(lambda number: 0.0)
    turn = ["SpeechStarted", "SpeechStopped"]
    assert [each[0] for each in expected] == [*turn, *turn, "completed", "completed"]
    assert await two_turns_and_a_backchannel(delays) == expected


async def test_a_reply_that_is_generated_too_slowly_is_still_spoken_over():
    stage = Stage.set(spoken(1.6), options=DialogueOptions(echo=None))
    scripted = stage.backend.state.reply

    def slow(plan):
        reply = scripted(plan)
        fast = reply.pieces()

        async def pieces():
            yield await anext(fast)
            async for piece in fast:
                yield piece
                await stage.clock.until(stage.clock.now() + 1.5)

        reply.pieces = pieces
        return reply

    stage.backend.state.reply = slow
    await answered(stage, 0.9)  # 0.8 s of it have been played, more follows later
    await stage.hear(np.concatenate([hum(0.3, seed=3), silence(1.5)]))
    assert len(stage.all(SpeechStarted)) == 1 and not stage.all(ReplyDone)
    await stage.close()


async def test_silence_that_arrives_before_the_turn_model_has_answered_waits_for_it():
    asked = asyncio.Event()
    stage = Stage.set(settings=with_turn(detector="semantic"), options=DialogueOptions(turn_model=lambda sound: 0.0))
    answer = stage.conversation._listening.set_finished_probability
    held = []

    def late(turn, probability):
        held.append((turn, probability))
        asked.set()

    stage.conversation._listening.set_finished_probability = late
    stage.clock.advance(4.0)
    stage.conversation.hear(np.concatenate([silence(0.5), talk(1.0, seed=5), silence(1.0)]).astype(np.float32))
    await asked.wait()
    assert not stage.all(SpeechStopped), "240 ms of silence would have ended it, but the model may say otherwise"
    stage.conversation._listening.set_finished_probability = answer
    answer(*held[0])
    await stage.settle()
    assert not stage.all(SpeechStopped) and not stage.all(ReplyStarted)
    await stage.hear(silence(4.0))
    assert len(stage.all(SpeechStopped)) == 1
    await stage.close()


def test_capture_times_bridge_a_stall_and_start_anew_after_a_pause():
    clock = CaptureClock()
    for number in range(100):
        clock.note(10.0 + 0.02 * number, 0.02 * number)
    for number in range(100, 160):  # 1.2 s of audio at once
        clock.note(13.2, 0.02 * number)
    assert clock.moment(2.5) == pytest.approx(12.5)
    for number in range(160, 300):  # the client sent nothing for 5 s
        clock.note(18.2 + 0.02 * (number - 160), 0.02 * number)
    assert clock.moment(4.0) == pytest.approx(19.0)


def test_a_client_that_paused_for_a_second_and_a_half_was_not_delayed():
    """As one that sends nothing while its user is silent: audio after the pause does not catch up."""
    clock = CaptureClock()
    for number in range(100):
        clock.note(10.0 + 0.02 * number, 0.02 * number)
    for number in range(100, 110):
        clock.note(11.5 + 0.02 * number, 0.02 * number)
    assert clock.moment(2.1) == pytest.approx(13.6)
