"""The sound of replies on its way to the loudspeaker: one queue, emptied by the device's thread."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vivavoce.dialogue.items import Samples

AUDIBLE = 0.01  # of full scale: the first sample above it is the first that is heard


@dataclass
class _Piece:
    reply: str
    samples: Samples


@dataclass
class PlayedAmount:
    """How much of a reply was played, and when its first audible sample was."""

    samples: int = 0
    first_audible: float | None = None


class PlaybackBuffer:
    """Sound of replies in order. `read` is called by the loudspeaker, the other methods by the conversation."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.clock, self.latency = rate, clock, 0.0
        """`latency`: seconds from `read` to the air."""
        self._pieces: deque[_Piece] = deque()
        self._played: dict[str, PlayedAmount] = {}
        self._gain = 1.0
        self._loudest = 0.0
        self._lock = threading.Lock()

    def add(self, reply: str, samples: Samples) -> None:
        """Queue the next samples of a reply."""
        with self._lock:
            self._pieces.append(_Piece(reply, samples))

    def set_gain(self, gain: float) -> None:
        """Set the gain of all that is not played yet."""
        self._gain = gain

    def clear(self, reply: str) -> None:
        """Drop what is left of a reply."""
        with self._lock:
            self._pieces = deque(piece for piece in self._pieces if piece.reply != reply)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to play."""
        return not self._pieces

    def has(self, reply: str) -> bool:
        """Whether something of a reply is left to play."""
        with self._lock:
            return any(piece.reply == reply for piece in self._pieces)

    def level(self) -> float:
        """The largest sample that was played since the last call."""
        loudest, self._loudest = self._loudest, 0.0
        return loudest

    def played(self, reply: str) -> PlayedAmount:
        """What was played of a reply."""
        with self._lock:
            return self._played.get(reply, PlayedAmount())

    def read(self, count: int) -> Samples:
        """The next samples to play, with silence where there are none."""
        output = np.zeros(count, np.float32)
        filled = 0
        with self._lock:
            while self._pieces and filled < count:
                piece = self._pieces[0]
                part = piece.samples[: count - filled]
                output[filled : filled + len(part)] = part
                self._note(piece.reply, part, filled)
                filled += len(part)
                piece.samples = piece.samples[len(part) :]
                if not len(piece.samples):
                    self._pieces.popleft()
        output *= np.float32(self._gain)
        self._loudest = max(self._loudest, float(np.abs(output).max(initial=0.0)))
        return output

    def _note(self, reply: str, part: Samples, offset: int) -> None:
        played = self._played.setdefault(reply, PlayedAmount())
        audible = np.abs(part) > AUDIBLE
        if played.first_audible is None and audible.any():
            played.first_audible = self.clock() + self.latency + (offset + int(np.argmax(audible))) / self.rate
        played.samples += len(part)
