"""A model compared with itself loses nothing; intervals separate loss from chance."""

from tests.minis.test_mini_cascade import bundled
from vivavoce import hub
from vivavoce.quant.subjects import SUBJECTS
from vivavoce.quant.voices import KIND, Misses, Readers, difference, texts_to_read

TEXTS = ["Yes.", "No."]


class FixedRecogniser:
    """Returns one word for every sound, and counts its calls."""

    def __init__(self):
        self.times = 0

    def transcribe(self, sound):
        self.times += 1
        assert sound.seconds > 0.2
        return "yes"


@bundled("mini-tts")
def test_float_compared_with_itself_reads_the_same():
    source, listener = hub.resolve("mini-tts"), FixedRecogniser()
    readers = Readers(source, TEXTS, listener)
    own = readers.own()
    assert own == Misses((0, 1), (1, 1)) and own.share == 50.0 and listener.times == 2
    assert readers.beside(SUBJECTS[KIND].load(source)) == readers.alone(source) == own
    assert listener.times == 2  # equal codes are transcribed once
    readers.alone(source, skipped=1)
    assert listener.times > 2  # but another draw is another reading


def test_an_interval_separates_loss_from_chance():
    before = Misses((1, 2) * 20, (10,) * 40)
    assert difference(before, before).high == 0.0
    everywhere = difference(before, Misses((2, 3) * 20, (10,) * 40))
    uneven = difference(before, Misses((0, 5) * 20, (10,) * 40))
    assert everywhere.points == uneven.points == 10.0
    assert everywhere.low == everywhere.high == 10.0
    assert 0 < uneven.low < 5 and 15 < uneven.high < 20


def test_texts_are_of_both_kinds_and_none_is_read_twice():
    texts = texts_to_read(21)
    assert len(texts) == len(set(texts)) == 21 and texts_to_read(21) == texts
