"""One response as the protocol sends it: every event from `response.created` to the one `response.done`."""

import struct
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from msgspec import UNSET

from vivavoce.dialogue import events as dialogue
from vivavoce.dialogue.events import EndReason, Item, ReplyItemStarted
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.audio_formats import FormatWriter, OpusWriter, SoundWriter
from vivavoce.server.realtime.event_log import EventLog
from vivavoce.server.realtime.items import (
    CachedTokenDetails,
    ConversationItem,
    InputTokenDetails,
    Response,
    ResponseAudio,
    ResponseAudioOutput,
    ResponseUsage,
    StatusDetails,
    TokenDetails,
    wire_item,
)
from vivavoce.server.realtime.output import OutputPiece
from vivavoce.server.realtime.server_events import ServerEvent
from vivavoce.server.realtime.session_config import output_format, voice_name
from vivavoce.server.realtime.session_types import Binary, Modality, RealtimeSessionObject
from vivavoce.server.wire import ErrorDetail

AUDIO_FRAME = 1
FRAME_HEADER = struct.Struct("<BBHI")
"""Kind (1: audio), version (0), output index, milliseconds into the item; then a u32 event number, and the audio."""

STATUS: dict[EndReason, str] = {
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
    """What was sent of a response so far. Methods give the next events."""

    id: str
    session: RealtimeSessionObject
    """The session as it stood when the response began, with what the client overrode."""
    conversation_id: str | None
    metadata: dict[str, str] | None = None
    is_out_of_band: bool = False
    output: list[ConversationItem] = field(default_factory=list)
    open: dict[str, OpenItem] = field(default_factory=dict)
    items: list[str] = field(default_factory=list)
    """Ids of its items, also of those that were not sent yet."""
    spoken: str | None = None
    """The item whose audio is on the way."""
    cut: EndReason | None = None
    """Why it ended early although the conversation had made it whole: its audio was still waiting to be sent."""
    is_done: bool = False

    @property
    def modality(self) -> Modality:
        return self.session.output_modalities[0]

    def created(self) -> list[ServerEvent]:
        """The response begins."""
        return [events.ResponseCreated(self._response("in_progress", None, None))]

    def item_started(self, started: ReplyItemStarted) -> list[ServerEvent]:
        """Its next item begins; the one part of a message too."""
        opened = OpenItem(started, len(self.output) + len(self.open))
        self.open[started.item] = opened
        item = wire_item(self._empty(started), "in_progress")
        sent: list[ServerEvent] = [events.OutputItemAdded(self.id, opened.output_index, item)]
        if not self.is_out_of_band:
            sent.append(events.ConversationItemAdded(started.previous, item))
        if started.kind == "message":
            sent.append(events.ContentPartAdded(*self._place(started.item), part=self._part("")))
        return sent

    def text(self, item: str, delta: str) -> list[ServerEvent]:
        """Words: the text itself, or what the audio says; none of audio that was dropped."""
        if self.cut is not None and self.modality == "audio":
            return []
        self.open[item].text += delta
        kind = events.OutputAudioTranscriptDelta if self.modality == "audio" else events.OutputTextDelta
        return [kind(*self._place(item), delta=delta)]

    def audio(self, item: str, data: bytes) -> ServerEvent:
        return events.OutputAudioDelta(*self._place(item), delta=data)

    def arguments(self, item: str, delta: str) -> list[ServerEvent]:
        """A part of a tool call's arguments."""
        opened = self.open[item]
        opened.text += delta
        call_id = opened.started.call_id or item
        return [events.FunctionCallArgumentsDelta(*self._place(item), call_id=call_id, delta=delta)]

    def item_done(self, item: Item) -> list[ServerEvent]:
        """The item is whole, or ends here."""
        opened = self.open[item.id]
        if self.cut is not None and self.modality == "audio" and isinstance(item.content, dialogue.Message):
            item = self._item_until_sent(opened)
        wire = wire_item(item)
        sent = [*self._content_done(item, opened), events.OutputItemDone(self.id, opened.output_index, wire)]
        if not self.is_out_of_band:
            sent.append(events.ConversationItemDone(opened.started.previous, wire))
        del self.open[item.id]
        self.output.append(wire)
        return sent

    def done(self, reason: EndReason, usage: dialogue.Usage, error: str | None) -> list[ServerEvent]:
        """The one end of the response; items that are open still end with it."""
        self.is_done = True
        sent: list[ServerEvent] = []
        for opened in list(self.open.values()):
            sent += self.item_done(self._item_until_sent(opened))
        reason = self.final_reason(reason)
        return [*sent, events.ResponseDone(self._response(STATUS[reason], _details(reason, error), usage))]

    def final_reason(self, reason: EndReason) -> EndReason:
        """Why it ended, also where its audio was cut after the conversation had made it whole."""
        return self.cut if self.cut and reason == "completed" else reason

    def _content_done(self, item: Item, opened: OpenItem) -> list[ServerEvent]:
        place, content = self._place(item.id), item.content
        if isinstance(content, dialogue.ToolCall):
            call_id = opened.started.call_id or item.id
            return [
                events.FunctionCallArgumentsDone(
                    *place, call_id=call_id, name=content.name, arguments=content.arguments
                )
            ]
        words = _words(item)
        part_done = events.ContentPartDone(*place, part=self._part(words))
        if self.modality == "text":
            return [events.OutputTextDone(*place, text=words), part_done]
        return [
            events.OutputAudioDone(*place),
            events.OutputAudioTranscriptDone(*place, transcript=words),
            part_done,
        ]

    def _part(self, words: str) -> events.ContentPartText | events.ContentPartAudio:
        return events.ContentPartAudio(words) if self.modality == "audio" else events.ContentPartText(words)

    def _place(self, item: str) -> tuple[str, str, int]:
        return self.id, item, self.open[item].output_index

    def _empty(self, started: ReplyItemStarted) -> Item:
        if started.kind == "tool_call":
            return Item(started.item, dialogue.ToolCall(started.call_id or started.item, started.tool_name or "", ""))
        return Item(started.item, dialogue.Message("assistant", ()))

    def _item_until_sent(self, opened: OpenItem) -> Item:
        started = opened.started
        if started.kind == "tool_call":
            call = dialogue.ToolCall(started.call_id or started.item, started.tool_name or "", opened.text)
            return Item(started.item, call, is_complete=False)
        part: dialogue.TextPart | dialogue.AudioPart = dialogue.TextPart(opened.text)
        if self.modality == "audio":
            part = dialogue.AudioPart(np.zeros(0, np.float32), 24_000, opened.text)
        return Item(started.item, dialogue.Message("assistant", (part,)), is_complete=False)

    def _response(self, status: str, details: StatusDetails | None, usage: dialogue.Usage | None) -> Response:
        spoken = self.session.audio.output
        audio = ResponseAudio(ResponseAudioOutput(spoken.format, voice_name(spoken.voice)))
        return Response(
            id=self.id,
            status=status,  # type: ignore[arg-type]
            status_details=details,
            output=list(self.output),
            conversation_id=None if self.is_out_of_band else self.conversation_id,
            output_modalities=self.session.output_modalities,
            max_output_tokens=self.session.max_output_tokens,
            metadata=self.metadata,
            usage=None if usage is None else response_usage(usage),
            audio=audio if self.modality == "audio" else UNSET,
        )


def response_usage(usage: dialogue.Usage) -> ResponseUsage:
    """What a response cost, in the protocol's words."""
    given, made = usage.input_text + usage.input_audio, usage.output_text + usage.output_audio
    return ResponseUsage(
        total_tokens=given + made,
        input_tokens=given,
        output_tokens=made,
        input_token_details=InputTokenDetails(
            text_tokens=usage.input_text,
            audio_tokens=usage.input_audio,
            cached_tokens_details=CachedTokenDetails(),
        ),
        output_token_details=TokenDetails(text_tokens=usage.output_text, audio_tokens=usage.output_audio),
    )


def _details(reason: EndReason, error: str | None) -> StatusDetails:
    if reason == "completed":
        return StatusDetails(type="completed")
    if reason == "failed":
        message = error or "the reply could not be made"
        return StatusDetails(
            type="failed", error=ErrorDetail(type="server_error", code="reply_failed", message=message)
        )
    return StatusDetails(type=STATUS[reason], reason=reason)  # type: ignore[arg-type]


def _words(item: Item) -> str:
    if not isinstance(item.content, dialogue.Message):
        return ""
    parts = item.content.parts
    return "".join((part.transcript or "") if isinstance(part, dialogue.AudioPart) else part.text for part in parts)


# Audio


class AudioSink(Protocol):
    """Takes the audio of responses when it is to go out."""

    def send(self, reply: ResponseEncoder, piece: OutputPiece) -> None:
        """Send a piece now."""
        ...

    def clear(self) -> None:
        """Drop what was not played."""
        ...


@dataclass
class ItemAudioStream:
    """The encoder of one item's audio."""

    writer: SoundWriter
    seconds: float = 0.0


@dataclass
class WebSocketOutput:
    """Audio into the event log. Binary frames are only for replies of the conversation, one at a time."""

    log: EventLog
    rate: int
    binary: Binary | None = None
    _streams: dict[str, ItemAudioStream] = field(default_factory=dict)

    def send(self, reply: ResponseEncoder, piece: OutputPiece) -> None:
        """Encode a piece and log it."""
        stream = self._streams.get(piece.item)
        if stream is None:
            stream = self._streams[piece.item] = ItemAudioStream(self._writer(reply))
        packets = stream.writer.write(piece.samples) if len(piece.samples) else []
        if piece.is_end:
            packets += stream.writer.flush()
            del self._streams[piece.item]
        for packet in packets:
            self._send(reply, piece, packet, round(stream.seconds * 1000))
        stream.seconds += len(piece.samples) / self.rate

    def clear(self) -> None:
        """What waits in the writers is dropped."""
        self._streams.clear()

    def _writer(self, reply: ResponseEncoder) -> SoundWriter:
        if self._is_binary(reply) and self.binary == "opus":
            return OpusWriter(self.rate)
        return FormatWriter(self.rate, output_format(reply.session))

    def _is_binary(self, reply: ResponseEncoder) -> bool:
        return self.binary is not None and not reply.is_out_of_band

    def _send(self, reply: ResponseEncoder, piece: OutputPiece, data: bytes, start_ms: int) -> None:
        if not self._is_binary(reply):
            self.log.append(reply.audio(piece.item, data), is_sound=True)
            return
        header = FRAME_HEADER.pack(AUDIO_FRAME, 0, reply.open[piece.item].output_index, start_ms)
        self.log.append_frame(header, data)
