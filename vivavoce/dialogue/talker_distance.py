"""How far from the microphone a voice is, by its sharpness, whatever its level.

The residual of the linear prediction of a voice near the microphone has a sharp peak in each pitch period. Reflections
of a room fill the gaps between them, so that its kurtosis falls (Gillespie, Malvar and Florêncio, 2001). It is compared
with the user's, who may be in a room too.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.vad import RATE, WINDOW
from vivavoce.dialogue.items import Samples

ORDER = 10  # of the prediction
BAND = (300.0, 3400.0)  # what a telephone lets through
TAPS = 65
SIZE = 2 * WINDOW  # of the Fourier transforms: room for the filter's tail
LOUD_DB = 12.0  # windows within this of the loudest count; the reverberation after them does not
USUAL_STEP = 3  # of the user's loud windows every third is enough, and costs a third
KEPT_WINDOWS = 96
MIN_WINDOWS = 4
MAX_EVIDENCE = 3.0
MIDDLE = 1.5  # sharpness between that of near and of distant voices
# A logistic regression, rounded, on 960 sounds of Kokoro's training voices in random rooms: sharpness minus half of the
# user's, at which both are as likely, and log-odds for each unit below it.
EVEN, WEIGHT, USUAL_SHARE = 0.62, 5.0, 0.5


def _band_pass() -> NDArray[np.complex128]:
    time = np.arange(TAPS) - TAPS // 2
    low, high = (2 * edge / RATE * np.sinc(2 * edge / RATE * time) for edge in BAND)
    return np.fft.rfft((high - low) * np.hamming(TAPS), SIZE)


_FILTER = _band_pass()
_HANN = np.hanning(WINDOW - TAPS + 1)
_LAGS = np.abs(np.subtract.outer(np.arange(ORDER), np.arange(ORDER)))


def sharpness(windows: Sequence[Samples]) -> NDArray[np.float64]:
    """Log kurtosis of the prediction residual of windows of 512 samples at 16 kHz.  # → [window]"""
    spectra = np.fft.rfft(np.stack(list(windows)).astype(np.float64), SIZE)
    passed = np.fft.irfft(spectra * _FILTER)[:, TAPS - 1 : WINDOW]
    power = np.square(np.abs(np.fft.rfft(passed * _HANN, SIZE)))
    correlation = np.fft.irfft(power)[:, : ORDER + 1]
    correlation[:, 0] = 1.001 * correlation[:, 0] + 1e-9
    weights = np.linalg.solve(correlation[:, _LAGS], correlation[:, 1:, None])[..., 0]
    filters = np.concatenate([np.ones((len(weights), 1)), -weights], axis=1)
    residual = np.fft.irfft(np.fft.rfft(passed, SIZE) * np.fft.rfft(filters, SIZE))[:, ORDER : passed.shape[1]]
    residual -= residual.mean(axis=1, keepdims=True)
    spread = np.square(residual).mean(axis=1) + 1e-20
    return np.asarray(np.log(np.square(np.square(residual)).mean(axis=1) / np.square(spread) + 1e-9))


@dataclass
class TalkerDistance:
    """Follows the speech of one sound."""

    usual: float | None = None
    """The user's usual sharpness; None: not known."""
    _windows: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_WINDOWS), repr=False)

    @classmethod
    def from_usual(cls, loud: Sequence[Samples]) -> "TalkerDistance":
        """One that knows some windows of the user's loud speech."""
        known = list(loud)[::USUAL_STEP]
        return cls(float(np.median(sharpness(known))) if len(known) >= MIN_WINDOWS else None)

    def add(self, level_db: float, sharp: float) -> None:
        """Add the level and the sharpness of a window of speech."""
        if self.usual is not None:
            self._windows.append((level_db, sharp))

    @property
    def relative_usual(self) -> float:
        """The user's usual sharpness relative to `MIDDLE`; 0 where it is not known."""
        return 0.0 if self.usual is None else self.usual - MIDDLE

    @property
    def evidence(self) -> float:
        """Log-odds that the voice is farther away than the user; 0 where too little is known."""
        if self.usual is None or len(self._windows) < MIN_WINDOWS:
            return 0.0
        levels, sharp = np.array(self._windows).T
        heard = float(np.median(sharp[levels > levels.max() - LOUD_DB]))
        return float(np.clip(WEIGHT * (EVEN - heard + USUAL_SHARE * self.usual), -MAX_EVIDENCE, MAX_EVIDENCE))
