"""Texts that are asked for together are generated together, and nothing is left of them or of their synthesizer."""

import gc
import threading
import weakref

import torch

from tests.models.tiny_nano import tiny_nano
from tests.tts.test_mouths import PROMPT, REFERENCE
from vivavoce.device import pick
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.runtime.executor import DeadlineExecutor
from vivavoce.tts.nano import EngineFrameGenerator

TWELVE = Generation(GREEDY, 12, min_new_rows=12)


def generator(executor=None) -> EngineFrameGenerator:
    return EngineFrameGenerator(tiny_nano(dtype=torch.float32), PROMPT, pick("cpu"), executor)


def test_texts_asked_for_together_are_made_together():
    mouth = generator()
    alone = list(mouth.frames(REFERENCE, "Good evening.", TWELVE))
    before, heard = mouth.engine.steps, []

    def listen() -> None:
        heard.append(list(mouth.frames(REFERENCE, "Good evening.", TWELVE)))

    threads = [threading.Thread(target=listen) for _ in range(6)]

    def until_all_have_asked() -> None:
        for thread in threads:
            thread.start()
        while mouth.driver._commands._actions.qsize() < len(threads):
            threading.Event().wait(0.001)

    mouth.driver.call(until_all_have_asked)
    for thread in threads:
        thread.join()
    assert heard == [alone] * 6
    assert mouth.engine.steps - before < 2 * 12  # six times as many, if one were made after another


def test_a_new_voice_that_several_ask_for_is_computed_once():
    mouth, heard = generator(), []
    threads = [
        threading.Thread(target=lambda: heard.append(list(mouth.frames(REFERENCE, "Good evening.", TWELVE))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mouth.driver.call(lambda: None)
    assert heard[0] == heard[1] == heard[2] and len(mouth.engine.scheduler.sequences) == 1


def test_a_synthesizer_that_is_dropped_leaves_no_thread_and_no_memory():
    executor = DeadlineExecutor("viva-test", linger=0.05)
    executor.start()
    mouth = generator(executor)
    frames = mouth.frames(REFERENCE, "Good evening.", TWELVE)
    next(frames)
    engine, threads = weakref.ref(mouth.engine), list(executor._threads)
    assert threads
    del mouth, frames
    while engine() is not None or any(thread.is_alive() for thread in threads):
        gc.collect()
        threading.Event().wait(0.01)
    assert executor.tasks == []


def test_closing_ends_the_texts_under_way_and_the_thread():
    executor = DeadlineExecutor("viva-test")
    executor.start()
    mouth = generator(executor)
    frames = mouth.frames(REFERENCE, "Good evening.", Generation(GREEDY, 400, min_new_rows=400))
    next(frames)
    threads = list(executor._threads)
    mouth.close()
    assert len(list(frames)) < 400
    assert not any(thread.is_alive() for thread in threads) and executor.tasks == []
