"""Sampling of one sequence on the CPU in NumPy: the engine's settings and the engine's noise, without torch."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
LOW_32 = 0xFFFFFFFF
FIRST, SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
PLACE, CHANNEL, TOKEN = 0x9E3779B9, 0x85EBCA77, np.uint32(0xC2B2AE3D)
MIN_WAYS = 2  # to go on: speak, or stop


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
        self.samplings = samplings
        self.generated = 0
        channels = len(samplings)
        self._is_greedy = all(sampling.temperature == 0 for sampling in samplings)
        self._penalties = np.ones((channels, entries), np.float32)  # what each id's logit is to be made less likely by
        self._seed = _mixed(_mixed(np.array([[seed & LOW_32]], np.uint32)) ^ np.uint32(seed >> 32 & LOW_32))
        numbers = np.arange(1, channels + 1, dtype=np.uint64) * np.uint64(CHANNEL)
        self._channels = numbers.astype(np.uint32)[:, None]
        self._ids = np.arange(max(entries, MIN_WAYS), dtype=np.uint32) * TOKEN
        self._noise: Floats = np.empty((channels, 0), np.float32)  # [channel, id], of the row that is drawn

    def start_row(self, position: int) -> None:
        """The next row will stand at this position of the sequence."""
        self.generated += 1
        if self._is_greedy:
            return
        state = _mixed(_mixed(self._seed + np.uint32(position * PLACE & LOW_32)) + self._channels)
        bits = _mixed(_mixed(state + self._ids) ^ state)
        uniform = ((bits >> np.uint32(8)).astype(np.float64) + 0.5) / 2**24
        self._noise = -np.log(-np.log(uniform)).astype(np.float32)

    def choose(self, channel: int, logits: Floats) -> int:
        """One of a few ways to go on, whatever was drawn before.  # [way]"""
        sampling = self.samplings[channel]
        if sampling.temperature == 0:
            return int(logits.argmax())
        scaled = logits / np.float32(sampling.temperature)
        noise = self._noise[channel]
        ids = _best(scaled, sampling.top_k)
        if ids is not None:
            scaled, noise = scaled[ids], noise[ids]
        drawn = _drawn(scaled, noise[: len(scaled)], sampling.top_p)
        return drawn if ids is None else int(ids[drawn])

    def sample(self, channel: int, logits: Floats) -> int:
        """An id of a codebook, those drawn before made less likely.  # [id]"""
        penalty = self.samplings[channel].repetition_penalty
        if penalty == 1.0:
            return self.choose(channel, logits)
        penalties = self._penalties[channel, : len(logits)]
        either = np.minimum if penalty > 1 else np.maximum  # of a positive and of a negative logit, what is meant
        drawn = self.choose(channel, either(logits * penalties, logits / penalties))
        penalties[drawn] = penalty
        return drawn


def _best(scaled: Floats, top_k: int) -> NDArray[np.int64] | None:
    """The ids of the `top_k` best, in any order; None for all."""
    count = len(scaled)
    return np.argpartition(scaled, count - top_k)[count - top_k :] if 0 < top_k < count else None


def _drawn(scores: Floats, noise: Floats, top_p: float) -> int:
    """The one that noise makes the best, of those before which less than `top_p` of all chances stand."""
    noisy = scores + noise
    if top_p >= 1.0:
        return int(noisy.argmax())
    chances = np.exp(scores - scores.max())
    threshold = top_p * chances.sum()
    while True:
        drawn = int(noisy.argmax())
        if chances[scores > scores[drawn]].sum() < threshold:
            return drawn
        noisy[drawn] = -np.inf


def _mixed(x: Words) -> Words:
    """`counter_noise.mixed`, where words wrap around by themselves."""
    x = (x ^ x >> np.uint32(16)) * FIRST
    x = (x ^ x >> np.uint32(15)) * SECOND
    return x ^ x >> np.uint32(16)
