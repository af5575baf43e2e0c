"""The words of a reply while its sound is being made."""

import pytest

from vivavoce.s2s.captions import Segment


def test_an_unfinished_segment_gives_only_words_that_can_have_been_said():
    segment = Segment(at=0.0)
    guessed = "Breakfast is served from seven until ten in the morning."
    first = segment.new_words(guessed, 1.8, is_whole=False)
    assert "".join(word for word, _ in first) == "Breakfast is served from"
    assert [at for _, at in first] == sorted(at for _, at in first) and all(at < 1.8 for _, at in first)
    assert segment.new_words("Break fast is over already", 2.4, is_whole=False) == []
    rest = segment.new_words(guessed, 3.6, is_whole=True)
    assert "".join(word for word, _ in rest) == " seven until ten in the morning."
    assert rest[0][1] == pytest.approx(3.6 * 24 / 56)


def test_no_more_is_written_than_can_have_been_said():
    segment = Segment(at=0.0)
    assert segment.rows_left(1.0) == 8
    segment.new_words("Breakfast is served", 1.0, is_whole=False)  # "Breakfast is" takes 0.8 s to say
    assert segment.rows_left(1.0) == 3 and segment.rows_left(0.5) == 2


def test_the_last_word_of_an_unfinished_segment_may_be_cut():
    segment = Segment(at=2.0)
    assert segment.new_words(" It is ser", 5.0, is_whole=False) == [(" It", 2.0), (" is", pytest.approx(3.5))]


def test_scripts_without_spaces_come_letter_by_letter():
    segment = Segment(at=0.0)
    assert [word for word, _ in segment.new_words("早餐七點開始", 1.0, is_whole=False)] == ["早", "餐", "七"]
    assert "".join(word for word, _ in segment.new_words("早餐七點開始", 2.0, is_whole=True)) == "點開始"
    assert segment.new_words("", 2.0, is_whole=True) == []
