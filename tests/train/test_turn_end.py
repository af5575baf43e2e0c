"""The corpus and the training of the turn-end model."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.tiny_kokoro import tiny_kokoro, write_folder
from vivavoce.audio.mel import WhisperMel
from vivavoce.bench.turn_sounds import talk
from vivavoce.errors import InputError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.models.kokoro.model import Kokoro
from vivavoce.models.turn_end import TurnEndConfig, load_network
from vivavoce.train.batch_synthesis import BatchSynthesizer
from vivavoce.train.loop import Budget
from vivavoce.train.spoken_shards import write_shard
from vivavoce.train.turn_end import examples as module
from vivavoce.train.turn_end.beginnings import beginning
from vivavoce.train.turn_end.corpus import (
    TurnUtterance,
    is_program,
    main,
    program_turns,
    read_plan,
    read_shards,
    speak_plan,
    turn_plan,
    write_plan,
)
from vivavoce.train.turn_end.examples import MIN_REST, Examples, end_of_speech, pauses
from vivavoce.train.turn_end.texts import WORDS, turn_texts
from vivavoce.train.turn_end.train import PauseWindows, initialised, train
from vivavoce.train.voices import RATE, programs


def utterance(seconds=2.0, is_finished=True, word_ends=(), part="train", seed=2):
    sound = np.zeros(round((seconds + 0.5) * RATE), np.float32)
    speech = talk(seconds * 1.5, seed=seed)[: round(seconds * RATE)]
    sound[: len(speech)] = speech
    samples = (sound * 32767).astype(np.int16)
    return TurnUtterance(part, "en", "Hello.", "voice", is_finished, word_ends=tuple(word_ends), samples=samples)


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
    sentences = [f"There are {number} boxes in the old house." for number in range(300)]
    plan = turn_plan(400, sentences)
    assert plan == turn_plan(400, sentences) and {each.language for each in plan} == {"en", "zh"}
    assert {each.part for each in plan} == {"train", "held_out"}
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


def test_batches_depend_on_the_seed_and_tell_nothing_but_the_place():
    spoken = [utterance(seed=1, word_ends=(0.6, 1.2, 2.0)), utterance(is_finished=False, seed=5)]
    examples = Examples(spoken, 2 * RATE)
    sounds, labels = examples.batch(64, 3)
    again, _ = examples.batch(64, 3)
    assert sounds.shape == (64, 2 * RATE) and 0.3 < labels.mean() < 0.7
    assert torch.equal(sounds, again) and not torch.equal(sounds, examples.batch(64, 4)[0])
    assert not examples.batch(8, 1, ("cut",))[1].any() and examples.batch(8, 1, ("end",))[1].all()
    alike = Examples([utterance(seed=1), utterance(is_finished=False, seed=1)], 2 * RATE)
    levels, finished = [], []
    for seed in range(6):
        sounds, labels = alike.batch(64, seed, ("end", "beginning"))
        levels.append(sounds.square().mean(1).log())
        finished.append(labels)
    correlation = torch.corrcoef(torch.stack([torch.cat(levels), torch.cat(finished)]))[0, 1]
    assert abs(correlation) < 0.2, "room, noise and level follow the label"


def test_the_sound_before_a_pause_ends_the_window():
    spoken = [utterance(seconds=2.0)]
    examples = Examples(spoken, 4 * RATE, strength=0.0)
    sounds, _ = examples.batch(8, 0, ("end",))
    quiet = sounds[:, -RATE // 20 :].square().mean(1)
    loud = sounds[:, -2 * RATE : -RATE // 4].square().mean(1)
    assert (loud > 100 * quiet).all()


def test_a_turn_may_have_a_pause_in_it(monkeypatch):
    monkeypatch.setattr(module, "PAUSED", 1.0)
    monkeypatch.setattr(module, "PRECEDED", 0.0)
    tone = (9_000 * np.sin(np.arange(3 * RATE) * 0.3)).astype(np.int16)
    spoken = TurnUtterance("train", "en", "Hello.", "voice", True, word_ends=(1.0, 2.0, 3.0), samples=tone)
    examples = Examples([spoken], 5 * RATE, strength=0.0)
    assert examples.paused_ends == pytest.approx(0.5), "one of the two cuts comes after another one"
    examples.paused_ends = 1.0
    sounds, labels, is_paused = examples.drawn(16, 0, ("end",))
    assert labels.all() and is_paused.all()
    for sound in sounds:
        is_loud = sound.unflatten(0, (-1, RATE // 50)).square().mean(1) > 1e-4
        begins = (is_loud[1:] & ~is_loud[:-1]).nonzero()[:, 0]
        assert len(begins) == 2, "the speech begins, and goes on after one pause"
        rest = int(is_loud[int(begins[1]) + 1 :].sum()) / 50
        assert min(abs(rest - 1 / tempo) for tempo in (0.88, 1.0, 1.15)) < 1.2 and rest > MIN_REST / 1.2


def test_a_beginning_stops_where_no_sentence_can():
    source = random.Random(0)
    begun = {beginning("We would like a table for four at eight.", "en", source) for _ in range(40)}
    assert all(text and text.rstrip(",. ") != "We would like a table for four at eight" for text in begun)
    assert any(text.startswith("We would like a table for") for text in begun)
    assert beginning("Coffee.", "en", source) is None
    assert beginning("我想要訂一個靠窗的位子。", "zh", source)


def test_a_plan_is_spoken_with_the_ends_of_its_words(tmp_path):
    folder = write_folder(tiny_kokoro(), tmp_path / "kokoro")
    planned = [
        TurnUtterance("train", "en", "one and more", "af_heart", True, phonemes="wˈʌn ænd mɔɹ"),
        TurnUtterance(
            "train", "en", "one and more", "af_heart", True, phonemes="wˈʌn ænd mɔɹ", drawn_out=1, lengthening=3.0
        ),
    ]
    write_plan(tmp_path / "plan.xz", planned)
    assert read_plan(tmp_path / "plan.xz") == planned
    synthesizer = BatchSynthesizer(Kokoro.load(folder), folder)
    spoken = list(speak_plan(read_plan(tmp_path / "plan.xz"), synthesizer))
    plain, slow = sorted(spoken, key=lambda each: each.lengthening)
    assert len(plain.word_ends) == 3 and list(plain.word_ends) == sorted(plain.word_ends)
    assert slow.word_ends[1] - slow.word_ends[0] > plain.word_ends[1] - plain.word_ends[0]
    (tmp_path / "plan.xz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="plan"):
        read_plan(tmp_path / "plan.xz")


@pytest.mark.debian("flite", "espeak-ng", "festival")
def test_synthesizers_speak_a_part_of_the_turns():
    spoken = list(program_turns(6, programs()))
    assert {each.part for each in spoken} == {"train", "held_out"} and {each.language for each in spoken} == {"en"}
    assert all(len(each.samples) > RATE // 4 for each in spoken)
    assert all(len(pauses(each)) >= 1 for each in spoken)


@pytest.mark.debian("flite", "espeak-ng", "festival")
def test_turns_of_programs_alone_need_no_kokoro(tmp_path):
    sentences = [f"There are {number} boxes in the old house." for number in range(50)]
    (tmp_path / "texts").write_text("\n".join(sentences))
    out = tmp_path / "turns"
    options = {"--out": out, "--count": 0, "--programs": 40, "--texts": tmp_path / "texts", "--kokoro": "absent"}
    main([str(each) for option in options.items() for each in option])
    spoken = read_shards(out)
    assert len(spoken) == 40 and sum(each.part == "held_out" for each in spoken) == 4
    assert all(is_program(each) and len(each.samples) for each in spoken)
    given = {each.text for each in spoken} & set(sentences)
    assert given and given.isdisjoint(sentences[::25]), "every 25th sentence is held out"


def test_shards_survive_the_disk(tmp_path):
    spoken = [utterance(word_ends=(0.5, 2.0)), utterance(is_finished=False)]
    write_shard(tmp_path / "train-0000", spoken)
    write_shard(tmp_path / "held_out-0000", spoken[1:])
    assert read_shards(tmp_path, "train") == spoken and len(read_shards(tmp_path)) == 3
    assert np.array_equal(read_shards(tmp_path, "train")[0].samples, spoken[0].samples)
    with pytest.raises(InputError, match="turn-end-data"):
        read_shards(tmp_path / "none")


def told_apart(voices=("voice",)):
    """Ends are loud and beginnings soft at their last moment here, so that a few steps suffice."""
    spoken = []
    for seed in range(6):
        for is_finished in (True, False):
            each = utterance(is_finished=is_finished, seed=seed, word_ends=(2.0,))
            end = end_of_speech(each.samples / np.float32(32768))
            each.samples[end - RATE // 2 : end] = 12_000 * np.sin(np.arange(RATE // 2) * (0.9 if is_finished else 0.1))
            spoken += [replace(each, voice=voice) for voice in voices]
    return spoken


def test_training_learns_and_writes_what_can_be_read(tmp_path):
    spoken = told_apart()
    torch.manual_seed(0)
    network = initialised(TurnEndConfig(d_model=32, layers=1, heads=2, ffn=64, seconds=2), None)
    train(network, spoken, tmp_path, Budget(60, warmup=5), batch=16, rate=3e-3)
    examples = Examples(spoken, 2 * RATE, strength=0.0)
    with torch.inference_mode():
        odds = {
            kind: load_network(tmp_path)(WhisperMel(80)(examples.batch(32, 9, (kind,))[0]))
            for kind in ("end", "beginning")
        }
    assert odds["end"].mean() > odds["beginning"].mean() + 1


def test_frozen_layers_stay_and_windows_made_once_suffice(tmp_path):
    spoken = told_apart(("espeak-en", "af_heart"))
    torch.manual_seed(0)
    network = initialised(TurnEndConfig(d_model=32, layers=2, heads=2, ffn=64, seconds=2), None)
    train(network, spoken, tmp_path / "all", Budget(60, warmup=5), batch=16, rate=3e-3)
    before = {name: weights.clone() for name, weights in network.state_dict().items()}
    train(network, spoken, tmp_path / "last", Budget(20, warmup=5), batch=16, rate=3e-3, bits=8, frozen=1, windows=64)
    frozen = ("encoder.conv", "encoder.embed", "encoder.layers.0.")
    for name, weights in network.state_dict().items():
        assert torch.equal(weights, before[name]) == name.startswith(frozen), name
    examples = Examples(spoken, 2 * RATE, strength=0.0)
    with torch.inference_mode():
        odds = [network(WhisperMel(80)(examples.batch(32, 9, (kind,))[0])).mean() for kind in ("end", "beginning")]
    assert odds[0] > odds[1] + 1
    with pytest.raises(InputError, match="frozen"):
        train(network, spoken, tmp_path / "none", Budget(1), frozen=3)


def test_half_of_the_windows_are_of_programs_and_kokoro_answers_as_before():
    spoken = told_apart(("espeak-en", "flite-rms", "af_heart"))
    network = initialised(TurnEndConfig(d_model=32, layers=1, heads=2, ffn=64, seconds=2), None).eval()
    windows = PauseWindows(network, spoken, "cpu", kept=1.0)
    made = windows.many(80, 40, seed=1)
    assert made["inputs"].shape[:2] == (80, 80) and torch.equal(made["inputs"], windows.many(80, 40, seed=1)["inputs"])
    with torch.inference_mode():
        answers = network(made["inputs"]).sigmoid()
    is_own = (made["finished"] - answers).abs() < 0.02
    programs, kokoro = is_own.view(2, 2, 20).transpose(0, 1).flatten(1).float().mean(1)
    assert kokoro > 0.4 and programs < 0.1, "windows with a pause in them have the label in both"
