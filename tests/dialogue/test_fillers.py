"""Fillers on the simulated clock: when they are spoken, when not, and what they leave behind."""

import asyncio

import numpy as np
import pytest

from tests.dialogue.stage import Stage, spoken
from tests.dialogue.voices import silence, talk
from vivavoce.dialogue.backend import CallArguments, CallBegan, Ended
from vivavoce.dialogue.events import ReplyDone, ReplyStarted, ReplyText
from vivavoce.dialogue.fillers import FILLERS, FillerVoice, filler_language
from vivavoce.dialogue.history import History
from vivavoce.dialogue.items import Message, TextPart, ToolOutput
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.settings import ConversationSettings, RecognitionSettings

CALL = [CallBegan("call_1", "look"), CallArguments("{}"), Ended("completed")]
FILLER_SECONDS = 0.6


def fillers(seconds=0.8, covers_replies=True):
    async def speak(text, voice, speed):
        yield np.full(round(FILLER_SECONDS * 24_000), 0.1, np.float32)

    return DialogueOptions(fillers=FillerVoice(speak, seconds, covers_replies))


def started(stage, is_filler):
    return [
        (time, event.reply)
        for time, event in zip(stage.times, stage.events, strict=True)
        if isinstance(event, ReplyStarted) and event.is_filler == is_filler
    ]


def texts(stage):
    names = {reply for _, reply in started(stage, True)}
    return [event.delta for event in stage.events if isinstance(event, ReplyText) and event.reply in names]


async def after_a_call(options=None, script=None):
    stage = Stage.set(script or CALL, spoken(1.0, "Here it is."), options=options or fillers())
    stage.conversation.add(Message("user", (TextPart("look it up"),)))
    stage.conversation.reply()
    await stage.settle()
    return stage


async def test_a_tool_that_works_is_covered_by_fillers_and_its_answer_comes_after_them():
    stage = await after_a_call()
    await stage.hear(silence(3.0))
    times = [time for time, _ in started(stage, True)]
    assert len(times) == 2 and abs(times[0] - 0.8) < 0.1 and abs(times[1] - (0.8 + FILLER_SECONDS + 0.8)) < 0.15
    assert texts(stage) == list(FILLERS["en"][:2])
    stage.conversation.add(ToolOutput("call_1", "found"))
    stage.conversation.reply()
    await stage.hear(silence(3.0))
    assert stage.all(ReplyDone)[-1].reason == "completed" and len(started(stage, True)) == 2
    words = [item.content.parts[0] for item in stage.conversation.items if isinstance(item.content, Message)]
    assert len(words) == 2, "fillers are not part of the history"


async def test_the_next_filler_is_made_while_one_is_played():
    made: list[tuple[str, float]] = []

    async def speak(text, voice, speed):
        made.append((text, stage.clock.now()))
        await stage.clock.until(stage.clock.now() + 0.4)
        yield np.full(round(FILLER_SECONDS * 24_000), 0.1, np.float32)

    stage = await after_a_call(DialogueOptions(fillers=FillerVoice(speak)))
    begin = stage.clock.now()
    await stage.hear(silence(4.0))
    times = [time for time, _ in started(stage, True)]
    assert [text for text, _ in made] == list(FILLERS["en"])
    assert times[0] - begin == pytest.approx(0.8 + 0.4, abs=0.1), "nothing is made before somebody waits"
    assert times[1] - times[0] == pytest.approx(FILLER_SECONDS + 0.8, abs=0.1)


async def test_a_quick_tool_and_a_reply_with_sound_have_no_filler():
    stage = await after_a_call()
    await stage.hear(silence(0.5))
    stage.conversation.add(ToolOutput("call_1", "found"))
    stage.conversation.reply()
    await stage.hear(silence(4.0))
    assert started(stage, True) == [] and len(started(stage, False)) == 2


@pytest.mark.parametrize("covers_replies", [True, False])
async def test_a_slow_reply_is_covered_where_its_model_may_be_slow(covers_replies):
    ready = asyncio.Event()
    stage = await after_a_call(fillers(covers_replies=covers_replies), [ready, *spoken(1.0, "Here it is.")])
    await stage.hear(silence(1.2))
    assert len(started(stage, True)) == covers_replies
    ready.set()
    await stage.hear(silence(3.0))
    assert stage.all(ReplyDone)[-1].reason == "completed"


async def test_where_only_calls_are_covered_a_tool_is():
    stage = await after_a_call(fillers(covers_replies=False))
    await stage.hear(silence(1.2))
    assert texts(stage) == [FILLERS["en"][0]]


async def test_the_time_that_a_call_took_to_write_counts_as_silence():
    written = asyncio.Event()
    stage = await after_a_call(fillers(covers_replies=False), [written, *CALL])
    begin = stage.clock.now()
    await stage.hear(silence(1.0))
    assert started(stage, True) == [], "the model itself answers"
    written.set()
    await stage.hear(silence(1.0))
    (time, _), *_ = started(stage, True)
    assert time - begin == pytest.approx(1.0, abs=0.1)


async def test_without_fillers_nothing_is_said():
    stage = await after_a_call(DialogueOptions())
    await stage.hear(silence(3.0))
    assert started(stage, True) == []


async def test_a_filler_is_never_spoken_over_the_user_and_stops_when_the_user_speaks():
    stage = await after_a_call()
    await stage.hear(talk(1.6))
    assert started(stage, True) == [], "the user spoke all the time"
    stage = await after_a_call()
    await stage.hear(silence(0.9))
    assert len(started(stage, True)) == 1
    await stage.hear(np.concatenate([talk(1.5), silence(1.5)]))
    filler = started(stage, True)[0][1]
    ends = [event.reason for event in stage.all(ReplyDone) if event.reply == filler]
    assert len(ends) == 1
    stage.conversation.add(ToolOutput("call_1", "found"))
    await stage.hear(silence(3.0))
    assert stage.all(ReplyDone)[-1].reason == "completed"


def history(*texts):
    made = History()
    for text in texts:
        made.add(Message("user", (TextPart(text),)))
    return made


@pytest.mark.parametrize(
    ("words", "language", "expected"),
    [
        ("hello", None, "en"),
        ("现在几点", None, "zh"),
        ("今何時ですか", "en", "ja"),
        ("guten Tag", "de-DE", "de"),
        ("hej", "sv", "en"),
        ("", "fr", "fr"),
    ],
)
def test_the_language_is_that_of_the_user(words, language, expected):
    recognition = RecognitionSettings(() if language is None else (language,))
    assert filler_language(history(words), ConversationSettings(recognition=recognition)) == expected
    assert len(FILLERS[expected]) == 3
