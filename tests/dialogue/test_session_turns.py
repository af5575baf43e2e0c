"""Turns of a whole conversation, at any speed: how they begin, pause and end, and when the reply does."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.dialogue.stage import Stage, spoken, with_turn
from tests.dialogue.voices import silence, talk
from vivavoce.dialogue.events import (
    ReplyAudio,
    ReplyDone,
    ReplyItemStarted,
    ReplyStarted,
    SpeechStarted,
    SpeechStopped,
    TurnCommitted,
    TurnTimedOut,
    Warned,
)
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.settings import TurnSettings
from vivavoce.errors import InputError

pytestmark = pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of sockets that other tests left open


async def test_the_events_of_one_turn_come_in_order():
    stage = Stage.set(spoken(1.0, "Good evening."))
    await stage.hear(np.concatenate([silence(0.5), talk(1.5), silence(2.5)]))
    await stage.close()
    assert stage.names() == [
        *("SpeechStarted", "SpeechStopped", "TurnCommitted", "ReplyStarted"),
        *("ReplyItemStarted", "ReplyText", "ReplyItemDone", "ReplyDone"),
    ]
    (user, reply) = stage.conversation.items
    assert user.id == stage.all(SpeechStarted)[0].item == stage.all(TurnCommitted)[0].item.id
    assert stage.all(ReplyItemStarted)[0].previous == user.id
    assert stage.all(ReplyDone)[0].reason == "completed"
    sound = np.concatenate([event.samples for event in stage.all(ReplyAudio)])
    (part,) = reply.content.parts
    assert np.array_equal(part.samples, sound) and len(sound) == 24_000
    assert part.transcript == "Good evening." and reply.is_complete
    assert stage.backend.state.past == (user, reply)
    stage.check()


async def test_the_turn_starts_with_its_prefix_and_ends_after_its_silence():
    stage = Stage.set(settings=with_turn(prefix_padding_ms=320, silence_duration_ms=320))
    await stage.hear(np.concatenate([silence(1.024), talk(1.024), silence(1.0)]))
    started, stopped = stage.all(SpeechStarted)[0], stage.all(SpeechStopped)[0]
    assert abs(started.audio_start_ms - (1024 - 320)) <= 64
    assert abs(stopped.audio_end_ms - (2048 + 320)) <= 96
    assert abs(stopped.silence_ms - 320) <= 32
    (part,) = stage.all(TurnCommitted)[0].item.content.parts
    assert len(part.samples) / 16 == stopped.audio_end_ms - started.audio_start_ms
    await stage.close()
    stage.check()


async def test_a_reply_starts_at_the_likely_end_and_is_held_until_the_turn_is_over():
    stage = Stage.set()
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.16)]))
    (held,) = stage.backend.replies
    assert not held.is_released and not stage.all(ReplyStarted)
    await stage.hear(silence(0.3))
    assert held.is_released and held.released_for == stage.all(TurnCommitted)[0].item.id
    assert stage.time_of(ReplyAudio) == stage.time_of(SpeechStopped), "the sound was ready when the turn was over"
    await stage.close()
    stage.check()


async def test_a_held_reply_is_dropped_without_a_trace_where_the_user_goes_on():
    stage = Stage.set()
    first, second = talk(1.0, seed=1), talk(1.0, seed=2)
    await stage.hear(np.concatenate([silence(0.5), first, silence(0.128), second]))
    (held,) = stage.backend.replies
    assert held.is_dropped and not held.is_released
    assert stage.names() == ["SpeechStarted"]
    turn_windows = stage.backend.state.turn_windows
    await stage.hear(silence(0.5))
    item = stage.all(TurnCommitted)[0].item
    assert stage.backend.replies[-1].is_released
    assert len(item.content.parts[0].samples) >= (turn_windows + 3) * 512, "the pause is part of the turn"
    await stage.close()
    stage.check()


async def test_without_holding_the_reply_begins_when_the_turn_is_over():
    stage = Stage.set(options=DialogueOptions(holds_replies=False))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.5)]))
    (item,) = [event.item for event in stage.all(TurnCommitted)]
    assert stage.backend.state.committed == [item.id]
    assert len(stage.backend.replies) == 1
    await stage.close()
    stage.check()


async def test_without_create_response_turns_are_committed_and_not_answered():
    stage = Stage.set(settings=with_turn(create_response=False))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(1.0)]))
    assert stage.names() == ["SpeechStarted", "SpeechStopped", "TurnCommitted"]
    assert not stage.backend.replies
    stage.conversation.reply()
    await stage.hear(silence(1.0))
    assert stage.all(ReplyAudio)
    await stage.close()
    stage.check()


async def test_turns_committed_by_the_client():
    stage = Stage.set(spoken(0.5), settings=with_turn(detector="none"))
    with pytest.raises(InputError, match="no audio since"):
        stage.conversation.commit()
    await stage.hear(silence(0.5))
    stage.conversation.clear_input()
    with pytest.raises(InputError, match="no audio since"):
        stage.conversation.commit()
    await stage.hear(talk(1.024))
    item = stage.conversation.commit()
    assert len(item.content.parts[0].samples) == 32 * 512
    assert not stage.all(SpeechStarted) and not stage.backend.replies
    stage.conversation.reply()
    await stage.hear(talk(1.0))
    assert stage.all(ReplyDone)[0].reason == "completed", "what is heard does not interrupt"
    await stage.close()
    stage.check()


async def test_what_a_client_commits_while_a_reply_plays_is_not_taken_for_its_echo():
    stage = Stage.set(spoken(4.0), settings=with_turn(detector="none"))
    stage.conversation.reply()
    await stage.hear(silence(0.256))
    assert stage.all(ReplyAudio)
    stage.conversation.clear_input()
    said = 0.1 * talk(1.024)
    await stage.hear(said)
    np.testing.assert_allclose(stage.conversation.commit().content.parts[0].samples, said, atol=1e-6)
    await stage.close()
    stage.check()


async def test_settings_reach_the_backend_and_the_next_turn():
    stage = Stage.set()
    stage.conversation.update(lambda settings: replace(settings, instructions="Be brief."))
    assert stage.backend.state.settings.instructions == "Be brief."
    stage.conversation.update(lambda settings: replace(settings, turn=TurnSettings(silence_duration_ms=640)))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.5)]))
    assert not stage.all(SpeechStopped)
    await stage.hear(silence(0.3))
    assert stage.all(SpeechStopped)
    await stage.close()
    stage.check()


async def test_the_idle_timeout_commits_a_silent_turn():
    stage = Stage.set(spoken(0.4), settings=with_turn(idle_timeout_ms=1024))
    await stage.hear(silence(1.2))
    (timed_out,) = stage.all(TurnTimedOut)
    assert timed_out.audio_end_ms - timed_out.audio_start_ms == 1024
    assert stage.all(TurnCommitted)[0].item.id == timed_out.item
    assert stage.all(ReplyAudio)
    await stage.close()
    stage.check()


async def test_a_turn_that_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr("vivavoce.dialogue.turns.MAX_TURN_SECONDS", 2.0)
    stage = Stage.set(settings=with_turn(create_response=False))
    await stage.hear(np.concatenate([silence(0.5), talk(3.0)]))
    assert stage.all(TurnCommitted) and stage.all(Warned)[0].code == "turn_too_long"
    await stage.close()
    stage.check()


@pytest.mark.parametrize(("finished", "silent"), [(0.9, 0.192), (0.01, 1.0)])
async def test_a_turn_model_decides_how_long_a_pause_may_be(finished, silent):
    asked = []

    def model(samples):
        asked.append(len(samples))
        return finished

    settings = with_turn(detector="semantic", eagerness="high", silence_duration_ms=320)
    stage = Stage.set(settings=settings, options=DialogueOptions(turn_model=model))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.128)]))
    async with asyncio.timeout(10):
        while stage.conversation._tasks:
            await asyncio.sleep(0)
    assert len(asked) == 1 and asked[0] > 16_000
    await stage.hear(silence(silent))
    assert bool(stage.all(SpeechStopped)) == (finished > 0.5)
    await stage.hear(silence(1.2))
    (stopped,) = stage.all(SpeechStopped)  # patience has an end
    assert (160 <= stopped.silence_ms <= 224) if finished > 0.5 else (1_900 <= stopped.silence_ms <= 2_100)
    await stage.close()
    stage.check()
