"""`viva bench answer` separates word errors of the speech from wrong answers."""

import numpy as np
import pytest
from typer.testing import CliRunner

from vivavoce.audio.io import Sound
from vivavoce.bench.answer import (
    AskedQuestion,
    ScoredAnswer,
    _figures,
    _teacher_figures,
    _word_error_rates,
    recorded_questions,
)
from vivavoce.bench.answer_questions import kokoro_questions
from vivavoce.cli import app
from vivavoce.errors import InputError
from vivavoce.evaluation.questions import bundled_questions
from vivavoce.train.front_desk import Exchange, language_of

SILENCE = Sound(np.zeros(16_000, np.float32), 16_000)
TAXI = Exchange("taxi", "A taxi, please.", "I will call a taxi for you right away.")
BILL = Exchange("bill", "I would like to pay.", "Of course. I will bring you the bill.")


class FixedRecogniser:
    """Returns the same transcript for every sound."""

    def transcribe(self, sound):
        return "i will call a taxi for you right away"


def _answer(exchange, model_text, heard_text, is_right):
    return ScoredAnswer(
        AskedQuestion(exchange, "flite-awb-1.0", SILENCE), model_text, heard_text, SILENCE, is_right, 0.5
    )


ANSWERS = [
    _answer(TAXI, TAXI.reply, "I will call a taxi for you right away", True),
    _answer(TAXI, BILL.reply, "Of course I will bring you the bill", False),  # wrong, and clearly spoken
    _answer(BILL, BILL.reply, "Of course I will bring you the pill", False),  # right, and badly spoken
]


def test_a_wrong_answer_that_is_clearly_spoken_is_no_word_error():
    rates = _word_error_rates(ANSWERS)
    assert rates["word_error_rate"] == pytest.approx(1 / 25)
    assert rates["word_error_rate_of_right_replies"] == 0


def test_each_entry_has_the_models_text_and_the_transcript():
    entries = _figures(ANSWERS)["answers"]
    assert [answer["meant"] for answer in entries] == [TAXI.reply, BILL.reply, BILL.reply]
    assert entries[2]["said"] == "Of course I will bring you the pill"


def test_the_recognisers_error_on_the_training_voice_is_reported():
    heard = _teacher_figures([(TAXI, SILENCE), (BILL, SILENCE)], FixedRecogniser())
    assert heard["right_of_teacher"] == 0.5
    assert heard["word_error_rate_of_teacher"] > 0.3
    assert _teacher_figures([], FixedRecogniser()) == {"word_error_rate_of_teacher": None, "right_of_teacher": None}


@pytest.mark.parametrize("others", [["--count", "3"], ["--text"]], ids=" ".join)
def test_new_questions_in_other_languages_need_kokoro(others):
    result = CliRunner().invoke(app, ["bench", "answer", "--language", "zh", *others])
    assert isinstance(result.exception, InputError) and "--kokoro" in str(result.exception)


def test_the_bundled_questions_of_a_language_are_asked_with_the_silence_that_turns_have():
    asked = recorded_questions("zh")
    assert [each.exchange.reply for each in asked] == [each.reply for each in bundled_questions("zh")]
    for each in asked:
        assert language_of(each.exchange.user).code == "zh" and not each.earlier
        assert each.sound.rate == 16_000 and not each.sound.samples[0, : int(0.2 * 16_000)].any()
    with pytest.raises(InputError, match="no bundled questions in 'fr'"):
        recorded_questions("fr")


def test_kokoros_questions_in_other_languages_need_a_number():
    with pytest.raises(InputError, match="give a number of questions"):
        kokoro_questions(None, 0, "cpu", "zh")
