"""Telephone lines of `viva bench telephone`: what they lose, delay and echo."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from vivavoce.audio.level import from_db
from vivavoce.bench.turn_sounds import Samples

TIMESTAMPS = 1 << 32


@dataclass(frozen=True)
class LineSettings:
    """What a telephone line does to the packets of a caller, and to what it hears."""

    loss: float = 0.0
    """Share of the packets of the caller that are lost."""
    jitter_seconds: float = 0.0
    """Packets are delayed by up to this, evenly distributed."""
    echo_db: float | None = None
    """Level of the reply in what the caller sends."""
    echo_seconds: float = 0.12


class EchoPath:
    """Returns what was received, softer and after a constant delay by its RTP timestamps, whatever its jitter was."""

    def __init__(self, line: LineSettings, rate: int) -> None:
        self._gain = 0.0 if line.echo_db is None else from_db(line.echo_db)
        self._delay = round(line.echo_seconds * rate)
        self._returned = 0  # samples
        self._start: int | None = None
        """The timestamp whose echo is the first sample returned."""
        self._received: deque[tuple[int, Samples]] = deque()

    def receive(self, timestamp: int, samples: Samples) -> None:
        """Take the samples of a packet."""
        if not self._gain:
            return
        if self._start is None:
            self._start = timestamp - self._returned - self._delay
        self._received.append(((timestamp - self._start) % TIMESTAMPS, samples))

    def next(self, count: int) -> Samples:
        """The next samples of the echo."""
        echo, begin = np.zeros(count, np.float32), self._returned
        self._returned += count
        while self._received and self._received[0][0] < self._returned:
            at, samples = self._received.popleft()
            first, last = max(at, begin), min(at + len(samples), self._returned)
            if last > first:
                echo[first - begin : last - begin] = self._gain * samples[first - at : last - at]
            if at + len(samples) > self._returned:
                self._received.appendleft((at, samples))
                break
        return echo
