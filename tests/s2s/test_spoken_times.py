"""Times of day in words get digits behind them."""

import re

import pytest

from vivavoce.cascade.call_decision import EXAMPLES, decision_messages
from vivavoce.cascade.spoken_times import with_clock_times


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("For twelve at quarter to five.", "For twelve at quarter to five (4:45)."),
        ("a quarter past 11, please", "a quarter past 11 (11:15), please"),
        ("Quarter to one?", "Quarter to one (12:45)?"),
        ("Twenty-five minutes to nine", "Twenty-five minutes to nine (8:35)"),
        ("half six or half past six", "half six (6:30) or half past six (6:30)"),
        ("seven fifteen, and at eight on Friday", "seven fifteen (7:15), and at eight (8:00) on Friday"),
        ("one o'clock or 2 o'clock", "one o'clock (1:00) or 2 o'clock (2:00)"),
        ("for nine at 145, or at 1230", "for nine at 145 (1:45), or at 1230 (12:30)"),
        ("七點半四位", "七點半 (7:30)四位"),
        ("差一刻五点", "差一刻五点 (4:45)"),
        ("差十分八點", "差十分八點 (7:50)"),
        ("十二點二十分", "十二點二十分 (12:20)"),
        ("下午兩點鐘", "下午兩點鐘 (2:00)"),
        ("三點十五", "三點十五 (3:15)"),
    ],
)
def test_times_in_words_are_repeated_in_digits(said, written):
    assert with_clock_times(said) == written


OTHERS = (
    "five to six people.",
    "at two tables",
    "at 7:30",
    "ten to go",
    "half a chicken",
    "一點也不",
    "十三點",
    "I am one.",
)


@pytest.mark.parametrize("said", OTHERS)
def test_other_numbers_stay_as_they_are(said):
    assert with_clock_times(said) == said


def test_examples_of_decisions_have_the_times_that_prompts_get():
    said = [words for _, _, turns in EXAMPLES for words, _ in turns]
    assert any("(6:15)" in words for words in said)
    assert [with_clock_times(re.sub(r" \(\d+:\d\d\)", "", words)) for words in said] == said


def test_a_decision_reads_the_times_of_the_users_words_and_of_nobody_elses():
    asked = [
        {"role": "user", "content": "At half past six."},
        {"role": "assistant", "content": "Half past six is taken."},
        {"role": "user", "content": "Then at quarter to seven."},
    ]
    *_, last = decision_messages(asked, EXAMPLES[0][1])
    assert last["content"].splitlines()[-3:] == [
        "User: At half past six (6:30).",
        "Assistant: Half past six is taken.",
        "User: Then at quarter to seven (6:45).",
    ]
