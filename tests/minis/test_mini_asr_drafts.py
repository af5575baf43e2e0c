"""What guesses ahead of the bundled recogniser: found by name, and worth its while, at the same text."""

import pytest
import torch

from vivavoce import hub
from vivavoce.asr.backends import OwnBackend, load_whisper
from vivavoce.asr.drafts import DraftChoice
from vivavoce.bench.asr import spoken_sentences
from vivavoce.device import pick
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.train.asr.evaluate import score_texts

QUESTIONS = 12
GREEDY = TranscriptionOptions(padding="trim", temperatures=(0.0,))


@pytest.fixture(scope="module")
def transcriber():
    torch.manual_seed(0)
    return load_whisper(hub.resolve("mini-asr"), pick("cpu"))


@pytest.fixture(scope="module")
def spoken():
    return spoken_sentences(max_recordings=QUESTIONS)


def texts_of(backend, spoken):
    return ["".join(segment.text for segment in backend.segments(one.samples, GREEDY)).strip() for one in spoken]


@pytest.fixture(scope="module")
def plain(transcriber, spoken):
    return texts_of(OwnBackend(transcriber, pick("cpu")), spoken)


def test_the_recogniser_understands_voices_it_has_never_heard(plain, spoken):
    assert score_texts(plain, [one.text for one in spoken]).word_error_rate < 0.15


@pytest.mark.parametrize(
    ("choice", "min_tokens"),
    [
        (DraftChoice(draft="mini-asr-draft"), 4.0),
        (DraftChoice(heads="mini-asr-heads"), 2.0),
        (DraftChoice(heads="mini-asr-heads", width=3, max_rows=12), 2.5),
    ],
    ids=["draft", "heads", "tree of heads"],
)
def test_bundled_drafts_save_passes_and_change_no_text(transcriber, spoken, plain, choice, min_tokens):
    backend = OwnBackend(transcriber, pick("cpu"), choice)
    assert texts_of(backend, spoken) == plain
    assert backend.report().tokens_per_pass > min_tokens
