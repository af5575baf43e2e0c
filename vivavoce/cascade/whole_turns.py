"""Recognition of whole turns, when they are likely over."""

import asyncio

import numpy as np

from vivavoce.cascade.interfaces import LiveRecognition, OnWords
from vivavoce.dialogue.backend import ReplyTranscriber, TurnTranscript, transcribe_turn
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.settings import RecognitionSettings


class WholeTurns:
    """A `CascadeRecogniser` by a transcriber of whole turns, which runs when the turn is likely over."""

    def __init__(self, transcriber: ReplyTranscriber, rate: int = 16_000) -> None:
        self._transcriber, self._rate = transcriber, rate

    def open(self, settings: RecognitionSettings, on_words: OnWords | None = None) -> LiveRecognition:
        """Start the recognition of a turn; there are no words before it is likely over."""
        return WholeTurn(self._transcriber, self._rate, settings)


class WholeTurn:
    """A `LiveRecognition` that transcribes all of a turn when its words are requested."""

    def __init__(self, transcriber: ReplyTranscriber, rate: int, settings: RecognitionSettings) -> None:
        self.transcriber, self.rate, self.settings = transcriber, rate, settings
        self._sound: list[Samples] = []
        self._requested: tuple[int, asyncio.Future[TurnTranscript]] | None = None

    @property
    def sound(self) -> Samples:
        """All samples so far."""
        return np.concatenate([np.zeros(0, np.float32), *self._sound])

    def hear(self, samples: Samples) -> None:
        """Add the next samples."""
        self._sound.append(samples)

    async def transcript(self) -> TurnTranscript:
        """The transcript so far; it is made once for the same samples."""
        if self._requested is None or self._requested[0] != len(self._sound):
            heard = asyncio.ensure_future(self._recognise())
            self._requested = (len(self._sound), heard)
        return await asyncio.shield(self._requested[1])

    async def _recognise(self) -> TurnTranscript:
        return await transcribe_turn(self.transcriber, self.sound, self.rate, self.settings)

    def close(self) -> None:
        """Nothing is in progress but what was requested."""
