"""All corpora at once: each holds the voices it should, and none of those held out but the one for judging."""

import pytest

from vivavoce.train.corpus import SECOND_VOICE, Corpus, Counts, teacher_plan, write_corpora
from vivavoce.train.voices import HELD_OUT, TEACHER


@pytest.mark.debian("flite", "espeak-ng", "festival")
def test_each_corpus_holds_the_voices_it_should(tmp_path):
    corpora = write_corpora(tmp_path, Counts(training=12, teacher=4, second_voice=3, held_out=4), workers=1)
    unheard = {voice.name for voice in HELD_OUT}
    assert set(corpora["held_out"].voices) <= unheard and len(corpora["held_out"]) == 4
    assert set(corpora["teacher"].voices) == {TEACHER.name}
    assert {text for text, _ in teacher_plan(4)} <= set(corpora["teacher"].texts)
    assert not set(corpora["mixed"].voices) & unheard
    assert len(corpora["mixed"]) >= 12
    assert {TEACHER.name, SECOND_VOICE.name} <= set(corpora["tts"].voices)
    again = Corpus.load(tmp_path / "teacher")
    assert again.texts == corpora["teacher"].texts and (again.samples == corpora["teacher"].samples).all()


def test_counts_keep_their_mixture():
    assert Counts().scaled(0.001) == Counts(40, 9, 2, 1)
