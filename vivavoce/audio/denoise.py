"""Noise suppression of streams: 32 ms windows of 16 kHz sound with less noise, 16 ms later.

GTCRN masks the spectrum of each 32 ms of sound, every 16 ms. Detectors of speech get its output. Recognisers and models
get it mixed with its input: they err less on speech with some noise than on speech that the mask has cut holes into,
and clean speech they should get as it is. How much of each follows the noise that was found, in the last seconds and at
the moment: in pauses there is nothing to cut.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.gtcrn import STATE as NETWORK_STATE
from vivavoce.audio.gtcrn import Gtcrn, Indices, gtcrn
from vivavoce.audio.rows import Rows
from vivavoce.audio.vad import RATE, WINDOW, Array
from vivavoce.errors import InputError

HOP = WINDOW // 2
DELAY = HOP
"""Samples by which the output is later than the input."""
DELAY_MS = DELAY * 1000 // RATE
CLEAN_DB, NOISY_DB = -18.0, -8.0
"""Power removed over power kept, over two seconds: up to the first the sound stays as it is, from the second on the
mask has its full share of the mix."""
SPEECH_DB, PAUSE_DB = -3.0, 7.0
"""The same for 16 ms: where there is mostly speech, and where there is none."""
SPEECH_SHARE, PAUSE_SHARE = 0.3, 0.9
"""Shares of the mask's output, there and there."""
MEMORY = 0.984  # of the powers of two seconds, a window
QUIETEST = 1e-10  # power, against division by zero
_WINDOW = np.sqrt(np.hanning(WINDOW + 1)[:-1]).astype(np.float32)  # its squares, half a window apart, add up to one
_RISE = np.linspace(0.0, 1.0, HOP, dtype=np.float32)
_ENDS = np.cumsum([NETWORK_STATE, HOP, HOP, 2, 2, 1])
STATE = int(_ENDS[-1])
"""Floats: of the network, the last samples, the last frame, powers of two seconds and of 16 ms, the mask's share."""


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
        _, before, tail, *others = (slice(*each) for each in zip([0, *_ENDS[:-1]], _ENDS, strict=True))
        heard = np.concatenate([states[rows, before], windows], 1)
        frames = np.stack([heard[:, :WINDOW], heard[:, HOP:]], 1) * _WINDOW
        spectra = np.fft.rfft(frames).astype(np.complex64).view(np.float32).reshape(len(rows), 2, -1, 2)
        masked = self.network.mask(states, rows, spectra)
        frames = np.fft.irfft(masked.view(np.complex64)[..., 0], WINDOW).astype(np.float32) * _WINDOW
        speech = np.concatenate([states[rows, tail] + frames[:, 0, :HOP], frames[:, 0, HOP:] + frames[:, 1, :HOP]], 1)
        late = heard[:, :WINDOW]
        states[rows, before], states[rows, tail] = windows[:, HOP:], frames[:, 1, HOP:]
        return Denoised(speech, late + self._shares(states, rows, others, speech, late, strengths) * (speech - late))

    @staticmethod
    def _shares(
        states: Array, rows: Indices, parts: list[slice], speech: Array, late: Array, strengths: Array
    ) -> Array:
        """The share of the mask's output for each sample.  # [stream, 512]"""
        long, short, last = parts
        hops = np.stack([speech, late - speech], 1).reshape(len(rows), 2, 2, HOP)  # kept and removed, hop
        powers = np.square(hops).mean(3).swapaxes(1, 2)  # [stream, hop, 2]
        recent = np.concatenate([states[rows, short][:, None], powers], 1)
        remembered = MEMORY * states[rows, long] + (1 - MEMORY) * powers.mean(1)
        noise = strengths * _between(remembered, CLEAN_DB, NOISY_DB)
        pause = _between(recent[:, :-1] + recent[:, 1:], SPEECH_DB, PAUSE_DB)
        share = noise[:, None] * (SPEECH_SHARE + (PAUSE_SHARE - SPEECH_SHARE) * pause)  # [stream, hop]
        begin = np.concatenate([states[rows, last], share[:, :1]], 1)
        states[rows, long], states[rows, short], states[rows, last] = remembered, powers[:, 1], share[:, 1:]
        ramp: Array = (begin[..., None] + (share - begin)[..., None] * _RISE).astype(np.float32)
        return ramp.reshape(len(rows), WINDOW)


def _between(powers: NDArray[np.floating[Any]], low_db: float, high_db: float) -> NDArray[np.floating[Any]]:
    """Where power removed over power kept is between two limits, from 0 to 1.  # [..., 2] → [...]"""
    ratio = 10.0 * np.log10((powers[..., 1] + QUIETEST) / (powers[..., 0] + QUIETEST))
    return np.clip((ratio - low_db) / (high_db - low_db), 0.0, 1.0)


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
