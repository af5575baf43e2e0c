"""Noise suppression of streams: 32 ms windows of 16 kHz sound with less noise, 16 ms later.

GTCRN masks the spectrum of each 32 ms of sound, every 16 ms. Detectors of speech get its output. Recognisers and models
get it mixed with its input: they err less on speech with some noise than on speech that the mask has cut holes into,
and clean speech they should get as it is. How much of each follows the share of noise that was found.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vivavoce.audio.gtcrn import STATE as NETWORK_STATE
from vivavoce.audio.gtcrn import Gtcrn, Indices, gtcrn
from vivavoce.audio.rows import Rows
from vivavoce.audio.vad import RATE, WINDOW, Array
from vivavoce.errors import InputError

HOP = WINDOW // 2
DELAY = HOP
"""Samples by which the output is later than the input."""
DELAY_MS = DELAY * 1000 // RATE
CLEAN_DB, NOISY_DB = -18.0, -10.0
"""Power removed over power kept: up to the first the sound stays as it is, from the second on it is mixed in full."""
MIX = 0.9
"""The share of the mask's output in noisy sound for recognisers and models, at full strength."""
MEMORY = 0.984  # of these powers, a window: two seconds
QUIETEST = 1e-10  # power, against division by zero
_WINDOW = np.sqrt(np.hanning(WINDOW + 1)[:-1]).astype(np.float32)  # its squares, half a window apart, add up to one
_RISE = np.linspace(0.0, 1.0, WINDOW, dtype=np.float32)
_ENDS = np.cumsum([NETWORK_STATE, HOP, HOP, 2, 1])
STATE = int(_ENDS[-1])
"""Floats: of the network, the last samples, the last frame, powers kept and removed, the share of the mask's output."""


class Denoised(NamedTuple):
    """Windows without noise for detectors, and those for recognisers and models.  # [stream, 512] twice"""

    speech: Array
    mixed: Array


class NoiseSuppressor:
    """Suppresses noise in any number of streams; the state of each is an array."""

    def __init__(self, network: Gtcrn | None = None) -> None:
        self.network = network or gtcrn()

    def initial_states(self, streams: int) -> Array:
        """States before the first window: silence.  # [stream, STATE]"""
        return np.zeros((streams, STATE), np.float32)

    def step(self, states: Array, rows: Indices, windows: Array, strengths: Array) -> Denoised:
        """The next window of each stream; the rows of the states are updated in place.

        # [row, STATE], [stream], [stream, 512], [stream]
        """
        if windows.shape != (len(rows), WINDOW):
            raise InputError(f"noise is suppressed in windows of {WINDOW} samples, not {list(windows.shape)}")
        _, before, tail, powers, shares = (slice(*each) for each in zip([0, *_ENDS[:-1]], _ENDS, strict=True))
        heard = np.concatenate([states[rows, before], windows], 1)
        frames = np.stack([heard[:, :WINDOW], heard[:, HOP:]], 1) * _WINDOW
        spectra = np.fft.rfft(frames).astype(np.complex64).view(np.float32).reshape(len(rows), 2, -1, 2)
        masked = self.network.mask(states, rows, spectra)
        frames = np.fft.irfft(masked.view(np.complex64)[..., 0], WINDOW).astype(np.float32) * _WINDOW
        speech = np.concatenate([states[rows, tail] + frames[:, 0, :HOP], frames[:, 0, HOP:] + frames[:, 1, :HOP]], 1)
        late = heard[:, :WINDOW]
        found = np.stack([np.square(speech).mean(1), np.square(late - speech).mean(1)], 1)
        remembered: Array = (MEMORY * states[rows, powers] + (1 - MEMORY) * found).astype(np.float32)
        share: Array = np.multiply(MIX * strengths, _noise_share(remembered))
        ramp = states[rows, shares] + (share[:, None] - states[rows, shares]) * _RISE
        states[rows, before], states[rows, tail] = windows[:, HOP:], frames[:, 1, HOP:]
        states[rows, powers], states[rows, shares] = remembered, share[:, None]
        return Denoised(speech, late + ramp * (speech - late))


def _noise_share(powers: Array) -> Array:
    """0 for clean speech, 1 for noisy, of the powers kept and removed.  # [stream, 2] → [stream]"""
    ratio = 10.0 * np.log10((powers[:, 1] + QUIETEST) / (powers[:, 0] + QUIETEST))
    return np.clip((ratio - CLEAN_DB) / (NOISY_DB - CLEAN_DB), 0.0, 1.0).astype(np.float32)


class DenoisedStreams:
    """The streams of a process whose noise is suppressed; each has a row from `join` to `leave`."""

    def __init__(self, suppressor: NoiseSuppressor) -> None:
        self._suppressor = suppressor
        self._rows = Rows()
        self._states = self._rows.array((STATE,), np.float32, 0.0)

    def join(self) -> int:
        """The row of a new stream."""
        return self._rows.take()

    def leave(self, row: int) -> None:
        """Release the row of a stream that has ended."""
        self._rows.release(row)

    def step(self, rows: Sequence[int], windows: Array, strengths: Sequence[float]) -> Denoised:
        """The next window of each row.  # [row], [row, 512], [row]"""
        indices = np.array(rows, np.intp)
        return self._suppressor.step(self._states.values, indices, windows, np.array(strengths, np.float32))


def denoised(samples: Array, strength: float = 1.0, suppressor: NoiseSuppressor | None = None) -> Denoised:
    """A whole sound as a stream has it, without the delay.  # [time] → [1, time] twice"""
    suppressor = suppressor or NoiseSuppressor()
    states, row, strengths = suppressor.initial_states(1), np.zeros(1, np.intp), np.array([strength], np.float32)
    padded = np.concatenate([samples, np.zeros(DELAY + -(len(samples) + DELAY) % WINDOW, np.float32)])
    windows = [suppressor.step(states, row, window[None], strengths) for window in padded.reshape(-1, WINDOW)]
    return Denoised(*(np.concatenate(part, 1)[:, DELAY : DELAY + len(samples)] for part in zip(*windows, strict=True)))
