"""Judges we did not train: an ASR that says what it heard, and a model of listeners that says how it sounds.

Both are ONNX files of other projects' packages, found on this machine, never fetched: Moonshine base (MIT), and DNSMOS
P.835 (MIT) from the PyPI package `speechmos`.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivavoce.asr.backends.moonshine import Moonshine, onnx_session
from vivavoce.audio.io import Sound
from vivavoce.errors import InputError, MissingDependencyError

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


def edit_distance(meant: Sequence[Any], got: Sequence[Any]) -> int:
    """How many insertions, deletions and replacements lie between two sequences."""
    row = list(range(len(got) + 1))
    for place, wanted in enumerate(meant, start=1):
        before, row[0] = row[0], place
        for index, given in enumerate(got, start=1):
            before, row[index] = row[index], min(row[index] + 1, row[index - 1] + 1, before + (wanted != given))
    return row[-1]


def error_rate(meant: Sequence[Sequence[Any]], got: Sequence[Sequence[Any]]) -> float:
    """Edits over length, of letters in sentences or words in lists of words."""
    edits = sum(edit_distance(one, other) for one, other in zip(meant, got, strict=True))
    return edits / max(1, sum(map(len, meant)))


def word_errors(meant: str, heard: str) -> int:
    """Words to insert, delete or replace to get from one to the other."""
    return edit_distance(meant.split(), heard.split())


SPECTROGRAM_RATE = 24_000
N_FFT, HOP = 1024, 256
RANGE_DB = 80.0


def plot_spectrograms(original: Sound, decoded: Sound, title: str, file: Path) -> None:
    """Write the picture; both sounds are shown up to 12 kHz."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'vivavoce[plot]'") from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    rows = figure.subplots(2, 1, sharex=True, sharey=True)
    pictures = [_decibels(sound) for sound in (original, decoded)]
    top = max(float(picture.max()) for picture in pictures)
    for axes, picture, name in zip(rows, pictures, ("original", title), strict=True):
        seconds = picture.shape[1] * HOP / SPECTROGRAM_RATE
        image = axes.imshow(
            picture,
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
    """Power spectrum over time.  # [bin, frame]"""
    samples = sound.mono().resampled(SPECTROGRAM_RATE).samples[0]
    samples = np.pad(samples, (0, max(0, N_FFT - len(samples))))
    frames = np.lib.stride_tricks.sliding_window_view(samples, N_FFT)[::HOP] * np.hanning(N_FFT)
    return 20 * np.log10(np.abs(np.fft.rfft(frames)).T + 1e-8)
