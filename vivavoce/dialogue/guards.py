"""Keeps a reply from running away: it may not be stuck on a sound, silent for long, or endless."""

from dataclasses import dataclass, replace

import numpy as np

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

    def initial_state(self) -> GuardState:
        """Before the first sample."""
        return GuardState()

    def step(self, state: GuardState, samples: Samples) -> tuple[str | None, GuardState]:
        """What is wrong with the reply, if anything, and the state after these samples."""
        held = samples if state.held is None else np.concatenate([state.held, samples])
        whole = len(held) // self.block * self.block
        for start in range(0, whole, self.block):
            state = self._block(state, held[start : start + self.block])
        seconds = state.seconds + len(samples) / self.rate
        state = replace(state, held=held[whole:], seconds=seconds)
        return self._complaint(state), state

    def _block(self, state: GuardState, block: Samples) -> GuardState:
        power = float(np.square(block, dtype=np.float64).mean())
        is_silent = 10 * np.log10(power + 1e-12) < self.limits.silence_dbfs
        spectrum = np.abs(np.fft.rfft(block * np.hanning(len(block)))[: len(block) // 4]).astype(np.float32)
        shape = spectrum / max(float(np.linalg.norm(spectrum)), 1e-9)
        is_same = state.shape is not None and float(shape @ state.shape) > self.limits.stuck_likeness
        return replace(
            state,
            silent=state.silent + BLOCK_SECONDS if is_silent else 0.0,
            stuck=state.stuck + BLOCK_SECONDS if is_same and not is_silent else 0.0,
            shape=shape,
        )

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
