"""Scores of text and audio: edit distance, error rates, DNSMOS, and plots of spectrograms.

DNSMOS P.835 (MIT) is an ONNX file of the PyPI package `speechmos`; it is used if installed, and never downloaded.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivavoce.asr.backends.moonshine import onnx_session
from vivavoce.audio.io import Sound
from vivavoce.errors import InputError, MissingDependencyError

RATE = 16_000
DNSMOS_SAMPLES = int(9.01 * RATE)
OVERALL = np.poly1d([-0.06766283, 1.11546468, 0.04602535])  # the published map from network outputs to listener scores
SPECTROGRAM_RATE = 24_000
N_FFT, HOP = 1024, 256
RANGE_DB = 80.0


class DNSMOS:
    """DNSMOS P.835: predicts the mean opinion score of overall quality, 1 to 5."""

    def __init__(self, threads: int = 2) -> None:
        spec = importlib.util.find_spec("speechmos")
        if spec is None or spec.origin is None:
            raise MissingDependencyError("opinion scores need DNSMOS: pip install 'vivavoce[judge]'")
        self._session = onnx_session(Path(spec.origin).parent / "dnsmos_models" / "sig_bak_ovr.onnx", threads)

    def overall(self, sound: Sound) -> float:
        """The score; audio shorter than nine seconds is repeated, as the model's authors do."""
        samples = sound.mono().resampled(RATE).samples[0]
        if not len(samples):
            raise InputError("the audio to score is empty")
        samples = np.tile(samples, -(-DNSMOS_SAMPLES // len(samples))) if len(samples) < DNSMOS_SAMPLES else samples
        starts = range(0, len(samples) - DNSMOS_SAMPLES + 1, RATE)
        return float(np.mean([OVERALL(self._raw(samples[start : start + DNSMOS_SAMPLES])) for start in starts]))

    def _raw(self, samples: NDArray[np.float32]) -> float:
        _signal, _background, overall = self._session.run(None, {"input_1": samples[None].astype(np.float32)})[0][0]
        return float(overall)


def edit_distance(reference: Sequence[Any], hypothesis: Sequence[Any]) -> int:
    """Levenshtein distance: insertions, deletions and substitutions."""
    row = list(range(len(hypothesis) + 1))
    for row_index, expected in enumerate(reference, start=1):
        diagonal, row[0] = row[0], row_index
        for index, actual in enumerate(hypothesis, start=1):
            diagonal, row[index] = row[index], min(row[index] + 1, row[index - 1] + 1, diagonal + (expected != actual))
    return row[-1]


def error_rate(references: Sequence[Sequence[Any]], hypotheses: Sequence[Sequence[Any]]) -> float:
    """Edits over reference length: of characters for strings, of words for lists of words."""
    edits = sum(
        edit_distance(reference, hypothesis) for reference, hypothesis in zip(references, hypotheses, strict=True)
    )
    return edits / max(1, sum(map(len, references)))


def word_errors(reference: str, hypothesis: str) -> int:
    return edit_distance(reference.split(), hypothesis.split())


def plot_spectrograms(original: Sound, decoded: Sound, title: str, file: Path) -> None:
    """Two spectrograms up to 12 kHz, one above the other, in one image file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'vivavoce[plot]'") from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    rows = figure.subplots(2, 1, sharex=True, sharey=True)
    spectrograms = [_decibels(sound) for sound in (original, decoded)]
    top = max(float(spectrogram.max()) for spectrogram in spectrograms)
    for axes, spectrogram, name in zip(rows, spectrograms, ("original", title), strict=True):
        seconds = spectrogram.shape[1] * HOP / SPECTROGRAM_RATE
        image = axes.imshow(
            spectrogram,
            origin="lower",
            aspect="auto",
            extent=(0.0, seconds, 0.0, SPECTROGRAM_RATE / 2000),
            vmin=top - RANGE_DB,
            vmax=top,
            cmap="magma",
        )
        axes.set(title=name, ylabel="kHz")
    rows[-1].set_xlabel("seconds")
    figure.colorbar(image, ax=rows, label="dB")
    figure.savefig(file, dpi=120)


def _decibels(sound: Sound) -> NDArray[np.float64]:
    """Log power spectrogram.  # [bin, frame]"""
    samples = sound.mono().resampled(SPECTROGRAM_RATE).samples[0]
    samples = np.pad(samples, (0, max(0, N_FFT - len(samples))))
    frames = np.lib.stride_tricks.sliding_window_view(samples, N_FFT)[::HOP] * np.hanning(N_FFT)
    return 20 * np.log10(np.abs(np.fft.rfft(frames)).T + 1e-8)
