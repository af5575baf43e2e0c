"""The media of one call: audio and key presses over RTP or SRTP, paced by a clock of 20 ms."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from ipaddress import ip_address
from typing import Literal

from aiortc.rtp import is_rtcp

from vivavoce.audio.tones import digit_tones
from vivavoce.dialogue.items import Samples
from vivavoce.errors import shown
from vivavoce.log import FailureLog
from vivavoce.server.rtp.codecs import CODECS, FRAME_SECONDS, TELEPHONE_EVENT, Codec, RtpCodec
from vivavoce.server.rtp.dtmf_events import check_digits
from vivavoce.server.rtp.line_input import LineInput
from vivavoce.server.rtp.output import ReplyQueue
from vivavoce.server.rtp.receiver import MALFORMED, DroppedPackets, RtpReceiver
from vivavoce.server.rtp.rtcp import RtcpReports
from vivavoce.server.rtp.sender import RtpSender
from vivavoce.server.rtp.sockets import RtpSockets
from vivavoce.server.rtp.source import Address, SourceFilter
from vivavoce.server.rtp.srtp import MAX_PACKET_BYTES, SrtpKeys, SrtpTransport
from vivavoce.server.wire import WireError

__all__ = ["CODECS", "TELEPHONE_EVENT", "Codec", "MediaSettings", "MediaStatistics", "RtpCodec", "RtpStream"]

logger = logging.getLogger(__name__)

Direction = Literal["sendrecv", "sendonly", "recvonly", "inactive"]

DEFAULT_RATE = 16_000
REPORT_SECONDS = 5.0
UNANSWERED_SECONDS = 15.0  # media to a peer that is to send, and from which nothing came
ECHO_SECONDS = 0.5  # after a reply, in which its echo may come back
MAX_PORT = 65_535
MAX_BEHIND_SECONDS = 0.5  # of the clock; beyond, the missed frames are skipped


@dataclass(frozen=True)
class MediaSettings:
    """What SDP has settled. Directions are ours: `sendonly` sends and ignores what comes."""

    codec: RtpCodec
    dtmf_payload_type: int | None
    remote: Address
    """An IP address and a port; nothing is sent to an unspecified address or port 0."""
    direction: Direction = "sendrecv"
    srtp: SrtpKeys | None = None
    rtcp_mux: bool = False
    """RTCP on the port of RTP (RFC 5761)."""

    @property
    def sends(self) -> bool:
        """Whether media is sent."""
        return self.direction in ("sendrecv", "sendonly") and self.has_address

    @property
    def receives(self) -> bool:
        """Whether media is received."""
        return self.direction in ("sendrecv", "recvonly")

    @cached_property
    def has_address(self) -> bool:
        """Whether there is an address to send to."""
        return self.remote[1] != 0 and not ip_address(self.remote[0]).is_unspecified


@dataclass(frozen=True)
class MediaStatistics:
    """Counters of a stream since it was opened; the SSRC's since it began."""

    sent: int = 0
    failed_sends: int = 0
    received: int = 0
    lost: int = 0
    late: int = 0
    """Came after their time in the jitter buffer."""
    jitter_seconds: float = 0.0
    """Interarrival jitter as RTCP reports it."""
    delay_seconds: float = 0.0
    """Target of the jitter buffer."""
    concealed_seconds: float = 0.0
    round_trip_seconds: float | None = None
    idle_seconds: float = 0.0
    """Since the last packet that was accepted, or since the settings."""
    dropped: DroppedPackets = field(default_factory=DroppedPackets)


class RtpStream:
    """Audio in both directions with one peer.

    `on_audio` gets received audio every 20 ms, mono at `rate`, quiet callers raised; `write` queues audio at
    `reply_rate`. `on_digit` gets key presses: events, or tones in the audio where no events were negotiated. Media goes
    to the negotiated address, or to the source of the first valid packet; packets from elsewhere are dropped.
    """

    def __init__(self, rate: int, reply_rate: int, name: str = "") -> None:
        """`name` is the call's, as the log has it."""
        self.rate, self.reply_rate, self._name = rate, reply_rate, name
        self.on_audio: Callable[[Samples], None] = lambda samples: None
        self.on_digit: Callable[[str], None] = lambda digit: None
        self._loop = asyncio.get_running_loop()
        self._sockets: RtpSockets
        self._queue = ReplyQueue(reply_rate)
        self._line: LineInput
        self._replied_at = float("-inf")
        self._settings: MediaSettings | None = None
        self._srtp: SrtpTransport | None = None
        self._sender: RtpSender
        self._receiver: RtpReceiver
        self._dropped = DroppedPackets()
        self._reports = RtcpReports()
        self._report_address: Address | None = None
        self._report_at: float | None = None
        self._next_tick = self._next_report = self._settled_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._failures = FailureLog(logger)
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        host: str,
        port_range: tuple[int, int],
        rate: int = DEFAULT_RATE,
        reply_rate: int | None = None,
        name: str = "",
    ) -> "RtpStream":
        """A stream bound to a free even port and the next one, which waits for `configure`."""
        stream = cls(rate, rate if reply_rate is None else reply_rate, name)
        stream._sockets = RtpSockets.open(host, port_range, stream._received)
        return stream

    @property
    def port(self) -> int:
        """The local port of RTP; RTCP has the next one."""
        return self._sockets.port

    def configure(self, settings: MediaSettings) -> None:
        """Start the stream, or change it; WireError where the settings cannot be used, which leaves it unchanged."""
        settings = replace(settings, remote=_checked_remote(settings.remote))
        before, codec, digits = self._settings, settings.codec, settings.dtmf_payload_type
        is_same_peer = before is not None and before.remote == settings.remote
        is_same_media = before is not None and (before.codec, before.dtmf_payload_type) == (codec, digits)
        srtp = self._srtp
        if before is None or before.srtp != settings.srtp:
            srtp = SrtpTransport(settings.srtp) if settings.srtp else None
        if before is None or before.codec.clock_rate != codec.clock_rate:
            self._sender = RtpSender(codec, digits, self._queue)
        elif not is_same_media:
            self._sender.use(codec, digits, self._queue)
        if not (is_same_peer and is_same_media):
            source = self._receiver.source if is_same_peer else SourceFilter(settings.remote)
            line_rate = min(codec.sample_rate, self.rate)
            self._receiver = RtpReceiver(codec, digits, source, line_rate, self._dropped)
            if before is None or self._line.rate != line_rate:
                self._line = LineInput(line_rate, self.rate)
        if not is_same_peer:
            self._settled_at, self._report_address, self._report_at = self._loop.time(), None, None
        self._settings, self._srtp = settings, srtp
        self._line.detect_digits(digits is None)
        if self._timer is None:
            self._next_tick = self._loop.time()
            self._next_report = self._next_tick + REPORT_SECONDS / 2
            self._timer = self._loop.call_at(self._next_tick, self._tick)

    # Replies

    def write(self, samples: Samples) -> None:
        """Queue audio of a reply, mono at `reply_rate`."""
        self._queue.write(samples)

    @property
    def queued_seconds(self) -> float:
        """Seconds of audio that were not sent yet."""
        return self._queue.queued_seconds

    @property
    def played_seconds(self) -> float:
        """Seconds of audio that were sent."""
        return self._queue.played_seconds

    def clear(self) -> float:
        """Drop what was not sent, and return its seconds; 5 ms fade out."""
        return self._queue.clear()

    def send_digits(self, digits: str) -> None:
        """Send key presses after what was sent so far, 160 ms and more each; replies wait meanwhile.

        As events where the peer takes them, otherwise as tones in the audio, after the audio that is queued.
        """
        keys = check_digits(digits)
        if self._settings is None:
            raise WireError("key presses need a configured stream")
        if self._settings.dtmf_payload_type is None:
            self.write(digit_tones(keys, self.reply_rate))
        else:
            for key in keys:
                self._sender.add_digit(key)

    def statistics(self) -> MediaStatistics:
        """Counters up to now."""
        if self._settings is None:
            return MediaStatistics(dropped=replace(self._dropped))
        received, playout = self._receiver.source.statistics, self._receiver.playout
        clock_rate = self._settings.codec.clock_rate
        return MediaStatistics(
            sent=self._sender.statistics.packets,
            failed_sends=self._sockets.failed_sends,
            received=0 if received is None else received.received,
            lost=0 if received is None else received.lost,
            late=playout.buffer.late,
            jitter_seconds=0.0 if received is None else received.jitter / clock_rate,
            delay_seconds=playout.buffer.target,
            concealed_seconds=playout.concealed_seconds,
            round_trip_seconds=self._reports.round_trip,
            idle_seconds=self._loop.time() - self._last_heard(),
            dropped=replace(self._dropped),
        )

    async def close(self) -> None:
        """Say goodbye to the peer and close the sockets."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._send_report(self._reports.goodbye(self._sender.statistics, self._sender.timestamp))
        self._sockets.close()

    # Clock

    def _tick(self) -> None:
        now = self._loop.time()
        try:
            self._sockets.read()
            if now - self._next_tick > MAX_BEHIND_SECONDS:
                skipped = int((now - self._next_tick) / FRAME_SECONDS)
                self._next_tick += skipped * FRAME_SECONDS
                self._sender.skip(skipped)
                for _ in range(skipped):
                    self._line.note_sent(None)
            while not self._is_closed and self._next_tick <= now:
                due = self._next_tick  # after a stall, the frames in between have the times they were due at
                self._next_tick += FRAME_SECONDS
                self._run_frame(due)
        except Exception as error:  # the next frame may work; one that fails each time is not logged each time
            self._failures.log(error, "20 ms of the call %s failed", self._name)
        if not self._is_closed:
            self._timer = self._loop.call_at(self._next_tick, self._tick)

    def _run_frame(self, now: float) -> None:
        settings = self._settings
        if settings is None:
            return
        if settings.sends and not (settings.receives and self._is_unanswered(now)):
            packet = self._sender.packet()
            if packet is not None:
                self._send(packet, self._media_address(settings), is_report=False)
        else:
            self._sender.skip()
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            self._send_report(
                self._reports.report(self._sender.statistics, self._sender.timestamp, self._receiver.source)
            )
        if self.queued_seconds:
            self._replied_at = now
        if settings.codec.sample_rate == self._line.rate:
            self._line.note_sent(self._sender.sent)
        if settings.receives and (samples := self._receiver.pull(now)) is not None:
            is_held, position = now - self._replied_at < ECHO_SECONDS, self._receiver.playout.position
            audio, digits = self._line.step(samples, is_held, position)
            for digit in digits:
                self.on_digit(digit)
            self.on_audio(audio)

    def _is_unanswered(self, now: float) -> bool:
        has_heard = self._receiver.source.heard_at is not None or self._report_at is not None
        return not has_heard and now - self._settled_at > UNANSWERED_SECONDS

    def _last_heard(self) -> float:
        return max(self._settled_at, self._receiver.source.heard_at or 0.0, self._report_at or 0.0)

    # Packets

    def _received(self, data: bytes, address: Address, came_to_rtcp: bool) -> None:
        settings = self._settings
        if settings is None:
            return
        is_report = is_rtcp(data)
        if len(data) > MAX_PACKET_BYTES or (came_to_rtcp and not is_report):
            self._dropped.malformed += 1
        elif not self._is_of_peer(settings, address, is_report):
            self._dropped.other_address += 1
        elif (plain := self._srtp.unprotect(data, is_report) if self._srtp else data) is None:
            self._dropped.unauthentic += 1
        elif is_report:
            self._received_report(plain, address)
        elif settings.receives:
            digit = self._receiver.receive(plain, address, self._loop.time())
            if digit is not None:
                self.on_digit(digit)

    def _is_of_peer(self, settings: MediaSettings, address: Address, is_report: bool) -> bool:
        if is_report:
            return address[0] == self._media_address(settings)[0]
        return self._receiver.source.accepts_address(address)

    def _received_report(self, data: bytes, address: Address) -> None:
        try:
            self._reports.receive(data, self._sender.statistics.ssrc)
        except MALFORMED:
            self._dropped.malformed += 1
        else:
            self._report_address, self._report_at = address, self._loop.time()

    def _media_address(self, settings: MediaSettings) -> Address:
        return self._receiver.source.address or settings.remote

    def _send_report(self, data: bytes) -> None:
        settings = self._settings
        if settings is None or not settings.has_address or self._is_unanswered(self._loop.time()):
            return
        host, port = self._media_address(settings)
        address = (host, port if settings.rtcp_mux else min(port + 1, MAX_PORT))
        if self._report_address is not None and self._report_address[0] == host:
            address = self._report_address
        self._send(data, address, is_report=True)

    def _send(self, data: bytes, address: Address, is_report: bool) -> None:
        if self._settings is None:
            return
        protected = self._srtp.protect(data, is_report) if self._srtp else data
        self._sockets.send(protected, address, is_report and not self._settings.rtcp_mux)


def _checked_remote(remote: Address) -> Address:
    """The address as sockets write it."""
    host, port = remote
    try:
        address = ip_address(host)
    except ValueError:
        raise WireError(f"{shown(host)} is not an IP address; media is sent to no other name", "invalid_sdp") from None
    if address.is_multicast or not 0 <= port <= MAX_PORT:
        raise WireError(f"media cannot be sent to {host} port {port}", "invalid_sdp")
    return str(address), port
