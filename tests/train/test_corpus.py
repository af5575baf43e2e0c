"""Corpora: built from a plan, deterministic, with an error if too many sentences fail, stored in files."""

import numpy as np
import pytest

from vivavoce.errors import InputError, VivaError
from vivavoce.train.asr.evaluate import human_recordings
from vivavoce.train.corpus import (
    SECOND_VOICE,
    Corpus,
    Counts,
    build,
    held_out_plan,
    teacher_plan,
    training_plan,
    write_corpora,
)
from vivavoce.train.front_desk import reply_sentences, user_sentences
from vivavoce.train.front_desk.answers import fixed_replies
from vivavoce.train.voices import HELD_OUT, TEACHER, TRAINING, SyntheticVoice

SPEAKER = SyntheticVoice("espeak", "espeak-ng", ("-v", "en-us+m1"))


def test_a_training_plan_uses_training_voices_and_repeats_no_sentence():
    plan = training_plan(0, 1_000)
    assert len(plan) == 1_000
    assert {voice for _, voice in plan} <= set(TRAINING)
    assert plan == training_plan(0, 1_000) != training_plan(1, 1_000)
    assert len(set(plan)) == 1_000
    assert len({text for text, _ in plan}) == 1_000


def test_a_held_out_plan_has_held_out_phrasings_and_voices():
    plan = held_out_plan(0, 300)
    assert {voice for _, voice in plan} <= set(HELD_OUT)
    assert not {text for text, _ in plan} & set(user_sentences("train", 10_000, 0))


def test_the_teacher_plan_has_replies():
    plan = teacher_plan(2000)
    texts = [text for text, _ in plan]
    assert 0.85 * len(texts) < len(set(texts)) and {voice for _, voice in plan} == {TEACHER}
    assert texts.count(fixed_replies()[0]) == 2
    assert set(reply_sentences(300, 0)) <= set(texts)
    assert sum("table" in text for text in texts) < 0.3 * len(texts)
    assert len({word for text in texts for word in text.lower().split()}) > 4000


@pytest.mark.debian("espeak-ng", "flite")
def test_a_corpus_is_deterministic_and_survives_its_file(tmp_path):
    plan = [(f"This is sentence {word}.", voice) for word in ("one", "two", "three") for voice in (SPEAKER, TEACHER)]
    seen = []
    corpus = build(plan, seed=3, progress=lambda done, total: seen.append((done, total)))
    assert len(corpus) == 6 and seen[-1] == (6, 6)
    assert sorted(zip(corpus.texts, corpus.voices, strict=True)) == sorted((text, voice.name) for text, voice in plan)
    again = build(plan, workers=2, seed=3)
    assert np.array_equal(corpus.samples, again.samples) and corpus.texts == again.texts

    corpus.save(tmp_path / "small")
    loaded = Corpus.load(tmp_path / "small")
    for index in range(6):
        assert np.array_equal(loaded[index][0], corpus[index][0]) and loaded[index][1:] == corpus[index][1:]
    samples, text, voice = loaded[0]
    assert samples.dtype == np.float32 and 0.5 < len(samples) / 16_000 < 4
    assert text in corpus.texts and voice in ("espeak", TEACHER.name)
    assert corpus.seconds == pytest.approx(sum(len(corpus[index][0]) for index in range(6)) / 16_000)


@pytest.mark.debian("espeak-ng")
def test_one_failure_in_a_hundred_is_left_out_and_more_is_an_error():
    unspeakable = [(" .", SPEAKER)]
    plan = [("Yes.", SPEAKER)] * 100
    assert len(build(plan + unspeakable)) == 100
    with pytest.raises(InputError, match=r"2 of 12 .*' \.' with voice espeak: voice espeak"):
        build(plan[:10] + 2 * unspeakable)


def test_the_death_of_a_worker_is_an_error(tmp_path, monkeypatch):
    (program := tmp_path / "espeak-ng").write_text("#!/bin/sh\nkill -9 $PPID\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(VivaError, match="worker that synthesizes speech died"):
        build([("A table for two.", SPEAKER)], workers=2)


def test_an_error_names_a_missing_corpus(tmp_path):
    with pytest.raises(InputError, match="nothing"):
        Corpus.load(tmp_path / "nothing")


def test_human_recordings_have_words_and_sound():
    pytest.importorskip("av")
    recordings = human_recordings()
    if not recordings:
        pytest.skip("no recordings are installed")
    for samples, text, source in recordings[::40]:
        assert samples.dtype == np.float32 and len(samples) > 4_000 and np.abs(samples).max() > 0.01
        assert len(text.split()) > 1 and source


@pytest.mark.debian("flite", "espeak-ng", "festival")
def test_each_corpus_holds_the_voices_it_should(tmp_path):
    corpora = write_corpora(tmp_path, Counts(training=12, teacher=4, second_voice=3, held_out=4), workers=1)
    held_out_names = {voice.name for voice in HELD_OUT}
    assert set(corpora["held_out"].voices) <= held_out_names and len(corpora["held_out"]) == 4
    assert set(corpora["teacher"].voices) == {TEACHER.name}
    assert {text for text, _ in teacher_plan(4)} <= set(corpora["teacher"].texts)
    assert not set(corpora["mixed"].voices) & held_out_names
    assert len(corpora["mixed"]) >= 12
    assert {TEACHER.name, SECOND_VOICE.name} <= set(corpora["tts"].voices)
    again = Corpus.load(tmp_path / "teacher")
    assert again.texts == corpora["teacher"].texts and (again.samples == corpora["teacher"].samples).all()


def test_scaled_counts_keep_their_proportions():
    assert Counts().scaled(0.001) == Counts(40, 9, 2, 1)
