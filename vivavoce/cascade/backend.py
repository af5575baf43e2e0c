"""Recogniser, chat model and synthesiser in a pipeline: each part passes on what it has as soon as it has it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vivavoce.audio.io import Sound
from vivavoce.cascade.sentences import SentenceSplitter
from vivavoce.dialogue.backend import (
    CallArguments,
    CallBegan,
    ConversationState,
    Ended,
    OnTranscript,
    Piece,
    PieceQueue,
    ReplyPlan,
    ReplyStream,
    ReplyTranscriber,
    Spoke,
    Wrote,
    failed,
)
from vivavoce.dialogue.events import AudioPart, ConversationSettings, Item, Message, Samples, ToolCall, Usage
from vivavoce.dialogue.history import new_id, written
from vivavoce.errors import NothingToSayError
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)


class LiveRecognition(Protocol):
    """A turn being recognised."""

    def hear(self, samples: Samples) -> None:
        """Its next sound, 16 kHz."""
        ...

    async def text(self) -> str:
        """What was said so far; the turn may go on after."""
        ...


class CascadeRecogniser(Protocol):
    """Speech recognition of live turns."""

    def open(self, language: str | None) -> LiveRecognition:
        """A turn begins."""
        ...


class Synthesiser(Protocol):
    """Text to speech."""

    rate: int

    def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Its sound as it is made, at `rate`; leaving it stops it."""
        ...


@runtime_checkable
class StyledSynthesiser(Synthesiser, Protocol):
    """One that can be asked for another way of speaking."""

    def after(self, said: Sequence[str]) -> Synthesiser:
        """The synthesiser in the style that these user messages ask for; most ask for none."""
        ...


@dataclass(frozen=True)
class ChatText:
    """The next words."""

    text: str


@dataclass(frozen=True)
class ChatCall:
    """The next part of a tool call; the first part of each has an id and a name."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ChatEnd:
    """The reply is over: why, and what it cost where the endpoint says so."""

    reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


ChatPiece = ChatText | ChatCall | ChatEnd


class ChatModel(Protocol):
    """Replies in writing."""

    def reply(self, messages: Sequence[dict[str, Any]], settings: ConversationSettings) -> AsyncIterator[ChatPiece]:
        """The reply as it comes; leaving it stops it."""
        ...


class WholeTurns:
    """A recogniser made of a transcriber that takes whole turns: it is asked when the turn is likely over."""

    def __init__(self, transcriber: ReplyTranscriber, rate: int = 16_000) -> None:
        self._transcriber, self._rate = transcriber, rate

    def open(self, language: str | None) -> LiveRecognition:
        """A turn begins."""
        return _WholeTurn(self._transcriber, self._rate, language)


@dataclass
class _WholeTurn:
    transcriber: ReplyTranscriber
    rate: int
    language: str | None

    def __post_init__(self) -> None:
        self._sound: list[Samples] = []
        self._known: tuple[int, asyncio.Future[str]] | None = None

    def hear(self, samples: Samples) -> None:
        self._sound.append(samples)

    async def text(self) -> str:
        if self._known is None or self._known[0] != len(self._sound):
            sound = np.concatenate([np.zeros(0, np.float32), *self._sound])
            asked = asyncio.ensure_future(self.transcriber.transcribe(sound, self.rate, self.language))
            self._known = (len(self._sound), asked)
        return await asyncio.shield(self._known[1])


class CascadeBackend:
    """Recogniser → chat model → synthesiser, behind the interface that speech-to-speech has."""

    input_rate = 16_000
    transcribes = True

    def __init__(self, recogniser: CascadeRecogniser, chat: ChatModel, synthesiser: Synthesiser) -> None:
        self.recogniser, self.chat, self.synthesiser = recogniser, chat, synthesiser
        self.output_rate = synthesiser.rate

    def open(self, heard: OnTranscript) -> ConversationState:
        """The state of a new conversation."""
        return CascadeConversation(self, heard)


class CascadeConversation:
    """The history as text, and the turn being recognised."""

    def __init__(self, pipeline: CascadeBackend, heard: OnTranscript) -> None:
        self.pipeline = pipeline
        self.words: dict[str, asyncio.Future[str]] = {}
        self._heard = heard
        self._past: Sequence[Item] = ()
        self._settings = ConversationSettings()
        self._turn: LiveRecognition | None = None
        self._replies: set[CascadeReply] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def set_history(self, past: Sequence[Item], settings: ConversationSettings) -> None:
        """Replace the history and the settings."""
        self._past, self._settings = tuple(past), settings
        known = {item.id for item in past}
        self.words = {id: words for id, words in self.words.items() if id in known}

    def listen(self, samples: Samples) -> None:
        """The next sound of the user's open turn."""
        if self._turn is None:
            self._turn = self.pipeline.recogniser.open(self._settings.language)
        self._turn.hear(samples)

    def discard_turn(self) -> None:
        """Drop the open turn."""
        self._turn = None

    def commit_turn(self, item: str) -> None:
        """End the open turn, which becomes this item."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self.set_transcript(item, asyncio.ensure_future(turn.text()))

    def set_transcript(self, item: str, words: "asyncio.Future[str]") -> None:
        """Set the transcript of an item, and report it when it is known."""
        self.words[item] = words
        task = asyncio.ensure_future(self._report_words(item, words))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def reply(self, plan: ReplyPlan) -> ReplyStream:
        """Start a reply; held."""
        past = self._past if plan.past is None else plan.past
        turn = self._turn if plan.includes_turn and plan.past is None else None
        asked = asyncio.ensure_future(turn.text()) if turn is not None else None
        reply = CascadeReply(self, plan, past, asked, self._replies.discard)
        self._replies.add(reply)
        return reply

    async def spoken_words(self, past: Sequence[Item]) -> dict[str, str]:
        """The words of all spoken items of a past, those not heard yet among them."""
        found = {}
        for item in past:
            if item.id in self.words:
                found[item.id] = await asyncio.shield(self.words[item.id])
            elif _needs_words(item):
                assert isinstance(item.content, Message)
                recognition = self.pipeline.recogniser.open(self._settings.language)
                for part in item.content.parts:
                    if isinstance(part, AudioPart):
                        recognition.hear(await asyncio.to_thread(_at_rate, part, self.pipeline.input_rate))
                found[item.id] = await recognition.text()
        return found

    def commit_answered_turn(self, item: str, asked: "asyncio.Future[str] | None") -> None:
        """A released reply has heard the open turn: it is this item now."""
        self._turn = None
        if asked is not None:
            self.set_transcript(item, asked)

    async def close(self) -> None:
        """Release what it holds."""
        for reply in list(self._replies):
            reply.drop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _report_words(self, item: str, words: "asyncio.Future[str]") -> None:
        try:
            self._heard(item, await asyncio.shield(words), True)
        except Exception as error:  # whatever a recogniser raises costs the words, not the conversation
            log_failure(logger, error, "recognition of a turn failed")
            self._heard(item, error, True)


class CascadeReply:
    """One reply on its way from the turn's words to sound."""

    def __init__(
        self,
        conversation: CascadeConversation,
        plan: ReplyPlan,
        past: Sequence[Item],
        asked: "asyncio.Future[str] | None",
        gone: Callable[["CascadeReply"], None],
    ) -> None:
        self.plan = plan
        self._conversation, self._past, self._asked, self._gone = conversation, past, asked, gone
        self._pieces = PieceQueue()
        self._voice: Synthesiser = conversation.pipeline.synthesiser
        self._usage = Usage()
        self._made_seconds = 0.0
        self._is_dropped = False
        self._task = asyncio.ensure_future(self._make())

    def pieces(self) -> AsyncIterator[Piece]:
        """What it consists of, as it is made."""
        return self._pieces.until_ended()

    def release(self, turn: str | None) -> None:
        """Let the turn it answers become an item."""
        if turn is not None:
            self._conversation.commit_answered_turn(turn, self._asked)

    def drop(self) -> None:
        """Stop making it."""
        if not self._is_dropped:
            self._is_dropped = True
            self._task.cancel()
            self._gone(self)

    @property
    def usage(self) -> Usage:
        """What it has cost so far."""
        return self._usage

    async def _make(self) -> None:
        try:
            reason = await self._reply()
            await self._pieces.put(Ended("max_output_tokens" if reason == "length" else "completed"))
        except Exception as error:  # whatever a part raises ends this reply, not the conversation
            log_failure(logger, error, "a reply of the cascade failed")
            await self._pieces.put(failed(error))

    async def _reply(self) -> str:
        settings = self.plan.settings
        spoken = await self._conversation.spoken_words(self._past)
        messages = chat_messages(self._past, settings.instructions, spoken)
        if self._asked is not None:
            asked = await asyncio.shield(self._asked)
            if not asked.strip():
                return "stop"  # an empty transcript: there is nothing to answer
            messages.append({"role": "user", "content": asked})
        if isinstance(self._voice, StyledSynthesiser):
            self._voice = self._voice.after([each["content"] for each in messages if each["role"] == "user"])
        splitter, call = SentenceSplitter(), -1
        reason = "stop"
        stream = self._conversation.pipeline.chat.reply(messages, settings)
        async for piece in stream:
            match piece:
                case ChatText(text):
                    await self._say(splitter.push(text) if settings.modality == "audio" else [text])
                case ChatCall(index, call_id, name, arguments):
                    if index != call:
                        call = index
                        await self._say(splitter.flush())
                        await self._pieces.put(CallBegan(call_id or new_id("call"), name or ""))
                    if arguments:
                        await self._pieces.put(CallArguments(arguments))
                case ChatEnd(ended, prompt, completion):
                    reason, self._usage = ended, Usage(input_text=prompt, output_text=completion)
        await self._say(splitter.flush())
        return reason

    async def _say(self, sentences: Sequence[str]) -> None:
        settings = self.plan.settings
        for sentence in sentences:
            await self._pieces.put(Wrote(sentence))
            if settings.modality == "audio" and any(letter.isalnum() for letter in sentence):
                with suppress(NothingToSayError):  # an emoji or a list mark cannot be spoken
                    async for samples in self._voice.speak(sentence.strip(), settings.voice, settings.speed):
                        await self._pieces.put(Spoke(samples))
                        self._made_seconds += len(samples) / self._voice.rate
                        await self._wait_for_playback()

    async def _wait_for_playback(self) -> None:
        """Make no more until what is made ahead has come down to the plan's limit."""
        limit = self.plan.max_ahead
        while limit is not None and (early := self._made_seconds - self.plan.played() - limit) > 0:
            await asyncio.sleep(early)


def chat_messages(past: Sequence[Item], instructions: str, spoken: dict[str, str]) -> list[dict[str, Any]]:
    """A history as chat messages; `spoken` has the words of spoken items."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in past:
        content = item.content
        if isinstance(content, Message):
            text = spoken.get(item.id) or written(item)
            if text:
                messages.append({"role": content.role, "content": text})
        elif isinstance(content, ToolCall):
            function = {"name": content.name, "arguments": content.arguments}
            call = {"id": content.call_id, "type": "function", "function": function}
            if messages and "tool_calls" in messages[-1]:  # calls made together are one message, or they are refused
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": "tool", "tool_call_id": content.call_id, "content": content.output})
    return messages


def _at_rate(part: AudioPart, rate: int) -> Samples:
    return Sound(part.samples, part.rate).resampled(rate).samples[0]


def _needs_words(item: Item) -> bool:
    if not isinstance(item.content, Message) or item.content.role != "user" or written(item):
        return False
    return any(isinstance(part, AudioPart) and len(part.samples) for part in item.content.parts)
