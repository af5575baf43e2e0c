"""An adaptive jitter buffer: which packet is to be played when. It has no clock; times are passed in, in seconds."""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

WINDOW = 400  # packets whose transit times are compared, 8 s of 20 ms
QUANTILE = 0.98  # of the transit times that the delay covers
MARGIN = 0.005
INITIAL_DELAY, FEW_PACKETS = 0.04, 25  # until this many packets were measured
MIN_DELAY, MAX_DELAY = 0.01, 0.4
MAX_STALL = 0.1  # an empty buffer is waited for this long, then playback pauses
MAX_GAP = 0.1  # a longer one in the timestamps is a pause of the sender
MAX_JUMP = 3.0  # of the transit time; beyond, the sender has begun a new sequence of timestamps
MAX_HELD = 150  # packets, 3 s
TIMESTAMPS = 1 << 32


@dataclass(frozen=True)
class MediaPacket:
    """The payload of a packet, and where it belongs in the stream."""

    timestamp: int
    payload: bytes
    is_comfort_noise: bool = False


class DelayEstimator:
    """The delay that most packets need, from the distribution of transit times of the last seconds."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, transit: float) -> None:
        """Add arrival minus timestamp of a packet; only differences between packets matter."""
        self._recent.append(transit)
        insort(self._sorted, transit)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    @property
    def fastest(self) -> float:
        """The least transit time."""
        return self._sorted[0]

    @property
    def target(self) -> float:
        """How long after the fastest packet one should be played."""
        count = len(self._sorted)
        needed = self._sorted[min(int(QUANTILE * count), count - 1)] - self._sorted[0] + MARGIN if count else 0.0
        lowest = INITIAL_DELAY if count < FEW_PACKETS else MIN_DELAY
        return min(max(needed, lowest), MAX_DELAY)


class Missing(Enum):
    """Why there is no packet to play."""

    LOST = auto()
    """Later packets are there: conceal `JitterBuffer.gap` and go on."""
    LATE = auto()
    """The buffer is empty: conceal, and wait for the packet."""
    PAUSED = auto()
    """The sender pauses, or its first packets are delayed until they are due."""


class JitterBuffer:
    """Orders packets by timestamp and delays them so that most arrive before they are due.

    The target delay is a quantile of the transit times of the last seconds. A packet that comes after others were
    played in its place is dropped. When the buffer runs empty, playback waits for the next packet, which raises the
    delay; `excess` says how much of the delay can be given up, or has to be added, at a moment of silence.
    """

    def __init__(self, clock_rate: int) -> None:
        self.clock_rate = clock_rate
        self.late = 0
        """Packets that came after their time."""
        self.overflowed = 0
        """Packets dropped because too many were held."""
        self._estimator = DelayEstimator()
        self._held: list[tuple[int, MediaPacket]] = []  # by timestamp without wrap-around
        self._newest: int | None = None  # timestamp without wrap-around
        self._cursor: int | None = None  # of the next sample to play; None while paused
        self._stalled = 0  # clock units concealed without moving the cursor

    def add(self, packet: MediaPacket, arrival: float) -> None:
        """Hold a packet until it is due."""
        timestamp = self._unwrapped(packet.timestamp)
        transit = arrival - timestamp / self.clock_rate
        if self._newest is not None and abs(transit - self._estimator.fastest) > MAX_JUMP:
            self._restart()
        self._newest = timestamp if self._newest is None else max(self._newest, timestamp)
        self._estimator.add(transit)
        if self._cursor is not None and timestamp < self._cursor:
            self.late += 1
            return
        index = bisect_left(self._held, timestamp, key=lambda each: each[0])
        if index < len(self._held) and self._held[index][0] == timestamp:
            return
        self._held.insert(index, (timestamp, packet))
        if len(self._held) > MAX_HELD:
            self.overflowed += 1
            del self._held[0]

    @property
    def cursor(self) -> int | None:
        """The timestamp, without wrap-around, of what is played next; None while paused."""
        return self._cursor

    @property
    def gap(self) -> int:
        """Clock units between what was played and the next packet."""
        return self._held[0][0] - self._cursor if self._held and self._cursor is not None else 0

    @property
    def target(self) -> float:
        """Seconds that a packet should wait after the arrival of the fastest."""
        return self._estimator.target

    def next(self, now: float) -> MediaPacket | Missing:
        """The packet to play now, which is removed, or why there is none."""
        if self._cursor is None:
            if not self._held or now < self._due(self._held[0][0]):
                return Missing.PAUSED
            self._cursor, self._stalled = self._held[0][0], 0
        if not self._held:
            if self._stalled < MAX_STALL * self.clock_rate:
                return Missing.LATE
            self.pause()
            return Missing.PAUSED
        if self.gap > MAX_GAP * self.clock_rate:
            self.pause()
            return self.next(now)
        if self.gap > self._stalled:
            return Missing.LOST
        self._cursor, self._stalled = self._held[0][0], 0
        return self._held.pop(0)[1]

    def played(self, units: int) -> None:
        """Note that the last packet, or what stands for lost ones, had this many clock units."""
        if self._cursor is not None:
            self._cursor += units

    def stalled(self, units: int) -> None:
        """Note that this many clock units were made up while the buffer was empty."""
        self._stalled += units

    def pause(self) -> None:
        """Play nothing until the next packet is due."""
        self._cursor, self._stalled = None, 0

    def excess(self, now: float, decoded: float) -> float:
        """Seconds by which the delay exceeds its target; `decoded` seconds were taken, but not yet played."""
        if self._cursor is None:
            return 0.0
        return now - (self._cursor / self.clock_rate - decoded) - self._estimator.fastest - self.target

    def _due(self, timestamp: int) -> float:
        return timestamp / self.clock_rate + self._estimator.fastest + self.target

    def _unwrapped(self, timestamp: int) -> int:
        if self._newest is None:
            return timestamp
        half = TIMESTAMPS // 2
        return self._newest + (timestamp - self._newest + half) % TIMESTAMPS - half

    def _restart(self) -> None:
        self._held.clear()
        self._estimator = DelayEstimator()
        self.pause()
