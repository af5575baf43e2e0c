"""A conversation backend of recogniser, chat model and synthesiser. All three stream: speech starts with the first
sentence of the chat reply.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
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
from vivavoce.dialogue.events import (
    AudioPart,
    ConversationSettings,
    HostedCall,
    Item,
    Message,
    Samples,
    Tool,
    ToolCall,
    ToolOutput,
    Usage,
)
from vivavoce.dialogue.history import new_id, written
from vivavoce.errors import NothingToSayError
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)

PENDING_OUTPUT = "(There is no result yet.)"
DENIED_OUTPUT = "(The call was not approved, and was not made.)"


class LiveRecognition(Protocol):
    """Recognition of one turn while it lasts."""

    def hear(self, samples: Samples) -> None:
        """Add the next samples, 16 kHz."""
        ...

    async def text(self) -> str:
        """The transcript so far; more samples may follow."""
        ...


class CascadeRecogniser(Protocol):
    """Speech recognition of live turns."""

    def open(self, language: str | None) -> LiveRecognition:
        """Start the recognition of a turn."""
        ...


class Synthesiser(Protocol):
    """Text to speech."""

    rate: int

    def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Stream the sound at `rate`; closing the iterator stops the synthesis."""
        ...


@runtime_checkable
class StyledSynthesiser(Synthesiser, Protocol):
    """A synthesiser whose speaking style the user can change."""

    def with_user_requests(self, messages: Sequence[str]) -> Synthesiser:
        """The synthesiser in the style that these user messages request, if any."""
        ...


@dataclass(frozen=True)
class ChatText:
    """The next words of a chat reply."""

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
    """The end of a chat reply: its reason, and its usage where the endpoint reports it."""

    reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were in the KV cache already."""


ChatPiece = ChatText | ChatCall | ChatEnd


class ChatModel(Protocol):
    """A chat model, local or remote."""

    def reply(self, messages: Sequence[dict[str, Any]], settings: ConversationSettings) -> AsyncIterator[ChatPiece]:
        """Stream the reply; closing the iterator stops it."""
        ...


class WholeTurns:
    """A `CascadeRecogniser` by a transcriber of whole turns, which runs when the turn is likely over."""

    def __init__(self, transcriber: ReplyTranscriber, rate: int = 16_000) -> None:
        self._transcriber, self._rate = transcriber, rate

    def open(self, language: str | None) -> LiveRecognition:
        """Start the recognition of a turn."""
        return _WholeTurn(self._transcriber, self._rate, language)


@dataclass
class _WholeTurn:
    transcriber: ReplyTranscriber
    rate: int
    language: str | None

    def __post_init__(self) -> None:
        self._sound: list[Samples] = []
        self._requested: tuple[int, asyncio.Future[str]] | None = None

    def hear(self, samples: Samples) -> None:
        self._sound.append(samples)

    async def text(self) -> str:
        if self._requested is None or self._requested[0] != len(self._sound):
            sound = np.concatenate([np.zeros(0, np.float32), *self._sound])
            text = asyncio.ensure_future(self.transcriber.transcribe(sound, self.rate, self.language))
            self._requested = (len(self._sound), text)
        return await asyncio.shield(self._requested[1])


class CascadeBackend:
    """The `ConversationBackend`: recogniser → chat model → synthesiser."""

    input_rate = 16_000
    transcribes = True

    def __init__(self, recogniser: CascadeRecogniser, chat: ChatModel, synthesiser: Synthesiser) -> None:
        self.recogniser, self.chat, self.synthesiser = recogniser, chat, synthesiser
        self.output_rate = synthesiser.rate

    def open(self, on_transcript: OnTranscript) -> ConversationState:
        """The state of a new conversation."""
        return CascadeConversation(self, on_transcript)


class CascadeConversation:
    """A `ConversationState`: the history as text, and the recognition of the open turn."""

    def __init__(self, backend: CascadeBackend, on_transcript: OnTranscript) -> None:
        self.backend = backend
        self.transcripts: dict[str, asyncio.Future[str]] = {}
        self._on_transcript = on_transcript
        self._past: Sequence[Item] = ()
        self._settings = ConversationSettings()
        self._turn: LiveRecognition | None = None
        self.is_attended = asyncio.Event()  # a client is connected
        self.is_attended.set()
        self._replies: set[CascadeReply] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def set_history(self, past: Sequence[Item], settings: ConversationSettings) -> None:
        """Replace the history and the settings."""
        self._past, self._settings = tuple(past), settings
        known = {item.id for item in past}
        self.transcripts = {id: words for id, words in self.transcripts.items() if id in known}

    def listen(self, samples: Samples) -> None:
        """Add sound to the user's open turn."""
        if self._turn is None:
            self._turn = self.backend.recogniser.open(self._settings.language)
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
        self.transcripts[item] = words
        task = asyncio.ensure_future(self._report_words(item, words))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def reply(self, plan: ReplyPlan) -> ReplyStream:
        """Start a reply, held until its release."""
        past = self._past if plan.past is None else plan.past
        turn = self._turn if plan.includes_turn and plan.past is None else None
        turn_text = asyncio.ensure_future(turn.text()) if turn is not None else None
        reply = CascadeReply(self, plan, past, turn_text, self._replies.discard)
        self._replies.add(reply)
        return reply

    def pause(self) -> None:
        """Let its replies wait."""
        self.is_attended.clear()

    def resume(self) -> None:
        """Continue its replies."""
        self.is_attended.set()

    async def spoken_words(self, past: Sequence[Item]) -> dict[str, str]:
        """Transcripts of all spoken items of a history; those without one are recognised now."""
        texts = {}
        for item in past:
            if item.id in self.transcripts:
                texts[item.id] = await asyncio.shield(self.transcripts[item.id])
            elif _needs_words(item):
                assert isinstance(item.content, Message)
                recognition = self.backend.recogniser.open(self._settings.language)
                for part in item.content.parts:
                    if isinstance(part, AudioPart):
                        recognition.hear(await asyncio.to_thread(_at_rate, part, self.backend.input_rate))
                texts[item.id] = await recognition.text()
        return texts

    def commit_answered_turn(self, item: str, turn_text: "asyncio.Future[str] | None") -> None:
        """Make the open turn, which a released reply answers, this item."""
        self._turn = None
        if turn_text is not None:
            self.set_transcript(item, turn_text)

    async def close(self) -> None:
        """Drop its replies and cancel its tasks."""
        for reply in list(self._replies):
            reply.drop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _report_words(self, item: str, words: "asyncio.Future[str]") -> None:
        try:
            self._on_transcript(item, await asyncio.shield(words), True)
        except Exception as error:  # an error of the recogniser costs the transcript, not the conversation
            log_failure(logger, error, "recognition of a turn failed")
            self._on_transcript(item, error, True)


class CascadeReply:
    """A `ReplyStream`: from the transcript of the turn to text and sound."""

    def __init__(
        self,
        conversation: CascadeConversation,
        plan: ReplyPlan,
        past: Sequence[Item],
        turn_text: "asyncio.Future[str] | None",
        on_drop: Callable[["CascadeReply"], None],
    ) -> None:
        self.plan = plan
        self._conversation, self._past, self._turn_text, self._on_drop = conversation, past, turn_text, on_drop
        self._pieces = PieceQueue()
        self._synthesiser: Synthesiser = conversation.backend.synthesiser
        self._usage = Usage()
        self._generated_seconds = 0.0
        self._is_dropped = False
        self._task = asyncio.ensure_future(self._run())

    def pieces(self) -> AsyncIterator[Piece]:
        """The pieces, each as soon as it is generated."""
        return self._pieces.until_ended()

    def release(self, turn: str | None) -> None:
        """Make the turn that it answers an item."""
        if turn is not None:
            self._conversation.commit_answered_turn(turn, self._turn_text)

    def drop(self) -> None:
        """Stop generating; nothing more is emitted."""
        if not self._is_dropped:
            self._is_dropped = True
            self._task.cancel()
            self._on_drop(self)

    @property
    def usage(self) -> Usage:
        """Tokens used, known at the end."""
        return self._usage

    async def _run(self) -> None:
        try:
            reason = await self._reply()
            await self._pieces.put(Ended("max_output_tokens" if reason == "length" else "completed"))
        except Exception as error:  # an error of a part ends this reply, not the conversation
            log_failure(logger, error, "a reply of the cascade failed")
            await self._pieces.put(failed(error))

    async def _reply(self) -> str:
        settings = self.plan.settings
        await self._conversation.is_attended.wait()
        spoken = await self._conversation.spoken_words(self._past)
        messages = chat_messages(self._past, settings.instructions, spoken)
        if self._turn_text is not None:
            text = await asyncio.shield(self._turn_text)
            if not text.strip():
                return "stop"  # an empty transcript needs no answer
            messages.append({"role": "user", "content": text})
        await self._conversation.is_attended.wait()
        if isinstance(self._synthesiser, StyledSynthesiser):
            self._synthesiser = self._synthesiser.with_user_requests(
                [each["content"] for each in messages if each["role"] == "user"]
            )
        splitter, call = SentenceSplitter(), -1
        reason = "stop"
        stream = self._conversation.backend.chat.reply(messages, settings)
        async for piece in stream:
            await self._conversation.is_attended.wait()
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
                case ChatEnd(ended, prompt, completion, cached):
                    reason = ended
                    self._usage = Usage(input_text=prompt, output_text=completion, cached_text=cached)
        await self._say(splitter.flush())
        return reason

    async def _say(self, sentences: Sequence[str]) -> None:
        settings = self.plan.settings
        for sentence in sentences:
            await self._pieces.put(Wrote(sentence))
            if settings.modality == "audio" and any(letter.isalnum() for letter in sentence):
                with suppress(NothingToSayError):  # an emoji or a list mark cannot be spoken
                    async for samples in self._synthesiser.speak(sentence.strip(), settings.voice, settings.speed):
                        await self._pieces.put(Spoke(samples))
                        self._generated_seconds += len(samples) / self._synthesiser.rate
                        await self._wait_for_playback()

    async def _wait_for_playback(self) -> None:
        """Wait until the sound ahead of playback is within the plan's limit, and until a client is connected."""
        limit = self.plan.max_ahead
        await self._conversation.is_attended.wait()
        while limit is not None and (excess := self._generated_seconds - self.plan.played() - limit) > 0:
            await asyncio.sleep(excess)
            await self._conversation.is_attended.wait()


def chat_messages(past: Sequence[Item], instructions: str, spoken: dict[str, str]) -> list[dict[str, Any]]:
    """A history as chat messages; `spoken` has the transcripts of spoken items.

    Endpoints require parallel calls in one message, and the output of each directly after it: an output that came later
    moves there, and a call without one gets a placeholder.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    calls = [each for item in past if (each := _whole_call(item)) is not None]
    called = {call.call_id for call in calls}
    outputs: dict[str, list[str]] = {}
    for item in past:
        if isinstance(item.content, ToolOutput):
            outputs.setdefault(item.content.call_id, []).append(item.content.output)
        elif (call := _whole_call(item)) is not None and call.hosted is not None:
            outputs.setdefault(call.call_id, []).append(_hosted_output(call.hosted))
    for kind, group in groupby(past, key=lambda item: type(item.content)):
        if kind is ToolCall:
            messages += _call_messages([each for item in group if (each := _whole_call(item)) is not None], outputs)
            continue
        for item in group:
            if isinstance(item.content, Message):
                text = spoken.get(item.id) or written(item)
                if text:
                    messages.append({"role": item.content.role, "content": text})
            elif isinstance(item.content, ToolOutput) and item.content.call_id not in called:
                messages.append({"role": "system", "content": f"Output of a function: {item.content.output}"})
    return messages


def tool_schema(tool: Tool) -> dict[str, Any]:
    """A function as chat models are told of it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _whole_call(item: Item) -> ToolCall | None:
    """The call of an item; None for another item, for a call whose arguments were cut, and for one only asked for."""
    if not isinstance(item.content, ToolCall) or not item.is_complete:
        return None
    is_request = item.content.hosted is not None and item.content.hosted.state in ("asked", "approved")
    return None if is_request else item.content


def _hosted_output(call: HostedCall) -> str:
    if call.state == "denied":
        return DENIED_OUTPUT
    if call.error is not None:
        return f"Error: {call.error[2]}"
    return PENDING_OUTPUT if call.output is None else call.output


def _call_messages(calls: Sequence[ToolCall], outputs: dict[str, list[str]]) -> list[dict[str, Any]]:
    """One message with parallel calls, and a message with the output of each, which is taken out of `outputs`."""
    if not calls:
        return []

    def output(call: ToolCall) -> str:
        waiting = outputs.get(call.call_id)
        return waiting.pop(0) if waiting else PENDING_OUTPUT

    functions = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    answers = [{"role": "tool", "tool_call_id": call.call_id, "content": output(call)} for call in calls]
    return [{"role": "assistant", "content": None, "tool_calls": functions}, *answers]


def _at_rate(part: AudioPart, rate: int) -> Samples:
    return Sound(part.samples, part.rate).resampled(rate).samples[0]


def _needs_words(item: Item) -> bool:
    if not isinstance(item.content, Message) or item.content.role != "user" or written(item):
        return False
    return any(isinstance(part, AudioPart) and len(part.samples) for part in item.content.parts)
