"""The turn-end model: a function of the last seconds, causal, level-independent, small."""

import numpy as np
import pytest
import torch

from vivavoce.audio.turn_model import (
    RATE,
    SECONDS,
    TurnEndModel,
    TurnEndNetwork,
    last_seconds,
    read_network,
    write_network,
)
from vivavoce.bench.turn_sounds import talk
from vivavoce.errors import CheckpointError, InputError
from vivavoce.server.hosting.config import ServingOptions

pytestmark = pytest.mark.quick


def speech(seconds=2.0, seed=3):
    return np.ascontiguousarray(talk(seconds * 1.5, seed=seed)[: round(seconds * RATE)], np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    file = tmp_path_factory.mktemp("turn-end") / "model.safetensors"
    torch.manual_seed(0)
    write_network(TurnEndNetwork(), file)
    assert file.stat().st_size < 100_000
    return TurnEndModel(file)


def test_the_answer_depends_on_the_last_seconds_alone(model):
    sound = speech(SECONDS)
    assert 0.0 < model(sound) < 1.0
    assert model(np.concatenate([speech(5.0, seed=8), sound])) == model(sound)
    short = speech(0.5)
    assert model(short) == model(last_seconds(short))


def test_the_level_does_not_matter(model):
    sound = speech()
    assert model(0.1 * sound) == pytest.approx(model(sound), abs=1e-3)


def test_a_sound_received_in_pieces_has_the_answer_of_the_whole(model):
    sound = speech(2.5)
    pieces = [sound[begin : begin + 512] for begin in range(0, len(sound), 512)]
    assert model(np.concatenate(pieces)) == model(sound)


def test_the_network_is_causal():
    """Later frames change no earlier state: the recurrent layer runs forwards over left-padded convolutions."""
    torch.manual_seed(0)
    network, mel = TurnEndNetwork(16).eval(), torch.randn(1, 80, 160)
    states = []
    network.recurrent.register_forward_hook(lambda layer, inputs, output: states.append(output[0]))
    network(mel)
    network(mel[:, :, :80])
    torch.testing.assert_close(states[0][:, :10], states[1])


def test_weights_survive_a_file(tmp_path):
    torch.manual_seed(1)
    network, mel = TurnEndNetwork(32).eval(), torch.randn(4, 80, 300)
    write_network(network, tmp_path / "made" / "model.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(
            read_network(tmp_path / "made" / "model.safetensors")(mel), network(mel), atol=0.02, rtol=0.05
        )


def test_wrong_files_and_sounds_are_refused(model, tmp_path):
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="turn-end model"):
        TurnEndModel(damaged)
    with pytest.raises(InputError, match="samples"):
        model(np.zeros((2, 10), np.float32))


def test_a_server_takes_a_trained_file_as_its_turn_model(tmp_path):
    torch.manual_seed(0)
    write_network(TurnEndNetwork(8), tmp_path / "model.safetensors")
    chosen = ServingOptions(smart_turn=str(tmp_path / "model.safetensors")).dialogue().turn_model
    assert isinstance(chosen, TurnEndModel) and 0.0 < chosen(speech()) < 1.0
    assert ServingOptions().dialogue().turn_model is None
    with pytest.raises(CheckpointError, match="absent"):
        ServingOptions(smart_turn=str(tmp_path / "absent.safetensors")).dialogue()
