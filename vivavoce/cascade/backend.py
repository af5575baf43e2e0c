"""A conversation backend of recogniser, chat model and synthesiser. All three stream: speech starts with the first
sentence of the chat reply.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from vivavoce.audio.io import Sound
from vivavoce.cascade.chat_messages import text_of
from vivavoce.cascade.interfaces import (
    CascadeRecogniser,
    ChatCall,
    ChatEnd,
    ChatModel,
    ChatText,
    LiveRecognition,
    PausableSpeech,
    ReadingChatModel,
    StyledSynthesiser,
    Synthesiser,
)
from vivavoce.cascade.pauses import SilenceTrimmer
from vivavoce.cascade.sentences import SentenceSplitter
from vivavoce.cascade.summary import ChatSummary
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
    Spoke,
    TurnTranscript,
    Wrote,
    failed,
)
from vivavoce.dialogue.events import Usage
from vivavoce.dialogue.history import new_id, written
from vivavoce.dialogue.items import AudioPart, Item, Message, Samples
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.errors import NothingToSayError
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)


class CascadeBackend:
    """The `ConversationBackend`: recogniser → chat model → synthesiser."""

    input_rate = 16_000
    transcribes = True

    def __init__(self, recogniser: CascadeRecogniser, chat: ChatModel, synthesiser: Synthesiser) -> None:
        self.recogniser, self.chat, self.synthesiser = recogniser, chat, synthesiser
        self.output_rate = synthesiser.rate
        self.awaited: set[CascadeReply] = set()
        """Replies without sound yet, of all conversations: nothing is computed in advance meanwhile."""

    def open(self, on_transcript: OnTranscript) -> ConversationState:
        """The state of a new conversation."""
        return CascadeConversation(self, on_transcript)


class CascadeConversation:
    """A `ConversationState`: the history as text, and the recognition of the open turn."""

    def __init__(self, backend: CascadeBackend, on_transcript: OnTranscript) -> None:
        self.backend = backend
        self.transcripts: dict[str, asyncio.Future[TurnTranscript]] = {}
        self._on_transcript = on_transcript
        self._past: Sequence[Item] = ()
        self._settings = ConversationSettings()
        self._turn: LiveRecognition | None = None
        self.is_attended = asyncio.Event()  # a client is connected
        self.is_attended.set()
        self._replies: set[CascadeReply] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._prompt = PromptReader(backend) if isinstance(backend.chat, ReadingChatModel) else None
        self.summary = ChatSummary(backend.chat, self.spoken_words)

    def set_history(self, past: Sequence[Item], settings: ConversationSettings) -> None:
        """Replace the history and the settings."""
        has_new_tools = bool(settings.tools) and settings.tools != self._settings.tools
        self._past, self._settings = tuple(past), settings
        if has_new_tools:  # their prompt is long: read it before the user speaks
            self._read_words("")
        known = {item.id for item in past}
        self.transcripts = {id: words for id, words in self.transcripts.items() if id in known}
        self.summary.follow(past, settings, is_busy=bool(self.backend.awaited))

    def listen(self, samples: Samples) -> None:
        """Add sound to the user's open turn."""
        if self._turn is None:
            on_words = self._read_words if self._prompt is not None else None
            self._turn = self.backend.recogniser.open(self._settings.recognition, on_words)
            self._read_words("")
        self._turn.hear(samples)

    def discard_turn(self) -> None:
        """Drop the open turn."""
        if self._turn is not None:
            self._turn.close()
        self._turn = None

    def commit_turn(self, item: str) -> None:
        """End the open turn, which becomes this item."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self.set_transcript(item, asyncio.ensure_future(turn.transcript()))

    def set_transcript(self, item: str, words: "asyncio.Future[TurnTranscript]") -> None:
        """Set the transcript of an item, and report it when it is known."""
        self.transcripts[item] = words
        task = asyncio.ensure_future(self._report_words(item, words))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def reply(self, plan: ReplyPlan) -> ReplyStream:
        """Start a reply, held until its release."""
        past = self._past if plan.past is None else plan.past
        turn = self._turn if plan.includes_turn and plan.past is None else None
        heard = asyncio.ensure_future(turn.transcript()) if turn is not None else None
        reply = CascadeReply(self, plan, past, heard, self._replies.discard)
        self._replies.add(reply)
        return reply

    def pause(self) -> None:
        """Let its replies wait, also those that compute a piece of sound now."""
        self.is_attended.clear()
        for reply in self._replies:
            reply.pause()

    def resume(self) -> None:
        """Continue its replies."""
        self.is_attended.set()
        for reply in self._replies:
            reply.resume()

    def _read_words(self, words: str) -> None:
        """Let the chat model read the history and the words of the open turn so far."""
        if self._prompt is not None:
            past, settings = self._past, self._settings

            async def messages() -> list[dict[str, Any]]:
                return self.summary.messages(past, settings.instructions, await self.spoken_words(past))

            self._prompt.read(messages, words, settings)

    async def spoken_words(self, past: Sequence[Item]) -> dict[str, str]:
        """Transcripts of all spoken items of a history; those without one are recognised now."""
        texts = {}
        for item in past:
            if item.id in self.transcripts:
                texts[item.id] = (await asyncio.shield(self.transcripts[item.id])).text
            elif _needs_words(item):
                assert isinstance(item.content, Message)
                recognition = self.backend.recogniser.open(self._settings.recognition)
                for part in item.content.parts:
                    if isinstance(part, AudioPart):
                        recognition.hear(await asyncio.to_thread(_at_rate, part, self.backend.input_rate))
                texts[item.id] = (await recognition.transcript()).text
        return texts

    def commit_answered_turn(self, item: str, heard: "asyncio.Future[TurnTranscript] | None") -> None:
        """Make the open turn, which a released reply answers, this item."""
        self._turn = None
        if heard is not None:
            self.set_transcript(item, heard)

    async def close(self) -> None:
        """Drop its replies and cancel its tasks."""
        for reply in list(self._replies):
            reply.drop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.discard_turn()
        await self.summary.close()
        if self._prompt is not None:
            await self._prompt.close()

    async def _report_words(self, item: str, words: "asyncio.Future[TurnTranscript]") -> None:
        try:
            self._on_transcript(item, await asyncio.shield(words))
        except Exception as error:  # an error of the recogniser costs the transcript, not the conversation
            log_failure(logger, error, "recognition of a turn failed")
            self._on_transcript(item, error)


class PromptReader:
    """Lets the chat model read a conversation's next prompt in the background; newer words replace those that wait."""

    def __init__(self, backend: CascadeBackend) -> None:
        assert isinstance(backend.chat, ReadingChatModel)
        self._backend, self._prompt = backend, backend.chat.open_prompt()
        self._next: tuple[MakeMessages, str, ConversationSettings] | None = None
        self._task: asyncio.Task[None] | None = None

    def read(self, messages: "MakeMessages", words: str, settings: ConversationSettings) -> None:
        """Read these messages and words next."""
        self._next = messages, words, settings
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_all())

    async def _read_all(self) -> None:
        try:
            while self._next is not None:
                (messages, words, settings), self._next = self._next, None
                if not self._backend.awaited:
                    await self._prompt.read(await messages(), words, settings)
        except Exception as error:  # what is not read now is read by the reply
            log_failure(logger, error, "the chat model could not read a prompt in advance")

    async def close(self) -> None:
        """Stop reading and release its memory."""
        self._next = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._prompt.close()


MakeMessages = Callable[[], Awaitable[list[dict[str, Any]]]]


class CascadeReply:
    """A `ReplyStream`: from the transcript of the turn to text and sound."""

    def __init__(
        self,
        conversation: CascadeConversation,
        plan: ReplyPlan,
        past: Sequence[Item],
        heard: "asyncio.Future[TurnTranscript] | None",
        on_drop: Callable[["CascadeReply"], None],
    ) -> None:
        self.plan = plan
        self._conversation, self._past, self._heard, self._on_drop = conversation, past, heard, on_drop
        self._pieces = PieceQueue()
        self._synthesiser: Synthesiser = conversation.backend.synthesiser
        self._pausable: PausableSpeech | None = None  # in progress
        self._usage = Usage()
        self._generated_seconds = 0.0
        self._is_dropped = False
        conversation.backend.awaited.add(self)
        self._task = asyncio.ensure_future(self._run())

    def pieces(self) -> AsyncIterator[Piece]:
        """The pieces, each as soon as it is generated."""
        return self._pieces.until_ended()

    def release(self, turn: str | None) -> None:
        """Make the turn that it answers an item."""
        if turn is not None:
            self._conversation.commit_answered_turn(turn, self._heard)

    def pause(self) -> None:
        """Pause the piece of sound that is computed now."""
        if self._pausable is not None:
            self._pausable.pause()

    def resume(self) -> None:
        """Continue it."""
        if self._pausable is not None:
            self._pausable.resume()

    def drop(self) -> None:
        """Stop generating; nothing more is emitted."""
        if not self._is_dropped:
            self._is_dropped = True
            self._conversation.backend.awaited.discard(self)
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
        finally:
            self._conversation.backend.awaited.discard(self)

    async def _reply(self) -> str:
        settings = self.plan.settings
        await self._conversation.is_attended.wait()
        spoken = await self._conversation.spoken_words(self._past)
        messages = self._conversation.summary.messages(self._past, settings.instructions, spoken)
        if self._heard is not None:
            text = (await asyncio.shield(self._heard)).text
            if not text.strip():
                return "stop"  # an empty transcript needs no answer
            messages.append({"role": "user", "content": text})
        await self._conversation.is_attended.wait()
        if isinstance(self._synthesiser, StyledSynthesiser):
            self._synthesiser = self._synthesiser.with_user_requests(
                [text_of(each) for each in messages if each["role"] == "user"]
            )
        splitter, call = SentenceSplitter(), -1
        reason = "stop"
        stream = self._conversation.backend.chat.reply(messages, settings)
        try:
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
        finally:
            await _close(stream)
        await self._say(splitter.flush())
        return reason

    async def _say(self, sentences: Sequence[str]) -> None:
        settings = self.plan.settings
        for sentence in sentences:
            await self._pieces.put(Wrote(sentence))
            if settings.modality == "audio" and any(letter.isalnum() for letter in sentence):
                with suppress(NothingToSayError):  # an emoji or a list mark cannot be spoken
                    await self._speak(sentence.strip())

    async def _speak(self, sentence: str) -> None:
        settings, trimmer = self.plan.settings, SilenceTrimmer(self._synthesiser.rate)
        await self._conversation.is_attended.wait()
        speech = self._synthesiser.speak(sentence, settings.voice, settings.speed)
        self._pausable = _pausable(speech)
        try:
            async for samples in speech:
                await self._emit(trimmer.push(samples))
            await self._emit(trimmer.flush(sentence))
        finally:
            self._pausable = None
            await _close(speech)

    async def _emit(self, samples: Samples) -> None:
        if len(samples):
            self._conversation.backend.awaited.discard(self)
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


def _pausable(speech: object) -> PausableSpeech | None:
    return speech if isinstance(speech, PausableSpeech) else None


@runtime_checkable
class _Closable(Protocol):
    async def aclose(self) -> None: ...


async def _close(iterator: object) -> None:
    """End an iterator now rather than when it is garbage-collected, where it can be."""
    if isinstance(iterator, _Closable):
        await iterator.aclose()


def _at_rate(part: AudioPart, rate: int) -> Samples:
    return Sound(part.samples, part.rate).resampled(rate).samples[0]


def _needs_words(item: Item) -> bool:
    if not isinstance(item.content, Message) or item.content.role != "user" or written(item):
        return False
    return any(isinstance(part, AudioPart) and len(part.samples) for part in item.content.parts)
