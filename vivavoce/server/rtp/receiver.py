"""The receiving side of a stream: which packets count, key presses, and audio. It has no socket and no clock."""

import struct
from dataclasses import dataclass

from aiortc.rtp import RtpPacket

from vivavoce.dialogue.items import Samples
from vivavoce.server.rtp.codecs import COMFORT_NOISE_PAYLOAD_TYPE, RtpCodec
from vivavoce.server.rtp.dtmf_events import DigitReceiver
from vivavoce.server.rtp.jitter import MediaPacket
from vivavoce.server.rtp.playout import Playout
from vivavoce.server.rtp.source import Address, SourceFilter

MALFORMED = (ValueError, IndexError, struct.error)
"""What aiortc's parsers raise for bytes that are not a packet."""


@dataclass
class DroppedPackets:
    """Packets that were not used, by reason."""

    malformed: int = 0
    unauthentic: int = 0
    """SRTP packets with a wrong tag, or received before."""
    other_address: int = 0
    other_source: int = 0
    """Of another SSRC, duplicates, or far from the sequence numbers before."""
    other_payload_type: int = 0


class RtpReceiver:
    """Receives the packets of one peer with one codec."""

    def __init__(
        self, codec: RtpCodec, dtmf_payload_type: int | None, source: SourceFilter, rate: int, dropped: DroppedPackets
    ) -> None:
        self.source, self.dropped = source, dropped
        self.playout = Playout(codec, rate)
        self._codec, self._dtmf_payload_type = codec, dtmf_payload_type
        self._digits = DigitReceiver()
        self._ssrc = source.ssrc
        self._has_audio = False

    def receive(self, data: bytes, address: Address, now: float) -> str | None:
        """Take a packet; the digit that it reports, if any."""
        try:
            packet = RtpPacket.parse(data)
        except MALFORMED:
            self.dropped.malformed += 1
            return None
        is_noise = packet.payload_type == COMFORT_NOISE_PAYLOAD_TYPE and self._codec.has_comfort_noise
        is_audio = is_noise or packet.payload_type == self._codec.payload_type
        if not is_audio and packet.payload_type != self._dtmf_payload_type:
            self.dropped.other_payload_type += 1
            return None
        if not self.source.accept(address, packet.ssrc, packet.sequence_number, now):
            self.dropped.other_source += 1
            return None
        if packet.ssrc != self._ssrc:
            self._ssrc, self._digits = packet.ssrc, DigitReceiver()
        if not is_audio:
            return self._digits.receive(packet.payload, packet.timestamp, bool(packet.marker))
        if self.source.statistics is not None:
            self.source.statistics.add_transit(now * self._codec.clock_rate - packet.timestamp)
        self._has_audio = True
        self.playout.buffer.add(MediaPacket(packet.timestamp, packet.payload, is_noise), now)
        return None

    def pull(self, now: float) -> Samples | None:
        """The next 20 ms of audio; None before the first packet."""
        return self.playout.pull(now) if self._has_audio else None
