"""Which packets belong to a call: source address, SSRC and sequence numbers (RFC 3550, appendix A)."""

from dataclasses import dataclass, field

Address = tuple[str, int]

SEQUENCES = 1 << 16
MAX_DROPOUT = 3_000  # sequence numbers that a gap may have
MIN_SEQUENTIAL = 3  # packets in order that another SSRC needs to take over
SILENT_SECONDS = 0.1  # after which another SSRC may take over
DUPLICATE_WINDOW = 256  # sequence numbers


@dataclass
class ReceptionStatistics:
    """Sequence numbers and jitter of one SSRC."""

    first: int
    highest: int
    """Extended: without wrap-around."""
    received: int = 0
    jitter: float = 0.0
    """In clock units, as RTCP reports it."""
    _transit: float | None = None
    _expected_before: int = 0
    _received_before: int = 0
    _recent: set[int] = field(default_factory=set)

    @property
    def expected(self) -> int:
        """Packets that were sent since the first, as far as is known."""
        return self.highest - self.first + 1

    @property
    def lost(self) -> int:
        """Packets that did not arrive."""
        return max(0, self.expected - self.received)

    def add(self, sequence: int) -> bool:
        """Count a packet; False for a duplicate or one far from the others."""
        half = SEQUENCES // 2
        extended = self.highest + (sequence - self.highest + half) % SEQUENCES - half
        if extended - self.highest > MAX_DROPOUT or extended <= self.highest - DUPLICATE_WINDOW:
            return False
        if extended in self._recent:
            return False
        self.first, self.highest = min(self.first, extended), max(self.highest, extended)
        self.received += 1
        self._recent.add(extended)
        if len(self._recent) > 2 * DUPLICATE_WINDOW:
            self._recent = {each for each in self._recent if each > self.highest - DUPLICATE_WINDOW}
        return True

    def add_transit(self, transit: float) -> None:
        """Add arrival minus timestamp of a packet, in clock units."""
        if self._transit is not None:
            self.jitter += (abs(transit - self._transit) - self.jitter) / 16
        self._transit = transit

    def fraction_lost(self) -> int:
        """Loss since the last call, in units of 1/256."""
        expected, received = self.expected - self._expected_before, self.received - self._received_before
        self._expected_before, self._received_before = self.expected, self.received
        return max(0, (expected - received) * 256 // expected) if expected > 0 else 0


@dataclass
class _Candidate:
    """Another SSRC that may take over."""

    ssrc: int
    sequence: int
    count: int = 1


class SourceFilter:
    """Accepts the packets of one address and one SSRC.

    The address is the negotiated one; until packets came from there, that of the first valid packet, which a NAT may
    have changed (symmetric RTP). A packet of another SSRC is dropped, until several in order came while the accepted
    SSRC was silent.
    """

    def __init__(self, negotiated: Address) -> None:
        self.negotiated = negotiated
        self.address: Address | None = None
        """Where accepted packets came from."""
        self.ssrc: int | None = None
        self.statistics: ReceptionStatistics | None = None
        self.heard_at: float | None = None
        """When the last packet was accepted."""
        self._candidate: _Candidate | None = None

    def accepts_address(self, address: Address) -> bool:
        """Whether packets of this address are looked at."""
        return self.address is None or address in (self.address, self.negotiated)

    def accept(self, address: Address, ssrc: int, sequence: int, now: float) -> bool:
        """Whether this packet, whose format is valid, belongs to the call."""
        if not self.accepts_address(address):
            return False
        if address != self.address or self.statistics is None:
            self._begin(ssrc, sequence)
        elif ssrc != self.ssrc:
            if not self._takes_over(ssrc, sequence, now):
                return False
            self._begin(ssrc, sequence)
        elif not self.statistics.add(sequence):
            if not self._takes_over(ssrc, sequence, now):
                return False
            self._begin(ssrc, sequence)  # the sender has restarted its sequence numbers
        self.address, self.heard_at = address, now
        return True

    def _begin(self, ssrc: int, sequence: int) -> None:
        self.ssrc, self.statistics, self._candidate = ssrc, ReceptionStatistics(sequence, sequence), None
        self.statistics.add(sequence)

    def _takes_over(self, ssrc: int, sequence: int, now: float) -> bool:
        candidate = self._candidate
        if candidate is None or candidate.ssrc != ssrc or sequence != (candidate.sequence + 1) % SEQUENCES:
            self._candidate = _Candidate(ssrc, sequence)
            return False
        candidate.sequence, candidate.count = sequence, candidate.count + 1
        is_silent = self.heard_at is None or now - self.heard_at >= SILENT_SECONDS
        return candidate.count >= MIN_SEQUENTIAL and is_silent
