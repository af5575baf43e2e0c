"""The user goes on after the end of the turn was detected: the reply is taken back, and both parts are one turn."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.dialogue.overlap_networks import network_in_doubt
from tests.dialogue.stage import WINDOW, InlineExecutor, Stage, spoken, with_turn
from tests.dialogue.voices import silence, talk
from vivavoce.dialogue.backend import CallArguments, CallBegan, Ended, TurnTranscript
from vivavoce.dialogue.events import (
    InputTranscript,
    ItemRetracted,
    ItemTruncated,
    OutputCleared,
    OverlapJudged,
    ReplyDone,
    ReplyStarted,
    SpeechStarted,
    TurnCommitted,
)
from vivavoce.dialogue.items import Message, TextPart
from vivavoce.dialogue.model_barge_in import ModelClassifier
from vivavoce.dialogue.session import DialogueOptions

pytestmark = pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of sockets that other tests left open
FIRST, REST = talk(1.2, seed=5), talk(0.9, seed=6)


async def paused(stage: Stage, pause: float, then: float = 0.6) -> None:
    """The user speaks, makes a pause, and goes on; 240 ms of silence end the turn."""
    await stage.hear(np.concatenate([silence(0.5), FIRST, silence(pause), REST, silence(then)]))


def seconds(item) -> float:
    (part,) = item.content.parts
    return len(part.samples) / part.rate


@pytest.mark.parametrize("ahead", [0.4, None], ids=["being made", "complete"])
async def test_a_turn_that_goes_on_takes_the_reply_back_and_is_one_turn(ahead):
    stage = Stage.set(spoken(4.0, "too early"), spoken(4.0, "in time"), ahead=ahead)
    await paused(stage, 0.6)
    first, whole = [event.item for event in stage.all(TurnCommitted)]
    assert [event.reason for event in stage.all(ReplyDone)][:1] == ["turn_detected" if ahead else "completed"]
    assert len(stage.all(OutputCleared)) == 1 and not stage.all(ItemTruncated)
    reply, turn = [event.item for event in stage.all(ItemRetracted)]
    assert turn == first.id and stage.conversation.items[0].id == whole.id
    known = {item.id for item in (*stage.conversation.items, *stage.backend.state.past)}
    assert not known & {reply, turn}, "neither history knows of the first part"
    assert seconds(whole) > 1.2 + 0.9 + 0.3 and seconds(first) < 1.9
    (part,) = whole.content.parts
    (begun,) = first.content.parts
    assert np.array_equal(part.samples[: len(begun.samples)], begun.samples)
    assert stage.backend.replies[-1].turn_windows * WINDOW >= len(begun.samples), "the model heard both parts"
    names = stage.names()
    assert names.index("SpeechStarted", 1) < names.index("ItemRetracted")
    await stage.close()
    stage.check()


async def test_a_turn_may_go_on_more_than_once():
    stage = Stage.set(*(spoken(4.0) for _ in range(3)))
    sound = [silence(0.5), FIRST, silence(0.6), REST, silence(0.6), talk(0.8, seed=8), silence(0.6)]
    await stage.hear(np.concatenate(sound))
    assert [isinstance(item.content, Message) for item in stage.conversation.items] == [True, True]
    assert seconds(stage.all(TurnCommitted)[-1].item) > 1.2 + 0.9 + 0.8
    assert len(stage.all(ItemRetracted)) == 4
    await stage.close()
    stage.check()


async def test_the_sound_is_joined_without_what_was_heard_twice():
    stage = Stage.set(spoken(4.0), spoken(4.0), options=DialogueOptions(echo=None))
    # The padding of the second part, 300 ms, reaches into the first.
    sound = np.concatenate([silence(0.5), FIRST, silence(0.32), REST, silence(0.6)]).astype(np.float32)
    await stage.hear(sound)
    assert stage.all(ItemRetracted)
    (part,) = stage.all(TurnCommitted)[-1].item.content.parts
    windows = sound[: len(sound) // WINDOW * WINDOW].reshape(-1, WINDOW)
    (start,) = np.flatnonzero((windows == part.samples[:WINDOW]).all(axis=1)) * WINDOW
    assert np.array_equal(part.samples, sound[start : start + len(part.samples)])
    await stage.close()


@pytest.mark.parametrize(
    ("options", "settings", "pause"),
    [
        (DialogueOptions(join_within_ms=0), with_turn(), 0.6),
        (DialogueOptions(), with_turn(), 1.7),
        (DialogueOptions(), with_turn(interrupt_response=False), 0.6),
        (DialogueOptions(), with_turn(create_response=False), 0.6),
    ],
    ids=["switched off", "after more of the reply was heard", "without interruptions", "without replies"],
)
async def test_what_follows_is_a_turn_of_its_own(options, settings, pause):
    stage = Stage.set(spoken(4.0), spoken(2.0), settings=settings, options=options)
    await paused(stage, pause)
    assert len(stage.all(TurnCommitted)) == 2 and not stage.all(ItemRetracted)
    assert seconds(stage.all(TurnCommitted)[1].item) < 2.0
    await stage.close()
    stage.check()


async def test_a_reply_that_was_played_to_its_end_stays():
    stage = Stage.set(spoken(0.3), spoken(2.0))
    await paused(stage, 0.9)
    assert len(stage.all(TurnCommitted)) == 2 and not stage.all(ItemRetracted)
    await stage.close()
    stage.check()


async def test_a_reply_that_called_a_function_stays():
    call = [CallBegan("call_1", "open_door"), CallArguments("{}")]
    stage = Stage.set([*spoken(2.0)[:-1], *call, Ended("completed")], spoken(2.0), ahead=None)
    await paused(stage, 0.6)
    assert len(stage.all(TurnCommitted)) == 2 and not stage.all(ItemRetracted)
    await stage.close()
    stage.check()


async def test_an_item_that_the_client_added_keeps_the_turns_apart():
    stage = Stage.set(spoken(4.0), spoken(2.0))
    await stage.hear(np.concatenate([silence(0.5), FIRST, silence(0.5)]))
    stage.conversation.add(Message("system", (TextPart("It is raining."),)))
    await stage.hear(np.concatenate([REST, silence(0.6)]))
    assert len(stage.all(TurnCommitted)) == 2 and not stage.all(ItemRetracted)
    await stage.close()
    stage.check()


async def test_a_long_turn_is_not_joined():
    stage = Stage.set(spoken(4.0), spoken(2.0), options=DialogueOptions(echo=None))
    await stage.hear(np.concatenate([silence(0.5), talk(30.5, seed=5), silence(0.6), REST, silence(0.6)]))
    assert not stage.all(ItemRetracted)
    await stage.close()
    stage.check()


async def test_a_client_may_still_refer_to_what_was_retracted():
    stage = Stage.set(spoken(4.0), spoken(2.0))
    await paused(stage, 0.6)
    reply, turn = [event.item for event in stage.all(ItemRetracted)]
    before = stage.conversation.items
    assert stage.conversation.item(turn).id == turn
    assert stage.conversation.truncate(reply, 100).id == reply, "a stock client truncates when it hears of speech"
    stage.conversation.delete(reply)
    assert stage.conversation.items == before
    await stage.close()
    stage.check()


async def test_the_words_of_the_first_part_alone_are_not_reported_any_more():
    stage = Stage.set(spoken(4.0), spoken(2.0))
    stage.conversation.update(lambda settings: replace(settings, transcribe_input=True))
    await paused(stage, 0.6)
    first, whole = [event.item.id for event in stage.all(TurnCommitted)]
    stage.backend.on_transcript(first, TurnTranscript("I'd like a table for"))
    stage.backend.on_transcript(whole, TurnTranscript("I'd like a table for four"))
    await asyncio.sleep(0)
    assert {event.item for event in stage.all(InputTranscript)} == {whole}
    assert [event.item for event in stage.all(SpeechStarted)] == [first, whole] and len(stage.all(ReplyStarted)) == 2
    await stage.close()
    stage.check()


async def over_the_first_words(classifier, turn_model, settings=None):
    """The user speaks, hears 0.2 s of the reply, and says something for 0.4 s."""
    asyncio.get_running_loop().set_default_executor(InlineExecutor())
    options = DialogueOptions(turn_model=turn_model, echo=None)
    stage = Stage.set(spoken(4.0), spoken(4.0), options=options, classifier=classifier, settings=settings)
    await stage.hear(np.concatenate([silence(0.5), FIRST, silence(0.45), REST[: 16 * 400], silence(0.6)]))
    await stage.close()
    stage.check()
    return stage


@pytest.mark.parametrize(
    ("finished", "verdict", "retracted"), [(0.02, "continuation", 2), (0.9, "backchannel", 0)], ids=["not", "it was"]
)
async def test_the_turn_model_says_whether_an_answered_turn_was_finished(finished, verdict, retracted):
    asked = []

    def model(sound):
        asked.append(len(sound) / 16_000)
        return finished

    stage = await over_the_first_words(ModelClassifier(network_in_doubt(0.0)), model)
    assert [event.verdict for event in stage.all(OverlapJudged)] == [verdict]
    assert len(stage.all(ItemRetracted)) == retracted
    (until_likely_end,) = asked
    assert until_likely_end < seconds(stage.all(TurnCommitted)[0].item) - 0.1


async def test_the_turn_model_is_not_asked_again_about_what_it_has_answered():
    asked = []

    def model(sound):
        asked.append(len(sound))
        return 0.6

    settings = with_turn(detector="semantic")
    stage = await over_the_first_words(ModelClassifier(network_in_doubt(0.0)), model, settings)
    assert [event.verdict for event in stage.all(OverlapJudged)] == ["backchannel"] and len(asked) == 1


async def test_a_turn_model_that_fails_leaves_it_to_the_sound():
    asked = []

    def model(sound):
        asked.append(len(sound))
        raise RuntimeError("no memory")

    for odds, verdict in ((0.0, "backchannel"), (3.0, "interruption")):
        asked.clear()
        stage = await over_the_first_words(ModelClassifier(network_in_doubt(odds)), model)
        assert [event.verdict for event in stage.all(OverlapJudged)] == [verdict] and len(asked) == 1
        assert bool(stage.all(ItemRetracted)) == (verdict == "interruption")


async def test_by_the_rules_a_reply_that_was_hardly_heard_yields_to_any_voice():
    stage = await over_the_first_words(None, lambda sound: pytest.fail("the rules do not ask"))
    assert len(stage.all(ItemRetracted)) == 2
