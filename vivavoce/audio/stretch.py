"""Streaming time stretching without pitch change (WSOLA): overlapping pieces of the sound, each moved to fit best.

A piece is taken near the position given by the speed, moved by a few milliseconds to where it is most similar to the
continuation of the previous piece, and cross-faded with it. The output does not depend on how the input is chunked.
"""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from vivavoce.errors import InputError

Samples = NDArray[np.float32]

SLOWEST, FASTEST = 0.5, 2.0
PIECE_SECONDS = 0.032
SEARCH_SECONDS = 0.008  # maximum move of a piece either way: more than half a period of the lowest voice


@dataclass(frozen=True)
class StretchState:
    """State of one stream, a value."""

    held: Samples  # [channel, time]: input that later pieces may need
    dropped: int  # samples of input before `held`
    pieces: int  # placed so far
    last: int  # start of the last piece, in samples of input
    fading: Samples  # [channel, hop]: the second half of the last piece
    received: int
    emitted: int


class TimeStretch:
    """Changes the speed of streams; 1.0 leaves them unchanged."""

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
        """The state before the first sample: silence."""
        silence = np.zeros((channels, self.hop), np.float32)
        return StretchState(silence, -self.hop, 0, -self.hop, silence, 0, 0)

    def step(self, state: StretchState, samples: Samples) -> tuple[Samples, StretchState]:
        """The output that these samples complete, and the state after them.  # [channel, time] → [channel, time]"""
        if np.ndim(samples) != 2 or samples.shape[0] != state.held.shape[0]:
            raise InputError(f"the stream has {state.held.shape[0]} channel(s), the samples are {np.shape(samples)}")
        if self.speed == 1.0:
            return samples, state
        return self._place(state, samples, state.received + samples.shape[1])

    def flush(self, state: StretchState) -> Samples:
        """The rest of the output, at the end of the sound.  # [channel, time]"""
        missing = round(state.received / self.speed) - state.emitted
        if self.speed == 1.0 or missing <= 0:
            return state.held[:, :0]
        silence = np.zeros((state.held.shape[0], 3 * self.hop + 2 * self.reach + int(2 * missing * self.speed)))
        rest, _ = self._place(state, silence.astype(np.float32), state.received)
        return rest[:, :missing]

    def _place(self, state: StretchState, samples: Samples, received: int) -> tuple[Samples, StretchState]:
        """Place every piece whose search range is available."""
        held = np.concatenate([state.held, samples], axis=1)
        fading, last, pieces = state.fading, state.last, state.pieces
        end = state.dropped + held.shape[1]
        outputs: list[Samples] = []
        while max(self._nominal(pieces) + self.reach, last + self.hop) + 2 * self.hop <= end:
            if pieces:
                last = self._best(held, state.dropped, self._nominal(pieces), last)
            piece = held[:, last - state.dropped :][:, : 2 * self.hop]
            if pieces:  # the first half of the first piece precedes the sound
                outputs.append(np.asarray(fading + piece[:, : self.hop] * self._rise, dtype=np.float32))
            fading = piece[:, self.hop :] * self._rise[::-1]
            pieces += 1
        keep = max(state.dropped, min(last + self.hop, self._nominal(pieces) - self.reach))
        out = np.concatenate([held[:, :0], *outputs], axis=1)
        held = held[:, keep - state.dropped :]
        return out, StretchState(held, keep, pieces, last, fading, received, state.emitted + out.shape[1])

    def _nominal(self, piece: int) -> int:
        """Start of a piece before it is moved."""
        return round(piece * self.hop * self.speed) - self.hop

    def _best(self, held: Samples, dropped: int, wanted: int, last: int) -> int:
        """The start near `wanted` at which the sound is most similar to the continuation of the last piece."""
        size = 2 * self.hop
        natural = held[:, last + self.hop - dropped :][:, :size].sum(axis=0)
        first = max(dropped, wanted - self.reach)
        near = held[:, first - dropped : wanted + self.reach + size - dropped].sum(axis=0)
        candidates = sliding_window_view(near, size)
        energy = np.einsum("ij,ij->i", candidates, candidates)
        similarity = candidates @ natural / np.sqrt(energy + 1e-6)
        return first + int(np.argmax(similarity))
