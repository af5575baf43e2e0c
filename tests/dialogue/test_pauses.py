"""Silence around the pieces of a reply: none before the first word, a short one after the last."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivavoce.cascade.pauses import CLAUSE_PAUSE, ONSET_SECONDS, SENTENCE_PAUSE, WORD_PAUSE, SilenceTrimmer

RATE = 1000
WORDS = np.concatenate([0.3 * np.ones(200), np.zeros(100), -0.2 * np.ones(300)]).astype(np.float32)


def trimmed(sound: np.ndarray, text: str, cuts: list[int]) -> np.ndarray:
    trimmer = SilenceTrimmer(RATE)
    pieces = [trimmer.push(piece) for piece in np.split(sound, sorted(cuts))]
    return np.concatenate([*pieces, trimmer.flush(text)])


@pytest.mark.parametrize(
    ("text", "pause"),
    [
        ("Good morning.", SENTENCE_PAUSE),
        ("Good morning, ", CLAUSE_PAUSE),
        ("早上好，", CLAUSE_PAUSE),
        ("早上好。", SENTENCE_PAUSE),
        ("He said “no.”", SENTENCE_PAUSE),
        ("Good ", WORD_PAUSE),
    ],
)
@given(cuts=st.lists(st.integers(0, 2000), max_size=6))
def test_what_is_left_of_it_depends_on_the_text_and_not_on_the_pieces(text, pause, cuts):
    quiet = np.full(400, 1e-4, np.float32)
    sound = np.concatenate([quiet, WORDS, np.zeros(1000, np.float32)])
    left = trimmed(sound, text, cuts)
    onset = round(ONSET_SECONDS * RATE)
    expected = np.concatenate([quiet[:onset], WORDS, np.zeros(round(pause * RATE), np.float32)])
    assert np.array_equal(left, expected)


def test_a_piece_that_is_silent_throughout_is_left_out():
    assert not len(trimmed(np.zeros(500, np.float32), "…", [100, 300]))
