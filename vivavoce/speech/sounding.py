"""Frames become sound in chunks that grow with the lead over an imagined player.

The first chunk is decoded at once, for a quick start. On a CPU with another core free, later ones are decoded there
while the next frames are made: short ones, since the last is waited for, unless more frames wait already. On other
devices, the chunks that several texts wait for are decoded together.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vivavoce.dialogue.chunking import Grain, LeadPolicy, next_chunk
from vivavoce.dialogue.player import SimulatedPlayer

Samples = NDArray[np.float32]
Frame = tuple[int, ...]
State = TypeVar("State")
"""Where a codec's stream stands; a value."""
LONGEST, LONGEST_BESIDE = 1.6, 0.32  # seconds of a chunk


def spare_cores() -> int:
    """Cores this process may use besides the one that makes frames."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return allowed - 1


def beside() -> Executor | None:
    """Where chunks can be decoded while frames are made; None where there is no core for it."""
    return ThreadPoolExecutor(spare_cores(), "viva-sound") if spare_cores() > 0 else None


class Decoder(Protocol[State]):
    """The next sound of a stream of frames, by whoever is best placed to make it."""

    def __call__(self, state: State, codes: list[Frame]) -> tuple[Samples, State]:
        """# [channel, time]"""
        ...


@dataclass
class ChunkedPlayback(Generic[State]):
    """The codec's side of one stretch of speech."""

    decode: Decoder[State]
    state: State
    frame_seconds: float
    player: SimulatedPlayer
    clock: Callable[[], float]
    beside: Executor | None = None
    is_live: bool = True
    """Whether sound is wanted as soon as it is there; if not, the chunks are always the same ones."""

    def __post_init__(self) -> None:
        longest = LONGEST if self.beside is None else LONGEST_BESIDE
        self.policy = LeadPolicy(Grain(frame_seconds=self.frame_seconds), longest=longest)
        self.chunks = 0

    def sounds(self, frames: Iterator[Frame]) -> Iterator[Samples]:
        """The sound of frames, as they come.  # pieces [channel, time]"""
        waiting: list[Frame] = []
        under_way: Future[tuple[Samples, State]] | None = None
        for frame in frames:
            waiting.append(frame)
            if under_way is not None and (under_way.done() if self.is_live else self._due(len(waiting), False)):
                yield self._taken(under_way.result())
                under_way = None
            if under_way is None and (count := self._due(len(waiting), False)):
                codes, waiting = waiting[:count], waiting[count:]
                if self.beside is None or self.chunks == 0:
                    yield self._taken(self._decoded(codes))
                else:
                    under_way = self.beside.submit(self._decoded, codes)
        if under_way is not None:
            yield self._taken(under_way.result())
        while count := self._due(len(waiting), True):
            codes, waiting = waiting[:count], waiting[count:]
            yield self._taken(self._decoded(codes))

    def _due(self, waiting: int, is_last: bool) -> int:
        """How many of the waiting frames are to be decoded now."""
        lead = self.player.lead(self.clock())
        count = next_chunk(self.policy, waiting, is_last, self.chunks, lead) if waiting else 0
        if count and self.is_live and self.beside is not None:  # the codec may be slower than the language model
            return min(waiting, round(LONGEST / self.frame_seconds))
        return count

    def _decoded(self, codes: list[Frame]) -> tuple[Samples, State]:
        return self.decode(self.state, codes)

    def _taken(self, made: tuple[Samples, State]) -> Samples:
        sound, self.state = made
        self.chunks += 1
        return sound
