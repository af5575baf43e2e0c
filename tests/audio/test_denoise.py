"""Noise suppression: the published network, streams of it, and what it does to speech and to noise."""

import platform
from pathlib import Path

import numpy as np
import pytest

from tests.dialogue.voices import talk
from vivavoce import hub
from vivavoce.audio.denoise import DELAY, DenoisedStreams, NoiseSuppressor, denoised
from vivavoce.audio.gtcrn import STATE, Gtcrn
from vivavoce.audio.io import read
from vivavoce.audio.vad import RATE, WINDOW
from vivavoce.errors import CheckpointError, InputError
from vivavoce.kernels import cpu

GOLDEN = Path(__file__).parent / "gtcrn_masked.npy"


def spectra(streams: int, frames: int, seed: int) -> np.ndarray:
    source = np.random.default_rng(seed)
    values, levels = source.standard_normal((streams, frames, 257, 2)), source.standard_normal((streams, frames, 1, 1))
    return (values * np.exp(levels)).astype("f")


def noise(seconds: float, seed: int = 0, level: float = 0.02) -> np.ndarray:
    return (level * np.random.default_rng(seed).standard_normal(round(seconds * RATE))).astype("f")


def power(samples: np.ndarray) -> float:
    return float(np.square(samples).mean())


@pytest.fixture(params=["C", "numpy"])
def network(request, monkeypatch):
    """The network by its C code, and without a compiler."""
    if request.param == "numpy":
        monkeypatch.setattr(cpu, "gtcrn_library", lambda: None)
    elif cpu.gtcrn_library() is None:
        pytest.skip("no C compiler")
    return Gtcrn()


def test_masked_spectra_equal_those_of_the_published_network(network):
    """Made once by the authors' PyTorch code with the weights they published for DNS3."""
    expected = np.load(GOLDEN)
    states = np.zeros((1, STATE), "f")
    masked = network.mask(states, np.zeros(1, np.intp), spectra(1, len(expected), 27))[0]
    np.testing.assert_allclose(masked, expected, atol=5e-5)


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86")
@pytest.mark.parametrize("target", ["-mavx2 -mfma", "-march=x86-64"])
def test_masks_on_older_cpus_are_the_same(monkeypatch, tmp_path, target):
    monkeypatch.setenv(cpu.TARGET, target)
    monkeypatch.setenv("VIVA_CACHE", str(tmp_path))
    older = cpu.gtcrn_library.__wrapped__()
    assert older is not None
    monkeypatch.setattr(cpu, "gtcrn_library", lambda: older)
    test_masked_spectra_equal_those_of_the_published_network(Gtcrn())


def test_frames_one_by_one_and_streams_together_give_the_same(network):
    sounds = spectra(3, 7, 1)
    alone = np.concatenate(
        [network.mask(np.zeros((1, STATE), "f"), np.zeros(1, np.intp), each[None]) for each in sounds]
    )
    states, rows = np.zeros((5, STATE + 9), "f"), np.array([4, 0, 2])
    together = [network.mask(states, rows, sounds[:, frame : frame + 1]) for frame in range(7)]
    np.testing.assert_allclose(np.concatenate(together, 1), alone, atol=2e-5)
    assert not states[[1, 3]].any() and not states[:, STATE:].any(), "other rows and what follows a state stay"


def test_a_file_that_is_no_network_is_refused_by_name(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors cannot be read"):
        Gtcrn(tmp_path / "weights.safetensors")


def test_streams_that_come_and_go_are_denoised_as_alone():
    sounds = [talk(1.0 + 0.2 * seed, seed=seed) + noise(1.0 + 0.2 * seed, seed) for seed in range(6)]
    sounds = [each[: len(each) // WINDOW * WINDOW].astype("f") for each in sounds]
    streams, found = DenoisedStreams(NoiseSuppressor()), [[] for _ in sounds]
    for group in ((0, 1, 2), (3, 4, 5)):  # the second has the rows of the first
        rows = {number: streams.join() for number in group}
        for window in range(max(len(sounds[number]) for number in group) // WINDOW):
            active = [number for number in group if (window + 1) * WINDOW <= len(sounds[number])]
            windows = np.stack([sounds[number][window * WINDOW :][:WINDOW] for number in active])
            output = streams.step([rows[number] for number in active], windows, [0.7] * len(active))
            for number, mixed in zip(active, output.mixed, strict=True):
                found[number].append(mixed)
        for row in rows.values():
            streams.leave(row)
    for sound, windows in zip(sounds, found, strict=True):
        late = np.concatenate(windows)[DELAY:]
        np.testing.assert_allclose(late, denoised(sound, 0.7).mixed[0, : len(late)], atol=1e-5)


def test_the_output_is_the_input_later_where_nothing_is_to_be_removed():
    """The time of speech stays known to the sample."""
    sound = talk(1.5, seed=3).astype("f")
    np.testing.assert_allclose(denoised(sound, 0.0).mixed[0], sound, atol=1e-6)
    speech = denoised(sound).speech[0]
    lags = np.arange(-400, 401)
    likeness = [float(np.dot(sound[500:-500], speech[500 + lag : len(speech) - 500 + lag])) for lag in lags]
    assert abs(lags[int(np.argmax(likeness))]) <= 1


def test_noise_is_removed_from_pauses_and_clean_speech_stays_as_it_is():
    pause, sentence = np.zeros(RATE, "f"), read(hub.BUNDLED / "questions/01-wake-up.opus", rate=RATE).samples[0]
    clean = np.concatenate([pause, sentence, pause])
    noisy = clean + noise(len(clean) / RATE, level=0.5 * np.sqrt(power(sentence)))
    found = denoised(noisy)
    last = slice(-RATE // 2, None)
    assert power(found.speech[0, last]) < 1e-2 * power(noisy[last]), "detectors get next to no noise"
    assert power(found.mixed[0, last]) < 0.05 * power(noisy[last])
    unchanged = denoised(clean).mixed[0] - clean
    assert power(unchanged) < 1e-3 * power(clean)


def test_a_window_of_another_size_is_refused():
    with pytest.raises(InputError, match="512"):
        NoiseSuppressor().step(np.zeros((1, 1), "f"), np.zeros(1, np.intp), np.zeros((1, 480), "f"), np.ones(1, "f"))
