"""Speaking a plan in large batches, on a tiny Kokoro with random weights."""

import json
import lzma
import shutil

import numpy as np
import pytest
import torch

from tests.models.tiny_kokoro import tiny_kokoro, write_folder
from vivavoce.errors import InputError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.models.checkpoint import save_weights
from vivavoce.models.kokoro.model import Kokoro
from vivavoce.models.quantised import pack_file
from vivavoce.train.batch_synthesis import BatchSynthesizer, at_training_rate, speech_bounds
from vivavoce.train.corpus import Corpus, main
from vivavoce.train.utterances import Utterance, plan_of_texts, read_plan
from vivavoce.train.voices import trimmed

PLAN = [
    Utterance("mixed", "en", "one", "af_heart", phonemes="wˈʌn ænd mɔɹ"),
    Utterance("mixed", "en", "two", "af_heart:0.5+af_bella:0.5", 1.2, phonemes="tˈu"),
    Utterance("held_out", "en", "three", "af_bella", phonemes="θɹˈi ʌv ðɛm, ɔɹ fˈɔɹ"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tiny_kokoro(), tmp_path_factory.mktemp("kokoro") / "model")


@pytest.fixture(scope="module")
def synthesizer(folder):
    return BatchSynthesizer(Kokoro.load(folder), folder)


def test_a_batch_sounds_as_each_utterance_alone(synthesizer):
    together = synthesizer.speak(PLAN)
    for utterance, sound in zip(PLAN, together, strict=True):
        (alone,) = synthesizer.speak([utterance])
        assert len(alone) == len(sound) > 1000
        # Not the largest difference: phases near ±π have either sign, by rounding, and padding changes the edges.
        difference = np.abs(alone.astype(float) - sound)
        assert np.quantile(difference, 0.95) < 0.02 * np.abs(alone).max()
        assert np.corrcoef(alone, sound)[0, 1] > 0.995


def test_batches_hold_utterances_of_one_length_up_to_a_limit(folder, synthesizer):
    small = BatchSynthesizer(synthesizer.model, folder, seconds_a_batch=3.0)
    many = [Utterance("mixed", "en", "x", "af_heart", phonemes="a" * length) for length in (40, 1, 39, 2, 41, 3)]
    batches = small.batches(many)
    assert sorted(index for batch in batches for index in batch) == list(range(len(many)))
    assert batches[0] == [1, 3] and all(len(batch) == 1 for batch in batches[2:])


def test_the_upper_third_of_the_spectrum_is_dropped():
    time = torch.arange(24_000, dtype=torch.float64) / 24_000
    low, high = (torch.sin(2 * torch.pi * pitch * time) for pitch in (1000, 10_000))
    expected = torch.sin(2 * torch.pi * 1000 * torch.arange(16_000, dtype=torch.float64) / 16_000)
    assert (at_training_rate((low + high)[None])[0] - expected).abs().max() < 1e-4


def test_speech_is_trimmed_as_one_recording_is():
    source = np.random.default_rng(0)
    sound = np.concatenate([np.zeros(4000), source.uniform(-0.3, 0.3, 8000), np.zeros(4000)]).astype(np.float32)
    rows = torch.stack([torch.from_numpy(sound), torch.zeros(len(sound))])
    begins, ends = speech_bounds(rows, torch.tensor([len(sound), len(sound)]))
    assert np.array_equal(sound[begins[0] : ends[0]], trimmed(sound))
    assert begins[1] == ends[1]


def test_texts_are_planned_with_held_out_voices_apart():
    plan = plan_of_texts(["a b"] * 50, ["c d"] * 5)
    assert [each.part for each in plan] == ["held_out"] * 5 + ["mixed"] * 50
    held_out = set(HELD_OUT_VOICES["en"])
    assert {each.voice for each in plan[:5]} <= held_out
    assert not any(name in each.voice for each in plan[5:] for name in held_out)


def test_the_command_writes_the_corpora_of_a_plan(folder, tmp_path, capsys):
    plan = tmp_path / "plan.jsonl"
    plan.write_text("".join(f"{each.to_json()}\n" for each in PLAN), encoding="utf8")
    options = ["--kokoro", str(folder), "--batched", "--device", "cpu", "--out", str(tmp_path / "out")]
    main([*options, "--plan", str(plan)])
    assert json.loads(capsys.readouterr().out.splitlines()[0])["batch"] == 0
    assert sorted(Corpus.load(tmp_path / "out" / "mixed").texts) == ["one", "two"]
    assert Corpus.load(tmp_path / "out" / "held_out").voices == ["kokoro-af_bella"]
    with pytest.raises(InputError, match="viva train plan"):
        main(options)


def test_without_phonemes_an_utterance_is_refused(synthesizer):
    with pytest.raises(InputError, match="no phonemes"):
        synthesizer.speak([Utterance("mixed", "en", "one", "af_heart")])


def test_a_compressed_plan_is_read(tmp_path):
    file = tmp_path / "plan.jsonl.xz"
    file.write_bytes(lzma.compress("".join(f"{each.to_json()}\n" for each in PLAN).encode()))
    assert read_plan(file) == PLAN
    file.write_bytes(b"no archive")
    with pytest.raises(InputError, match="no plan"):
        read_plan(file)


def test_packed_weights_speak_nearly_as_the_published_ones(folder, synthesizer, tmp_path):
    save_weights(synthesizer.model, tmp_path)
    packed = tmp_path / "packed"
    shutil.copytree(folder, packed, ignore=shutil.ignore_patterns("*.pth"))
    pack_file(tmp_path / "model.safetensors", packed / "model.safetensors")
    own, loaded = synthesizer.model.state_dict(), Kokoro.load(packed).state_dict()
    assert all((loaded[name] - own[name]).abs().max() <= own[name].abs().max() / 100 for name in own)
