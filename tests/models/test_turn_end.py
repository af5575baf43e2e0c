"""The turn-end model: a function of the last seconds; the bundled one on speech that it was not trained on."""

import numpy as np
import pytest
import torch

from vivavoce import hub
from vivavoce.audio.io import read
from vivavoce.audio.vad import RATE, last_samples
from vivavoce.bench.turn_sounds import talk
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.turn_end import (
    BUNDLED,
    TurnEndConfig,
    TurnEndModel,
    TurnEndNetwork,
    load_network,
    save_network,
)
from vivavoce.server.hosting.config import ServingOptions
from vivavoce.train.turn_end.train import package

SMALL = TurnEndConfig(d_model=32, layers=1, heads=2, ffn=64, seconds=2)


def speech(seconds=2.0, seed=3):
    return np.ascontiguousarray(talk(seconds * 1.5, seed=seed)[: round(seconds * RATE)], np.float32)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return TurnEndNetwork(SMALL)


def test_the_answer_depends_on_the_last_seconds_alone(network):
    model = TurnEndModel(network)
    sound = speech(SMALL.seconds)
    assert 0.0 < model(sound) < 1.0
    assert model(np.concatenate([speech(5.0, seed=8), sound])) == model(sound)
    short = speech(0.5)
    assert model(short) == model(last_samples(short, SMALL.samples))


def test_a_shift_lowers_every_answer_by_its_odds(network, tmp_path):
    save_network(network, tmp_path)
    shifted = (tmp_path / "turn_end.json").read_text().replace('"shift": 0.0', '"shift": 1.0')
    (tmp_path / "turn_end.json").write_text(shifted)
    plain, lower = TurnEndModel(network)(speech()), TurnEndModel.load(tmp_path)(speech())
    assert np.log(plain / (1 - plain)) - np.log(lower / (1 - lower)) == pytest.approx(1.0, abs=1e-3)


def test_weights_survive_packing(network, tmp_path):
    mel = torch.randn(4, 80, 200)
    save_network(network, tmp_path / "run")
    package(tmp_path / "run", tmp_path / "packed", bits=6)
    with torch.no_grad():
        torch.testing.assert_close(load_network(tmp_path / "run")(mel), network(mel))
        torch.testing.assert_close(load_network(tmp_path / "packed")(mel), network(mel), atol=0.05, rtol=0.1)


def test_wrong_folders_and_sounds_are_refused(network, tmp_path):
    with pytest.raises(CheckpointError, match="turn-end model"):
        TurnEndModel.load(tmp_path)
    save_network(network, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError):
        TurnEndModel.load(tmp_path)
    with pytest.raises(InputError, match="samples"):
        TurnEndModel(network)(np.zeros((2, 10), np.float32))


def test_a_server_has_the_bundled_model_or_the_one_it_is_given(network, tmp_path):
    save_network(network, tmp_path)
    given = ServingOptions(smart_turn=str(tmp_path)).dialogue().turn_model
    bundled = ServingOptions().dialogue().turn_model
    assert isinstance(given, TurnEndModel) and given.network.config == SMALL
    assert isinstance(bundled, TurnEndModel) and bundled.network.config.layers == 4


def test_the_bundled_model_tells_an_end_from_a_place_within_the_sentence():
    """Of bundled questions in synthesizers' voices, which are none of its training."""
    model = TurnEndModel.load(BUNDLED)
    ends, cuts = [], []
    for file in sorted((hub.BUNDLED / "questions").glob("*.opus"))[::5]:
        sound = read(file, rate=RATE).samples[0]
        silence = np.zeros(RATE // 10, np.float32)
        ends.append(model(np.concatenate([sound, silence])))
        cuts.append(model(np.concatenate([sound[: round(0.55 * len(sound))], silence])))
    assert np.mean(ends) > 3 * np.mean(cuts)


def test_its_card_says_what_it_was_made_of():
    card = (BUNDLED / "README.md").read_text(encoding="utf8")
    assert all(word in card for word in ("Data", "Recipe", "Seed", "Figures", "Limits", "Licence"))
