"""Encodes the events of a conversation as events of the protocol, in its order."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vivavoce.dialogue import events as dialogue
from vivavoce.dialogue.conversation import Conversation
from vivavoce.dialogue.items import Item, Message
from vivavoce.errors import InputError, VivaError
from vivavoce.log import log_failure
from vivavoce.server.metrics import Metrics, TraceSpan, TurnClock, new_span
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.input_encoder import InputEventEncoder
from vivavoce.server.realtime.output import OutputPiece, PacedOutput, Schedule
from vivavoce.server.realtime.response import AudioSink, ResponseEncoder, is_running
from vivavoce.server.realtime.server_events import ServerEvent
from vivavoce.server.realtime.session_types import (
    RealtimeSessionObject,
    SessionObject,
    Tracing,
    TracingConfiguration,
    VivaSession,
    value_or,
)
from vivavoce.server.recording import SessionRecording

logger = logging.getLogger(__name__)

FILLER_METADATA = {"viva": "filler"}  # of responses that fill a wait and are not part of the conversation
CLIENT_TRUNCATE_SECONDS = 0.2  # time for a client that stops its playback to send its own truncate event


@dataclass
class ResponseRequest:
    """The parameters of a `response.create` event."""

    session: SessionObject
    metadata: dict[str, str] | None = None
    is_out_of_band: bool = False


@dataclass
class EventEncoder:
    """Encodes the events of one conversation. `send` takes each event when it is due."""

    conversation: Conversation
    send: Callable[[ServerEvent], None]
    output: AudioSink
    metrics: Metrics
    clock: TurnClock
    conversation_id: str
    session: SessionObject
    lead: Callable[[float], float]
    """Seconds by which audio is sent before playback needs it, at a given time."""
    piece_seconds: float
    plays_audio: bool
    """Whether the server plays the audio (WebRTC), and reports when it starts and ends."""
    requested: dict[str, ResponseRequest] = field(default_factory=dict)
    truncated: tuple[str, int] | None = None
    """The item truncated last, and its end in milliseconds."""
    last_reply: str = ""
    on_hosted_call: Callable[[Item, int], None] | None = None
    """Makes a call of a tool that is not the client's: its item, and its index in the response."""
    on_played: Callable[[str], None] = lambda _: None
    """Is told which reply was sent whole and is no longer played."""
    recording: SessionRecording | None = None
    """Is given the audio of replies when it is sent."""
    _replies: dict[str, ResponseEncoder] = field(default_factory=dict)
    _outputs: dict[str, PacedOutput] = field(default_factory=dict)
    _side_tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _audio_started: set[str] = field(default_factory=set)
    _client_playback: str | None = None
    _spans: dict[str, TraceSpan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.main = self._new_output()
        self.input = InputEventEncoder(self.send, self.metrics, self.clock, lambda: self.session)

    async def run(self) -> None:
        """Encode everything until the conversation is closed."""
        async with asyncio.TaskGroup() as self._tasks:  # an output that fails ends the session
            main = self._tasks.create_task(self.main.run())
            async for event in self.conversation.events():
                self._encode_one(event)
            for task in (main, *self._side_tasks.values()):
                task.cancel()

    def pause(self) -> None:
        """Hold the audio, and the generation of replies, while no client is connected."""
        self.conversation.pause()
        for output in (self.main, *self._outputs.values()):
            output.pause()

    def resume(self) -> None:
        """Continue after a client has connected."""
        self.conversation.resume()
        for output in (self.main, *self._outputs.values()):
            output.resume()

    @property
    def is_speaking(self) -> bool:
        """Whether a reply is being generated or played."""
        return bool(self._replies) or not self.main.is_idle

    def cut(self, reply: str | None, truncates: bool = True) -> bool:
        """End the playback of a generated reply, or of all; whether one was not yet played to its end."""
        waiting = [known for known in self._replies.values() if reply in (None, known.id) and not known.is_out_of_band]
        has_cut = False
        for known in waiting:
            output = self._output(known.id)
            milliseconds = output.played_ms(known.id)
            known.cut = known.cut or "client_cancelled"
            # The history is cut first, as the events of the item, which are sent now, have the words that were heard.
            is_truncated = truncates and output.has_unplayed(known.id) and self._truncate_unplayed(known, milliseconds)
            has_cut |= self._clear(known.id)
            if is_truncated and known.spoken is not None:
                self.send(events.ConversationItemTruncated(known.spoken, milliseconds))
        return has_cut

    @property
    def open_reply(self) -> str | None:
        """The reply of the conversation whose `response.done` was not sent yet."""
        return next((reply.id for reply in self._replies.values() if not reply.is_out_of_band), None)

    def reply_with(self, item: str) -> str | None:
        """The reply in progress that has this item."""
        return next((reply.id for reply in self._replies.values() if item in reply.items), None)

    def client_played(self, reply: str, milliseconds: int) -> None:
        """Use the playback position that the client reports instead of the estimate."""
        self._client_playback = reply
        self.conversation.played(reply, milliseconds)

    # ClientPlayer of the outputs

    def play(self, piece: OutputPiece) -> None:
        """Send a chunk of a reply's audio."""
        reply = self._replies.get(piece.reply)
        if reply is None:
            return
        if len(piece.samples) and piece.reply not in self._audio_started:
            self._audio_started.add(piece.reply)
            self.clock.note_first_audio()
            self._spans[piece.reply].note_first_audio()
            if self.plays_audio:
                self.send(events.OutputAudioBufferStarted(piece.reply))
        if self.recording is not None and not reply.is_out_of_band:
            self.recording.said(piece.samples)
        try:
            self.output.send(reply, piece)
        except VivaError as error:
            log_failure(logger, error, "audio of a reply could not be sent")
            message = f"a chunk of the reply's audio could not be sent: {error}"
            self._warn(dialogue.Warned("sound_lost", message, piece.reply))

    def playback_position(self, reply: str, milliseconds: int) -> None:
        """Pass the estimated playback position on, unless the client reports its own."""
        if reply != self._client_playback:
            self.conversation.played(reply, milliseconds)

    def playback_finished(self, reply: str, schedule: Schedule) -> None:
        """Close the output of a reply whose playback has ended."""
        self._audio_started.discard(reply)
        self._close_side_output(reply)
        self.metrics.count_sent_audio(schedule)
        if self.plays_audio and not schedule.is_cut:
            self.send(events.OutputAudioBufferStopped(reply))
        self.on_played(reply)

    # One method for each event of a conversation but those of the input

    def _encode_one(self, event: dialogue.Event) -> None:
        if self.input.encode(event):
            return
        reply = (
            None if isinstance(event, dialogue.ReplyStarted | dialogue.OutputCleared) else getattr(event, "reply", None)
        )
        if reply is None or reply in self._replies:  # events after the end of a reply are stale
            _HANDLERS[type(event)](self, event)

    def _reply_started(self, event: dialogue.ReplyStarted) -> None:
        request = self.requested.pop(event.reply, None) or ResponseRequest(self.session)
        if event.is_filler:
            request = ResponseRequest(self.session, FILLER_METADATA, is_out_of_band=True)
        if not isinstance(request.session, RealtimeSessionObject):  # the session has become a transcription session
            with suppress(VivaError):
                self.conversation.cancel(event.reply)
            return
        reply = ResponseEncoder(
            event.reply, request.session, self.conversation_id, request.metadata, request.is_out_of_band
        )
        self._replies[event.reply] = reply
        self.last_reply = event.reply
        self._spans[event.reply] = new_span(
            self.conversation_id, event.reply, self.clock.waiting_seconds, _trace_attributes(request.session.tracing)
        )
        if reply.is_out_of_band and not event.is_filler:
            self._open_side_output(event.reply)
        self._send_in_order(event.reply, reply.created)

    def _reply_item_started(self, event: dialogue.ReplyItemStarted) -> None:
        reply = self._replies[event.reply]
        reply.items.append(event.item)
        if event.kind == "message" and reply.modality == "audio":
            reply.spoken = event.item
        self._send_in_order(event.reply, lambda: reply.item_started(event))

    def _reply_audio(self, event: dialogue.ReplyAudio) -> None:
        self._output(event.reply).add(OutputPiece(event.reply, event.item, event.samples), event.gain)

    def _reply_text(self, event: dialogue.ReplyText) -> None:
        """Text at once; the words of audio just before they are spoken."""
        reply = self._replies[event.reply]
        if event.at is None:
            self._send_in_order(event.reply, lambda: reply.text(event.item, event.delta))
            return
        send = self._sender(lambda: reply.text(event.item, event.delta))
        self._output(event.reply).send_with_audio(event.reply, event.item, event.at, send)

    def _tool_arguments(self, event: dialogue.ToolArguments) -> None:
        reply = self._replies[event.reply]
        self._send_in_order(event.reply, lambda: reply.arguments(event.item, event.delta))

    def _reply_item_done(self, event: dialogue.ReplyItemDone) -> None:
        reply = self._replies[event.reply]
        if isinstance(event.item.content, Message) and reply.modality == "audio":
            self._output(event.reply).end_item(event.reply, event.item.id)
        index = len(reply.items) - 1
        self._send_in_order(event.reply, lambda: reply.item_done(self._heard(reply, event.item)))
        if is_running(event.item) and self.on_hosted_call is not None:
            make_call = self.on_hosted_call
            self._output(event.reply).send_in_order(lambda: make_call(event.item, index))

    def _reply_done(self, event: dialogue.ReplyDone) -> None:
        reply, output = self._replies[event.reply], self._output(event.reply)

        def finish() -> None:
            if reply.is_done:
                return
            for sent in reply.done(event.reason, event.usage, event.error):
                self.send(sent)
            self.send(events.RateLimitsUpdated())
            reason = reply.final_reason(event.reason)
            self.metrics.count_reply(reason)
            self._spans.pop(event.reply).end(reason)
            del self._replies[event.reply]
            if not output.end(event.reply):
                self._close_side_output(event.reply)
                self.on_played(event.reply)

        output.send_in_order(finish)

    def _output_cleared(self, event: dialogue.OutputCleared) -> None:
        reply = self._replies.get(event.reply)
        if reply is not None:
            reply.cut = reply.cut or "turn_detected"
        self._clear(event.reply)

    def _item_truncated(self, event: dialogue.ItemTruncated) -> None:
        """Sent once: a client that plays the audio may be about to send its own truncate event, which is answered."""
        if self.truncated == (event.item.id, event.audio_end_ms):
            return
        cut = self.truncated = (event.item.id, event.audio_end_ms)

        def send() -> None:
            is_answered = self.truncated is not cut and self.truncated is not None and self.truncated[0] == cut[0]
            if not is_answered:
                self.send(events.ConversationItemTruncated(*cut))

        if self.plays_audio:
            send()
        else:
            asyncio.get_running_loop().call_later(CLIENT_TRUNCATE_SECONDS, send)

    def _item_retracted(self, event: dialogue.ItemRetracted) -> None:
        self.send(events.ConversationItemDeleted(event.item))

    def _warn(self, event: dialogue.Warned) -> None:
        """Put a problem into the details of its response; clients that ask for warnings get an event too.

        It is no `error` event: stock clients end the session on one.
        """
        if event.reply in self._replies:
            self._replies[event.reply].problem = events.server_error(event.code, event.message)
        if value_or(value_or(self.session.viva, VivaSession()).warnings, False):
            self.send(events.VivaWarning(event.code, event.message, event.reply))

    def _clear(self, reply: str) -> bool:
        had_sound = self._output(reply).clear(reply)
        if had_sound:
            if self.recording is not None:
                self.recording.cut()
            self.output.clear()
            self.send(events.OutputAudioBufferCleared(reply))
        return had_sound

    def _truncate_unplayed(self, reply: ResponseEncoder, milliseconds: int) -> bool:
        """Remove unplayed audio from the history, where the reply may be complete; whether there was any."""
        if reply.spoken is None or reply.is_out_of_band:
            return False
        with suppress(InputError):  # the item is shorter
            self.conversation.truncate(reply.spoken, milliseconds)
            self.truncated = (reply.spoken, milliseconds)
            return True
        return False

    def _heard(self, reply: ResponseEncoder, item: Item) -> Item:
        """The item as the history has it: where playback was cut, with the words that were heard."""
        if reply.cut is None or reply.is_out_of_band or not isinstance(item.content, Message):
            return item
        with suppress(InputError):  # it was deleted meanwhile
            return dataclasses.replace(self.conversation.item(item.id), is_complete=False)
        return item

    def _send_in_order(self, reply: str, build: Callable[[], list[ServerEvent]]) -> None:
        self._output(reply).send_in_order(self._sender(build))

    def _sender(self, build: Callable[[], list[ServerEvent]]) -> Callable[[], None]:
        def send() -> None:
            for event in build():
                self.send(event)

        return send

    def _output(self, reply: str) -> PacedOutput:
        return self._outputs.get(reply, self.main)

    def _new_output(self) -> PacedOutput:
        return PacedOutput(self, self.conversation.output_rate, self.lead, self.piece_seconds)

    def _open_side_output(self, reply: str) -> None:
        """An out-of-band reply has an output of its own: it does not wait for the replies of the conversation."""
        output = self._outputs[reply] = self._new_output()
        self._side_tasks[reply] = self._tasks.create_task(output.run())

    def _close_side_output(self, reply: str) -> None:
        if self._outputs.pop(reply, None) is not None:
            self._side_tasks.pop(reply).cancel()


def _trace_attributes(tracing: Tracing | None) -> dict[str, str]:
    """What a client wants to find its traces by."""
    if not isinstance(tracing, TracingConfiguration):
        return {}
    fields = {"viva.workflow": value_or(tracing.workflow_name, ""), "viva.group": value_or(tracing.group_id, "")}
    metadata = tracing.metadata if isinstance(tracing.metadata, dict) else {}
    fields |= {f"viva.metadata.{name}": str(value) for name, value in metadata.items()}
    return {name: value for name, value in fields.items() if value}


_HANDLERS: dict[type, Callable[[EventEncoder, Any], None]] = {
    dialogue.ReplyStarted: EventEncoder._reply_started,
    dialogue.ReplyItemStarted: EventEncoder._reply_item_started,
    dialogue.ReplyAudio: EventEncoder._reply_audio,
    dialogue.ReplyText: EventEncoder._reply_text,
    dialogue.ToolArguments: EventEncoder._tool_arguments,
    dialogue.ReplyItemDone: EventEncoder._reply_item_done,
    dialogue.ReplyDone: EventEncoder._reply_done,
    dialogue.OutputCleared: EventEncoder._output_cleared,
    dialogue.ItemTruncated: EventEncoder._item_truncated,
    dialogue.ItemRetracted: EventEncoder._item_retracted,
    dialogue.Warned: EventEncoder._warn,
}
