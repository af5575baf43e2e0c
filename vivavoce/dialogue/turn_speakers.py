"""The speakers of a conversation's turns: A to D, the same letter for the same voice in every turn."""

import asyncio
from collections.abc import Awaitable, Callable

from vivavoce.audio.diarization import SpeakerLabels, SpeakerTurn, diarize, with_margin
from vivavoce.audio.vad import RATE, voice_activity
from vivavoce.dialogue.events import SpeakerSegment
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.speaker import Embed

TranscribePart = Callable[[Samples], Awaitable[str | None]]
"""The text of a part of a turn; None: there is no recogniser for it."""


class TurnSpeakers:
    """Splits the transcripts of turns by speaker."""

    def __init__(self) -> None:
        self._labels = SpeakerLabels()
        self._is_free = asyncio.Lock()  # turns are labelled in their order

    async def segments(
        self, text: str, sound: Samples, embed: Embed, transcribe: TranscribePart
    ) -> tuple[SpeakerSegment, ...]:
        """The segments of a turn with this text and sound at 16 kHz; empty where no voice is found."""
        async with self._is_free:
            turns = await asyncio.to_thread(diarize, sound, embed, voice_activity(), self._labels)
        if len({turn.speaker for turn in turns}) < 2:
            return tuple(SpeakerSegment(turn.speaker, text, 0.0, len(sound) / RATE) for turn in turns[:1])
        found = [await self._segment(turn, sound, transcribe) for turn in turns]
        return tuple(segment for segment in found if segment is not None and segment.text)

    @staticmethod
    async def _segment(turn: SpeakerTurn, sound: Samples, transcribe: TranscribePart) -> SpeakerSegment | None:
        text = await transcribe(with_margin(sound, turn)[0])
        return None if text is None else SpeakerSegment(turn.speaker, text.strip(), turn.start, turn.end)
