"""A server that only listens, or only speaks: `/v1/audio/*` and transcription sessions, and no conversations."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from vivavoce.dialogue.cascade import CascadeBackend, WholeTurns
from vivavoce.dialogue.chat_endpoint import ChatPiece
from vivavoce.dialogue.interface import Conversation, ConversationSettings, Samples
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.errors import CapacityError, InputError
from vivavoce.pipelines.recogniser_ear import LocalRecogniser
from vivavoce.server.host import ModelCard
from vivavoce.serving.audio import ASREndpoint, TTSEndpoint, requests


@dataclass
class AudioHost:
    """A `Host` without conversations: it writes down, it speaks, or both; sessions may be transcribed."""

    ear: LocalRecogniser | None = None
    speech: TTSEndpoint | None = None
    transcriber: ASREndpoint | None = None
    options: DialogueOptions = field(default_factory=DialogueOptions)
    settings: ConversationSettings = field(default_factory=ConversationSettings)
    is_ready: bool = False

    @property
    def name(self) -> str:
        """Its models."""
        return " and ".join(card.id for card in self.models)

    @property
    def models(self) -> Sequence[ModelCard]:
        """Who listens, and who speaks."""
        return [ModelCard(each.model) for each in (self.transcriber, self.speech) if each is not None]

    @property
    def voices(self) -> Sequence[str]:
        """None: nobody converses."""
        return []

    @property
    def parts(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """What runs while it is served."""
        return [] if self.ear is None else [self.ear]

    def open(self, settings: ConversationSettings, model: str) -> Conversation:
        """A conversation in which nobody answers: the user's words are all there is of it."""
        if self.ear is None:
            raise CapacityError("this server speaks and hears nobody: there are no sessions here")
        listening = CascadeBackend(WholeTurns(self.ear), NOBODY, NOBODY)
        return LiveConversation(listening, settings, replace(self.options, transcriber=self.ear))

    def gauges(self) -> Mapping[str, float]:
        """What waits, and what is being done."""
        waiting = 0 if self.ear is None else self.ear.waiting
        return {"queue_depth": float(waiting), **requests(self.speech, self.transcriber)}

    async def warm_up(self) -> None:
        """Let everything work once; then clients may come."""
        if self.ear is not None:
            await self.ear.warm_up()
        if self.speech is not None:
            await self.speech.voice.warm_up()
        self.is_ready = True


class NoConversationBackend:
    """The chat model and the voice of a server that only listens."""

    rate = 24_000

    def reply(self, messages: Sequence[dict[str, Any]], settings: ConversationSettings) -> AsyncIterator[ChatPiece]:
        """Says so."""
        raise InputError("this server writes down what it hears and answers nobody; ask for a transcription session")

    def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Says so."""
        raise InputError("this server writes down what it hears and has no voice")


NOBODY = NoConversationBackend()
