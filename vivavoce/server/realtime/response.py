"""One response in the protocol: its events, from `response.created` to `response.done`, and its encoded audio."""

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from msgspec import UNSET

from vivavoce.audio.io import check_finite
from vivavoce.dialogue import events as dialogue
from vivavoce.dialogue.events import EndReason, ReplyItemStarted
from vivavoce.dialogue.history import written
from vivavoce.dialogue.items import AudioPart, Item, Message, TextPart, ToolCall
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.audio_events import OPUS, AudioHead, AudioPiece, Encoding
from vivavoce.server.realtime.event_log import EventLog
from vivavoce.server.realtime.items import (
    CachedTokenDetails,
    ConversationItem,
    EndStatus,
    InputTokenDetails,
    Response,
    ResponseAudio,
    ResponseAudioOutput,
    ResponseStatus,
    ResponseUsage,
    StatusDetails,
    TokenDetails,
    wire_item,
)
from vivavoce.server.realtime.output import OutputPiece, Pacing
from vivavoce.server.realtime.server_events import ServerEvent
from vivavoce.server.realtime.session_settings import output_format, voice_name
from vivavoce.server.realtime.session_types import Binary, Modality, RealtimeSessionObject
from vivavoce.server.wire import ErrorDetail

STATUS: dict[EndReason, EndStatus] = {
    "completed": "completed",
    "turn_detected": "cancelled",
    "client_cancelled": "cancelled",
    "max_output_tokens": "incomplete",
    "content_filter": "incomplete",
    "failed": "failed",
}


@dataclass
class OpenItem:
    """An item that is being sent."""

    started: ReplyItemStarted
    output_index: int
    text: str = ""


@dataclass
class ResponseEncoder:
    """The state of a response. Each method returns the next events to send."""

    id: str
    session: RealtimeSessionObject
    """The session object when the response started, with the options of `response.create`."""
    conversation_id: str | None
    metadata: dict[str, str] | None = None
    is_out_of_band: bool = False
    output: list[ConversationItem] = field(default_factory=list)
    open: dict[str, OpenItem] = field(default_factory=dict)
    items: list[str] = field(default_factory=list)
    """Ids of its items, including those not sent yet."""
    spoken: str | None = None
    """The item whose audio is being sent."""
    cut: EndReason | None = None
    """Why playback ended early; the conversation may have completed the response before."""
    problem: ErrorDetail | None = None
    """What went wrong although the response did not fail."""
    is_done: bool = False

    @property
    def modality(self) -> Modality:
        return self.session.output_modalities[0]

    def created(self) -> list[ServerEvent]:
        """Events of the start of the response."""
        return [events.ResponseCreated(self._response("in_progress", None, None))]

    def item_started(self, started: ReplyItemStarted) -> list[ServerEvent]:
        """Events of the start of an item, and of the content part of a message."""
        opened = OpenItem(started, len(self.output) + len(self.open))
        self.open[started.item] = opened
        item = wire_item(self._empty(started), "in_progress")
        sent: list[ServerEvent] = [events.OutputItemAdded(self.id, opened.output_index, item)]
        if not self.is_out_of_band:
            sent.append(events.ConversationItemAdded(started.previous, item))
        if started.kind == "message":
            sent.append(events.ContentPartAdded(*self._position(started.item), part=self._part("")))
        return sent

    def text(self, item: str, delta: str) -> list[ServerEvent]:
        """A delta of the text, or of the transcript of the audio; none for audio that was dropped."""
        if self.cut is not None and self.modality == "audio":
            return []
        self.open[item].text += delta
        kind = events.OutputAudioTranscriptDelta if self.modality == "audio" else events.OutputTextDelta
        return [kind(*self._position(item), delta=delta)]

    def arguments(self, item: str, delta: str) -> list[ServerEvent]:
        """A delta of the arguments of a tool call."""
        opened = self.open[item]
        opened.text += delta
        if opened.started.hosted is not None:
            is_call = opened.started.hosted.state == "running"
            return [events.McpCallArgumentsDelta(*self._position(item), delta=delta)] if is_call else []
        call_id = opened.started.call_id or item
        return [events.FunctionCallArgumentsDelta(*self._position(item), call_id=call_id, delta=delta)]

    def item_done(self, item: Item) -> list[ServerEvent]:
        """Events of the end of an item, complete or not."""
        opened = self.open[item.id]
        is_cut = self.cut is not None and self.modality == "audio" and isinstance(item.content, Message)
        if is_cut and self.is_out_of_band:  # the history does not say what was heard
            item = self._item_until_sent(opened)
        wire = wire_item(item)
        sent = [*self._content_done(item, opened), events.OutputItemDone(self.id, opened.output_index, wire)]
        if not self.is_out_of_band and not is_running(item):
            sent.append(events.ConversationItemDone(opened.started.previous, wire))
        del self.open[item.id]
        self.output.append(wire)
        return sent

    def done(self, reason: EndReason, usage: dialogue.Usage, error: str | None) -> list[ServerEvent]:
        """Events of the end of the response, and of the items that are still open."""
        self.is_done = True
        sent: list[ServerEvent] = []
        for opened in list(self.open.values()):
            sent += self.item_done(self._item_until_sent(opened))
        reason = self.final_reason(reason)
        return [*sent, events.ResponseDone(self._response(STATUS[reason], self._details(reason, error), usage))]

    def _details(self, reason: EndReason, error: str | None) -> StatusDetails:
        problem = self.problem or UNSET
        if reason == "failed":
            problem = events.server_error("reply_failed", error or "the reply could not be generated")
        if reason in ("completed", "failed"):
            return StatusDetails(type=STATUS[reason], error=problem)
        return StatusDetails(type=STATUS[reason], reason=reason, error=problem)

    def final_reason(self, reason: EndReason) -> EndReason:
        """Why the response ended, taking into account that its playback may have been cut."""
        return self.cut if self.cut and reason == "completed" else reason

    def _content_done(self, item: Item, opened: OpenItem) -> list[ServerEvent]:
        position, content = self._position(item.id), item.content
        if isinstance(content, ToolCall) and content.hosted is not None:
            is_call = content.hosted.state == "running"
            return [events.McpCallArgumentsDone(*position, arguments=content.arguments)] if is_call else []
        if isinstance(content, ToolCall):
            call_id = opened.started.call_id or item.id
            return [
                events.FunctionCallArgumentsDone(
                    *position, call_id=call_id, name=content.name, arguments=content.arguments
                )
            ]
        text = _text_of(item)
        part_done = events.ContentPartDone(*position, part=self._part(text))
        if self.modality == "text":
            return [events.OutputTextDone(*position, text=text), part_done]
        return [
            events.OutputAudioDone(*position),
            events.OutputAudioTranscriptDone(*position, transcript=text),
            part_done,
        ]

    def _part(self, text: str) -> events.ContentPartText | events.ContentPartAudio:
        return events.ContentPartAudio(text) if self.modality == "audio" else events.ContentPartText(text)

    def _position(self, item: str) -> tuple[str, str, int]:
        return self.id, item, self.open[item].output_index

    def _empty(self, started: ReplyItemStarted) -> Item:
        if started.kind == "tool_call":
            return Item(started.item, _call_of(started, ""))
        return Item(started.item, Message("assistant", ()))

    def _item_until_sent(self, opened: OpenItem) -> Item:
        started = opened.started
        if started.kind == "tool_call":
            return Item(started.item, _call_of(started, opened.text), is_complete=False)
        part: TextPart | AudioPart = TextPart(opened.text)
        if self.modality == "audio":
            part = AudioPart(np.zeros(0, np.float32), 24_000, opened.text)
        return Item(started.item, Message("assistant", (part,)), is_complete=False)

    def _response(
        self, status: ResponseStatus, details: StatusDetails | None, usage: dialogue.Usage | None
    ) -> Response:
        spoken = self.session.audio.output
        audio = ResponseAudio(ResponseAudioOutput(spoken.format, voice_name(spoken.voice)))
        return Response(
            id=self.id,
            status=status,
            status_details=details,
            output=list(self.output),
            conversation_id=None if self.is_out_of_band else self.conversation_id,
            output_modalities=self.session.output_modalities,
            max_output_tokens=self.session.max_output_tokens,
            metadata=self.metadata,
            usage=None if usage is None else response_usage(usage),
            audio=audio if self.modality == "audio" else UNSET,
        )


def is_running(item: Item) -> bool:
    """Whether an item is a complete call that the server now makes; its end is told when there is an output."""
    content = item.content
    hosted = content.hosted if isinstance(content, ToolCall) else None
    return item.is_complete and hosted is not None and hosted.state == "running"


def _call_of(started: ReplyItemStarted, arguments: str) -> ToolCall:
    return ToolCall(started.call_id or started.item, started.tool_name or "", arguments, started.hosted)


def response_usage(usage: dialogue.Usage) -> ResponseUsage:
    """The usage object of a response."""
    input_tokens, output_tokens = usage.input_text + usage.input_audio, usage.output_text + usage.output_audio
    return ResponseUsage(
        total_tokens=input_tokens + output_tokens,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        input_token_details=InputTokenDetails(
            text_tokens=usage.input_text,
            audio_tokens=usage.input_audio,
            cached_tokens=usage.cached_text + usage.cached_audio,
            cached_tokens_details=CachedTokenDetails(text_tokens=usage.cached_text, audio_tokens=usage.cached_audio),
        ),
        output_token_details=TokenDetails(text_tokens=usage.output_text, audio_tokens=usage.output_audio),
    )


def _text_of(item: Item) -> str:
    return written(item) if isinstance(item.content, Message) else ""


# Audio


class AudioSink(Protocol):
    """Takes the audio of responses when it is due."""

    def pacing(self, options: ServerOptions) -> Pacing:
        """How far ahead of playback the audio is sent, and in which chunks."""
        ...

    def send(self, reply: ResponseEncoder, piece: OutputPiece) -> None:
        """Send a chunk."""
        ...

    def clear(self) -> None:
        """Drop the audio that was not played."""
        ...


@dataclass
class ItemAudio:
    """How much of an item's audio was logged."""

    head: AudioHead
    samples: int = 0


@dataclass
class WebSocketOutput:
    """Logs the audio of responses; connections encode it: as events, or as binary frames for the conversation's."""

    log: EventLog
    rate: int
    binary: Binary | None = None
    _items: dict[str, ItemAudio] = field(default_factory=dict)

    def pacing(self, options: ServerOptions) -> Pacing:
        """With a lead that depends on the jitter."""
        return Pacing.of_sockets(options)

    def send(self, reply: ResponseEncoder, piece: OutputPiece) -> None:
        """Append a chunk to the log."""
        samples = np.asarray(piece.samples, np.float32)
        if not math.isfinite(np.dot(samples, samples)):  # quicker than the check itself
            check_finite(samples)
        item = self._items.get(piece.item)
        if item is None:
            item = self._items[piece.item] = ItemAudio(self._head(reply, piece.item))
        logged = AudioPiece(item.head, item.samples, samples.tobytes(), piece.is_end)
        item.samples += len(samples)
        if piece.is_end:
            del self._items[piece.item]
        if not logged.is_silent:
            self.log.append_audio(logged)

    def clear(self) -> None:
        """Forget the items whose audio is cut."""
        self._items.clear()

    def _head(self, reply: ResponseEncoder, item: str) -> AudioHead:
        format = output_format(reply.session)
        is_binary = self.binary is not None and not reply.is_out_of_band
        encoding: Encoding = OPUS if is_binary and self.binary == "opus" else format.type
        output_index = reply.open[item].output_index
        return AudioHead(reply.id, item, output_index, self.rate, encoding, format.rate, is_binary)
