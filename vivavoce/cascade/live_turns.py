"""Recognition of turns while they last.

While the user speaks, the turn so far is recognised again and again, at a bounded pace and with the lowest priority, so
that the chat model can read the words early. The words of a finished turn are those of one recognition of the whole
turn: what was written before does not change them.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vivavoce.cascade.interfaces import LiveRecognition, OnWords
from vivavoce.cascade.whole_turns import WholeTurn
from vivavoce.dialogue.backend import ReplyTranscriber, TurnTranscript
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.settings import RecognitionSettings
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)


class DraftingTranscriber(ReplyTranscriber, Protocol):
    """A transcriber that can also write drafts of turns that go on."""

    async def draft(self, samples: Samples, settings: RecognitionSettings, is_wanted: Callable[[], bool]) -> str | None:
        """The words of the samples so far, 16 kHz, with the lowest priority; None where they are no longer wanted."""
        ...

    async def finish(self, samples: Samples, settings: RecognitionSettings, draft: str) -> TurnTranscript:
        """The transcript of a whole turn, 16 kHz; its last draft may save time and does not change it."""
        ...


@dataclass(frozen=True)
class DraftPace:
    """How often the words so far are written."""

    every: float = 0.4
    """Seconds of new sound before the next draft."""
    max_share: float = 0.5
    """The share of the time that drafts of one turn may take: on a busy machine there are fewer of them."""
    max_seconds: float = 20.0
    """Longer turns have no more drafts: each costs as much as the whole turn so far."""


class LiveTurns:
    """A `CascadeRecogniser` that writes drafts while `may_draft` says that no other work is urgent."""

    def __init__(
        self,
        transcriber: DraftingTranscriber,
        may_draft: Callable[[], bool],
        rate: int = 16_000,
        pace: DraftPace | None = None,
    ) -> None:
        self.transcriber, self.may_draft, self.rate = transcriber, may_draft, rate
        self.pace = pace or DraftPace()

    def open(self, settings: RecognitionSettings, on_words: OnWords | None = None) -> LiveRecognition:
        """Start the recognition of a turn; `on_words` gets its drafts."""
        if on_words is None:
            return WholeTurn(self.transcriber, self.rate, settings)
        return LiveTurn(self, settings, on_words)


class LiveTurn(WholeTurn):
    """The recognition of one turn."""

    def __init__(self, turns: LiveTurns, settings: RecognitionSettings, on_words: OnWords) -> None:
        super().__init__(turns.transcriber, turns.rate, settings)
        self._turns, self._pace, self._on_words = turns, turns.pace, on_words
        self._heard = self._drafted = 0  # samples
        self._not_before = 0.0
        self._words = ""  # of the last draft
        self._draft: asyncio.Task[None] | None = None
        self._goes_on = True

    def hear(self, samples: Samples) -> None:
        """Add the next samples, and write a draft where one is due."""
        super().hear(samples)
        self._goes_on = True
        self._heard += len(samples)
        is_new = self._heard - self._drafted >= self._pace.every * self.rate
        is_short = self._heard <= self._pace.max_seconds * self.rate
        is_due = asyncio.get_running_loop().time() >= self._not_before
        if is_new and is_short and is_due and self._draft is None and self._turns.may_draft():
            self._draft = asyncio.create_task(self._write_draft())

    async def transcript(self) -> TurnTranscript:
        """The transcript so far; a draft in progress is dropped."""
        self._goes_on = False
        return await super().transcript()

    def close(self) -> None:
        """Drop the draft in progress."""
        self._goes_on = False

    async def _recognise(self) -> TurnTranscript:
        return await self._turns.transcriber.finish(self.sound, self.settings, self._words)

    def _is_wanted(self) -> bool:
        return self._goes_on and self._turns.may_draft()

    async def _write_draft(self) -> None:
        loop = asyncio.get_running_loop()
        began, self._drafted = loop.time(), self._heard
        try:
            words = await self._turns.transcriber.draft(self.sound, self.settings, self._is_wanted)
        except Exception as error:  # the whole turn is recognised all the same
            log_failure(logger, error, "a draft of a turn failed")
            return
        finally:
            self._draft = None
            self._not_before = loop.time() + (loop.time() - began) * (1 / self._pace.max_share - 1)
        self._words = words or self._words
        if words and self._goes_on:
            self._on_words(words.strip())
