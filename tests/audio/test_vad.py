"""Voice activity (the published network, and a detector without weights) and Smart Turn's turn ends."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.dialogue.voices import cough, hum, silence, talk
from vivavoce.audio.vad import (
    BUNDLED,
    MODEL_VARIABLE,
    WINDOW,
    EnergyActivity,
    SileroActivity,
    SmartTurn,
    smart_turn_file,
    speech_probabilities,
    voice_activity,
)
from vivavoce.errors import CheckpointError, InputError, MissingDependencyError

GOLDEN = Path(__file__).parent / "silero_chances.json"


def sound() -> np.ndarray:
    parts = [silence(0.3), talk(1.2, 1), silence(0.4), hum(0.4, 2), silence(0.3), talk(0.6, 2, -40), silence(0.4)]
    return np.concatenate(parts).astype(np.float32)


def test_the_probabilities_equal_those_of_the_published_network():
    """Made once with onnxruntime from silero-vad 6.2.3, for the same sound."""
    expected = np.array(json.loads(GOLDEN.read_text()))
    np.testing.assert_allclose(speech_probabilities(SileroActivity(), sound()), expected, atol=2e-3)


@pytest.mark.skipif(find_spec("silero_vad") is None, reason="silero-vad is not installed")
def test_the_probabilities_equal_those_of_the_installed_package():
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


@pytest.fixture
def model(tmp_path):
    """A network of the published shape that answers with the mean of its features."""
    features = helper.make_tensor_value_info("input_features", TensorProto.FLOAT, ["batch", 80, 800])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])
    nodes = [
        helper.make_node("ReduceMean", ["input_features"], ["mean"], axes=[1, 2], keepdims=0),
        helper.make_node("Unsqueeze", ["mean", "one"], ["logits"]),
    ]
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(nodes, "turn", [features], [logits], [one])
    file = tmp_path / "smart-turn-v3.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


def test_features_are_whispers_of_the_last_eight_seconds(model):
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(chunk_length=8)
    for seconds in (2.0, 8.0, 9.5):
        samples = talk(seconds, seed=1)
        last = samples[-8 * 16_000 :]
        padded = np.concatenate([np.zeros(8 * 16_000 - len(last), "f"), last])
        expected = extractor(
            padded, sampling_rate=16_000, return_tensors="np", padding="max_length", max_length=128_000,
            truncation=True, do_normalize=True,
        ).input_features  # fmt: skip
        np.testing.assert_allclose(SmartTurn(model).features(samples), expected, atol=2e-3)


def test_the_answer_is_the_models(model):
    turn = SmartTurn(model)
    samples = talk(2.0, seed=1)
    assert turn(samples) == pytest.approx(np.clip(turn.features(samples).mean(), 0, 1), abs=1e-5)


def test_the_model_is_found_by_variable_or_package(model, monkeypatch, tmp_path):
    monkeypatch.setenv(MODEL_VARIABLE, str(model))
    assert smart_turn_file() == model and 0 <= SmartTurn()(talk(1.0)) <= 1
    monkeypatch.delenv(MODEL_VARIABLE)
    monkeypatch.setattr("vivavoce.audio.vad.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pipecat-ai"):
        SmartTurn()
    with pytest.raises(CheckpointError, match="does not exist"):
        SmartTurn(tmp_path / "absent.onnx")
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="not a turn model"):
        SmartTurn(damaged)(talk(1.0))
    with pytest.raises(InputError, match="samples"):
        SmartTurn(model)(np.zeros((2, 10), "f"))
