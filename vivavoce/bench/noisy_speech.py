"""Recordings with noise added at a signal-to-noise ratio, for measures of recognition and voice activity.

The noise is that of files, such as the steady ones of ESC-50, or synthetic. ESC-50 is published for non-commercial use:
it measures, and is neither bundled nor trained on.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.audio.io import read
from vivavoce.bench.asr import RATE
from vivavoce.bench.duplex.sounds import esc50_files, shuffled_by_name
from vivavoce.errors import InputError
from vivavoce.train.augment import NOISES, at_snr, noise

Array = NDArray[np.float32]
STEADY = (
    *("rain", "wind", "vacuum_cleaner", "engine", "crackling_fire", "washing_machine"),
    *("train", "helicopter", "sea_waves", "airplane", "pouring_water", "crickets"),
)


class NoiseBeds:
    """Noise at a signal-to-noise ratio for recordings, by their number.

    It is that of the steady sounds of an ESC-50 folder, of any files of another folder, or synthetic.
    """

    def __init__(self, decibels: float, folder: Path | None = None) -> None:
        self._decibels = decibels
        self._files: list[Path] = []
        if folder is None:
            return
        if (folder / "meta" / "esc50.csv").is_file():
            in_turn = zip(*esc50_files(folder, STEADY).values(), strict=False)
            self._files = [path for group in in_turn for path in group]
        else:
            self._files = shuffled_by_name(list(folder.rglob("*.wav")))
        if not self._files:
            raise InputError(f"{folder} holds no WAV files of noise; give a folder of them, or that of ESC-50")

    def added(self, samples: Array, number: int) -> Array:
        """The samples with noise over their whole length.  # [time]"""
        speech = torch.from_numpy(samples)[None]
        if self._files:
            bed = read(self._files[number % len(self._files)], rate=RATE).samples[0]
            noise_bed = torch.from_numpy(np.resize(bed, len(samples)))[None]
        else:
            noise_bed = noise(NOISES[number % len(NOISES)], speech, torch.Generator().manual_seed(number))
        return at_snr(speech, noise_bed, self._decibels)[0].clamp(-1, 1).numpy()


def noise_beds(decibels: float | None, folder: Path | None) -> NoiseBeds | None:
    """The noise of a command's options; None where none is added."""
    if decibels is not None:
        return NoiseBeds(decibels, folder)
    if folder is not None:
        raise InputError("--noise needs --snr: how many decibels the speech is above the noise")
    return None
