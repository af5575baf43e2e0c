"""Words of a turn while it lasts: now and then, dropped for urgent work, and without effect on the last ones."""

import asyncio

import numpy as np
import pytest

from vivavoce.cascade.live_turns import DraftPace, LiveTurns
from vivavoce.dialogue.backend import TurnTranscript
from vivavoce.dialogue.settings import RecognitionSettings

SECOND = np.zeros(16_000, np.float32)
ENGLISH = RecognitionSettings(("en",))


class Writer:
    """Writes the seconds it has heard; a draft takes until it `is_free`."""

    def __init__(self):
        self.drafts = []
        self.finished_from = []
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def transcribe(self, samples, rate, language=None):
        return f"{len(samples) / rate:.1f} s in all"

    async def finish(self, samples, settings, draft):
        self.finished_from.append(draft)
        return TurnTranscript(await self.transcribe(samples, 16_000))

    async def draft(self, samples, settings, is_wanted):
        self.drafts.append(len(samples) / 16_000)
        await self.is_free.wait()
        return f"{len(samples) / 16_000:.1f} s" if is_wanted() else None


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def writer():
    return Writer()


async def test_words_so_far_are_written_once_enough_is_new(writer):
    words = []
    turn = LiveTurns(writer, lambda: True, pace=DraftPace(every=0.5, max_share=1.0)).open(ENGLISH, words.append)
    for _ in range(8):
        turn.hear(SECOND[:4000])
        await settle()
    assert words == ["0.5 s", "1.0 s", "1.5 s", "2.0 s"]
    assert (await turn.transcript()).text == "2.0 s in all", (
        "the words of the turn are those of one recognition of all of it"
    )
    assert writer.finished_from == ["2.0 s"], "the recognition is told of the last draft"


async def test_a_draft_that_takes_long_is_followed_by_a_pause(writer):
    turn = LiveTurns(writer, lambda: True, pace=DraftPace(every=0.1, max_share=0.01)).open(ENGLISH, lambda words: None)
    writer.is_free.clear()
    turn.hear(SECOND)
    await asyncio.sleep(0.05)
    turn.hear(SECOND)
    assert writer.drafts == [1.0], "one at a time"
    writer.is_free.set()
    await settle()
    turn.hear(SECOND)
    await settle()
    assert writer.drafts == [1.0], "drafts take a hundredth of the time at most: the next is due in five seconds"


async def test_a_draft_is_dropped_at_the_end_of_the_turn_and_beside_urgent_work(writer):
    words, is_urgent = [], False
    turns = LiveTurns(writer, lambda: not is_urgent, pace=DraftPace(every=0.5, max_share=1.0))
    turn = turns.open(ENGLISH, words.append)
    writer.is_free.clear()
    turn.hear(SECOND)
    await settle()
    assert (await turn.transcript()).text == "1.0 s in all"
    writer.is_free.set()
    await settle()
    assert writer.drafts == [1.0] and not words
    is_urgent = True
    turn.hear(SECOND)
    await settle()
    assert writer.drafts == [1.0]
    is_urgent = False
    turn.hear(SECOND)
    await settle()
    assert writer.drafts == [1.0, 3.0] and words == ["3.0 s"], "the user went on, and is heard again"


async def test_a_discarded_turn_reports_nothing(writer):
    words = []
    turn = LiveTurns(writer, lambda: True).open(ENGLISH, words.append)
    writer.is_free.clear()
    turn.hear(SECOND)
    await settle()
    turn.close()
    writer.is_free.set()
    await settle()
    assert writer.drafts == [1.0] and not words


async def test_long_turns_are_drafted_no_more(writer):
    turn = LiveTurns(writer, lambda: True, pace=DraftPace(max_seconds=2.0, max_share=1.0)).open(ENGLISH, print)
    turn.hear(np.zeros(3 * 16_000, np.float32))
    await settle()
    assert not writer.drafts
