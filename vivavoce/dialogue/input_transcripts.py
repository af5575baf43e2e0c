"""Transcripts of the user's turns, made beside the conversation: stored in the history, and emitted as events."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from vivavoce.audio.vad import RATE
from vivavoce.dialogue.backend import ReplyTranscriber, TurnTranscript, transcribe_turn
from vivavoce.dialogue.events import InputTranscript, InputTranscriptFailed, SpeakerSegment
from vivavoce.dialogue.items import AudioPart, Item, Message, Samples
from vivavoce.dialogue.joined_turns import OpenTurn
from vivavoce.dialogue.partial_transcripts import PartialTranscripts
from vivavoce.dialogue.replies import ConversationContext, Replies
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.dialogue.speaker import Embed
from vivavoce.dialogue.turn_speakers import TurnSpeakers
from vivavoce.errors import public_message
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)


class InputTranscripts:
    """Transcribes the turns of one conversation, or takes the transcripts that its backend makes."""

    def __init__(
        self,
        context: ConversationContext,
        replies: Replies,
        transcriber: ReplyTranscriber | None,
        voices: Embed | None,
        backend_transcribes: bool,
        is_attended: asyncio.Event,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`voices` separates the speakers of a turn, `is_attended` is set while a client is connected, and `start`
        runs work beside the audio until the conversation is closed."""
        self._context, self._replies = context, replies
        self._transcriber, self._voices, self._backend_transcribes = transcriber, voices, backend_transcribes
        self._is_attended, self._start = is_attended, start
        self._partials = PartialTranscripts(self._text_of, self._on_partial_transcript, start)
        self._turn_speakers = TurnSpeakers()

    @property
    def _settings(self) -> ConversationSettings:
        return self._context.settings

    def end_partials(self) -> None:
        """Report nothing more of the open turn."""
        self._partials.end()

    def turn_grew(self, turn: OpenTurn) -> None:
        """Transcribe a turn that is not over, where its client wants to read along."""
        every = self._settings.recognition.partial_seconds
        if every is not None and self._settings.transcribe_input and self._transcriber is not None:
            self._partials.turn_grew(turn, every)

    async def _text_of(self, sound: Samples) -> str:
        """The text alone of an open turn, or of a part of one; there is a transcriber."""
        assert self._transcriber is not None
        settings = replace(self._settings.recognition, with_logprobs=False)
        return (await transcribe_turn(self._transcriber, sound, RATE, settings)).text

    def _on_partial_transcript(self, item: str, text: str) -> None:
        self._context.emit(InputTranscript(item, text, False))

    def turn_committed(self, item: Item, sound: Samples) -> None:
        """Transcribe a turn that is over, unless the backend does."""
        self._partials.end()
        transcriber = self._transcriber
        if self._settings.transcribe_input and not self._backend_transcribes and transcriber is not None:
            self._start(self._transcribe(item.id, sound, transcriber))

    async def _transcribe(self, item: str, sound: Samples, transcriber: ReplyTranscriber) -> None:
        """Transcribe a turn once the reply has sound: the reply is more urgent."""
        if self._replies.generating is not None:
            await self._replies.generating.wait_for_output()
        await self._is_attended.wait()
        try:
            transcript = await transcribe_turn(transcriber, sound, RATE, self._settings.recognition)
        except Exception as error:  # an error of the transcriber costs the transcript, not the conversation
            log_failure(logger, error, "transcription of a turn failed")
            self.take(item, error)
            return
        self.take(item, transcript)

    def take(self, item: str, heard: TurnTranscript | Exception) -> None:
        """Store and emit the transcript of a turn, or emit why there is none."""
        if self._context.history.retracted(item) is not None:
            return  # the turn that it became part of has its words
        if isinstance(heard, Exception):
            if self._settings.transcribe_input:
                self._context.emit(InputTranscriptFailed(item, public_message(heard) or type(heard).__name__))
            return
        seconds = self._store(item, heard.text)
        if not self._settings.transcribe_input:
            return
        transcript = InputTranscript(item, heard.text, True, seconds, heard.logprobs, heard.languages)
        if self._settings.recognition.with_speakers and self._voices is not None and heard.text:
            self._start(self._emit_by_speaker(transcript, self._voices))
        else:
            self._context.emit(transcript)

    async def _emit_by_speaker(self, transcript: InputTranscript, voices: Embed) -> None:
        """Emit a transcript with its speakers; where there are several, each is transcribed again."""
        segments: tuple[SpeakerSegment, ...] = ()
        try:
            (part,) = self._parts_of(transcript.item)
            segments = await self._turn_speakers.segments(transcript.text, part.samples, voices, self._transcribe_part)
        except Exception as error:  # without speakers the transcript is still right
            log_failure(logger, error, "the speakers of a turn could not be separated")
        self._context.emit(replace(transcript, segments=segments))

    def _parts_of(self, item: str) -> list[AudioPart]:
        content = self._context.history.find(item).content
        return [part for part in content.parts if isinstance(part, AudioPart)] if isinstance(content, Message) else []

    async def _transcribe_part(self, sound: Samples) -> str | None:
        return None if self._transcriber is None else await self._text_of(sound)

    def _store(self, item: str, text: str) -> float:
        """Store a transcript in its item; returns the item's duration in seconds."""
        known = next((each for each in self._context.history if each.id == item), None)
        if known is None or not isinstance(known.content, Message):
            return 0.0
        part = known.content.parts[0]
        if not isinstance(part, AudioPart):
            return 0.0
        content = Message(known.content.role, (AudioPart(part.samples, part.rate, text),))
        self._context.history.replace(Item(item, content, known.is_complete))
        return len(part.samples) / part.rate
