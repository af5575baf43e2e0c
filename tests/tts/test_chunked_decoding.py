"""Frames decoded in chunks, on another thread or in batches, give the same audio."""

import asyncio
import contextlib
import dataclasses
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.models.tiny_nano import CODEC_CONFIG, tiny_nano_codec
from tests.tts.test_nano import EIGHT, TEXT, joined, tiny_speaker
from vivavoce.audio.player import PlaybackClock
from vivavoce.device import pick
from vivavoce.errors import InputError
from vivavoce.models.moss_audio_tokenizer.cuda import SlotDecoder, SlotState
from vivavoce.models.moss_audio_tokenizer.model import CodecState
from vivavoce.runtime.event_loop import iterate_on_thread
from vivavoce.tts.chunked_decoding import ChunkedPlayback, spare_cores
from vivavoce.tts.nano import BatchedDecoder, EngineFrameGenerator, SingleDecoder

FRAMES = [tuple(frame) for frame in torch.randint(32, (40, 6), generator=torch.Generator().manual_seed(0)).tolist()]


@pytest.fixture(scope="module")
def codec():
    return tiny_nano_codec()


@pytest.fixture(scope="module")
def whole(codec):
    return codec.decode(torch.tensor(FRAMES).T[None])[0].numpy()


def sounding(codec, decode=None, beside=None, is_live=True, clock=lambda: 0.0) -> ChunkedPlayback:
    seconds = 1 / CODEC_CONFIG.frame_rate
    player = PlaybackClock()
    decode = decode or SingleDecoder(codec)
    return ChunkedPlayback(decode, decode.start(), seconds, player, clock, beside, is_live)


@pytest.mark.parametrize("is_live", [True, False])
def test_decoding_on_another_thread_changes_nothing(codec, whole, is_live):
    with ThreadPoolExecutor(1) as beside:
        heard = joined(sounding(codec, beside=beside, is_live=is_live).sounds(iter(FRAMES)))
    np.testing.assert_allclose(heard, whole, atol=1e-5)


@pytest.mark.parametrize(("is_threaded", "max_length"), [(True, 4), (False, 20)])
def test_chunks_decoded_on_another_thread_are_short(codec, is_threaded, max_length):
    with ThreadPoolExecutor(1) as pool:
        speech = sounding(codec, beside=pool if is_threaded else None, is_live=False)
        lengths = []
        for sound in speech.sounds(iter(FRAMES * 3)):
            lengths.append(sound.shape[1] // CODEC_CONFIG.frame_samples)
            speech.player.feed(0.0, lengths[-1] * speech.frame_seconds)
    assert lengths[0] == 1 and max(lengths) == max_length and sum(lengths) == 3 * len(FRAMES)


async def test_frames_are_generated_for_no_reader_that_is_gone(codec):
    speech, permits, ended = sounding(codec, is_live=False), threading.Semaphore(1), asyncio.Event()
    loop, asked, taken = asyncio.get_running_loop(), asyncio.Queue(), []

    def frames():
        try:
            for frame in FRAMES:
                loop.call_soon_threadsafe(asked.put_nowait, frame)
                permits.acquire()
                taken.append(frame)
                yield frame
        finally:
            loop.call_soon_threadsafe(ended.set)

    def sounds():
        with contextlib.closing(frames()) as generated:
            for sound in speech.sounds(generated):
                speech.player.feed(0.0, 10.0)  # so far ahead that the next chunk is long
                yield sound

    pieces = iterate_on_thread(sounds, 1)
    async with asyncio.timeout(20):
        await anext(pieces)
        assert [await asked.get(), await asked.get()] == FRAMES[:2]
        await pieces.aclose()
        permits.release(len(FRAMES))
        await ended.wait()
    assert len(taken) == 2, "the chunk is given up at its first frame"


class Lagging(Executor):
    """Does nothing for a while, then everything at once."""

    def __init__(self) -> None:
        self.is_awake, self.kept = False, None

    def submit(self, work, *given):
        future = Future()
        self.kept = lambda: future.set_result(work(*given))
        if self.is_awake:
            self.kept()
        return future


def test_a_codec_that_lags_behind_takes_all_that_waits(codec, whole):
    pool = Lagging()

    def frames():
        for number, frame in enumerate(FRAMES):
            if number == 12:
                pool.is_awake = True
                pool.kept()
            yield frame

    heard = list(sounding(codec, beside=pool).sounds(frames()))
    assert [sound.shape[1] // CODEC_CONFIG.frame_samples for sound in heard[:3]] == [1, 1, 11]
    np.testing.assert_allclose(np.concatenate(heard, axis=1), whole, atol=1e-5)


def test_without_a_spare_core_decoding_stays_on_the_calling_thread(tmp_path):
    speaker, threads = tiny_speaker(tmp_path), torch.get_num_threads()
    try:
        for count in (spare_cores() + 1, max(1, spare_cores())):
            torch.set_num_threads(count)
            sounding = speaker._start_playback(PlaybackClock(), lambda: 0.0, True)
            assert (sounding.executor is None) == (count > spare_cores())
    finally:
        torch.set_num_threads(threads)


def test_an_error_on_the_decoding_thread_is_raised_to_the_caller(codec):
    with ThreadPoolExecutor(1) as beside, pytest.raises(InputError, match="code 99"):
        list(sounding(codec, beside=beside).sounds(iter([*FRAMES[:1], (99,) * 6, *FRAMES])))


def together_on(codec, graphs: bool) -> BatchedDecoder:
    return BatchedDecoder(codec, dataclasses.replace(pick("cpu"), graphs=graphs))


@pytest.mark.parametrize("in_slots", [True, False])
def test_many_threads_are_decoded_together(codec, whole, in_slots):
    together, heard, passes = together_on(codec, in_slots), {}, []
    assert (together.slots is not None) == in_slots
    work = together.batcher.work

    def counted(jobs):
        passes.append(len(jobs))
        return work(jobs)

    together.batcher.work = counted

    def listen(index):
        heard[index] = joined(sounding(codec, together).sounds(iter(FRAMES)))

    threads = [threading.Thread(target=listen, args=(index,)) for index in range(6)]

    def until_all_have_asked() -> None:
        for thread in threads:
            thread.start()
        while together.batcher.waiting < 6:
            threading.Event().wait(0.001)

    together.call(until_all_have_asked)
    for thread in threads:
        thread.join()
    assert passes[0] == 6
    for sound in heard.values():
        np.testing.assert_allclose(sound, whole, atol=1e-5)


def test_streams_without_a_slot_are_decoded_too(codec, whole):
    together = together_on(codec, graphs=True)
    together.slots = SlotDecoder(codec, 1)
    held = together.start()
    heard = joined(sounding(codec, together).sounds(iter(FRAMES)))
    assert isinstance(held, SlotState) and isinstance(together.start(), CodecState)
    np.testing.assert_allclose(heard, whole, atol=1e-5)


@pytest.mark.parametrize("in_slots", [True, False])
def test_a_failing_pass_raises_in_all_its_callers(codec, in_slots):
    together = together_on(codec, in_slots)
    with pytest.raises(InputError, match="code 99"):
        together(together.start(), [(99,) * 6])


def test_a_step_that_fails_ends_the_texts_under_way_and_no_later_one(tmp_path):
    speaker = tiny_speaker(tmp_path)
    generator = speaker.generator = EngineFrameGenerator(speaker.model, speaker.prompt, pick("cpu"))
    expected = speaker.say(TEXT, "bell", EIGHT).samples
    run = generator.engine.runner.run

    def failing(works):
        generator.engine.runner.run = run
        raise RuntimeError("the device is gone")

    generator.engine.runner.run = failing
    with pytest.raises(RuntimeError, match="the device is gone"):
        speaker.say(TEXT, "bell", EIGHT)
    np.testing.assert_array_equal(speaker.say(TEXT, "bell", EIGHT).samples, expected)
    generator.driver.call(lambda: None)
    assert len(generator.engine.scheduler.sequences) == 1


@pytest.mark.parametrize("in_slots", [True, False])
def test_a_chunk_that_fails_in_a_pass_of_several_fails_alone(codec, whole, in_slots, monkeypatch):
    together, others = together_on(codec, in_slots), []
    decode, poison = together.batcher.work, FRAMES[0][::-1]

    def failing(jobs):
        results = decode(jobs)  # so that whatever a pass writes is written
        if any(tuple(job.codes[:, 0]) == poison for job in jobs):
            raise ArithmeticError
        others.append(len(jobs))
        return results

    together.batcher.work = failing
    heard = {}

    def listen(index):
        try:
            heard[index] = joined(sounding(codec, together).sounds(iter([poison] if index == 3 else FRAMES)))
        except ArithmeticError as error:
            heard[index] = error

    threads = [threading.Thread(target=listen, args=(index,)) for index in range(4)]

    def until_all_have_asked() -> None:
        for thread in threads:
            thread.start()
        while together.batcher.waiting < 4:
            threading.Event().wait(0.001)

    together.call(until_all_have_asked)
    for thread in threads:
        thread.join(30)
    assert isinstance(heard.pop(3), ArithmeticError) and others[:3] == [1, 1, 1]
    for sound in heard.values():
        np.testing.assert_allclose(sound, whole, atol=1e-5)


def test_parts_begun_side_by_side_sound_as_one_after_another(tmp_path):
    speaker = tiny_speaker(tmp_path)
    expected = speaker.say(TEXT, "bell", EIGHT).samples
    speaker.generator = EngineFrameGenerator(speaker.model, speaker.prompt, pick("cpu"))
    speaker.generator.parallel_parts = 3
    np.testing.assert_allclose(speaker.say(TEXT, "bell", EIGHT).samples, expected, atol=1e-5)
    steps = speaker.generator.engine.steps
    pieces = speaker.stream(TEXT, "bell", EIGHT)
    next(pieces)
    assert len(speaker.generator.engine.scheduler.sequences) == 1 + 3
    pieces.close()
    speaker.generator.driver.call(lambda: None)
    assert len(speaker.generator.engine.scheduler.sequences) == 1
    assert steps < 4 * 10  # four parts of nine frames would take forty by themselves
