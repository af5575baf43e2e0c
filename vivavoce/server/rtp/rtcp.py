"""RTCP reports (RFC 3550): what was sent and received, and the round trip that a peer's reports give."""

import secrets
from dataclasses import dataclass

from aiortc.clock import current_ntp_time
from aiortc.rtp import (
    RtcpByePacket,
    RtcpPacket,
    RtcpReceiverInfo,
    RtcpRrPacket,
    RtcpSdesPacket,
    RtcpSenderInfo,
    RtcpSourceInfo,
    RtcpSrPacket,
    clamp_packets_lost,
)

from vivavoce.server.rtp.source import ReceptionStatistics, SourceFilter

CNAME = 1  # SDES item
MAX_ROUND_TRIP = 10.0  # seconds; beyond, a report is not believed


@dataclass
class SenderStatistics:
    """What was sent under an SSRC."""

    ssrc: int
    packets: int = 0
    octets: int = 0


class RtcpReports:
    """Makes the reports of one stream and reads those of its peer."""

    def __init__(self) -> None:
        self.round_trip: float | None = None
        """Seconds, of the last report that gives it."""
        self._name = secrets.token_hex(8).encode()  # a CNAME that tells nothing about the host (RFC 7022)
        self._last_sender_report = 0  # the middle 32 bits of its NTP time
        self._last_received_at = 0

    def report(self, sent: SenderStatistics, timestamp: int, source: SourceFilter | None = None) -> bytes:
        """A sender or receiver report with the CNAME; `timestamp` is that of the next packet."""
        now, reports = current_ntp_time(), []
        if source is not None and source.ssrc is not None and source.statistics is not None:
            reports.append(self._receiver_info(source.ssrc, source.statistics, now))
        first: RtcpSrPacket | RtcpRrPacket = RtcpRrPacket(sent.ssrc, reports)
        if sent.packets:
            info = RtcpSenderInfo(now, timestamp, sent.packets % (1 << 32), sent.octets % (1 << 32))
            first = RtcpSrPacket(sent.ssrc, info, reports)
        return bytes(first) + bytes(RtcpSdesPacket([RtcpSourceInfo(sent.ssrc, [(CNAME, self._name)])]))

    def goodbye(self, sent: SenderStatistics, timestamp: int) -> bytes:
        """A last report, and the end of the SSRC."""
        return self.report(sent, timestamp) + bytes(RtcpByePacket([sent.ssrc]))

    def receive(self, data: bytes, ssrc: int) -> None:
        """Read a compound packet; ValueError where it is malformed. `ssrc` is ours."""
        now = current_ntp_time()
        for packet in RtcpPacket.parse(data):
            if isinstance(packet, RtcpSrPacket):
                self._last_sender_report = _middle(packet.sender_info.ntp_timestamp)
                self._last_received_at = _middle(now)
            if isinstance(packet, RtcpSrPacket | RtcpRrPacket):
                for report in packet.reports:
                    if report.ssrc == ssrc and report.lsr:
                        self._measure(report, _middle(now))

    def _measure(self, report: RtcpReceiverInfo, now: int) -> None:
        seconds = ((now - report.lsr - report.dlsr) % (1 << 32)) / (1 << 16)
        if seconds <= MAX_ROUND_TRIP:
            self.round_trip = seconds

    def _receiver_info(self, ssrc: int, statistics: ReceptionStatistics, now: int) -> RtcpReceiverInfo:
        since = (_middle(now) - self._last_received_at) % (1 << 32) if self._last_sender_report else 0
        return RtcpReceiverInfo(
            ssrc=ssrc,
            fraction_lost=statistics.fraction_lost(),
            packets_lost=clamp_packets_lost(statistics.lost),
            highest_sequence=statistics.highest % (1 << 32),
            jitter=round(statistics.jitter) % (1 << 32),
            lsr=self._last_sender_report,
            dlsr=since,
        )


def _middle(ntp: int) -> int:
    return (ntp >> 16) & 0xFFFFFFFF
