"""Tool calls for speech-to-speech models that cannot make them: a chat model reads the transcript and decides.

Both models follow the same conversation. A reply starts in both at once: the chat model's is only read up to its first
piece. If that is a call, the reply is that call; if it is a word, the reply is that of the speech model, which was
generated and held meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatModel
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.backend import (
    ConversationBackend,
    ConversationState,
    OnTranscript,
    ReplyPlan,
    ReplyStream,
    ReplyTranscriber,
    TurnTranscript,
)
from vivavoce.dialogue.delegated_reply import DelegatedReply, may_call
from vivavoce.dialogue.events import Usage
from vivavoce.dialogue.items import Item, Samples
from vivavoce.dialogue.settings import ConversationSettings


class ToolDelegate:
    """A `ConversationBackend`: the inner one, whose tool calls a chat model makes."""

    def __init__(self, inner: ConversationBackend, chat: ChatModel, transcriber: ReplyTranscriber) -> None:
        self.input_rate, self.output_rate, self.transcribes = inner.input_rate, inner.output_rate, inner.transcribes
        self._inner = inner
        self._decider = CascadeBackend(WholeTurns(transcriber, inner.input_rate), chat, _NoVoice(inner.output_rate))
        self._decider.input_rate = inner.input_rate

    def open(self, on_transcript: OnTranscript) -> ConversationState:
        """The state of a new conversation, in both."""
        return DelegatingConversation(self._inner.open(on_transcript), self._decider.open(_ignore))


class _NoVoice:
    """The synthesiser of replies that are written."""

    def __init__(self, rate: int) -> None:
        self.rate = rate

    async def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Nothing."""
        silence: tuple[Samples, ...] = ()
        for samples in silence:
            yield samples


def _ignore(item: str, heard: TurnTranscript | Exception) -> None:
    """Transcripts of the decider are not the conversation's."""


class DelegatingConversation:
    """A `ConversationState` of both backends."""

    def __init__(self, inner: ConversationState, decider: ConversationState) -> None:
        self._inner, self._decider = inner, decider
        self._has_tools = False

    def set_history(self, past: Sequence[Item], settings: ConversationSettings) -> None:
        """Replace the history and the settings."""
        self._has_tools = bool(settings.tools)
        self._inner.set_history(past, settings)
        self._decider.set_history(past, settings)

    def listen(self, samples: Samples) -> None:
        """Add sound to the user's open turn."""
        self._inner.listen(samples)
        self._decider.listen(samples)

    def discard_turn(self) -> None:
        """Drop the open turn."""
        self._inner.discard_turn()
        self._decider.discard_turn()

    def commit_turn(self, item: str) -> None:
        """End the open turn, which becomes this item."""
        self._inner.commit_turn(item)
        if self._has_tools:  # otherwise nobody needs its transcript
            self._decider.commit_turn(item)
        else:
            self._decider.discard_turn()

    def reply(self, plan: ReplyPlan) -> ReplyStream:
        """Start a reply, held until its release."""
        inner = self._inner.reply(plan)
        settings = plan.settings
        if not may_call(settings):
            return UndelegatedReply(inner, self._decider)
        written = replace(plan, settings=replace(settings, modality="text"))
        return DelegatedReply(inner, self._decider.reply(written), must_call=settings.tool_choice != "auto")

    def pause(self) -> None:
        """Let its replies wait."""
        self._inner.pause()
        self._decider.pause()

    def resume(self) -> None:
        """Continue its replies."""
        self._inner.resume()
        self._decider.resume()

    async def close(self) -> None:
        """Drop its replies and release its memory."""
        await asyncio.gather(self._inner.close(), self._decider.close())


class UndelegatedReply:
    """A reply without tools: that of the speech model; the decider forgets the turn, which is part of the history."""

    def __init__(self, inner: ReplyStream, decider: ConversationState) -> None:
        self._inner, self._decider = inner, decider
        self.pieces, self.drop = inner.pieces, inner.drop

    def release(self, turn: str | None) -> None:
        """Play it."""
        self._inner.release(turn)
        if turn is not None:
            self._decider.discard_turn()

    @property
    def usage(self) -> Usage:
        """Rows of the speech model."""
        return self._inner.usage
