"""Decoding of frames in chunks while they are generated; the chunks grow with the lead over playback.

Nothing here imports torch.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.chunking import ChunkUnit, LeadPolicy, next_chunk
from vivavoce.audio.player import PlaybackClock
from vivavoce.cores import usable_cores
from vivavoce.runtime.event_loop import await_reader

Samples = NDArray[np.float32]
Frame = tuple[int, ...]
State = TypeVar("State")
"""The state of a codec's decoder stream, an immutable value."""
MAX_CHUNK_SECONDS, MAX_PARALLEL_CHUNK_SECONDS = 1.6, 0.32


def spare_cores() -> int:
    """Cores this process may use besides the one that generates frames."""
    return usable_cores() - 1


def decoding_executor() -> Executor | None:
    """Threads that decode chunks while frames are generated; None if there is no spare core."""
    return ThreadPoolExecutor(spare_cores(), "viva-sound") if spare_cores() > 0 else None


class Decoder(Protocol[State]):
    """Decodes the next frames of a codec stream."""

    def __call__(self, state: State, codes: list[Frame], lead: float = 0.0) -> tuple[Samples, State]:
        """Decode frames; the audio is needed in `lead` seconds.  # [channel, time]"""
        ...


@dataclass
class ChunkedPlayback(Generic[State]):
    """Decodes the frames of one part in chunks whose size grows with the lead over playback."""

    decode: Decoder[State]
    state: State
    frame_seconds: float
    player: PlaybackClock
    clock: Callable[[], float]
    executor: Executor | None = None
    is_live: bool = True
    """Whether audio is played while it is generated; if not, the chunk sizes do not depend on timing."""

    def __post_init__(self) -> None:
        max_seconds = MAX_CHUNK_SECONDS if self.executor is None else MAX_PARALLEL_CHUNK_SECONDS
        self.policy = LeadPolicy(ChunkUnit(frame_seconds=self.frame_seconds), max_seconds=max_seconds)
        self.chunks = 0

    def sounds(self, frames: Iterator[Frame]) -> Iterator[Samples]:
        """The audio of frames, chunk by chunk.  # pieces [channel, time]"""
        waiting: list[Frame] = []
        pending: Future[tuple[Samples, State]] | None = None
        for frame in frames:
            await_reader()
            waiting.append(frame)
            if pending is not None and (pending.done() if self.is_live else self._frames_due(len(waiting), False)):
                yield self._accept(pending.result())
                pending = None
            if pending is None and (count := self._frames_due(len(waiting), False)):
                codes, waiting = waiting[:count], waiting[count:]
                if self.executor is None or self.chunks == 0:
                    yield self._accept(self._decode_chunk(codes, self._lead()))
                else:
                    pending = self.executor.submit(self._decode_chunk, codes, self._lead())
        if pending is not None:
            yield self._accept(pending.result())
        while count := self._frames_due(len(waiting), True):
            codes, waiting = waiting[:count], waiting[count:]
            yield self._accept(self._decode_chunk(codes, self._lead()))

    def _lead(self) -> float:
        return self.player.lead(self.clock())

    def _frames_due(self, waiting: int, is_last: bool) -> int:
        """The number of waiting frames to decode now."""
        count = next_chunk(self.policy, waiting, is_last, self.chunks, self._lead()) if waiting else 0
        if count and self.is_live and self.executor is not None:  # the codec may be slower than the language model
            return min(waiting, round(MAX_CHUNK_SECONDS / self.frame_seconds))
        return count

    def _decode_chunk(self, codes: list[Frame], lead: float) -> tuple[Samples, State]:
        return self.decode(self.state, codes, lead)

    def _accept(self, decoded: tuple[Samples, State]) -> Samples:
        sound, self.state = decoded
        self.chunks += 1
        return sound
