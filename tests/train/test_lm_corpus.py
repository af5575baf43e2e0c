"""Data of the language model: codes of the speech encoder under silence and augmentation, for the whole plan."""

import dataclasses

import numpy as np
import pytest
import torch

from vivavoce.minis.untrained import SPEECH_ENCODER
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.nn.modules import fill_randomly
from vivavoce.train.corpus import Corpus
from vivavoce.train.lm.corpus import (
    CLEAN,
    LIVE,
    NOISY,
    NONE,
    CodeExtractor,
    DialoguePlan,
    SilenceAugmentation,
    encoded_data,
    held_out_dialogues,
    noise_augmenter,
    speaker_augmenter,
    speech_plan,
    train_dialogues,
)
from vivavoce.train.speech_encoder import encode_corpus
from vivavoce.train.voices import HELD_OUT, TEACHER

PLAN = DialoguePlan(spoken=3, written=1, general=1, read=1, versions=2, held_out=2, held_out_general=1)


@pytest.fixture(scope="module")
def encoder() -> SpeechEncoder:
    encoder = SpeechEncoder(dataclasses.replace(SPEECH_ENCODER, quantize_vocab_size=50)).requires_grad_(False).eval()
    fill_randomly(encoder)
    return encoder


def _sounds(plan) -> Corpus:
    """Noise in place of speech, longer where there is more to say."""
    source = np.random.default_rng(0)
    made = [(source.normal(0, 3000, 400 * len(text) + 700).astype(np.int16), text, voice.name) for text, voice in plan]
    return Corpus.of(made)


def _few(encoder) -> tuple[CodeExtractor, Corpus]:
    corpus = _sounds([(text, TEACHER) for text in ("One.", "Two or three words.", "And quite a few words more.")])
    return CodeExtractor(encoder, corpus, "cpu"), corpus


def test_codes_without_silence_equal_those_of_the_encoder(encoder):
    extractor, corpus = _few(encoder)
    codes_of_rows = extractor.codes(np.array([2, 0]), NONE, seed=0)
    expected = encode_corpus(encoder, corpus, "cpu")
    assert [codes.tolist() for codes in codes_of_rows] == [expected[2].tolist(), expected[0].tolist()]


def test_silence_takes_its_time(encoder):
    extractor, _ = _few(encoder)
    rows = np.arange(3)
    plain = extractor.codes(rows, NONE, seed=0)
    padded = extractor.codes(rows, SilenceAugmentation((160.0, 160.0), (80.0, 80.0)), seed=0)
    assert [len(codes) for codes in padded] == [len(codes) + 3 for codes in plain]


def test_other_voices_may_be_slower_and_nothing_of_them_is_cut(encoder):
    extractor, _ = _few(encoder)
    rows = np.arange(3)
    plain = extractor.codes(rows, NONE, seed=0)
    max_lengths = [len(codes) for codes in plain]
    for seed in range(6):
        changed = extractor.codes(rows, NONE, seed, speaker_augmenter("cpu", seed))
        max_lengths = [max(a, len(b)) for a, b in zip(max_lengths, changed, strict=True)]
    assert all(a > len(b) for a, b in zip(max_lengths, plain, strict=True))


def test_noise_lies_at_the_distance_that_was_asked_for():
    samples = torch.randn(4, 16000) * 0.1
    lengths = torch.full((4,), 16000)
    changed, same = noise_augmenter("cpu", 0, 15.0)(samples, lengths)
    distance = 10 * torch.log10(samples.square().mean(1) / (changed - samples).square().mean(1))
    assert torch.equal(same, lengths)
    torch.testing.assert_close(distance, torch.full((4,), 15.0), atol=0.3, rtol=0)


def test_the_plan_separates_voices_and_all_of_it_is_encoded(encoder):
    plan = speech_plan(PLAN)
    train, held_out = encoded_data(PLAN, _sounds(plan), encoder, "cpu")
    held_out_texts = {text for text, voice in plan if voice in HELD_OUT}
    assert set(held_out.user_speech.sentences) == held_out_texts
    assert not held_out_texts & {text for text, voice in plan if voice not in HELD_OUT and voice != TEACHER}
    for line in held_out.dialogues:
        for exchange in line:
            assert (
                len(held_out.user_speech.of(exchange.user, CLEAN))
                == len(held_out.user_speech.of(exchange.user, NOISY))
                == 1
            )
            assert len(held_out.replies.of(exchange.reply)) == 1
    spoken = train.dialogues[: PLAN.spoken + PLAN.general]
    assert all(
        len(train.user_speech.of(e.user)) >= PLAN.versions and len(train.replies.of(e.reply))
        for line in spoken
        for e in line
    )
    assert LIVE.tail[1] <= 320


def test_single_questions_are_asked_more_often_where_answers_carry_values():
    plan = dataclasses.replace(PLAN, slot_questions=10)
    (lines, sentences), (fewer, _) = train_dialogues(plan), train_dialogues(PLAN)
    more = [line for line in lines if line not in fewer]
    assert [len(line) for line in more] == [1] * 10
    assert sum("forty five" in line[0].user for line in more) >= 5
    assert all("a quarter to" in line[0].reply for line in more if "forty five" in line[0].user)
    assert {line[0].user for line in more} <= set(sentences)


def test_the_evaluation_does_not_depend_on_the_training_data():
    for_evaluation = held_out_dialogues(PLAN)
    again = held_out_dialogues(dataclasses.replace(PLAN, seed=7))
    assert [line for line in for_evaluation if line[0].intent != "decline"] == [
        line for line in again if line[0].intent != "decline"
    ]
    assert train_dialogues(PLAN)[0] != train_dialogues(dataclasses.replace(PLAN, seed=7))[0]
