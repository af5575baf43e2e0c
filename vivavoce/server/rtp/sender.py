"""The sending side of a stream: packets of 20 ms with audio or key presses. It has no socket and no clock."""

import secrets

from aiortc.rtp import RtpPacket

from vivavoce.dialogue.items import Samples
from vivavoce.server.rtp.codecs import FRAMES_PER_SECOND, RtpCodec
from vivavoce.server.rtp.dtmf_events import DigitSender
from vivavoce.server.rtp.output import Output, ReplyQueue
from vivavoce.server.rtp.rtcp import SenderStatistics

TIMESTAMPS, SEQUENCES = 1 << 32, 1 << 16


class RtpSender:
    """Sends with one codec under one SSRC."""

    def __init__(self, codec: RtpCodec, dtmf_payload_type: int | None, queue: ReplyQueue) -> None:
        self.statistics = SenderStatistics(secrets.randbits(32))
        self.timestamp = secrets.randbits(32)
        self._sequence = secrets.randbits(15)  # far from the wrap-around, which SRTP could not follow after a loss
        self._is_talking = False
        self.use(codec, dtmf_payload_type, queue)

    def use(self, codec: RtpCodec, dtmf_payload_type: int | None, queue: ReplyQueue) -> None:
        """Send with this codec, of the same clock rate, from the next packet on."""
        self._output = Output(codec, queue)
        self._codec, self._dtmf_payload_type = codec, dtmf_payload_type
        self._frame = codec.clock_rate // FRAMES_PER_SECOND
        self._digits = DigitSender(self._frame, codec.clock_rate)
        self.sent: Samples | None = None
        """The audio of the last packet, at the sample rate of the codec; None where it had none."""

    def add_digit(self, digit: str) -> None:
        """Send a digit after those before it; audio waits meanwhile."""
        self._digits.add(digit)

    def skip(self, frames: int = 1) -> None:
        """Let frames of 20 ms pass without a packet."""
        self.timestamp = (self.timestamp + frames * self._frame) % TIMESTAMPS
        self._is_talking = False
        self.sent = None

    def packet(self) -> bytes | None:
        """The packet of the next 20 ms; None in the pause between two digits."""
        if not self._digits.is_sending or self._dtmf_payload_type is None:
            data = self._packet(self._codec.payload_type, self.timestamp, not self._is_talking, self._output.payload())
            self.timestamp = (self.timestamp + self._frame) % TIMESTAMPS
            self._is_talking = True
            self.sent = self._output.frame
            return data
        event, now = self._digits.next(), self.timestamp
        self.skip()
        if event is None:
            return None
        return self._packet(self._dtmf_payload_type, (now - event.age) % TIMESTAMPS, event.is_marked, event.payload)

    def _packet(self, payload_type: int, timestamp: int, is_marked: bool, payload: bytes) -> bytes:
        packet = RtpPacket(payload_type, int(is_marked), self._sequence, timestamp, self.statistics.ssrc, payload)
        self._sequence = (self._sequence + 1) % SEQUENCES
        self.statistics.packets += 1
        self.statistics.octets += len(payload)
        return packet.serialize()
