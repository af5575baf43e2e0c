"""Recordings transcribed in a batch have the segments they have alone."""

import threading
from dataclasses import replace

import pytest
import torch

from tests.asr.idle_engine import assert_idle
from tests.asr.test_transcribe import folder, noise, transcriber  # noqa: F401 - fixtures
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.device import pick
from vivavoce.models.whisper.engine import WhisperWriter
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.models.whisper.transcriber import WhisperTranscriber

SOUNDS = [torch.from_numpy(noise(seconds, seed)) for seed, seconds in enumerate((1.3, 6.2, 2.0, 3.9, 0.6))]


def tokens_of(recordings) -> list[list[tuple[int, ...]]]:
    return [[segment.tokens for segment in segments] for segments in recordings]


@pytest.mark.parametrize("padding", ["full", "trim"])
def test_batched_segments_are_those_of_single_recordings(transcriber, padding):  # noqa: F811
    options = TranscriptionOptions(padding=padding, word_times=True)
    together = TranscribingEngine(transcriber, pick("cpu"), windows=3).transcribe(SOUNDS, options)
    for samples, segments in zip(SOUNDS, together, strict=True):
        alone = list(transcriber.segments(samples, options))
        assert [segment.tokens for segment in segments] == [segment.tokens for segment in alone]
        for mine, other in zip(segments, alone, strict=True):
            assert (mine.start, mine.end, mine.text) == (other.start, other.end, other.text)
            assert [word.start for word in mine.words] == [word.start for word in other.words]
            assert mine.average_logprob == pytest.approx(other.average_logprob, abs=1e-3)


def test_doubtful_texts_are_sampled_again_and_all_slots_are_released(transcriber):  # noqa: F811
    strict = replace(transcriber.settings, min_logprob=0.0, temperatures=(0.0, 1.0), best_of=3)
    engine = TranscribingEngine(
        WhisperTranscriber(transcriber.model, transcriber.tokenizer, transcriber.tokens, strict), pick("cpu"), windows=2
    )
    heard = []
    segments = engine.transcribe(
        SOUNDS[:3], TranscriptionOptions(seed=3), lambda number, segment: heard.append((number, segment))
    )
    assert {segment.temperature for mine in segments for segment in mine} == {1.0}
    assert len(heard) == sum(len(mine) for mine in segments) > 3
    assert_idle(engine)
    assert tokens_of(engine.transcribe(SOUNDS[:3], TranscriptionOptions(seed=3))) == tokens_of(segments)


def test_a_cancelled_caller_frees_the_engine(transcriber):  # noqa: F811
    engine = TranscribingEngine(transcriber, pick("cpu"), windows=2)

    def give_up(number, segment):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.transcribe(SOUNDS, on_segment=give_up)
    assert_idle(engine)


def test_each_recording_may_have_its_own_options(transcriber):  # noqa: F811
    options_list = [
        TranscriptionOptions(prefix="a table"),
        TranscriptionOptions(timestamps=False),
        TranscriptionOptions(hotwords=("breakfast",)),
    ]
    together = TranscribingEngine(transcriber, pick("cpu"), windows=4).transcribe(SOUNDS[:3], options_list)
    for samples, options, segments in zip(SOUNDS, options_list, together, strict=False):
        assert [s.tokens for s in segments] == [s.tokens for s in transcriber.segments(samples, options)]


class PlantedError(Exception):
    """The fault of these tests."""


@pytest.mark.parametrize("beams", [1, 3])
def test_a_failing_text_fails_only_its_recording(transcriber, beams, monkeypatch):  # noqa: F811
    options = TranscriptionOptions(timestamps=False, temperatures=(0.0,), beams=beams)
    engine = TranscribingEngine(transcriber, pick("cpu"), windows=3)
    wanted = engine.transcribe(SOUNDS[:3], options)
    first, second, third = ({token for tokens in mine for token in tokens} for mine in tokens_of(wanted))
    poison = min(second - first - third)
    forward = WhisperWriter.forward

    def faulty(self, rows, batch):
        hidden = forward(self, rows, batch)  # writes keys and values of all rows before it fails
        if poison in rows[:, 0].tolist():
            raise PlantedError
        return hidden

    monkeypatch.setattr(WhisperWriter, "forward", faulty)
    heard: list = [None] * 3

    def read(number: int) -> None:
        try:
            heard[number] = list(engine.begin(SOUNDS[number], options))
        except Exception as error:
            heard[number] = error

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert isinstance(heard[1], PlantedError)
    assert tokens_of([heard[0], heard[2]]) == tokens_of([wanted[0], wanted[2]])
    assert_idle(engine)
    monkeypatch.undo()
    assert tokens_of(engine.transcribe(SOUNDS[:3], options)) == tokens_of(wanted)


def test_a_failing_window_fails_only_its_recording(transcriber):  # noqa: F811
    engine = TranscribingEngine(transcriber, pick("cpu"), windows=2)
    options = TranscriptionOptions(timestamps=False, temperatures=(0.0,))
    (wanted,) = engine.transcribe([SOUNDS[0]], options)
    bad = SOUNDS[0].clone()
    bad[100] = torch.nan
    hook = transcriber.model.encoder.register_forward_pre_hook(refuse_nan)
    try:
        jobs = [engine.begin(samples, options) for samples in (SOUNDS[0], bad)]
        heard: list = [None] * 2
        threads = [threading.Thread(target=collect, args=(job, heard, index)) for index, job in enumerate(jobs)]
        engine.driver.call(lambda: [thread.start() for thread in threads])
        for thread in threads:
            thread.join(60)
    finally:
        hook.remove()
    assert tokens_of([heard[0]]) == tokens_of([wanted]) and isinstance(heard[1], PlantedError)
    assert_idle(engine)


def refuse_nan(module, inputs) -> None:
    if torch.isnan(inputs[0]).any():
        raise PlantedError


def collect(job, heard: list, index: int) -> None:
    try:
        heard[index] = list(job)
    except Exception as error:
        heard[index] = error


def test_a_recording_is_cancelled_between_two_steps(transcriber):  # noqa: F811
    engine = TranscribingEngine(transcriber, pick("cpu"), windows=1)
    first, waiting = engine.begin(SOUNDS[1]), engine.begin(SOUNDS[0])
    iterator = iter(first)
    begins = next(iterator)
    thread = threading.Thread(target=lambda: list(waiting))
    thread.start()
    waiting.cancel()
    thread.join(60)
    assert not thread.is_alive()  # it waited for a place
    first.cancel()
    assert list(iterator) == [] and begins.tokens
    assert_idle(engine)
    assert tokens_of([list(engine.begin(SOUNDS[0]))]) == tokens_of(engine.transcribe(SOUNDS[:1]))
