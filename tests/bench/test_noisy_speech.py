"""Noise for benchmarks: at the ratio that was asked for, from files or synthetic, the same in every run."""

import csv

import numpy as np
import pytest

from vivavoce.audio.io import Sound, write
from vivavoce.bench.duplex.sounds import esc50_files
from vivavoce.bench.noisy_speech import STEADY, NoiseBeds, noise_beds
from vivavoce.bench.turn_sounds import talk
from vivavoce.errors import InputError

RATE = 16_000


def question(seconds: float = 1.0) -> np.ndarray:
    return talk(seconds * RATE / 24_000, seed=1)


def ratio_db(samples: np.ndarray, noisy: np.ndarray) -> float:
    return 10 * float(np.log10(np.square(samples).mean() / np.square(noisy - samples).mean()))


def tone(path, hertz: float, seconds: float = 0.3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = 0.1 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * RATE)) / RATE)
    write(path, Sound(samples.astype(np.float32), RATE))


@pytest.mark.parametrize("number", range(6))
def test_synthetic_noise_has_its_ratio_and_is_the_same_again(number):
    samples = question()
    noisy = NoiseBeds(5.0).added(samples, number)
    assert ratio_db(samples, noisy) == pytest.approx(5.0, abs=0.1)
    np.testing.assert_array_equal(NoiseBeds(5.0).added(samples, number), noisy)


def test_noise_of_files_is_repeated_over_the_whole_recording(tmp_path):
    tone(tmp_path / "fan.wav", 200.0)
    samples = question(2.0)
    noisy = NoiseBeds(0.0, tmp_path).added(samples, 7)
    assert ratio_db(samples, noisy) == pytest.approx(0.0, abs=0.1)
    noise = noisy - samples
    assert np.square(noise[-RATE // 2 :]).mean() == pytest.approx(np.square(noise[: RATE // 2]).mean(), rel=0.05)


def test_steady_sounds_of_esc50_come_in_turn(tmp_path):
    rows = [(f"{number}-{category}.wav", category) for category in (*STEADY, "dog") for number in range(2)]
    for number, (name, category) in enumerate(rows):
        if category != "dog":
            tone(tmp_path / "audio" / name, 100.0 + 50 * number)
    (tmp_path / "meta").mkdir()
    with (tmp_path / "meta" / "esc50.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("filename", "category"), *rows])
    samples, beds = question(), NoiseBeds(5.0, tmp_path)
    noises = [beds.added(samples, number) - samples for number in range(2 * len(STEADY))]
    peaks = [int(np.abs(np.fft.rfft(each)).argmax()) for each in noises]
    assert len(set(peaks)) == 2 * len(STEADY), "every file is used before one is used again"
    assert list(esc50_files(tmp_path, STEADY)) == list(STEADY)


def test_noise_without_a_ratio_and_folders_without_sound_are_refused(tmp_path):
    assert noise_beds(None, None) is None
    with pytest.raises(InputError, match="--noise needs --snr"):
        noise_beds(None, tmp_path)
    with pytest.raises(InputError, match="holds no WAV files of noise"):
        noise_beds(5.0, tmp_path)
