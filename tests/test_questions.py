"""The bundled questions: held-out phrasings in held-out voices, English and Mandarin, and how they were chosen."""

from itertools import pairwise

import pytest

from vivavoce.audio.io import read
from vivavoce.errors import InputError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.evaluation.questions import QUESTIONS, bundled_questions, question_folder
from vivavoce.train.front_desk import Exchange, judge, language, language_of
from vivavoce.train.front_desk.scripts import is_traditional
from vivavoce.train.questions import main, questions_of_each_intent, write_questions
from vivavoce.train.voices import HELD_OUT

SEEDS = {"en": 1, "zh": 10}
VOICES = {"en": {voice.name for voice in HELD_OUT}, "zh": {f"kokoro-{voice}" for voice in HELD_OUT_VOICES["zh"]}}


@pytest.mark.parametrize("code", SEEDS)
def test_every_question_has_its_sound_a_held_out_voice_and_one_right_reply(code):
    folder, questions = question_folder(code), bundled_questions(code)
    assert {file.name for file in folder.glob("*.opus")} == {question.file for question in questions}
    assert {question.voice for question in questions} <= VOICES[code]
    exchanges = [Exchange(each.intent, each.text, each.reply, each.slots) for each in questions]
    for question, exchange in zip(questions, exchanges, strict=True):
        assert 0.4 < read(folder / question.file).seconds < 6
        assert language_of(question.text) is language_of(question.reply) is language(code)
        assert judge(question.reply, exchange)
    replies = sorted({each.reply: each for each in exchanges}.items())
    for (reply, _), (_, other) in pairwise(replies):
        assert not judge(reply, other), "a reply is right for its own question"


def test_the_mandarin_questions_are_in_both_voices_written_in_traditional_script_and_small():
    assert {each.voice for each in bundled_questions("zh")} == VOICES["zh"]
    assert all(is_traditional(each.text + each.reply) for each in bundled_questions("zh"))
    assert sum(file.stat().st_size for file in question_folder("zh").iterdir()) < 150_000


@pytest.mark.parametrize("code", SEEDS)
def test_they_are_chosen_by_a_seed_one_of_each_intent(code):
    questions = bundled_questions(code)
    chosen = questions_of_each_intent(len(questions), SEEDS[code], code)
    assert [(each.user, each.reply) for each in chosen] == [(each.text, each.reply) for each in questions]
    assert len({each.intent for each in chosen}) == len(chosen)


def test_the_english_questions_are_in_the_folder_itself():
    assert question_folder() == QUESTIONS and bundled_questions() == bundled_questions("en")
    with pytest.raises(InputError, match="no bundled questions in 'fr', only in en, zh"):
        bundled_questions("fr")


def test_mandarin_needs_kokoro(tmp_path):
    with pytest.raises(InputError, match="add --kokoro"):
        main(["--out", str(tmp_path), "--language", "zh"])
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.published
def test_kokoro_speaks_them_as_they_are_bundled(tmp_path, published_model):
    published_model("kokoro-82m")
    for phonemiser in ("misaki", "pypinyin"):
        pytest.importorskip(phonemiser, reason="Mandarin needs its phonemes")
    made = write_questions(tmp_path, 2, SEEDS["zh"], kokoro=True, code="zh", device="cpu")
    for question, bundled in zip(made, bundled_questions("zh"), strict=False):
        assert (question.file, question.text) == (bundled.file, bundled.text)
        seconds = read(question_folder("zh") / bundled.file).seconds
        assert question.voice in VOICES["zh"] and 0.5 < read(tmp_path / question.file).seconds / seconds < 2
