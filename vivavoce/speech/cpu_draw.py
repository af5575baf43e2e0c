"""The engine's draw for one sequence on the CPU: the same settings, the same noise, in NumPy.

A draw is some dozens of operations on a few numbers. There NumPy's smaller cost of a call counts: an eighth of torch's
time, for the same codes.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
LOW_32 = 0xFFFFFFFF
FIRST, SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
PLACE, CHANNEL, TOKEN = 0x9E3779B9, 0x85EBCA77, np.uint32(0xC2B2AE3D)


class ChannelSampling(Protocol):
    """How one channel is drawn, as the engine's `Sampling` says it."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...


class SequenceDraw:
    """Draws the channels of one reply's rows; it remembers what it drew, for penalties."""

    def __init__(self, samplings: Sequence[ChannelSampling], seed: int, entries: int) -> None:
        self.samplings, self.seed = samplings, seed
        self.generated = 0
        channels = len(samplings)
        self._seen = np.zeros((channels, entries), dtype=bool)
        self._noise_of_channel = np.zeros(channels, dtype=np.uint32)

    def start_row(self, position: int) -> None:
        """The next row will stand at this position of the sequence."""
        self.generated += 1
        seed = self.seed
        state = _mixed(np.array([seed & LOW_32], np.uint32))
        state = _mixed(state ^ np.uint32(seed >> 32 & LOW_32))
        state = _mixed(state + np.uint32(position * PLACE & LOW_32))
        channels = np.arange(1, len(self.samplings) + 1, dtype=np.uint64) * np.uint64(CHANNEL)
        self._noise_of_channel = _mixed(state + channels.astype(np.uint32))

    def choose(self, channel: int, logits: Floats) -> int:
        """One of a few ways to go on, whatever was drawn before.  # [way]"""
        sampling = self.samplings[channel]
        if sampling.temperature == 0:
            return int(logits.argmax())
        scaled = logits / np.float32(sampling.temperature)
        ids, scores = _likely(scaled, sampling)
        return int(ids[(scores + self._noise(channel, ids)).argmax()])

    def sample(self, channel: int, logits: Floats) -> int:
        """An id of a codebook, those drawn before made less likely.  # [id]"""
        penalty = self.samplings[channel].repetition_penalty
        seen = self._seen[channel, : len(logits)]
        if penalty != 1.0:
            told = logits[seen]
            logits = logits.copy()
            logits[seen] = np.where(told < 0, told * np.float32(penalty), told / np.float32(penalty))
        drawn = self.choose(channel, logits)
        seen[drawn] = True
        return drawn

    def _noise(self, channel: int, ids: NDArray[np.int64]) -> Floats:
        state = self._noise_of_channel[channel]
        bits = _mixed(_mixed(state + ids.astype(np.uint32) * TOKEN) ^ state)
        uniform = ((bits >> np.uint32(8)).astype(np.float64) + 0.5) / 2**24
        return np.asarray(-np.log(-np.log(uniform)), dtype=np.float32)


def _likely(scaled: Floats, sampling: ChannelSampling) -> tuple[NDArray[np.int64], Floats]:
    """Ids that survive top-k, then top-p over what top-k left, and their scores, the best first."""
    count = min(sampling.top_k or len(scaled), len(scaled))
    ids = np.argpartition(-scaled, count - 1)[:count] if count < len(scaled) else np.arange(len(scaled))
    ids = ids[np.argsort(-scaled[ids], kind="stable")]
    scores = scaled[ids]
    if sampling.top_p < 1.0:
        chances = np.exp(scores - scores[0])
        chances /= chances.sum()
        kept = max(1, int((np.cumsum(chances) - chances < sampling.top_p).sum()))
        ids, scores = ids[:kept], scores[:kept]
    return ids, scores


def _mixed(x: Words) -> Words:
    """`counter_noise.mixed`, where words wrap around by themselves."""
    x = (x ^ x >> np.uint32(16)) * FIRST
    x = (x ^ x >> np.uint32(15)) * SECOND
    return x ^ x >> np.uint32(16)
