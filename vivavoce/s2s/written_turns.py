"""A conversation on MOSS-Speech in which a recogniser writes the user's turns down: the model reads them, and speaks.

For a model that understands text better than the voices of people, as the bundled miniature does.
"""

import logging
from typing import TYPE_CHECKING

import numpy as np

from vivavoce.dialogue.backend import OnTranscript, ReplyTranscriber, TurnTranscript
from vivavoce.dialogue.items import AudioPart, Item, Message, Samples
from vivavoce.log import log_failure
from vivavoce.models.interface import Row
from vivavoce.s2s.conversation import EncodedTurn, MossSpeechConversation
from vivavoce.s2s.reply import MossSpeechReply
from vivavoce.s2s.summary import TurnContent

if TYPE_CHECKING:
    from vivavoce.s2s.moss_speech import MossSpeechBackend

logger = logging.getLogger(__name__)


class WrittenTurnConversation(MossSpeechConversation):
    """A `ConversationState` that reports the words of every turn."""

    def __init__(self, backend: "MossSpeechBackend", recogniser: ReplyTranscriber, on_transcript: OnTranscript) -> None:
        super().__init__(backend)
        self._recogniser, self._on_transcript = recogniser, on_transcript
        self._failure: Exception | None = None  # of the recogniser, at the open turn

    async def _listen(self, samples: Samples) -> None:
        if self._turn is None:
            self._turn = EncodedTurn(self._backend.codec.speech_encoder.initial_state())
        self._turn.waiting.append(samples)

    def _open_turn_rows(self, codes: list[int]) -> list[Row]:
        return []  # its words are known at its end

    async def _whole_turn(self, turn: EncodedTurn) -> TurnContent:
        sound = np.concatenate([np.zeros(0, np.float32), *turn.waiting])
        self._failure = None
        try:
            return await self._words(sound, self._backend.input_rate)
        except Exception as error:
            self._failure = error
            raise

    async def _codes_of(self, item: Item, audio: AudioPart) -> TurnContent:
        assert isinstance(item.content, Message)
        if item.content.role == "user" and item.id not in self._codes:
            self._codes[item.id] = audio.transcript or await self._words(audio.samples, audio.rate)
        return self._readable(await super()._codes_of(item, audio))

    def _turn_rows(self, content: TurnContent) -> list[Row]:
        return super()._turn_rows(self._readable(content))

    def _readable(self, content: TurnContent) -> TurnContent:
        normalise = self._backend.options.normalise
        return normalise(content) if isinstance(content, str) and normalise is not None else content

    async def _words(self, samples: Samples, rate: int) -> str:
        return (await self._recogniser.transcribe(samples, rate, self._settings.recognition.language)).strip()

    async def _commit_turn(self, item: str) -> None:
        try:
            await super()._commit_turn(item)
        except Exception as error:  # it costs the turn, not the conversation
            log_failure(logger, error, "recognition of a turn failed")
        self._report(item)

    async def _adopt_reply(self, reply: MossSpeechReply, turn: str | None) -> None:
        await super()._adopt_reply(reply, turn)
        if turn is not None:
            self._report(turn)

    def _report(self, item: str) -> None:
        words = self._codes.get(item, self._failure)
        if isinstance(words, Exception):
            self._codes[item] = ""  # not to be recognised again with the history
        if isinstance(words, str | Exception):
            self._on_transcript(item, TurnTranscript(words) if isinstance(words, str) else words)
