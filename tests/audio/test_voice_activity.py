"""Voice activity: the published network's own chances, and a detector that needs no weights."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.dialogue.voices import cough, hum, silence, talk
from vivavoce.audio.vad import BUNDLED, WINDOW, EnergyActivity, SileroActivity, speech_probabilities, voice_activity
from vivavoce.errors import CheckpointError, InputError

GOLDEN = Path(__file__).parent / "silero_chances.json"


def sound() -> np.ndarray:
    parts = [silence(0.3), talk(1.2, 1), silence(0.4), hum(0.4, 2), silence(0.3), talk(0.6, 2, -40), silence(0.4)]
    return np.concatenate(parts).astype(np.float32)


def test_the_chances_are_those_of_the_published_network():
    """Made once with onnxruntime from silero-vad 6.2.3, for the same sound."""
    expected = np.array(json.loads(GOLDEN.read_text()))
    np.testing.assert_allclose(speech_probabilities(SileroActivity(), sound()), expected, atol=2e-3)


@pytest.mark.skipif(find_spec("silero_vad") is None, reason="silero-vad is not installed")
def test_the_chances_are_those_of_the_installed_package():
    import onnxruntime

    spec = find_spec("silero_vad")
    session = onnxruntime.InferenceSession(str(Path(spec.origin).parent / "data" / "silero_vad.onnx"))
    state, context, samples, probabilities = np.zeros((2, 1, 128), "f"), np.zeros(64, "f"), sound(), []
    for start in range(0, len(samples) - WINDOW + 1, WINDOW):
        window = samples[start : start + WINDOW]
        inputs = {"input": np.concatenate([context, window])[None], "state": state, "sr": np.array(16_000)}
        (probability, state), context = session.run(None, inputs), window[-64:]
        probabilities.append(probability[0, 0])
    np.testing.assert_allclose(speech_probabilities(SileroActivity(), samples), probabilities, atol=1e-4)


@pytest.mark.parametrize("detector", [SileroActivity(), EnergyActivity()], ids=["silero", "energy"])
def test_speech_is_speech_and_silence_is_not(detector):
    for seed in range(3):
        probabilities = speech_probabilities(
            detector, np.concatenate([silence(0.96, seed), talk(1.92, seed), silence(0.96, seed)])
        )
        before, during, after = np.split(probabilities, [30, 90])
        assert (before < 0.35).mean() > 0.95 and (during[4:-1] > 0.5).mean() > 0.9 and (after[6:] < 0.35).all()


@pytest.mark.parametrize("level", [-70.0, -50.0])
def test_steady_noise_is_not_speech(level):
    noise = silence(5.0, level_dbfs=level)
    assert (speech_probabilities(SileroActivity(), noise) < 0.35).all()
    assert (speech_probabilities(EnergyActivity(), noise)[30:] < 0.35).all()


def test_a_cough_is_hardly_ever_speech_to_silero():
    probabilities = [
        speech_probabilities(SileroActivity(), np.concatenate([silence(0.5), cough(seed)])) for seed in range(10)
    ]
    assert np.mean([(each > 0.5).sum() >= 2 for each in probabilities]) <= 0.2


@pytest.mark.parametrize("detector", [SileroActivity(), EnergyActivity()], ids=["silero", "energy"])
def test_a_state_is_a_value(detector):
    window = talk(0.032)[:WINDOW].astype(np.float32)
    state = detector.initial_state()
    first, after = detector.step(state, window)
    detector.step(after, window)
    again, _ = detector.step(state, window)
    assert first == again


def test_wrong_windows_and_files_are_refused(tmp_path):
    detector = SileroActivity()
    with pytest.raises(InputError, match="512"):
        detector.step(detector.initial_state(), np.zeros(511, np.float32))
    damaged = tmp_path / "silero.safetensors"
    damaged.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        SileroActivity(damaged)
    with pytest.raises(CheckpointError, match="cannot be read"):
        voice_activity(tmp_path / "absent.safetensors")


def test_the_weights_come_with_the_package():
    assert BUNDLED.is_file() and (BUNDLED.parent / "LICENSE").read_text().startswith("MIT License")
    assert isinstance(voice_activity(), SileroActivity)
