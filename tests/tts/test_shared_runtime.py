"""Concurrent texts are generated in shared steps, and a closed generator frees its memory and thread."""

import gc
import threading
import weakref

import torch

from tests.models.tiny_nano import tiny_nano
from tests.tts.test_frame_generators import PROMPT, REFERENCE
from vivavoce.device import pick
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.runtime.executor import DeadlineExecutor
from vivavoce.tts.nano import EngineFrameGenerator

TWELVE = Generation(GREEDY, 12, min_new_rows=12)


def make_generator(executor=None) -> EngineFrameGenerator:
    return EngineFrameGenerator(tiny_nano(dtype=torch.float32), PROMPT, pick("cpu"), executor)


def test_texts_asked_for_together_are_made_together():
    generator = make_generator()
    alone = list(generator.frames(REFERENCE, "Good evening.", TWELVE))
    before, heard = generator.engine.steps, []

    def listen() -> None:
        heard.append(list(generator.frames(REFERENCE, "Good evening.", TWELVE)))

    threads = [threading.Thread(target=listen) for _ in range(6)]

    def until_all_have_asked() -> None:
        for thread in threads:
            thread.start()
        while generator.driver._commands._actions.qsize() < len(threads):
            threading.Event().wait(0.001)

    generator.driver.call(until_all_have_asked)
    for thread in threads:
        thread.join()
    assert heard == [alone] * 6
    assert generator.engine.steps - before < 2 * 12  # six times as many, if one were made after another


def test_a_new_voice_that_several_ask_for_is_computed_once():
    generator, heard = make_generator(), []
    threads = [
        threading.Thread(target=lambda: heard.append(list(generator.frames(REFERENCE, "Good evening.", TWELVE))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    generator.driver.call(lambda: None)
    assert heard[0] == heard[1] == heard[2] and len(generator.engine.scheduler.sequences) == 1


def test_a_synthesizer_that_is_dropped_leaves_no_thread_and_no_memory():
    executor = DeadlineExecutor("viva-test", linger=0.05)
    executor.start()
    generator = make_generator(executor)
    frames = generator.frames(REFERENCE, "Good evening.", TWELVE)
    next(frames)
    engine, threads = weakref.ref(generator.engine), list(executor._threads)
    assert threads
    del generator, frames
    while engine() is not None or any(thread.is_alive() for thread in threads):
        gc.collect()
        threading.Event().wait(0.01)
    assert executor.tasks == []


def test_closing_ends_the_texts_under_way_and_the_thread():
    executor = DeadlineExecutor("viva-test")
    executor.start()
    generator = make_generator(executor)
    frames = generator.frames(REFERENCE, "Good evening.", Generation(GREEDY, 400, min_new_rows=400))
    next(frames)
    threads = list(executor._threads)
    generator.close()
    assert len(list(frames)) < 400
    assert not any(thread.is_alive() for thread in threads) and executor.tasks == []
