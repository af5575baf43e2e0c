"""Keeps a reply from running away: it may not be stuck on a sound, silent for long, or endless."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vivavoce.dialogue.interface import Samples

BLOCK_SECONDS = 0.08


@dataclass(frozen=True)
class GuardLimits:
    """What is too much. None: no limit."""

    longest_seconds: float | None = 120.0
    silent_seconds: float | None = 4.0
    silence_dbfs: float = -55.0
    stuck_seconds: float | None = 3.0
    stuck_likeness: float = 0.995
    """How alike the spectra of neighbouring blocks must be to count as the same sound."""


@dataclass(frozen=True)
class GuardState:
    """What a reply has sounded like so far."""

    seconds: float = 0.0
    silent: float = 0.0
    stuck: float = 0.0
    held: Samples | None = None
    shape: Samples | None = None  # the last block's spectrum, of length 1


class SoundGuard:
    """Watches the sound of a reply as it is made."""

    def __init__(self, rate: int, limits: GuardLimits | None = None) -> None:
        self.limits = limits or GuardLimits()
        self.block = round(BLOCK_SECONDS * rate)
        self.rate = rate
        self._window = np.hanning(self.block).astype(np.float32)

    def initial_state(self) -> GuardState:
        """Before the first sample."""
        return GuardState()

    def step(self, state: GuardState, samples: Samples) -> tuple[str | None, GuardState]:
        """What is wrong with the reply, if anything, and the state after these samples."""
        held = samples if state.held is None else np.concatenate([state.held, samples])
        whole = len(held) // self.block
        if whole:
            state = self._blocks(state, held[: whole * self.block].reshape(whole, self.block))
        seconds = state.seconds + len(samples) / self.rate
        state = replace(state, held=held[whole * self.block :], seconds=seconds)
        return self._complaint(state), state

    def _blocks(self, state: GuardState, blocks: Samples) -> GuardState:
        """After these blocks: for how long it has been silent, or the same, without a break.  # [block, sample]"""
        limits = self.limits
        silent, stuck, shape = state.silent, state.stuck, state.shape
        power = np.einsum("bs,bs->b", blocks, blocks) / self.block
        is_silent = power < 10 ** (limits.silence_dbfs / 10)
        is_same = np.zeros(len(blocks), bool)
        if limits.stuck_seconds is not None:
            is_same, shape = self._alike(shape, blocks)
        for quiet, same in zip(is_silent.tolist(), is_same.tolist(), strict=True):
            silent = silent + BLOCK_SECONDS if quiet else 0.0
            stuck = stuck + BLOCK_SECONDS if same and not quiet else 0.0
        return replace(state, silent=silent, stuck=stuck, shape=shape)

    def _alike(self, before: Samples | None, blocks: Samples) -> tuple[NDArray[np.bool_], Samples]:
        """Which blocks have the spectrum of the one before them, and that of the last."""
        spectra = np.abs(np.fft.rfft(blocks * self._window)[:, : self.block // 4]).astype(np.float32)
        shapes = spectra / np.maximum(np.linalg.norm(spectra, axis=1, keepdims=True), 1e-9)
        joined = np.concatenate([np.zeros_like(shapes[:1]) if before is None else before[None], shapes])
        likeness = np.einsum("bf,bf->b", joined[:-1], joined[1:])
        return likeness > self.limits.stuck_likeness, shapes[-1]

    def _complaint(self, state: GuardState) -> str | None:
        limits = self.limits
        if limits.longest_seconds is not None and state.seconds > limits.longest_seconds:
            return f"the reply is longer than {limits.longest_seconds:.0f} s"
        if limits.silent_seconds is not None and state.silent >= limits.silent_seconds:
            return f"the reply has been silent for {state.silent:.1f} s"
        if limits.stuck_seconds is not None and state.stuck >= limits.stuck_seconds:
            return f"the reply has been stuck on one sound for {state.stuck:.1f} s"
        return None


def longest_loop(codes: list[int], most_period: int = 25) -> int:
    """How many codes at the end repeat what stood one period before, for the period that explains most of them."""
    best = 0
    for period in range(1, min(most_period, len(codes) // 2) + 1):
        run = 0
        while run + period < len(codes) and codes[-1 - run] == codes[-1 - run - period]:
            run += 1
        if run >= 2 * period:
            best = max(best, run)
    return best
