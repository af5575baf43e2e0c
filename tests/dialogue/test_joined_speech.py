"""Sentences with pauses end in one right answer, on real models; the clock advances with the sound."""

import asyncio
import json

import numpy as np
import pytest

from tests.dialogue.stage import RATE, WINDOW
from tests.server.test_live_conversation import Chat, Voice
from vivavoce import hub
from vivavoce.audio.io import Sound, read
from vivavoce.audio.player import SimulatedClock
from vivavoce.bench.turn_sounds import with_pause
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.local_recogniser import LocalRecogniser
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.events import ReplyText, TurnCommitted
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.s2s.moss_speech import load_moss_speech
from vivavoce.tts.kokoro import KokoroTTS

pytestmark = pytest.mark.full
PAUSES = (0.4, 0.7, 1.0)
MIN_LEAD = 0.1  # seconds of a reply that are always generated before more is heard: a machine that is fast enough
QUESTIONS = hub.BUNDLED / "questions"


async def heard(backend, sound: np.ndarray) -> tuple[list, str]:
    """The turns of a sound, spoken into a headset, and the last reply's words."""
    clock = SimulatedClock()
    options = DialogueOptions(echo=None)
    conversation = LiveConversation(backend, options=options, input_rate=RATE, clock=clock)
    events = []

    async def collect():
        async for event in conversation.events():
            events.append(event)

    async def keep_up():
        while (reply := conversation._replies.generating) and reply.playback.ends < clock.now() + MIN_LEAD:
            await asyncio.sleep(0.002)

    collecting = asyncio.create_task(collect())
    noise = np.random.default_rng(0).normal(0, 1e-4, len(sound) + 4 * RATE)
    sound = (np.pad(sound, (RATE // 2, 7 * RATE // 2)) + noise).astype(np.float32)
    for start in range(0, len(sound) - WINDOW, WINDOW):
        clock.advance(WINDOW / RATE)
        conversation.hear(sound[start : start + WINDOW])
        await asyncio.sleep(0)
        await keep_up()
    while (reply := conversation._replies.generating) is not None:
        clock.advance(0.1)
        await asyncio.wait([reply._task], timeout=0.01)
    await conversation.close()
    await collecting
    words = [event for event in events if isinstance(event, ReplyText)]
    last = "".join(event.delta for event in words if event.reply == words[-1].reply)
    return [event.item for event in events if isinstance(event, TurnCommitted)], last


@pytest.fixture
async def mini_speech():
    async with load_moss_speech(hub.resolve("mini-speech")) as backend:
        yield backend


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("name", ["13-room", "01-wake-up"])
async def test_a_question_with_a_pause_is_answered_as_a_whole(mini_speech, name, pause):
    (question,) = [each for each in json.loads((QUESTIONS / "questions.json").read_text()) if name in each["file"]]
    sound, _ = with_pause(read(QUESTIONS / question["file"], rate=RATE).samples[0], pause)
    turns, answer = await heard(mini_speech, sound)
    assert answer.strip() == question["reply"]
    assert len(turns) == 2, "the pause ended the turn, and it went on"


@pytest.mark.published
@pytest.mark.parametrize("pause", PAUSES)
async def test_an_order_with_two_pauses_is_recognised_as_a_whole(published_model, pause):
    tts = KokoroTTS.load(str(published_model("kokoro-82m")), "cpu")
    pieces = list(tts.speak("I'd like a table for four at eight.", "am_michael"))
    sound = Sound(np.concatenate([piece.samples for piece in pieces], axis=1), tts.rate).resampled(RATE).samples[0]
    ends = {word.word: round(word.end * RATE) for piece in pieces for word in piece.words}
    gap = np.zeros(round(pause * RATE), np.float32)
    sound = np.concatenate([part for each in np.split(sound, [ends["for"], ends["four"]]) for part in (each, gap)])
    async with LocalRecogniser.load(str(published_model("moonshine-base-en"))) as recogniser:
        turns, answer = await heard(CascadeBackend(WholeTurns(recogniser), Chat(), Voice()), sound)
    assert "a table for" in answer, answer  # Moonshine writes the numbers between the pauses in several ways
    (whole,) = turns[-1].content.parts
    assert len(whole.samples) > ends["four"] + 2 * len(gap), "all three parts"
