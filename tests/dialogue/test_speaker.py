"""Whose voice: enrolment by the first turns, and what others say over a reply, in silence and within a turn."""

import asyncio

import numpy as np
import pytest

from tests.dialogue.marked_voices import by_mark, voice
from tests.dialogue.stage import InlineExecutor, Stage, answered, spoken, with_turn
from tests.dialogue.voices import silence
from vivavoce.dialogue.events import ReplyDone, ReplyStarted, SpeechStarted, SpeechStopped, TurnCommitted, TurnIgnored
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.speaker import EnrolledVoices, SpeakerVerdict, VoiceSample, joined_voice, verdict_of

USER, OTHER, THIRD = np.eye(3, dtype=np.float32)


def sample(vector, speech_ms=2000, level_db=-24.0):
    return VoiceSample(np.asarray(vector, np.float32), speech_ms, level_db)


def test_short_speech_is_judged_with_wide_margins():
    for speech_ms in (300, 700, 1500, 4000):
        assert (
            verdict_of(0.9, speech_ms, False) is SpeakerVerdict.USER
            and verdict_of(-0.1, speech_ms, False) is SpeakerVerdict.OTHER
        )
        assert (
            verdict_of(0.9, speech_ms, True) is SpeakerVerdict.USER
            and verdict_of(-0.1, speech_ms, True) is SpeakerVerdict.OTHER
        )
    assert verdict_of(0.27, 600, False) is SpeakerVerdict.UNSURE and verdict_of(0.27, 600, True) is SpeakerVerdict.USER
    assert verdict_of(0.25, 4000, False) is verdict_of(0.25, 4000, True) is SpeakerVerdict.OTHER


def test_short_turns_enrol_together():
    voices = EnrolledVoices()
    voices.accept(sample(USER, 800))
    assert not voices.is_enrolled
    voices.accept(sample([0.8, 0.6, 0.0], 800))
    assert voices.score(USER) == pytest.approx(voices.score(np.float32([0.8, 0.6, 0.0])), abs=1e-6)


def test_a_voice_is_refined_by_what_is_surely_the_users():
    voices = EnrolledVoices()
    voices.accept(sample(USER))
    voices.accept(sample([0.8, 0.6, 0.0]))
    assert voices.score(np.float32([0.8, 0.6, 0.0])) > 0.9
    known = voices.voices[0].vector
    voices.accept(sample([0.42, 0.0, 0.91]))  # accepted, but in doubt
    assert (voices.voices[0].vector == known).all()


def test_a_voice_that_keeps_speaking_is_let_in_at_its_third_turn():
    voices = EnrolledVoices()
    voices.accept(sample(USER))
    assert voices.refuse(sample(OTHER)) and voices.refuse(sample(OTHER))
    assert not voices.refuse(sample(OTHER))
    assert voices.score(OTHER) == pytest.approx(1.0) and voices.score(USER) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda voices: voices.accept(sample(USER)), id="the user spoke"),
        pytest.param(lambda voices: voices.refuse(sample(THIRD)), id="a third speaker"),
    ],
)
def test_refused_turns_count_only_in_a_row(between):
    voices = EnrolledVoices()
    voices.accept(sample(USER))
    assert voices.refuse(sample(OTHER)) and voices.refuse(sample(OTHER))
    between(voices)
    assert voices.refuse(sample(OTHER))


def test_a_soft_voice_is_never_let_in():
    voices = EnrolledVoices()
    voices.accept(sample(USER))
    assert all(voices.refuse(sample(OTHER, level_db=-34.0)) for _ in range(5))


def test_joined_voices_are_weighted_by_their_speech():
    joined = joined_voice([sample(USER, 3000, -20.0), sample(OTHER, 1000, -24.0)])
    assert joined.speech_ms == 4000 and joined.level_db == pytest.approx(-21.0)
    assert joined.vector == pytest.approx(np.float32([3, 1, 0]) / np.sqrt(10))


# --- in a conversation; a mark distinguishes the voices ----------------------------------------------------------


def test_the_two_voices_of_these_tests_differ():
    vectors = {is_user: by_mark(voice(1.0, is_user)) for is_user in (True, False)}
    assert by_mark(voice(0.5)) @ vectors[True] > 0.9
    assert abs(vectors[True] @ vectors[False]) < 0.1


async def enrolled(*scripts, embed=by_mark):
    """A conversation whose user asked for 2 s, and hears the reply since 1.5 s."""
    asyncio.get_running_loop().set_default_executor(InlineExecutor())
    stage = Stage.set(*scripts, options=DialogueOptions(voices=embed, enrols_speaker=True), settings=with_turn())
    await stage.hear(np.concatenate([silence(0.5), voice(2.2), silence(1.8)]))
    assert len(stage.all(ReplyStarted)) == 1
    return stage


async def finish(stage):
    await stage.close()
    stage.check()


async def test_somebody_else_does_not_stop_the_reply():
    stage = await enrolled(spoken(8.0))
    await stage.hear(np.concatenate([voice(1.6, is_user=False), silence(1.0)]))
    assert len(stage.all(SpeechStarted)) == 1 and not stage.all(ReplyDone)
    assert stage.conversation.gain == 1.0
    await finish(stage)


async def test_the_user_stops_the_reply():
    stage = await enrolled(spoken(8.0))
    began = stage.clock.now()
    await stage.hear(voice(1.2))
    assert stage.all(ReplyDone)[0].reason == "turn_detected"
    assert stage.time_of(ReplyDone) - began < 0.8
    await stage.hear(silence(0.6))
    assert len(stage.all(TurnCommitted)) == 2
    await finish(stage)


async def test_the_user_stops_the_reply_while_somebody_else_speaks():
    stage = await enrolled(spoken(9.0))
    await stage.hear(voice(1.5, is_user=False))
    assert not stage.all(ReplyDone)
    await stage.hear(voice(2.5))
    assert stage.all(ReplyDone)[0].reason == "turn_detected"
    await finish(stage)


async def test_a_turn_of_somebody_else_is_not_answered():
    stage = await enrolled(spoken(1.0))
    await stage.hear(silence(1.5))
    await stage.hear(np.concatenate([voice(1.5, is_user=False), silence(1.0)]))
    (ignored,) = stage.all(TurnIgnored)
    assert ignored.item == stage.all(SpeechStarted)[1].item == stage.all(SpeechStopped)[1].item
    assert len(stage.all(ReplyStarted)) == len(stage.all(TurnCommitted)) == 1
    assert stage.backend.state.turn_windows == 0
    await stage.hear(np.concatenate([voice(1.5), silence(1.0)]))
    assert len(stage.all(ReplyStarted)) == len(stage.all(TurnCommitted)) == 2
    await finish(stage)


async def test_the_third_turn_of_a_voice_is_answered():
    stage = await enrolled(spoken(1.0))
    await stage.hear(silence(1.5))
    for answers in (1, 1, 2):
        await stage.hear(np.concatenate([voice(1.5, is_user=False), silence(1.0)]))
        assert len(stage.all(ReplyStarted)) == answers
    await finish(stage)


async def test_what_somebody_else_says_leaves_the_turn():
    stage = await enrolled(spoken(1.0))
    await stage.hear(silence(1.5))
    own, other = voice(1.5), voice(1.5, is_user=False)
    await stage.hear(np.concatenate([own, silence(0.16), other, silence(1.0)]))
    item = stage.all(TurnCommitted)[1].item
    seconds = len(item.content.parts[0].samples) / 16_000
    assert 1.5 <= seconds < 2.6
    assert by_mark(item.content.parts[0].samples) @ by_mark(own) > 0.9
    assert len(stage.all(ReplyStarted)) == 2
    await finish(stage)


async def test_an_embedding_that_fails_lets_all_voices_in():
    calls = []

    def fails_later(sound):
        calls.append(len(sound))
        if len(calls) > 1:
            raise RuntimeError("no memory")
        return by_mark(sound)

    stage = await enrolled(spoken(8.0), embed=fails_later)
    await stage.hear(voice(1.2, is_user=False))
    assert stage.all(ReplyDone)[0].reason == "turn_detected" and len(calls) > 1
    await finish(stage)


async def test_without_enrolment_every_voice_stops_the_reply():
    stage = Stage.set(spoken(8.0))
    await answered(stage)
    await stage.hear(voice(1.2, is_user=False))
    assert stage.all(ReplyDone)[0].reason == "turn_detected"
    await finish(stage)
