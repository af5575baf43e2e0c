"""A conversation that follows a script instead of a model: what it answers can be read off the question.

Turns end by loudness. The answer to "x" is the text "You said: x" and a tone whose pitch is a hash of the text, so that
a reply that reached the wrong session is heard at once. The words "wait", "fail" and "long", and a declared tool named
in the question, make replies that hang, fail, last 20 seconds, or call the tool.
"""

import asyncio
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vivavoce.dialogue import events as dialogue
from vivavoce.dialogue.conversation import ReplyRequest
from vivavoce.dialogue.items import AudioPart, Item, Message, TextPart, ToolCall, ToolOutput
from vivavoce.dialogue.settings import ConversationSettings, TurnSettings
from vivavoce.errors import CapacityError, InputError
from vivavoce.server.host import ModelCard

RATE = 16_000
FRAME = RATE // 50
LOUD = 0.05
REPLY_SECONDS = 0.4


def watermark(text: str) -> float:
    """The pitch of the reply that says this text."""
    return 300.0 + zlib.crc32(text.encode()) % 40 * 50.0


def tone(frequency: float, seconds: float, rate: int = RATE, amplitude: float = 0.3) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (amplitude * np.sin(2 * np.pi * frequency * time)).astype(np.float32)


def pitch(samples: np.ndarray, rate: int) -> float:
    """The strongest frequency of a sound."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * rate / len(samples))


@dataclass
class Reply:
    id: str
    item: str
    text: str
    settings: ConversationSettings
    is_out_of_band: bool
    played_ms: int = 0
    made_ms: int = 0
    is_made: bool = False


class ScriptedConversation:
    """Implements `Conversation` with loudness for ears and a script for a mind."""

    input_rate = RATE
    output_rate = RATE

    def __init__(self, settings: ConversationSettings) -> None:
        self.settings = settings
        self.items: list[Item] = []
        self.reply_settings: list[ConversationSettings] = []
        self.is_closed = self.is_paused = False
        self.heard = np.zeros(0, np.float32)
        self.total_ms = 0
        self._queue: asyncio.Queue[dialogue.Event | None] = asyncio.Queue()
        self._ids = itertools.count(1)
        self._reply: Reply | None = None
        self._last: Reply | None = None
        self._speaking: str | None = None
        self._silent_ms = 0

    async def events(self):
        while (event := await self._queue.get()) is not None:
            yield event

    # Ears

    def hear(self, samples) -> None:
        self.heard = np.concatenate([self.heard[-30 * RATE :], samples])
        self.total_ms += round(len(samples) * 1000 / RATE)
        if self.settings.turn.detector == "none":
            return
        is_loud = len(samples) > 0 and float(np.abs(samples).max()) > LOUD
        if is_loud and self._speaking is None:
            self._start_speech()
        if self._speaking is None:
            return
        self._silent_ms = 0 if is_loud else self._silent_ms + round(len(samples) * 1000 / RATE)
        if self._silent_ms >= self.settings.turn.silence_duration_ms:
            self._end_turn()

    unprocessed_seconds = 0.0

    async def drain_input(self, max_seconds=0.0) -> None:
        """Nothing is pending: `hear` does all."""

    def _start_speech(self) -> None:
        self._speaking, self._silent_ms = self._id("item"), 0
        self.emit(dialogue.SpeechStarted(self._speaking, max(self.total_ms - self.settings.turn.prefix_padding_ms, 0)))
        if self.settings.turn.interrupt_response:
            self._interrupt()

    def _interrupt(self) -> None:
        last = self._last
        if last is None or last.played_ms >= last.made_ms > 0:
            return
        self.emit(dialogue.OutputCleared(last.id))
        if self._reply is last:
            self._end(last, "turn_detected")
        self.emit(dialogue.ItemTruncated(self._cut(last.item, last.played_ms), last.played_ms))
        self._last = None

    def _end_turn(self) -> None:
        item, previous = self._take_heard(self._speaking)
        self.emit(dialogue.SpeechStopped(item.id, self.total_ms, self._silent_ms))
        self.emit(dialogue.TurnCommitted(item, previous))
        self._after_commit(item)
        if self.settings.turn.create_response:
            self.reply()

    def _take_heard(self, id: str | None) -> tuple[Item, str | None]:
        content = Message("user", (AudioPart(self.heard, RATE),))
        self.heard, self._speaking = np.zeros(0, np.float32), None
        return self.add(content, id)

    def _after_commit(self, item: Item) -> None:
        if self.settings.transcribe_input:
            text = f"tone {round(pitch(item.content.parts[0].samples, RATE), -1):g}"
            self.emit(dialogue.InputTranscript(item.id, text[:5], False))
            self.emit(dialogue.InputTranscript(item.id, text, True, 1.0))
            self._replace(item.id, Message("user", (replace(item.content.parts[0], transcript=text),)))

    # Commands

    def played(self, reply: str, milliseconds: int) -> None:
        if self._last is not None and self._last.id == reply:
            self._last.played_ms = milliseconds

    def update(self, change) -> None:
        self.settings = change(self.settings)

    def commit(self) -> Item:
        if len(self.heard) == 0:
            raise InputError("nothing was heard since the last turn")
        item, previous = self._take_heard(self._speaking)
        self.emit(dialogue.TurnCommitted(item, previous))
        self._after_commit(item)
        return item

    def clear_input(self) -> None:
        self.heard, self._speaking = np.zeros(0, np.float32), None

    def add(self, content, id=None, after=None):
        index = len(self.items) if after is None else 0 if after == "root" else self._index(after) + 1
        item = Item(id or self._id("item"), content)
        self.items.insert(index, item)
        return item, self.items[index - 1].id if index else None

    def item(self, id: str) -> Item:
        return self.items[self._index(id)]

    def delete(self, id: str) -> None:
        del self.items[self._index(id)]

    def truncate(self, id: str, audio_end_ms: int) -> Item:
        part = self.item(id).content.parts[0] if isinstance(self.item(id).content, Message) else None
        if not isinstance(part, AudioPart):
            raise InputError(f"item {id} holds no sound")
        if audio_end_ms > round(len(part.samples) * 1000 / part.rate):
            raise InputError(f"item {id} has less than {audio_end_ms} ms of sound")
        return self._cut(id, audio_end_ms)

    def reply(self, request=None) -> str:
        request = request or ReplyRequest()
        if self._reply is not None and not request.is_out_of_band:
            raise InputError(f"the reply {self._reply.id} is under way")
        settings = request.settings or self.settings
        self.reply_settings.append(settings)
        items = [item.content for item in self.items] if request.input is None else list(request.input)
        question = self._question(items)
        reply = Reply(self._id("resp"), self._id("item"), "", settings, request.is_out_of_band)
        if not request.is_out_of_band:
            self._reply = reply
        self.emit(dialogue.ReplyStarted(reply.id))
        self._answer(reply, question, items)
        return reply.id

    def cancel(self, reply=None) -> None:
        if self._reply is None or reply not in (None, self._reply.id):
            raise InputError("no reply is under way")
        self.emit(dialogue.OutputCleared(self._reply.id))
        self._end(self._reply, "client_cancelled")

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    async def close(self) -> None:
        self.is_closed = True
        self._queue.put_nowait(None)

    # Mind

    def _question(self, items) -> str:
        last = items[-1] if items else None
        if isinstance(last, ToolOutput):
            return last.output
        users = [content for content in items if isinstance(content, Message) and content.role == "user"]
        if not users:
            return "nothing"
        part = users[-1].parts[-1]
        return part.text if isinstance(part, TextPart) else f"tone {round(pitch(part.samples, part.rate), -1):g}"

    def _answer(self, reply: Reply, question: str, items) -> None:
        tool = next((tool for tool in reply.settings.tools if tool.name in question), None)
        if tool is not None and not isinstance(items[-1], ToolOutput):
            self._call(reply, tool.name)
            return
        if "fail" in question:
            self._done(reply, "failed", "the script says so")
            return
        previous = self.items[-1].id if self.items else None
        self.emit(dialogue.ReplyItemStarted(reply.id, reply.item, "message", previous))
        reply.text = f"You said: {question}"
        if not reply.is_out_of_band:
            self.items.append(Item(reply.item, self._said(reply), is_complete=False))
        self._say(reply)
        if "wait" not in question:
            self._end(reply, "completed")

    def _said(self, reply: Reply) -> Message:
        if reply.settings.modality == "text":
            return Message("assistant", (TextPart(reply.text),))
        seconds = 20.0 if "long" in reply.text else REPLY_SECONDS
        return Message("assistant", (AudioPart(tone(watermark(reply.text), seconds), RATE, reply.text),))

    def _say(self, reply: Reply) -> None:
        words = reply.text.split(" ")
        for index, word in enumerate(words):
            self.emit(dialogue.ReplyText(reply.id, reply.item, word if index == 0 else f" {word}"))
        if reply.settings.modality == "text":
            return
        sound = self._said(reply).parts[0].samples
        for begin in range(0, len(sound), RATE // 10):
            self.emit(dialogue.ReplyAudio(reply.id, reply.item, sound[begin : begin + RATE // 10]))
        reply.made_ms = round(len(sound) * 1000 / RATE)
        if not reply.is_out_of_band:
            self._last = reply

    def _call(self, reply: Reply, name: str) -> None:
        previous, call_id = (self.items[-1].id if self.items else None), self._id("call")
        arguments = json.dumps({"place": "here"})
        self.emit(dialogue.ReplyItemStarted(reply.id, reply.item, "tool_call", previous, name, call_id))
        for begin in range(0, len(arguments), 6):
            self.emit(dialogue.ToolArguments(reply.id, reply.item, arguments[begin : begin + 6]))
        item = Item(reply.item, ToolCall(call_id, name, arguments))
        self.items.append(item)
        self.emit(dialogue.ReplyItemDone(reply.id, item))
        self._done(reply, "completed")

    def _end(self, reply: Reply, reason: str) -> None:
        item = Item(reply.item, self._said(reply), reason == "completed")
        if not reply.is_out_of_band:
            item = replace(self.item(reply.item), is_complete=item.is_complete)  # it may have been cut already
            self.items[self._index(reply.item)] = item
        self.emit(dialogue.ReplyItemDone(reply.id, item))
        self._done(reply, reason)

    def _done(self, reply: Reply, reason: str, error: str | None = None) -> None:
        if self._reply is reply:
            self._reply = None
        self.emit(dialogue.ReplyDone(reply.id, reason, dialogue.Usage(3, 5, 7, 11), error))

    def _cut(self, id: str, end_ms: int) -> Item:
        part = self.item(id).content.parts[0]
        kept = part.samples[: end_ms * part.rate // 1000]
        words = (part.transcript or "").split(" ")
        share = len(kept) / max(len(part.samples), 1)
        text = " ".join(words[: round(share * len(words))])
        self._replace(id, Message("assistant", (AudioPart(kept, part.rate, text),)))
        return self.item(id)

    def _replace(self, id: str, content) -> None:
        index = self._index(id)
        self.items[index] = replace(self.items[index], content=content)

    def _index(self, id: str) -> int:
        for index, item in enumerate(self.items):
            if item.id == id:
                return index
        raise InputError(f"there is no item {id!r}")

    def _id(self, kind: str) -> str:
        return f"{kind}_{id(self):x}_{next(self._ids)}"

    def emit(self, event: dialogue.Event) -> None:
        self._queue.put_nowait(event)


@dataclass
class ScriptedHost:
    """A host of scripted conversations, all of which can be looked at."""

    settings: ConversationSettings = field(
        default_factory=lambda: ConversationSettings(turn=TurnSettings(silence_duration_ms=240))
    )
    is_ready: bool = True
    room: int = 1000
    opened: list[ScriptedConversation] = field(default_factory=list)
    models: Sequence[ModelCard] = (ModelCard("scripted-1", 1_700_000_000), ModelCard("scripted-2"))
    voices: Sequence[str] = ("ada", "ben")

    def open(self, settings: ConversationSettings, model: str) -> ScriptedConversation:
        if len(self.alive) >= self.room:
            raise CapacityError(f"no room for more than {self.room} conversations")
        self.opened.append(ScriptedConversation(settings))
        return self.opened[-1]

    def gauges(self) -> Mapping[str, float]:
        return {"queue_depth": 0.0, "kv_used_ratio": 0.25}

    @property
    def alive(self) -> list[ScriptedConversation]:
        return [conversation for conversation in self.opened if not conversation.is_closed]
