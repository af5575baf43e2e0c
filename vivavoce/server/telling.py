"""What a conversation tells, as events of the protocol in its order."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from vivavoce.dialogue import events as said
from vivavoce.errors import InputError, VivaError
from vivavoce.log import log_failure
from vivavoce.server.metrics import Metrics, TraceSpan, TurnClock, new_span
from vivavoce.server.realtime.output import OutputPiece, PacedOutput, Schedule
from vivavoce.server.wire_items import wire_item
from vivavoce.server.wire_reply import WireReply

logger = logging.getLogger(__name__)

Wire = dict[str, Any]
CLIENT_CUTS_SECONDS = 0.2  # in which a client that stops playing by itself has said how far it was


class AudioSink(Protocol):
    """Where the sound of replies goes: into events, into binary frames, or onto a track."""

    def say(self, reply: WireReply, piece: OutputPiece) -> None:
        """This sound goes out now."""
        ...

    def clear(self) -> None:
        """Drop what was not heard."""
        ...


@dataclass
class RequestedReply:
    """What a client asked of a reply."""

    session: Wire
    metadata: Wire | None = None
    is_out_of_band: bool = False


@dataclass
class EventEncoder:
    """Events of one conversation to events of one session. `tell` takes each when it is to go out."""

    conversation: said.Conversation
    tell: Callable[[Wire], None]
    speaker: AudioSink
    metrics: Metrics
    clock: TurnClock
    conversation_id: str
    session: Wire
    lead: Callable[[float], float]
    """Seconds by which sound is sent before it is to be heard, at a moment."""
    piece_seconds: float
    plays_itself: bool
    """Over WebRTC the server plays the sound, and says when it begins and ends."""
    asked: dict[str, RequestedReply] = field(default_factory=dict)
    answered_commits: set[str] = field(default_factory=set)
    """Turns that the client ended and was told of; the conversation tells of them once more."""
    truncated: tuple[str, int] | None = None
    """The item cut last, and where."""
    last_reply: str = ""
    _replies: dict[str, WireReply] = field(default_factory=dict)
    _transcripts: dict[str, str] = field(default_factory=dict)
    _lanes: dict[str, PacedOutput] = field(default_factory=dict)
    _side_tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _has_sounded: set[str] = field(default_factory=set)
    _told_by_client: str | None = None
    _spans: dict[str, TraceSpan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.main = self._new_lane()

    async def run(self) -> None:
        """Tell everything until the conversation is closed."""
        async with asyncio.TaskGroup() as self._tasks:  # a lane that fails ends the session, not its sound alone
            main = self._tasks.create_task(self.main.run())
            async for event in self.conversation.events():
                self._tell_one(event)
            for task in (main, *self._side_tasks.values()):
                task.cancel()

    def pause(self) -> None:
        """Nobody is connected: sound waits."""
        for lane in (self.main, *self._lanes.values()):
            lane.pause()

    def resume(self) -> None:
        """Somebody is connected again."""
        for lane in (self.main, *self._lanes.values()):
            lane.resume()

    @property
    def is_speaking(self) -> bool:
        """Whether a reply is under way, or its sound is."""
        return bool(self._replies) or not self.main.is_idle

    def cut(self, reply: str | None, truncates: bool = True) -> bool:
        """Cut a reply that is made but not yet heard to its end; whether there was one."""
        waiting = [known for known in self._replies.values() if reply in (None, known.id) and not known.is_out_of_band]
        has_cut = False
        for known in waiting:
            milliseconds = self._lane(known.id).heard_ms(known.id)
            known.cut = known.cut or "client_cancelled"
            if self._clear(known.id):
                has_cut = True
                if truncates:
                    self._truncate_unheard(known, milliseconds)
        return has_cut

    def reply_with(self, item: str) -> str | None:
        """The reply that is still telling this item, or has its sound on the way."""
        return next((reply.id for reply in self._replies.values() if item in reply.items), None)

    def announce_turn(self, item: said.Item, previous: str | None) -> None:
        """The user's turn became an item."""
        wire = wire_item(item)
        self.tell({"type": "input_audio_buffer.committed", "previous_item_id": previous, "item_id": item.id})
        self.tell({"type": "conversation.item.added", "previous_item_id": previous, "item": wire})
        self.tell({"type": "conversation.item.done", "previous_item_id": previous, "item": wire})

    def client_played(self, reply: str, milliseconds: int) -> None:
        """The client says how far it is; better than any guess of ours."""
        self._told_by_client = reply
        self.conversation.played(reply, milliseconds)

    # Lane's listener

    def sound(self, piece: OutputPiece) -> None:
        """Sound of a reply goes out."""
        reply = self._replies.get(piece.reply)
        if reply is None:
            return
        if len(piece.samples) and piece.reply not in self._has_sounded:
            self._has_sounded.add(piece.reply)
            self.clock.sounded()
            self._spans[piece.reply].sounded()
            if self.plays_itself:
                self.tell({"type": "output_audio_buffer.started", "response_id": piece.reply})
        try:
            self.speaker.say(reply, piece)
        except VivaError as error:
            log_failure(logger, error, "sound of a reply could not be sent")
            self._warned(said.Warned("sound_lost", f"a piece of the reply's sound could not be sent: {error}"))

    def heard(self, reply: str, milliseconds: int) -> None:
        """The listener must be so far, unless he says himself where he is."""
        if reply != self._told_by_client:
            self.conversation.played(reply, milliseconds)

    def finished(self, reply: str, schedule: Schedule) -> None:
        """A reply's sound is over."""
        self._has_sounded.discard(reply)
        self._close_side_lane(reply)
        self.metrics.sound_sent(schedule)
        if self.plays_itself and not schedule.is_cut:
            self.tell({"type": "output_audio_buffer.stopped", "response_id": reply})

    # One method for each thing a conversation tells

    def _tell_one(self, event: said.Event) -> None:
        reply = None if isinstance(event, said.ReplyStarted | said.OutputCleared) else getattr(event, "reply", None)
        if reply is None or reply in self._replies:  # what comes after a reply's end is stale
            _HANDLERS[type(event)](self, event)

    def _speech_started(self, event: said.SpeechStarted) -> None:
        self.tell(
            {"type": "input_audio_buffer.speech_started", "audio_start_ms": event.audio_start_ms, "item_id": event.item}
        )

    def _speech_stopped(self, event: said.SpeechStopped) -> None:
        detection = self.session["audio"]["input"]["turn_detection"] or {}
        self.clock.turn_ended(event.audio_end_ms - detection.get("silence_duration_ms", 0))
        self.tell(
            {"type": "input_audio_buffer.speech_stopped", "audio_end_ms": event.audio_end_ms, "item_id": event.item}
        )

    def _turn_committed(self, event: said.TurnCommitted) -> None:
        if event.item.id in self.answered_commits:
            self.answered_commits.remove(event.item.id)
        else:
            self.announce_turn(event.item, event.previous)

    def _turn_timed_out(self, event: said.TurnTimedOut) -> None:
        times = {"audio_start_ms": event.audio_start_ms, "audio_end_ms": event.audio_end_ms}
        self.tell({"type": "input_audio_buffer.timeout_triggered", **times, "item_id": event.item})

    def _input_transcript(self, event: said.InputTranscript) -> None:
        """Deltas cannot be taken back on the wire: words that were revised wait for the whole text."""
        place = {"item_id": event.item, "content_index": 0}
        told = self._transcripts.get(event.item, "")
        if event.text.startswith(told) and len(event.text) > len(told):
            delta = event.text[len(told) :]
            self._transcripts[event.item] = event.text
            self.tell({"type": "conversation.item.input_audio_transcription.delta", **place, "delta": delta})
        if event.is_final:
            self._transcripts.pop(event.item, None)
            usage = {"type": "duration", "seconds": event.seconds}
            self.tell(
                {"type": "conversation.item.input_audio_transcription.completed", **place}
                | {"transcript": event.text, "usage": usage}
            )

    def _input_transcript_failed(self, event: said.InputTranscriptFailed) -> None:
        error = {"type": "server_error", "code": "transcription_failed", "message": event.message, "param": None}
        place = {"item_id": event.item, "content_index": 0}
        self.tell({"type": "conversation.item.input_audio_transcription.failed", **place, "error": error})

    def _reply_started(self, event: said.ReplyStarted) -> None:
        asked = self.asked.pop(event.reply, None) or RequestedReply(self.session)
        reply = WireReply(event.reply, asked.session, self.conversation_id, asked.metadata, asked.is_out_of_band)
        self._replies[event.reply] = reply
        self.last_reply = event.reply
        self._spans[event.reply] = new_span(self.conversation_id, event.reply, self.clock.waiting_seconds)
        if reply.is_out_of_band:
            self._open_side_lane(event.reply)
        self._tell_in_order(event.reply, reply.created)

    def _reply_item_started(self, event: said.ReplyItemStarted) -> None:
        reply = self._replies[event.reply]
        reply.items.append(event.item)
        if event.kind == "message" and reply.part_type == "audio":
            reply.spoken = event.item
        self._tell_in_order(event.reply, lambda: reply.item_started(event))

    def _reply_audio(self, event: said.ReplyAudio) -> None:
        self._lane(event.reply).add(OutputPiece(event.reply, event.item, event.samples), event.gain)

    def _reply_text(self, event: said.ReplyText) -> None:
        reply = self._replies[event.reply]
        self._tell_in_order(event.reply, lambda: reply.text(event.item, event.delta))

    def _tool_arguments(self, event: said.ToolArguments) -> None:
        reply = self._replies[event.reply]
        self._tell_in_order(event.reply, lambda: reply.arguments(event.item, event.delta))

    def _reply_item_done(self, event: said.ReplyItemDone) -> None:
        reply = self._replies[event.reply]
        if isinstance(event.item.content, said.Message) and reply.part_type == "audio":
            self._lane(event.reply).end_item(event.reply, event.item.id)
        self._tell_in_order(event.reply, lambda: reply.item_done(event.item))

    def _reply_done(self, event: said.ReplyDone) -> None:
        reply, lane = self._replies[event.reply], self._lane(event.reply)

        def finish() -> None:
            if reply.is_done:
                return
            for wire in reply.done(event.reason, event.usage, event.error):
                self.tell(wire)
            self.metrics.replied(event.reason)
            self._spans.pop(event.reply).end(event.reason)
            del self._replies[event.reply]
            if not lane.end(event.reply):
                self._close_side_lane(event.reply)

        lane.tell(finish)

    def _output_cleared(self, event: said.OutputCleared) -> None:
        reply = self._replies.get(event.reply)
        if reply is not None:
            reply.cut = reply.cut or "turn_detected"
        self._clear(event.reply)

    def _item_truncated(self, event: said.ItemTruncated) -> None:
        """Told once: a client that plays the sound itself may be about to say where it stopped, and is answered."""
        if self.truncated == (event.item.id, event.audio_end_ms):
            return
        cut = self.truncated = (event.item.id, event.audio_end_ms)

        def tell() -> None:
            is_answered = self.truncated is not cut and self.truncated is not None and self.truncated[0] == cut[0]
            if not is_answered:
                self.tell(truncation(*cut))

        if self.plays_itself:
            tell()
        else:
            asyncio.get_running_loop().call_later(CLIENT_CUTS_SECONDS, tell)

    def _warned(self, event: said.Warned) -> None:
        error = {"type": "server_error", "code": event.code, "message": event.message, "param": None}
        self.tell({"type": "error", "error": error})

    def _clear(self, reply: str) -> bool:
        had_sound = self._lane(reply).clear(reply)
        if had_sound:
            self.speaker.clear()
            self.tell({"type": "output_audio_buffer.cleared", "response_id": reply})
        return had_sound

    def _truncate_unheard(self, reply: WireReply, milliseconds: int) -> None:
        """The conversation took the reply as said; what was not heard is not history."""
        if reply.spoken is None or reply.is_out_of_band:
            return
        with suppress(InputError):  # it ended sooner
            self.conversation.truncate(reply.spoken, milliseconds)
            self.truncated = (reply.spoken, milliseconds)
            self.tell(truncation(reply.spoken, milliseconds))

    def _tell_in_order(self, reply: str, events: Callable[[], list[Wire]]) -> None:
        def tell() -> None:
            for event in events():
                self.tell(event)

        self._lane(reply).tell(tell)

    def _lane(self, reply: str) -> PacedOutput:
        return self._lanes.get(reply, self.main)

    def _new_lane(self) -> PacedOutput:
        return PacedOutput(self, self.conversation.output_rate, self.lead, self.piece_seconds)

    def _open_side_lane(self, reply: str) -> None:
        """A reply beside the conversation waits for nobody."""
        lane = self._lanes[reply] = self._new_lane()
        self._side_tasks[reply] = self._tasks.create_task(lane.run())

    def _close_side_lane(self, reply: str) -> None:
        if self._lanes.pop(reply, None) is not None:
            self._side_tasks.pop(reply).cancel()


def truncation(item: str, milliseconds: int) -> Wire:
    """An item was cut to what had been heard."""
    return {"type": "conversation.item.truncated", "item_id": item, "content_index": 0, "audio_end_ms": milliseconds}


_HANDLERS: dict[type, Callable[[EventEncoder, Any], None]] = {
    said.SpeechStarted: EventEncoder._speech_started,
    said.SpeechStopped: EventEncoder._speech_stopped,
    said.TurnCommitted: EventEncoder._turn_committed,
    said.TurnTimedOut: EventEncoder._turn_timed_out,
    said.InputTranscript: EventEncoder._input_transcript,
    said.InputTranscriptFailed: EventEncoder._input_transcript_failed,
    said.ReplyStarted: EventEncoder._reply_started,
    said.ReplyItemStarted: EventEncoder._reply_item_started,
    said.ReplyAudio: EventEncoder._reply_audio,
    said.ReplyText: EventEncoder._reply_text,
    said.ToolArguments: EventEncoder._tool_arguments,
    said.ReplyItemDone: EventEncoder._reply_item_done,
    said.ReplyDone: EventEncoder._reply_done,
    said.OutputCleared: EventEncoder._output_cleared,
    said.ItemTruncated: EventEncoder._item_truncated,
    said.Warned: EventEncoder._warned,
}
