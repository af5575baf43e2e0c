"""A gate that lets a sound begin where it can be heard: silence before its first word is left out."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

BLOCK_SECONDS = 0.005


@dataclass(frozen=True)
class OnsetState:
    """What came before anything could be heard."""

    held: Samples
    dropped: int = 0
    """Samples left out."""
    is_open: bool = False


class OnsetGate:
    """Leaves out what is under `threshold_dbfs` at the beginning, but for `kept` seconds, and not more than `most`."""

    def __init__(self, rate: int, threshold_dbfs: float = -48.0, kept: float = 0.01, most: float = 0.4) -> None:
        self._block = max(1, round(BLOCK_SECONDS * rate))
        self._power = 10.0 ** (threshold_dbfs / 10)
        self._kept = round(kept / BLOCK_SECONDS) * self._block
        self._most = round(most * rate)

    def initial_state(self) -> OnsetState:
        """Before the first sample."""
        return OnsetState(np.zeros(0, np.float32))

    def step(self, state: OnsetState, samples: Samples, final: bool = False) -> tuple[Samples, OnsetState]:
        """What may be heard by now; a `final` step holds nothing back.  # [time]"""
        if state.is_open:
            return samples, state
        joined = np.concatenate([state.held, samples])
        whole = len(joined) // self._block * self._block
        power = np.square(joined[:whole], dtype=np.float64).reshape(-1, self._block).mean(axis=1)
        heard = np.flatnonzero(power > self._power)
        first = int(heard[0]) * self._block if heard.size else whole
        left_out = max(0, min(first - self._kept, self._most - state.dropped))
        state = OnsetState(joined[left_out:], state.dropped + left_out)
        if heard.size or final or state.dropped >= self._most:
            return state.held, replace(state, held=joined[:0], is_open=True)
        return joined[:0], state
