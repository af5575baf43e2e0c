"""The corpus and the training of the turn-end model."""

import numpy as np
import pytest
import torch

from vivavoce.audio.turn_model import RATE, SECONDS, TurnEndNetwork
from vivavoce.bench.turn_sounds import talk
from vivavoce.errors import InputError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.train.turn_end.corpus import TurnUtterance, kokoro_plan, read_shards, write_shard
from vivavoce.train.turn_end.examples import MIN_REST, Examples, end_of_speech, pauses
from vivavoce.train.turn_end.texts import WORDS, turn_texts
from vivavoce.train.turn_end.train import TurnTraining, fit

pytestmark = pytest.mark.quick


def utterance(seconds=2.0, is_finished=True, word_ends=(), part="train", seed=2):
    sound = np.zeros(round((seconds + 0.5) * RATE), np.float32)
    speech = talk(seconds * 1.5, seed=seed)[: round(seconds * RATE)]
    sound[: len(speech)] = speech
    samples = (sound * 32767).astype(np.int16)
    return TurnUtterance(part, "en", "Hello there.", "voice", is_finished, 1.0, tuple(word_ends), samples)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_held_out_texts_share_no_sentence_with_training(language):
    parts = {part: turn_texts(language, part, 400) for part in ("train", "held_out")}
    assert parts["train"] == turn_texts(language, "train", 400)
    train, held_out = ({each.text for each in texts if each.is_finished} for texts in parts.values())
    assert train.isdisjoint(held_out)
    for texts in parts.values():
        assert 0.2 < np.mean([not each.is_finished for each in texts]) < 0.5
        trailing = WORDS[language].trailing
        assert all(each.text.endswith(trailing) for each in texts if not each.is_finished)
        assert all(each.text[-1] in ".?。？" for each in texts if each.is_finished)


def test_held_out_voices_only_evaluate():
    plan = kokoro_plan(60)
    assert plan == kokoro_plan(60) and {each.language for each in plan} == {"en", "zh"}
    held = {voice for voices in HELD_OUT_VOICES.values() for voice in voices}
    for each in plan:
        assert (each.voice in held) == (each.part == "held_out")
        assert each.part == "held_out" or not any(voice in each.voice for voice in held)


def test_an_utterance_has_its_end_and_cuts_within_it():
    spoken = utterance(word_ends=(0.1, 0.6, 1.2, 1.9, 2.0))
    end, *cuts = pauses(spoken)
    assert end.is_finished and abs(end.end / RATE - 2.0) < 0.15
    assert [round(cut.end / RATE, 1) for cut in cuts] == pytest.approx([0.6, 1.2], abs=0.1)
    assert all(cut.is_cut and not cut.is_finished and cut.end <= end.end - MIN_REST * RATE for cut in cuts)
    assert len(pauses(utterance())) > 2, "without the ends of words, cuts are made at regular places"


def test_trailing_silence_is_not_speech():
    sound = np.zeros(RATE, np.float32)
    sound[: RATE // 2] = 0.3
    assert end_of_speech(sound) == RATE // 2


def test_batches_are_half_ends_and_depend_on_the_seed_alone():
    spoken = [utterance(seed=1), utterance(is_finished=False, seed=5)]
    sounds, labels = Examples(spoken, 3).batch(6)
    again, _ = Examples(spoken, 3).batch(6)
    assert sounds.shape == (6, SECONDS * RATE) and labels.tolist() == [1.0, 0.0] * 3
    assert torch.equal(sounds, again) and not torch.equal(sounds, Examples(spoken, 4).batch(6)[0])


def test_shards_survive_the_disk(tmp_path):
    spoken = [utterance(word_ends=(0.5, 2.0)), utterance(is_finished=False)]
    write_shard(tmp_path / "kokoro-0000", spoken)
    write_shard(tmp_path / "hibari-0000", spoken[1:])
    assert read_shards(tmp_path, "kokoro") == spoken and len(read_shards(tmp_path)) == 3
    assert np.array_equal(read_shards(tmp_path, "kokoro")[0].samples, spoken[0].samples)
    with pytest.raises(InputError, match="turn-end-data"):
        read_shards(tmp_path, "programs")


def test_training_learns_what_differs_at_the_end_and_repeats_itself():
    torch.manual_seed(0)
    labels = torch.tensor([1.0, 0.0] * 32)
    features = torch.randn(64, 80, 120)
    features[:, :20, -30:] += 3 * (labels[:, None, None] - 0.5)
    options, losses = TurnTraining(epochs=6, batch=16, rate=1e-2), []
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        network = fit(TurnEndNetwork(16), features, labels, options, lambda values: losses.append(values["loss"]))
        made.append(network(features))
    assert losses[5] < 0.4 < losses[0]
    assert torch.equal(*made) and losses[:6] == losses[6:]
