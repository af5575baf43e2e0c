"""Sounds transcribed together are transcribed as each alone."""

from dataclasses import replace

import pytest
import torch

from tests.asr.test_transcribe import folder, listener, noise  # noqa: F401 - fixtures
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.device import pick
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.models.whisper.windows import TranscriptionOptions

SOUNDS = [torch.from_numpy(noise(seconds, seed)) for seed, seconds in enumerate((1.3, 6.2, 2.0, 3.9, 0.6))]


@pytest.mark.parametrize("padding", ["full", "trim"])
def test_each_sound_has_the_segments_it_has_alone(listener, padding):  # noqa: F811
    wish = TranscriptionOptions(padding=padding, word_times=True)
    together = TranscribingEngine(listener, pick("cpu"), windows=3).transcribe(SOUNDS, wish)
    for samples, segments in zip(SOUNDS, together, strict=True):
        alone = list(listener.segments(samples, wish))
        assert [segment.tokens for segment in segments] == [segment.tokens for segment in alone]
        for mine, other in zip(segments, alone, strict=True):
            assert (mine.start, mine.end, mine.text) == (other.start, other.end, other.text)
            assert [word.start for word in mine.words] == [word.start for word in other.words]
            assert mine.average_logprob == pytest.approx(other.average_logprob, abs=1e-3)


def test_doubtful_texts_are_drawn_again_and_every_place_is_given_back(listener):  # noqa: F811
    strict = replace(listener.settings, least_logprob=0.0, temperatures=(0.0, 1.0), best_of=3)
    engine = TranscribingEngine(
        WhisperTranscriber(listener.model, listener.tokenizer, listener.tokens, strict), pick("cpu"), windows=2
    )
    heard = []
    segments = engine.transcribe(
        SOUNDS[:3], TranscriptionOptions(seed=3), lambda number, segment: heard.append((number, segment))
    )
    assert {segment.temperature for mine in segments for segment in mine} == {1.0}
    assert len(heard) == sum(len(mine) for mine in segments) > 3
    assert engine.writer.store.free == 2 and not engine.engine.scheduler.sequences
    assert engine.transcribe(SOUNDS[:3], TranscriptionOptions(seed=3)) == segments


def test_a_caller_that_gives_up_leaves_nothing_behind(listener):  # noqa: F811
    engine = TranscribingEngine(listener, pick("cpu"), windows=2)

    def give_up(number, segment):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.transcribe(SOUNDS, on_segment=give_up)
    assert engine.writer.store.free == 2 and not engine.engine.scheduler.sequences


def test_each_sound_may_have_its_own_wish(listener):  # noqa: F811
    wishes = [
        TranscriptionOptions(prefix="a table"),
        TranscriptionOptions(timestamps=False),
        TranscriptionOptions(hotwords=("breakfast",)),
    ]
    together = TranscribingEngine(listener, pick("cpu"), windows=4).transcribe(SOUNDS[:3], wishes)
    for samples, wish, segments in zip(SOUNDS, wishes, together, strict=False):
        assert [s.tokens for s in segments] == [s.tokens for s in listener.segments(samples, wish)]
