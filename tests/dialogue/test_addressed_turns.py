"""Turns in silence that are not spoken to the machine: what is dropped, what never is, and who is heard in the end."""

import asyncio

import numpy as np
import pytest

from tests.dialogue.overlap_networks import network_that_always_says, network_with
from tests.dialogue.stage import Stage, spoken
from tests.dialogue.voices import silence, talk
from vivavoce.audio.io import Sound
from vivavoce.bench.turn_sounds import gather, voiced_bounds
from vivavoce.dialogue.backend import Ended
from vivavoce.dialogue.events import ReplyStarted, SpeechStarted, SpeechStopped, TurnCommitted, TurnIgnored
from vivavoce.dialogue.model_barge_in import ModelClassifier
from vivavoce.dialogue.overlap_model import SoundKind
from vivavoce.dialogue.session import DialogueOptions

pytestmark = pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of sockets that other tests left open
BYSTANDER = ModelClassifier(network_that_always_says(SoundKind.BYSTANDER))
USER_DB, SOFT_DB = -24.0, -36.0


async def opened(classifier=BYSTANDER, options=None, replies=8) -> Stage:
    """The user has asked, in 2 s, and has heard the reply to its end."""
    options = options or DialogueOptions(echo=None)
    stage = Stage.set(*(spoken(0.5) for _ in range(replies)), options=options, classifier=classifier)
    await stage.hear(np.concatenate([silence(0.5), talk(2.0, seed=5, level_dbfs=USER_DB), silence(2.0)]))
    assert len(stage.all(TurnCommitted)) == len(stage.all(ReplyStarted)) == 1, "the first turn is always taken"
    return stage


async def say(stage: Stage, seconds: float = 1.2, level_db: float = SOFT_DB, seed: int = 6) -> bool:
    """Whether what is said now is taken for a turn."""
    before = len(stage.all(TurnCommitted)), len(stage.all(TurnIgnored))
    await stage.hear(np.concatenate([talk(seconds, seed=seed, level_dbfs=level_db), silence(2.0)]))
    taken, ignored = len(stage.all(TurnCommitted)) - before[0], len(stage.all(TurnIgnored)) - before[1]
    assert taken + ignored == 1, "no turn is lost silently"
    return bool(taken)


async def finish(stage: Stage) -> None:
    await stage.close()
    stage.check()


async def test_a_bystander_in_silence_is_reported_and_not_answered():
    stage = await opened()
    assert not await say(stage)
    (ignored,) = stage.all(TurnIgnored)
    assert ignored.item == stage.all(SpeechStarted)[1].item == stage.all(SpeechStopped)[1].item
    assert ignored.reason == "not_addressed"
    assert len(stage.all(ReplyStarted)) == 1 and len(stage.conversation.items) == 2
    assert stage.backend.state.turn_windows == 0, "the model does not keep what was said"
    await finish(stage)


async def test_a_voice_as_loud_as_the_user_is_taken():
    stage = await opened()
    assert await say(stage, level_db=USER_DB)
    await finish(stage)


@pytest.mark.parametrize("kind", [SoundKind.TURN, SoundKind.BACKCHANNEL, SoundKind.NOISE, SoundKind.ECHO])
async def test_only_a_bystander_is_dropped(kind):
    stage = await opened(ModelClassifier(network_that_always_says(kind)))
    assert await say(stage, seconds=0.6)
    await finish(stage)


async def test_a_bystander_in_doubt_is_taken():
    stage = await opened(ModelClassifier(network_with({SoundKind.BYSTANDER: 0.2, SoundKind.NOISE: 0.0}, -20.0)))
    assert await say(stage)
    await finish(stage)


async def test_after_two_dropped_turns_the_next_is_taken_and_the_user_is_known_as_softer():
    stage = await opened()
    assert [await say(stage, seed=6 + number) for number in range(5)] == [False, False, True, True, True]
    await finish(stage)


@pytest.mark.parametrize(("level_db", "is_taken"), [(USER_DB - 4.0, True), (SOFT_DB, False)])
async def test_after_a_dropped_turn_one_nearly_as_loud_as_the_user_is_taken(level_db, is_taken):
    for speaks_again in (False, True):
        stage = await opened()
        if speaks_again:
            assert not await say(stage)
        assert await say(stage, 0.8, level_db) is (is_taken and speaks_again)
        await finish(stage)


async def test_a_dropped_turn_does_not_change_how_the_user_sounds():
    stage = await opened()
    softer = USER_DB - 8.0
    assert [await say(stage, 0.9, softer), await say(stage, 0.9, softer)] == [False, False]
    await finish(stage)


async def test_after_a_dropped_turn_it_takes_more_to_drop_the_next():
    odds = {SoundKind.BYSTANDER: 1.5, SoundKind.NOISE: 0.0}
    stage = await opened(ModelClassifier(network_with(odds, -20.0)))
    assert [await say(stage), await say(stage)] == [False, True]
    await finish(stage)


async def test_a_user_who_has_said_little_so_far_is_not_dropped():
    stage = Stage.set(*(spoken(0.5) for _ in range(3)), options=DialogueOptions(echo=None), classifier=BYSTANDER)
    await stage.hear(np.concatenate([silence(0.5), talk(0.5, seed=5, level_dbfs=USER_DB), silence(2.0)]))
    assert await say(stage)
    await finish(stage)


@pytest.mark.parametrize(
    ("classifier", "options"),
    [(None, DialogueOptions(echo=None)), (BYSTANDER, DialogueOptions(echo=None, ignores_side_talk=False))],
    ids=["by the rules", "switched off"],
)
async def test_all_turns_are_taken_where_nobody_judges_them(classifier, options):
    stage = await opened(classifier, options)
    assert await say(stage)
    await finish(stage)


async def test_a_turn_that_ended_a_reply_before_its_first_sound_is_taken():
    stage = await opened(replies=1)
    stage.backend.scripts = [[asyncio.Event(), Ended("completed")], spoken(0.5)]
    assert await say(stage, level_db=USER_DB)
    assert await say(stage), "the reply that it stopped is not made again, so it needs an answer"
    await finish(stage)


async def test_what_the_client_commits_is_taken():
    stage = await opened()
    await stage.hear(talk(1.2, seed=6, level_dbfs=SOFT_DB))
    stage.conversation.commit()
    await stage.hear(silence(1.0))
    assert len(stage.all(TurnCommitted)) == 2 and not stage.all(TurnIgnored)
    await finish(stage)


async def test_the_bundled_model_takes_the_users_turns_and_drops_a_distant_voice():
    dropped: dict[str, list[bool]] = {"user": [], "distant": []}
    questions = [Sound(each.sound[None], 24_000).resampled(16_000).samples[0] for each in gather().questions[:8]]
    for number, question in enumerate(questions):
        for name, gain, sound in (("user", 0.8, question), ("distant", 0.2, questions[number - 1])):
            stage = Stage.set(*(spoken(0.5) for _ in range(3)), classifier=ModelClassifier())
            begin = round(voiced_bounds(question)[0])
            for _ in range(2):
                await stage.hear(np.concatenate([silence(0.5), question[begin:], silence(2.5)]))
            await stage.hear(np.concatenate([np.float32(gain) * _in_a_hall(sound, name), silence(1.5)]))
            dropped[name].append(bool(stage.all(TurnIgnored)))
            await finish(stage)
    assert not any(dropped["user"]) and np.mean(dropped["distant"]) >= 0.75


def _in_a_hall(sound: np.ndarray, who: str) -> np.ndarray:
    """Reverberation of 0.4 s for a voice far from the microphone."""
    if who == "user":
        return sound
    time = np.arange(6400) / 16_000
    tail = np.random.default_rng(0).standard_normal(len(time)) * np.exp(-time / 0.06)
    tail[0] = 3.0
    return (np.convolve(sound, tail)[: len(sound)] / np.linalg.norm(tail)).astype(np.float32)
