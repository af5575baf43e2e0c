"""Smart Turn's features and answer, on a stand-in of the same shape; the real file where it is installed."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.dialogue.voices import talk
from vivavoce.audio.vad import MODEL_VARIABLE, SmartTurn, smart_turn_file
from vivavoce.errors import CheckpointError, InputError, MissingDependencyError


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


def test_where_the_model_is_looked_for(model, monkeypatch, tmp_path):
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
