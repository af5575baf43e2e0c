"""Sampling of codes in NumPy, with the settings and the noise of the engine's sampling. Nothing here imports torch."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
LOW_32 = 0xFFFFFFFF
FIRST, SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
POSITION, CHANNEL, TOKEN = 0x9E3779B9, 0x85EBCA77, np.uint32(0xC2B2AE3D)
MIN_CHOICES = 2  # continue or stop


class ChannelSampling(Protocol):
    """The sampling settings of one channel; the engine's `Sampling` has them."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...


class SequenceSampler:
    """Samples the rows of one sequence with the engine's settings and noise, in NumPy; tracks ids for penalties."""

    def __init__(self, samplings: Sequence[ChannelSampling], seed: int, entries: int) -> None:
        self.samplings = samplings
        self.generated = 0
        channels = len(samplings)
        self._is_greedy = all(sampling.temperature == 0 for sampling in samplings)
        self._penalties = np.ones((channels, entries), np.float32)  # of each id, 1 until it is sampled
        self._seed = _mix(_mix(np.array([[seed & LOW_32]], np.uint32)) ^ np.uint32(seed >> 32 & LOW_32))
        numbers = np.arange(1, channels + 1, dtype=np.uint64) * np.uint64(CHANNEL)
        self._channels = numbers.astype(np.uint32)[:, None]
        self._ids = np.arange(max(entries, MIN_CHOICES), dtype=np.uint32) * TOKEN
        self._noise: Floats = np.empty((channels, 0), np.float32)  # [channel, id], of the current row

    def start_row(self, position: int) -> None:
        """Start the row at this position of the sequence, on which its noise depends."""
        self.generated += 1
        if self._is_greedy:
            return
        state = _mix(_mix(self._seed + np.uint32(position * POSITION & LOW_32)) + self._channels)
        bits = _mix(_mix(state + self._ids) ^ state)
        uniform = ((bits >> np.uint32(8)).astype(np.float64) + 0.5) / 2**24
        self._noise = -np.log(-np.log(uniform)).astype(np.float32)

    def choose(self, channel: int, logits: Floats) -> int:
        """Sample one of some options, without a repetition penalty.  # [option]"""
        sampling = self.samplings[channel]
        if sampling.temperature == 0:
            return int(logits.argmax())
        scaled = logits / np.float32(sampling.temperature)
        noise = self._noise[channel]
        ids = _top_ids(scaled, sampling.top_k)
        if ids is not None:
            scaled, noise = scaled[ids], noise[ids]
        chosen = _sample_index(scaled, noise[: len(scaled)], sampling.top_p)
        return chosen if ids is None else int(ids[chosen])

    def sample(self, channel: int, logits: Floats) -> int:
        """Sample an id of a codebook, with the repetition penalty.  # [id]"""
        penalty = self.samplings[channel].repetition_penalty
        if penalty == 1.0:
            return self.choose(channel, logits)
        penalties = self._penalties[channel, : len(logits)]
        penalise = np.minimum if penalty > 1 else np.maximum  # right for positive and for negative logits
        chosen = self.choose(channel, penalise(logits * penalties, logits / penalties))
        penalties[chosen] = penalty
        return chosen


def _top_ids(scaled: Floats, top_k: int) -> NDArray[np.int64] | None:
    """The ids of the `top_k` highest scores, in any order; None for all."""
    count = len(scaled)
    return np.argpartition(scaled, count - top_k)[count - top_k :] if 0 < top_k < count else None


def _sample_index(scores: Floats, noise: Floats, top_p: float) -> int:
    """The index with the highest noisy score in the nucleus of probability `top_p`."""
    noisy = scores + noise
    if top_p >= 1.0:
        return int(noisy.argmax())
    probabilities = np.exp(scores - scores.max())
    threshold = top_p * probabilities.sum()
    while True:
        chosen = int(noisy.argmax())
        if probabilities[scores > scores[chosen]].sum() < threshold:
            return chosen
        noisy[chosen] = -np.inf


def _mix(x: Words) -> Words:
    """`counter_noise.mixed` for unsigned 32-bit words, whose products wrap around."""
    x = (x ^ x >> np.uint32(16)) * FIRST
    x = (x ^ x >> np.uint32(15)) * SECOND
    return x ^ x >> np.uint32(16)
