"""Speculative decoding never changes a transcript, whatever the source of the drafts."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from tests.asr.idle_engine import assert_idle
from tests.asr.test_batch import SOUNDS
from tests.asr.test_transcribe import folder, transcriber  # noqa: F401 - fixtures
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.asr.drafts import DraftChoice
from vivavoce.device import pick
from vivavoce.errors import CheckpointError
from vivavoce.models.whisper.drafts import PieceGuesser, WhisperHeads, distilled, save_decoder
from vivavoce.models.whisper.model import Whisper
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.nn.modules import fill_randomly

CPU = pick("cpu")


@pytest.fixture(scope="module")
def drafts(transcriber, tmp_path_factory):  # noqa: F811
    """Untrained guessers of every kind: mostly wrong, now and then right."""
    root, model = tmp_path_factory.mktemp("drafts"), transcriber.model
    heads = WhisperHeads.for_decoder(model.decoder, 3)
    fill_randomly(heads, 1, 0.3)
    heads.save(root / "heads", model.config)
    save_decoder(distilled(model.decoder, 1), root / "decoder", model.config)
    guesser = PieceGuesser(model.config.d_model, transcriber.tokens.endoftext)
    fill_randomly(guesser, 2)
    guesser.save(root / "pieces", model.config)
    Whisper.random(replace(model.config, decoder_layers=1), seed=9).save(root / "whisper")
    return root


CHOICES = {
    "heads": {"heads": "heads"},
    "branching heads": {"heads": "heads", "width": 3, "max_rows": 7},
    "decoder": {"draft": "decoder"},
    "pieces": {"draft": "pieces"},
    "another whisper": {"draft": "whisper"},
    "lookup": {"lookup": True},
    "all": {"draft": "pieces", "heads": "heads", "lookup": True},
}


def choice_of(drafts, name: str) -> DraftChoice:
    given = CHOICES[name]
    paths = {key: drafts / value for key, value in given.items() if isinstance(value, str)}
    return DraftChoice(**(given | paths))


def assert_same(segments, expected) -> None:
    """The very tokens and times; what is said of them, within rounding."""
    for mine, theirs in zip(segments, expected, strict=True):
        assert [(s.tokens, s.start, s.end, s.text) for s in mine] == [
            (s.tokens, s.start, s.end, s.text) for s in theirs
        ]
        for one, other in zip(mine, theirs, strict=True):
            assert one.average_logprob == pytest.approx(other.average_logprob, abs=1e-3)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(
    "options", [TranscriptionOptions(), TranscriptionOptions(timestamps=False, padding="trim")], ids=["timed", "plain"]
)
def test_the_segments_are_those_of_plain_decoding(transcriber, drafts, name, options):  # noqa: F811
    plain = TranscribingEngine(transcriber, CPU, windows=3)
    expected = plain.transcribe(SOUNDS, options)
    engine = TranscribingEngine(transcriber, CPU, windows=3, drafts=choice_of(drafts, name))
    assert_same(engine.transcribe(SOUNDS, options), expected)
    report = engine.report()
    assert report.tokens == plain.report().tokens > 50
    assert_idle(engine)
    if name != "lookup":
        assert report.acceptance.checks > 0
    assert str(report.tokens) in report.line() and report.as_dict()["passes"] == report.passes


@pytest.mark.parametrize("name", ["heads", "decoder", "pieces"])
def test_sampled_texts_are_those_of_plain_sampling(transcriber, drafts, name):  # noqa: F811
    hot = replace(transcriber.settings, min_logprob=0.0, temperatures=(0.0, 0.8), best_of=2)
    strict = WhisperTranscriber(transcriber.model, transcriber.tokenizer, transcriber.tokens, hot)
    sounds, options = SOUNDS[2:3], TranscriptionOptions(seed=5, timestamps=False)
    expected = TranscribingEngine(strict, CPU, windows=2).transcribe(sounds, options)
    engine = TranscribingEngine(strict, CPU, windows=2, drafts=choice_of(drafts, name))
    assert_same(engine.transcribe(sounds, options), expected)
    assert {segment.temperature for mine in expected for segment in mine} == {0.8}


def test_drafts_by_the_model_itself_are_all_accepted(transcriber, tmp_path):  # noqa: F811
    sure = deepcopy(transcriber)
    sure.model.decoder.embed_tokens.weight.data *= 20
    sure.model.save(tmp_path)
    options = TranscriptionOptions(timestamps=False)
    engine = TranscribingEngine(sure, CPU, windows=1, drafts=DraftChoice(draft=tmp_path))
    engine.transcribe(SOUNDS[:1], options)
    report = engine.report()
    assert report.acceptance.kept == report.acceptance.drafted and report.tokens_per_pass > 4


def test_the_previous_hypothesis_is_a_draft_that_saves_passes(transcriber):  # noqa: F811
    samples, options = SOUNDS[2], TranscriptionOptions(timestamps=False)
    engine = TranscribingEngine(transcriber, CPU, windows=1)
    first = list(engine.begin(samples, options))
    plain = engine.report()
    again = list(engine.begin(samples, options, [token for segment in first for token in segment.tokens]))
    assert_same([again], [first])
    assert engine.report().passes * 3 < plain.passes


def test_recordings_may_start_and_be_cancelled_between_steps(transcriber):  # noqa: F811
    engine = TranscribingEngine(transcriber, CPU, windows=3)
    alone = [list(transcriber.segments(samples)) for samples in SOUNDS[:2]]
    first, gone, last = (iter(engine.begin(samples)) for samples in (SOUNDS[0], SOUNDS[1], SOUNDS[1]))
    segments = [[next(each)] for each in (first, gone, last)]
    gone.close()
    segments[0].extend(first)
    segments[2].extend(last)
    assert [s.tokens for s in segments[0]] == [s.tokens for s in alone[0]]
    assert [s.tokens for s in segments[2]] == [s.tokens for s in alone[1]]
    assert segments[1][0].tokens == segments[2][0].tokens
    assert_idle(engine)


def test_drafts_that_do_not_fit_are_refused_in_a_line(transcriber, drafts, tmp_path):  # noqa: F811
    other = replace(transcriber.model.config, num_mel_bins=128)
    Whisper.random(other, seed=1).save(tmp_path)
    for choice, complaint in (
        (DraftChoice(draft=tmp_path), "num_mel_bins is 128, not 80"),
        (DraftChoice(draft=drafts / "heads"), "pass it as heads"),
        (DraftChoice(heads=drafts / "pieces"), "not of heads drafts"),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            TranscribingEngine(transcriber, CPU, windows=1, drafts=choice)


def test_beam_search_finds_a_more_probable_text(transcriber):  # noqa: F811
    one, many = (
        list(transcriber.segments(SOUNDS[2], TranscriptionOptions(timestamps=False, beams=beams))) for beams in (1, 5)
    )
    assert many[0].average_logprob >= one[0].average_logprob - 1e-4
    together = TranscribingEngine(transcriber, CPU, windows=2).transcribe(
        [SOUNDS[2]], TranscriptionOptions(timestamps=False, beams=5)
    )
    assert [s.tokens for s in together[0]] == [s.tokens for s in many]
    assert torch.isfinite(torch.tensor(many[0].average_logprob))
