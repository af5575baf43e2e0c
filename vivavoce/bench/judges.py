"""Judges we did not train: an ASR that says what it heard, and a model of listeners that says how it sounds.

Both are ONNX files of other projects' packages, found on this machine, never fetched: Moonshine base (MIT), and DNSMOS
P.835 (MIT) from the PyPI package `speechmos`.
"""

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.sound import Sound
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.recognition.moonshine import Moonshine, onnx_session

__all__ = ["Listeners", "Moonshine"]

RATE = 16_000
DNSMOS_SAMPLES = int(9.01 * RATE)
OVERALL = np.poly1d([-0.06766283, 1.11546468, 0.04602535])  # from the network's scale to the listeners', as published


class Listeners:
    """DNSMOS P.835: the mean opinion of overall quality, 1 to 5, that listeners would give."""

    def __init__(self, threads: int = 2) -> None:
        spec = importlib.util.find_spec("speechmos")
        if spec is None or spec.origin is None:
            raise MissingDependencyError("opinion scores need DNSMOS: pip install 'vivavoce[judge]'")
        self._session = onnx_session(Path(spec.origin).parent / "dnsmos_models" / "sig_bak_ovr.onnx", threads)

    def overall(self, sound: Sound) -> float:
        """The score; sound shorter than nine seconds is repeated, as the model's authors do."""
        samples = sound.mono().resampled(RATE).samples[0]
        if not len(samples):
            raise InputError("there is no sound to judge")
        samples = np.tile(samples, -(-DNSMOS_SAMPLES // len(samples))) if len(samples) < DNSMOS_SAMPLES else samples
        starts = range(0, len(samples) - DNSMOS_SAMPLES + 1, RATE)
        return float(np.mean([OVERALL(self._raw(samples[start : start + DNSMOS_SAMPLES])) for start in starts]))

    def _raw(self, samples: NDArray[np.float32]) -> float:
        _signal, _background, overall = self._session.run(None, {"input_1": samples[None].astype(np.float32)})[0][0]
        return float(overall)
