"""Text normalisation: markup is removed, numbers become words, and all that can be spoken stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivavoce.errors import InputError
from vivavoce.tts.text import cardinal, cleaned, numbers_as_words, ordinal


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Plain words, said as they are.", "Plain words, said as they are."),
        ("# Title\n\nBody", "Title. Body."),
        ("- one\n* two\n3. three\n4) four", "one. two. three. four."),
        ("**bold** and *slanted* and `code` and ~~gone~~", "bold and slanted and code and gone."),
        ("see [the menu](http://x.org/y)", "see the menu."),
        ("![a cat](cat.png)", "a cat."),
        ("go to https://www.example.com/a?b=c now", "go to example.com now."),
        ("```python\n```\ntext", "text."),
        ("I <b>mean</b> it", "I mean it."),
        ("| dish | price |\n|---|---|\n| soup | five |", "dish, price. soup, five."),
        ("A -> B → C", "A, B, C."),
        ("snake_case_name", "snake case name."),
        ("yes — no – maybe -- fine", "yes, no, maybe, fine."),
        ("well-known", "well-known."),
        ("Mr. Smith (the owner) said so.", "Mr. Smith, the owner, said so."),
        ("What?! Really??! No!!!", "What? Really? No!"),
        ("wait... what", "wait. what."),
        ("...and then", "and then."),
        ("too   many\t spaces , here", "too many spaces, here."),
        ("emoji 🎉 test 😀", "emoji test."),
        ("a\x00b\u200bc", "abc."),
        ("He said “hello.”", "He said “hello.”"),
        ("line one\r\nline two", "line one. line two."),
        ("> quoted\n> twice", "quoted. twice."),
        ("ends with a colon:", "ends with a colon."),
        ("你好，【世界】！！！\n第二行", "你好，世界！第二行。"),
        ("3.14 and 12:30", "3.14 and 12:30."),
        ("-5°C", "-5°C."),
    ],
)
def test_a_text_as_it_is_said(text, said):
    assert cleaned(text) == said


@pytest.mark.parametrize("text", ["", " \n ", "🎉🎉", "---", "```\n```", "!!!", "\u200b"])
def test_a_text_without_words_is_an_error(text):
    with pytest.raises(InputError, match="nothing to say"):
        cleaned(text)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_any_text_is_either_refused_or_ends_like_a_sentence(text):
    try:
        said = cleaned(text)
    except InputError:
        assert not any(character.isalnum() and character.isascii() for character in text) or "<" in text
        return
    assert "\n" not in said and "  " not in said
    assert said == said.strip() and any(character.isalnum() for character in said)


@given(st.lists(st.sampled_from(["Hello there", "two, please", "it's late"]), min_size=1, max_size=4))
def test_cleaning_twice_is_cleaning_once(sentences):
    once = cleaned("\n".join(sentences))
    assert cleaned(once) == once


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("At 7:30 pm, table for 4.", "At seven thirty p m, table for four."),
        ("12:00 or 9:05", "twelve o'clock or nine oh five"),
        (
            "It costs $12.50 or 3 € or £1.01.",
            "It costs twelve dollars and fifty cents or three euros or one pound and one penny.",
        ),
        ("the 3rd, 12th and 21st", "the third, twelfth and twenty first"),
        ("2,500 people, 3.14!", "two thousand five hundred people, three point one four!"),
        ("in 1999 and 1905", "in nineteen ninety nine and nineteen oh five"),
        ("50% & -5°", "fifty percent and minus five degrees"),
        ("no digits here", "no digits here"),
        ("room 101a", "room one hundred one a"),
    ],
)
def test_numbers_become_words(text, words):
    assert numbers_as_words(text) == words


@given(st.text(max_size=60))
def test_no_digit_is_left(text):
    assert not any(digit in numbers_as_words(text) for digit in "0123456789")


def test_numbers_are_counted_right():
    assert [cardinal(n) for n in (0, 15, 40, 99, 100, 1_000_001)] == [
        "zero",
        "fifteen",
        "forty",
        "ninety nine",
        "one hundred",
        "one million one",
    ]
    assert [ordinal(n) for n in (1, 2, 8, 20, 100, 112)] == [
        "first",
        "second",
        "eighth",
        "twentieth",
        "one hundredth",
        "one hundred twelfth",
    ]
