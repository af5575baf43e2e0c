"""The corpus, the examples and the training of the barge-in model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vivavoce.audio.io import Sound, write
from vivavoce.audio.vad import voice_activity
from vivavoce.bench.duplex import texts as lab_texts
from vivavoce.bench.turn_sounds import talk
from vivavoce.dialogue.overlap_model import CONTEXT, DISTANCES, INPUTS, MELS, SoundKind, read_overlap_network
from vivavoce.errors import CheckpointError, InputError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.train.barge_in import sounds, texts
from vivavoce.train.barge_in.corpus import (
    UTTERANCES_A_VOICE,
    OverlapUtterance,
    hibari_plan,
    kokoro_plan,
    people_utterances,
    read_overlaps,
)
from vivavoce.train.barge_in.examples import Calls, Example, Rooms, Voices, _convolved, read_examples, write_examples
from vivavoce.train.barge_in.train import (
    FORGOTTEN,
    BargeInTraining,
    _varied,
    fit,
    stopped,
    turn_odds,
    write_overlap_network,
)
from vivavoce.train.spoken_shards import write_shard


def utterance(kind="interruption", seconds=1.0, seed=1):
    samples = (talk(seconds * 1.5, seed=seed)[: round(seconds * 16_000)] * 32767).astype(np.int16)
    return OverlapUtterance("train", "en", "Hello there.", "voice", True, samples=samples, kind=kind)


def test_held_out_voices_and_the_labs_interruptions_are_in_no_plan():
    plan = [*kokoro_plan(200), *hibari_plan(60)]
    assert kokoro_plan(200) == plan[:200]
    held = {voice for voices in HELD_OUT_VOICES.values() for voice in voices}
    assert not any(voice in each.voice for voice in held for each in plan)
    said = {each.text for each in plan}
    assert said.isdisjoint({text for bank in lab_texts.INTERRUPTIONS.values() for text in bank})
    assert {each.kind for each in plan} == set(texts.KINDS) and {each.language for each in plan} == {"en", "zh"}
    voices = [each.voice for each in kokoro_plan(200)]
    assert voices[:UTTERANCES_A_VOICE] == [voices[0]] * UTTERANCES_A_VOICE and len(set(voices)) > 20
    assert 0.05 < np.mean([each.part == "check" for each in plan]) < 0.25


def test_shards_keep_the_kind(tmp_path):
    write_shard(tmp_path / "kokoro-0000", [utterance("backchannel"), utterance()])
    assert [each.kind for each in read_overlaps(tmp_path)] == ["backchannel", "interruption"]
    with pytest.raises(InputError, match="barge-in-data"):
        read_overlaps(tmp_path / "none")


@pytest.mark.parametrize("make", sounds.MADE, ids=lambda make: make.__name__)
def test_made_sounds_differ_by_seed_and_are_finite(make):
    made = [make(np.random.default_rng(seed)) for seed in range(3)]
    assert np.array_equal(made[0], make(np.random.default_rng(0)))
    assert all(each.dtype == np.float32 and np.isfinite(each).all() and np.abs(each).max() > 0.01 for each in made)
    assert len({each.tobytes() for each in made}) == 3


def test_the_overlaps_of_a_call_are_labelled_and_depend_on_the_seed_alone(tmp_path):
    spoken = {"interruption": [utterance(seed=1), utterance(seed=4)], "backchannel": [utterance("backchannel", 0.3)]}
    rooms = Rooms.__new__(Rooms)
    rooms.near = rooms.distant = [np.array([1.0, 0.0, 0.3], np.float32)]
    made = [Calls(Voices(spoken), rooms, voice_activity(), "1").examples(1) for _ in range(2)]
    assert len(made[0]) >= 2 and {each.kind for each in made[0]} <= set(SoundKind)
    for one, two in zip(*made, strict=True):
        assert one.kind == two.kind and np.array_equal(one.inputs, two.inputs)
        assert one.inputs.shape[1] == INPUTS and len(one.inputs) > CONTEXT
    write_examples(tmp_path / "examples.npz", made[0])
    for one, two in zip(made[0], read_examples(tmp_path / "examples.npz"), strict=True):
        assert one.kind == two.kind
        np.testing.assert_allclose(one.inputs, two.inputs, atol=2e-2)


def test_people_are_voices_of_their_own_and_say_interruptions(tmp_path):
    for voice in ("ann", "bob"):
        (tmp_path / voice).mkdir()
        for number in range(9):
            sound = talk(1.5, seed=number + 1)[:16_000]
            write(tmp_path / voice / f"{number}.wav", Sound(sound[None], 16_000))
    people = people_utterances(tmp_path, 9)
    assert [each.voice for each in people] == ["ann"] * 9 + ["bob"] * 9
    assert [each.part for each in people[:9]] == ["check", *["train"] * 7, "check"]
    voices = Voices.of([utterance("backchannel", 0.3)], [], "train", people)
    assert voices.people == {"ann", "bob"} and set(voices.users) == {"ann", "bob"}
    with pytest.raises(InputError, match="one for each voice"):
        people_utterances(tmp_path / "ann", 9)


def test_what_is_known_of_a_user_is_their_own_voice():
    said = [utterance(seed=seed) for seed in (1, 2, 3)]
    tone = (8000 * np.sin(2 * np.pi * 6000 * np.arange(16_000) / 16_000)).astype(np.int16)
    other = replace(said[0], voice="other", samples=tone)
    said.append(utterance("backchannel", 0.3))
    calls = Calls(Voices.of([*said, other], [], "train"), Rooms(0), voice_activity(), "2")
    assert set(calls.voices.users) == {"voice"}
    made = [calls._call() for _ in range(12)]
    assert any(call.levels.user is None and not call.levels.loud for call in made)
    known = [call.levels for call in made if call.levels.user is not None]
    assert all(len(levels.loud) >= 8 for levels in known)
    power = [np.square(np.abs(np.fft.rfft(np.concatenate(levels.loud)))) for levels in known]
    assert all(each[len(each) * 2 // 3 :].sum() < 0.5 * each.sum() for each in power), "the other voice's tone"


def test_in_a_room_a_sound_is_convolved_with_its_response():
    source = np.random.default_rng(0)
    sound, response = (source.standard_normal(size).astype(np.float32) for size in (1000, 77))
    np.testing.assert_allclose(_convolved(sound, response), np.convolve(sound, response), atol=1e-3)


def test_where_it_is_forgotten_how_the_user_sounds_the_distance_from_the_user_is_too():
    inputs = torch.ones(400, 3, INPUTS)
    varied = _varied(inputs, torch.Generator().manual_seed(0))
    spectrum, distances = varied[..., -MELS - DISTANCES : -DISTANCES], varied[..., -DISTANCES:]
    is_known = spectrum.any(-1)
    assert 0.5 * FORGOTTEN < 1 - is_known.float().mean() < 2 * FORGOTTEN
    assert not distances[~is_known][:, 1:].any() and distances[is_known].all() and distances[..., 0].all()


def test_training_learns_and_numpy_gives_what_torch_gives(tmp_path):
    source = np.random.default_rng(0)
    examples = []
    for index in range(96):
        kind = SoundKind(index % len(SoundKind))
        inputs = source.standard_normal((CONTEXT + 12, INPUTS)).astype(np.float32)
        inputs[CONTEXT:, int(kind)] += 3.0
        examples.append(Example(inputs, kind))
    options = BargeInTraining(epochs=30, batch=16, rate=1e-2, hidden=16, state=16)
    module = fit(examples, options)
    figures = stopped(module, examples, enough=0.0)
    assert figures["turn stopped"] > 0.95 and figures["noise stopped"] < 0.3
    write_overlap_network(module.network(), tmp_path / "model.safetensors")
    network = read_overlap_network(tmp_path / "model.safetensors")
    state = network.initial_state()
    for row, odds in zip(examples[0].inputs, [*[None] * CONTEXT, *turn_odds(module, examples[:1])[0]], strict=True):
        outputs, state = network.step(state, row[None])
        if odds is not None:
            others = np.logaddexp.reduce(np.delete(outputs[0], SoundKind.TURN))
            assert outputs[0][SoundKind.TURN] - others == pytest.approx(float(odds), abs=0.05)


def test_weights_of_another_shape_are_refused(tmp_path):
    module = fit(
        [Example(np.zeros((CONTEXT + 3, INPUTS), np.float32), SoundKind.TURN)] * 4, BargeInTraining(epochs=1, batch=2)
    )
    network = module.network()
    object.__setattr__(network, "input_weight", network.input_weight[:, :-1])
    write_overlap_network(network, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not a barge-in model"):
        read_overlap_network(tmp_path / "model.safetensors")
