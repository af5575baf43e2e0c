"""Pieces for a voice: nothing lost, the first one soon, no cut where a full stop is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivavoce.cascade.sentences import SentenceRules, SentenceSplitter


def pieces(text: str, step: int = 1, rules: SentenceRules | None = None) -> list[str]:
    splitter, found = SentenceSplitter(rules), []
    for start in range(0, len(text), step):
        found += splitter.push(text[start : start + step])
    return found + splitter.flush()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there. How are you?", ["Hello there. ", "How are you?"]),
        ("It costs 3.50 today. Fine.", ["It costs 3.50 today. ", "Fine."]),
        ("Dr. Smith is in. Come.", ["Dr. Smith is in. ", "Come."]),
        ("Of course I can, let me see, one moment.", ["Of course I can, ", "let me see, one moment."]),
        ("Wait... what?! No.", ["Wait... ", "what?! ", "No."]),
        ('He said "yes." Then he left.', ['He said "yes." ', "Then he left."]),
        ("好的，我来帮您。请问几位？两位。", ["好的，", "我来帮您。", "请问几位？", "两位。"]),
        ("Ok.", ["Ok."]),
        ("   ", []),
    ],
)
def test_where_it_is_cut(text, expected):
    rules = SentenceRules(first_clause=6) if not text.isascii() else None
    assert [piece.strip() for piece in pieces(text, rules=rules)] == [piece.strip() for piece in expected]


@pytest.mark.parametrize("step", [1, 7, 400])
def test_the_first_piece_is_short_even_where_nothing_ends(step):
    first, *rest = pieces("The largest planet " * 20, step)
    assert first == "The largest planet The largest planet The largest planet The " and len(rest[0]) > 200
    assert len(pieces("最大的行星是木星" * 20, step)[0]) == 21


def test_a_text_without_end_is_cut_at_a_space():
    found = pieces("word " * 200)
    assert all(len(piece) <= 250 for piece in found) and len(found) >= 4


@given(st.text(alphabet="ab 1.,!?。，…\n\"'é", max_size=200), st.integers(1, 9))
def test_joined_the_pieces_are_the_text(text, step):
    assert "".join(pieces(text, step)).rstrip() == text.rstrip()


def test_the_first_piece_comes_before_the_sentence_is_over():
    splitter = SentenceSplitter()
    assert splitter.push("Certainly, sir, ") == ["Certainly, sir, "]
    assert splitter.push("I will see, what I can do") == [], "later pieces are whole sentences"
