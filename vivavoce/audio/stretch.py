"""Faster or slower speech at its own pitch, live: overlapping pieces of the sound, each put where it fits best (WSOLA).

A piece is taken near where the speed says, moved by a few milliseconds to where it most resembles what would have come
next anyway, and faded over the end of the piece before it. What comes out does not depend on how the sound was cut.
"""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from vivavoce.errors import InputError

Samples = NDArray[np.float32]

SLOWEST, FASTEST = 0.5, 2.0
PIECE_SECONDS = 0.032
SEARCH_SECONDS = 0.008  # how far a piece may be moved either way: more than half a period of the lowest voice


@dataclass(frozen=True)
class StretchState:
    """Where one stream stands. A value: stepping from it twice gives the same twice."""

    held: Samples  # [channel, time]: input that pieces to come may need
    dropped: int  # samples of input before `held`
    pieces: int  # laid so far
    last: int  # where the last piece began, in samples of input
    fading: Samples  # [channel, hop]: the second half of the last piece
    received: int
    emitted: int


class TimeStretch:
    """Changes the speed of streams; 1.0 leaves them as they are."""

    def __init__(self, rate: int, speed: float) -> None:
        if not SLOWEST <= speed <= FASTEST:
            raise InputError(f"speed must be {SLOWEST} to {FASTEST}, not {speed}")
        self.speed = speed
        self.hop = int(PIECE_SECONDS / 2 * rate)
        self.reach = int(SEARCH_SECONDS * rate)
        self._rise: Samples = np.asarray(
            0.5 - 0.5 * np.cos(np.pi * (np.arange(self.hop) + 0.5) / self.hop), dtype=np.float32
        )

    def initial_state(self, channels: int = 1) -> StretchState:
        """Before the first sample: silence."""
        silence = np.zeros((channels, self.hop), np.float32)
        return StretchState(silence, -self.hop, 0, -self.hop, silence, 0, 0)

    def step(self, state: StretchState, samples: Samples) -> tuple[Samples, StretchState]:
        """What these samples allow to be said, and the state after them.  # [channel, time] → [channel, time]"""
        if np.ndim(samples) != 2 or samples.shape[0] != state.held.shape[0]:
            raise InputError(f"the stream has {state.held.shape[0]} channel(s), the samples are {np.shape(samples)}")
        if self.speed == 1.0:
            return samples, state
        return self._lay(state, samples, state.received + samples.shape[1])

    def flush(self, state: StretchState) -> Samples:
        """The rest, once the sound is over.  # [channel, time]"""
        missing = round(state.received / self.speed) - state.emitted
        if self.speed == 1.0 or missing <= 0:
            return state.held[:, :0]
        silence = np.zeros((state.held.shape[0], 3 * self.hop + 2 * self.reach + int(2 * missing * self.speed)))
        rest, _ = self._lay(state, silence.astype(np.float32), state.received)
        return rest[:, :missing]

    def _lay(self, state: StretchState, samples: Samples, received: int) -> tuple[Samples, StretchState]:
        """Lay every piece whose whole neighbourhood is known."""
        held = np.concatenate([state.held, samples], axis=1)
        fading, last, pieces = state.fading, state.last, state.pieces
        end = state.dropped + held.shape[1]
        made: list[Samples] = []
        while max(self._wanted(pieces) + self.reach, last + self.hop) + 2 * self.hop <= end:
            if pieces:
                last = self._best(held, state.dropped, self._wanted(pieces), last)
            piece = held[:, last - state.dropped :][:, : 2 * self.hop]
            if pieces:  # the first half of the first piece lies before the sound
                made.append(np.asarray(fading + piece[:, : self.hop] * self._rise, dtype=np.float32))
            fading = piece[:, self.hop :] * self._rise[::-1]
            pieces += 1
        keep = max(state.dropped, min(last + self.hop, self._wanted(pieces) - self.reach))
        out = np.concatenate([held[:, :0], *made], axis=1)
        held = held[:, keep - state.dropped :]
        return out, StretchState(held, keep, pieces, last, fading, received, state.emitted + out.shape[1])

    def _wanted(self, piece: int) -> int:
        """Where a piece would begin if it were not moved."""
        return round(piece * self.hop * self.speed) - self.hop

    def _best(self, held: Samples, dropped: int, wanted: int, last: int) -> int:
        """The beginning near `wanted` from which the sound is most like what followed the last piece."""
        size = 2 * self.hop
        natural = held[:, last + self.hop - dropped :][:, :size].sum(axis=0)
        first = max(dropped, wanted - self.reach)
        near = held[:, first - dropped : wanted + self.reach + size - dropped].sum(axis=0)
        candidates = sliding_window_view(near, size)
        energy = np.einsum("ij,ij->i", candidates, candidates)
        likeness = candidates @ natural / np.sqrt(energy + 1e-6)
        return first + int(np.argmax(likeness))
