"""A telephone call: a session like one over `/v1/realtime`, whose audio is a provider's media stream.

The provider plays the audio and returns marks, so the conversation knows what was heard; a clear stops the playback
when the caller interrupts.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from vivavoce.log import log_failure
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.audio_formats import MU_LAW, PCM, FormatReader, FormatWriter, WireFormat
from vivavoce.server.realtime.handlers import MAX_UNPROCESSED_SECONDS, DecodedAudio
from vivavoce.server.realtime.output import OutputPiece, Pacing
from vivavoce.server.realtime.response import ResponseEncoder
from vivavoce.server.realtime.session import Connection, Opening, RealtimeSession
from vivavoce.server.realtime.session_types import (
    AudioInputParams,
    AudioOutputParams,
    AudioParams,
    SessionParams,
    value_or,
)
from vivavoce.server.realtime.sessions import Sessions, served_model
from vivavoce.server.realtime.websocket import InputLimits
from vivavoce.server.telephony.active_calls import CallObject
from vivavoce.server.telephony.end_of_call import EndOfCall
from vivavoce.server.telephony.records import CallRecord, CallTimes
from vivavoce.server.telephony.wire import (
    Audio,
    CallEnded,
    CallEvent,
    Digit,
    MediaWire,
    Played,
    Started,
    Unknown,
    WireMessage,
)
from vivavoce.server.wire import WireError

logger = logging.getLogger(__name__)

START_SECONDS = 10.0  # within which a stream has to start
CLOSE_SECONDS = 2.0
MARK_SECONDS = 0.1  # between two marks
MAX_MARKS = 256  # that wait for an answer; of a provider that returns none, the oldest are dropped
MAX_REPLIES = 8  # whose audio is counted
MAX_MESSAGE_BYTES = 64 << 10
MAX_AUDIO_SECONDS = 2.0  # in one message of the caller
MAX_UNKNOWN = 100  # messages of unknown kinds in one call
MAX_REASON_BYTES = 120  # of a close frame
CAPACITY_STATUSES = (429, 503)


class CallLine(Protocol):
    """The connection of a call."""

    async def receive(self) -> WireMessage | None:
        """The next message; None after the last one."""
        ...

    async def send(self, message: WireMessage) -> None:
        """Send a message; returns when there is room for another one."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """Close the connection, with a close code of WebSockets."""
        ...


@dataclass(frozen=True)
class PhoneCaller:
    """Where a call comes from, and the session that its key is bound to."""

    address: str
    model: str | None = None
    session: SessionParams | None = None
    opened_with: bytes | None = None
    """The hash of the browser key."""


class ReplyMark(NamedTuple):
    """A point in the audio of a reply."""

    reply: str
    milliseconds: int


async def serve_call(line: CallLine, wire: MediaWire, caller: PhoneCaller, sessions: Sessions) -> None:
    """Serve a call from its first message to its end. Every failure ends this call only."""
    times = CallTimes()
    started: Started | None = None
    call_id = ""

    def record(reason: str) -> CallRecord:
        return CallRecord(
            call_id=call_id,
            provider=wire.provider,
            provider_call_id="" if started is None else started.call_id,
            source=caller.address,
            started_at=times.started_at,
            duration_seconds=times.seconds,
            reason=reason,
        )

    try:
        started = await _start_of(line, wire)
        if started is None:
            reason = "not_started"
        else:
            call = PhoneCall(wire, started.format)
            call.open(sessions, caller, started)
            call_id = call.session.id.replace("sess_", "rtc_", 1)
            times.note_answer()
            sessions.calls.begin(call_id, lambda: CallObject.of(record(""), "answered"))
            reason = await call.run(line)
    except WireError as error:
        reason = error.code or "refused"
        logger.info("a call over %s was ended: %s", wire.provider, reason)
        await close_line(line, 1013 if error.status in CAPACITY_STATUSES else 1008, str(error))
    except Exception as error:
        reason = "failed"
        log_failure(logger, error, "a call over %s failed", wire.provider)
        await close_line(line, 1011, "the call failed")
    sessions.metrics.calls_ended.labels(wire.provider, reason).inc()
    sessions.calls.end(record(reason))
    sessions.call_records.write(record(reason))


async def _start_of(line: CallLine, wire: MediaWire) -> Started | None:
    """The start of the stream; None where the caller hung up before."""
    try:
        async with asyncio.timeout(START_SECONDS):
            while (message := await line.receive()) is not None:
                event = event_of(wire, message)
                if isinstance(event, Started):
                    return event
                if isinstance(event, Audio | CallEnded):
                    raise WireError("the stream has not started", "not_started")
    except TimeoutError:
        raise WireError(f"the stream did not start within {START_SECONDS:g} s", "not_started") from None
    return None


def event_of(wire: MediaWire, message: WireMessage) -> CallEvent | None:
    """The event of a message of limited size."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(message)} bytes; the limit is {MAX_MESSAGE_BYTES}", "message_too_large")
    return wire.received(message)


async def close_line(line: CallLine, code: int, reason: str) -> None:
    """Close a connection; the other side may have closed it."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await line.close(code, reason.encode()[:MAX_REASON_BYTES].decode("utf8", "ignore"))
    except Exception:
        logger.debug("the connection of a call could not be closed", exc_info=True)


class PhoneCall:
    """The audio sink of a session, and its connection."""

    session: RealtimeSession

    def __init__(self, wire: MediaWire, format: WireFormat) -> None:
        self._wire, self._format = wire, format
        self._packet = round(wire.packet_seconds * format.rate) * format.bytes_per_sample
        self._pending = bytearray()  # encoded audio that does not fill a packet
        self._to_send: deque[WireMessage] = deque()
        self._has_work = asyncio.Event()
        self._sent: dict[str, int] = {}  # bytes of audio by reply
        self._marks: dict[str, ReplyMark] = {}
        self._last_mark: ReplyMark | None = None
        self._mark_count = 0
        self._unknown = 0
        self._end_reason = "server"
        self._dropped: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    def open(self, sessions: Sessions, caller: PhoneCaller, started: Started) -> None:
        """Open the session; WireError 429 or 503 where it is refused."""
        bound = caller.session or SessionParams()
        opening = Opening(
            served_model(sessions, caller.model or bound.model or None),
            bound.type or "realtime",
            with_format(bound, self._format),
            opened_with=caller.opened_with,
            silence_seconds=sessions.options.call_silence_seconds,
        )
        session = self.session = sessions.open(opening, caller.address, self._wire.provider, self)
        self._reader = FormatReader(self._format, session.conversation.input_rate)
        self._rate = session.conversation.output_rate
        self._writer = FormatWriter(self._rate, self._format)
        attach_without_reading(session, self)
        EndOfCall(session, self._end)
        session.start()
        session.send(events.VivaCallStarted(self._wire.provider, started.call_id, started.stream_id))

    async def run(self, line: CallLine) -> str:
        """Receive and send until the call ends; why it ended. WireError where the caller's messages are invalid."""
        receiver, sender = asyncio.create_task(self._receive(line)), asyncio.create_task(self._send(line))
        calls = self.session.metrics.calls.labels(self._wire.provider)
        calls.inc()
        try:
            ends: set[asyncio.Future[Any]] = {receiver, sender, self._dropped}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if receiver.done():
                receiver.result()
                return "caller"
            if self._dropped.done():
                await self._hang_up(line, sender, *self._dropped.result())
                return self._end_reason
            return self._sending_failed(sender.exception())
        finally:
            calls.dec()
            for task in (receiver, sender):
                task.cancel()
            await asyncio.gather(receiver, sender, return_exceptions=True)
            self.session.detach(self)
            await self.session.close(1000, "the call ended")

    def _sending_failed(self, error: BaseException | None) -> str:
        if isinstance(error, TimeoutError):
            self.session.metrics.dropped.labels("stalled").inc()
            return "stalled"
        if error is not None and not isinstance(error, OSError | RuntimeError):
            log_failure(logger, error, "session %s: sending failed", self.session.id)
        return "lost"

    async def _hang_up(self, line: CallLine, sender: asyncio.Task[None], code: int, reason: str) -> None:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        message = self._wire.hang_up()
        if message is not None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await line.send(message)
            except (OSError, RuntimeError, TimeoutError):
                logger.debug("session %s: the caller is gone", self.session.id, exc_info=True)
        await close_line(line, code, reason)

    def _end(self, reason: str) -> None:
        self._end_reason = reason
        self.drop(1000, "the call ended")

    # Connection

    def drop(self, code: int, reason: str) -> None:
        """Hang up."""
        if not self._dropped.done():
            self._dropped.set_result((code, reason))

    # Receiving

    async def _receive(self, line: CallLine) -> None:
        limits = InputLimits(self.session)
        while (message := await line.receive()) is not None:
            event = event_of(self._wire, message)
            if isinstance(event, CallEnded):
                return
            await self._handle(event)
            wait = limits.wait_seconds()
            if wait > 0:  # messages above the rate limit wait in the socket
                await asyncio.sleep(wait)

    async def _handle(self, event: CallEvent | None) -> None:
        match event:
            case Audio(data):
                await self._hear(data)
            case Digit(digit):
                note_digit(self.session, digit)
            case Played(mark):
                self._note_played(mark)
            case Started():
                raise WireError("the stream has already started", "invalid_message")
            case Unknown():
                self._unknown += 1
                if self._unknown > MAX_UNKNOWN:
                    raise WireError(f"more than {MAX_UNKNOWN} messages of unknown kinds", "invalid_message")

    async def _hear(self, data: bytes) -> None:
        if self._format.seconds(len(data)) > MAX_AUDIO_SECONDS:
            raise WireError(f"a message holds at most {MAX_AUDIO_SECONDS:g} s of audio", "message_too_large")
        samples = self._reader.read(data)
        await self.session.receive_decoded(DecodedAudio(None, len(data), samples))
        await self.session.conversation.drain_input(MAX_UNPROCESSED_SECONDS)

    def _note_played(self, name: str) -> None:
        """Report what the caller has heard. Marks before a clear are forgotten: they come back although not played."""
        mark = self._marks.get(name)
        if mark is None:
            return
        for earlier in list(self._marks):
            del self._marks[earlier]
            if earlier == name:
                break
        self.session.encoder.client_played(mark.reply, mark.milliseconds)

    # AudioSink

    def pacing(self, options: ServerOptions) -> Pacing:
        """That of WebSocket clients; where sent audio cannot be cleared, that of WebRTC calls."""
        return Pacing.of_sockets(options) if self._wire.can_clear else Pacing.of_calls(options)

    def send(self, reply: ResponseEncoder, piece: OutputPiece) -> None:
        """Send the packets that a chunk completes."""
        for data in self._writer.write(piece.samples) if len(piece.samples) else ():
            self._pending += data
        if piece.is_end:
            for data in self._writer.flush():
                self._pending += data
            self._pending += silence(self._format, -len(self._pending) % self._packet)
        whole = len(self._pending) - len(self._pending) % self._packet
        for begin in range(0, whole, self._packet):
            self._to_send.append(self._wire.audio(bytes(self._pending[begin : begin + self._packet])))
        del self._pending[:whole]
        if whole:
            self._count(reply.id, whole)
            self._mark(reply.id, piece.is_end)
        self._has_work.set()

    def clear(self) -> None:
        """Drop the audio that was not played."""
        self._pending.clear()
        self._to_send.clear()
        self._marks.clear()
        self._writer = FormatWriter(self._rate, self._format)
        message = self._wire.clear()
        if message is not None:
            self._to_send.append(message)
            self._has_work.set()

    def _count(self, reply: str, size: int) -> None:
        if reply not in self._sent and len(self._sent) == MAX_REPLIES:
            del self._sent[next(iter(self._sent))]
        self._sent[reply] = self._sent.get(reply, 0) + size

    def _mark(self, reply: str, is_end: bool) -> None:
        """Mark the end of the audio that was sent, where enough was sent since the last mark."""
        seconds = self._format.seconds(self._sent[reply])
        last = self._last_mark
        is_near = last is not None and last.reply == reply and seconds - last.milliseconds / 1000 < MARK_SECONDS
        if is_near and not is_end:
            return
        self._mark_count += 1
        name = f"viva-{self._mark_count}"
        message = self._wire.mark(name)
        if message is None:
            return
        if len(self._marks) == MAX_MARKS:
            del self._marks[next(iter(self._marks))]
        self._marks[name] = self._last_mark = ReplyMark(reply, round(seconds * 1000))
        self._to_send.append(message)

    async def _send(self, line: CallLine) -> None:
        while True:
            while self._to_send:
                async with asyncio.timeout(self.session.options.stall_seconds):
                    await line.send(self._to_send.popleft())
            self._has_work.clear()
            await self._has_work.wait()


def attach_without_reading(session: RealtimeSession, connection: Connection) -> None:
    """Attach the connection of a call, which has no use for the events; sidebands read them."""
    cursor = session.attach(connection, 0)

    def skip() -> None:
        while (entry := cursor.log.entry_at(cursor.position)) is not None:
            cursor.advance(entry)

    cursor.on_append = skip
    skip()


def note_digit(session: RealtimeSession, digit: str) -> None:
    """Tell the clients of a session of a key that the caller has pressed."""
    session.note_activity()
    session.send(events.InputAudioBufferDtmfEventReceived(digit, int(time.time())))


def silence(format: WireFormat, size: int) -> bytes:
    """Bytes of silence."""
    return {PCM: b"\x00", MU_LAW: b"\xff"}.get(format.type, b"\xd5") * size


def with_format(session: SessionParams, format: WireFormat) -> SessionParams:
    """Session parameters with the audio format of the line."""
    audio = value_or(session.audio, AudioParams())
    heard = replace(value_or(audio.input, AudioInputParams()), format=format.as_wire())
    audio = replace(audio, input=heard)
    if session.type != "transcription":
        said = replace(value_or(audio.output, AudioOutputParams()), format=format.as_wire())
        audio = replace(audio, output=said)
    return replace(session, audio=audio)
