"""A picture of a sound before and after a codec: two spectrograms on one scale."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.sound import Sound
from vivavoce.errors import MissingDependencyError

RATE = 24_000
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
        seconds = picture.shape[1] * HOP / RATE
        image = axes.imshow(
            picture,
            origin="lower",
            aspect="auto",
            extent=(0.0, seconds, 0.0, RATE / 2000),
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
    samples = sound.mono().resampled(RATE).samples[0]
    samples = np.pad(samples, (0, max(0, N_FFT - len(samples))))
    frames = np.lib.stride_tricks.sliding_window_view(samples, N_FFT)[::HOP] * np.hanning(N_FFT)
    return 20 * np.log10(np.abs(np.fft.rfft(frames)).T + 1e-8)
