"""A simulated network between an RTP sender and receiver, on a clock of its own: nothing sleeps."""

import heapq
from dataclasses import dataclass, field

import numpy as np

from vivavoce.server.rtp.codecs import CODECS
from vivavoce.server.rtp.output import ReplyQueue
from vivavoce.server.rtp.receiver import DroppedPackets, RtpReceiver
from vivavoce.server.rtp.sender import RtpSender
from vivavoce.server.rtp.source import SourceFilter

PEER = ("192.0.2.1", 4_000)
FRAME = 0.02
CODEC = {codec.name: codec for codec in CODECS}


@dataclass
class Network:
    """Delay, loss and duplication of packets; deterministic."""

    delay: float = 0.03
    jitter: float = 0.0
    """Added to the delay, uniformly from 0 on; more than 20 ms reorders packets."""
    loss: float = 0.0
    duplication: float = 0.0
    drift: float = 0.0
    """How much slower the sender's clock runs."""
    stalls: dict[float, float] = field(default_factory=dict)
    """Nothing arrives from a time on for so long; then all at once."""
    lost: set[int] = field(default_factory=set)
    """Packets that are lost, by number."""

    def arrivals(self, number: int, random: np.random.Generator) -> list[float]:
        sent = number * FRAME * (1 + self.drift)
        copies = 0 if number in self.lost or random.random() < self.loss else 1 + (random.random() < self.duplication)
        times = [sent + self.delay + self.jitter * random.random() for _ in range(copies)]
        for begin, length in self.stalls.items():
            times = [begin + length if begin <= each < begin + length else each for each in times]
        return times


@dataclass
class Call:
    """One direction of a call."""

    codec: str = "PCMU"
    network: Network = field(default_factory=Network)
    rate: int = 16_000
    seed: int = 1

    def __post_init__(self):
        self.queue = ReplyQueue(self.rate)
        self.sender = RtpSender(CODEC[self.codec], 101, self.queue)
        self.dropped = DroppedPackets()
        self.receiver = RtpReceiver(CODEC[self.codec], 101, SourceFilter(PEER), self.rate, self.dropped)
        self.digits = ""
        self.excess = []
        """Of the delay over its target, at each frame."""

    def run(self, seconds: float, change=None) -> np.ndarray:
        """What is heard; `change` gets the number of each packet and the packet, and returns the packets to send."""
        random = np.random.default_rng(self.seed)
        waiting, heard = [], []
        for number in range(round(seconds / FRAME)):
            packet = self.sender.packet()
            packets = [packet] if change is None else change(number, packet)
            for place, data in enumerate(each for each in packets if each is not None):
                for arrival in self.network.arrivals(number, random):
                    heapq.heappush(waiting, (arrival, number, place, data))
            now = number * FRAME + 0.007
            while waiting and waiting[0][0] <= now:
                arrival, *_, data = heapq.heappop(waiting)
                self.digits += self.receiver.receive(data, PEER, arrival) or ""
            samples = self.receiver.pull(now)
            if samples is not None:
                heard.append(samples)
                self.excess.append(self.receiver.playout.buffer.excess(now, FRAME))
        return np.concatenate(heard) if heard else np.zeros(0, np.float32)
