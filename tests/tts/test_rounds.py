"""One thread works for all who wait: what they ask for together is made together, and nothing is left when they go."""

import threading

import pytest
import torch

from tests.models.tiny_nano import tiny_nano
from tests.tts.test_mouths import PROMPT, REFERENCE
from vivavoce.device import pick
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.runtime.device_loop import DeviceLoop
from vivavoce.tts.nano_engine import EngineFrameGenerator


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "viva-rounds"]


def test_answers_and_errors_come_back_to_who_asked():
    rounds = DeviceLoop()
    assert rounds.ask(lambda: 7 * 6) == 42
    with pytest.raises(ZeroDivisionError):
        rounds.ask(lambda: 1 // 0)
    assert rounds.ask(lambda: threading.current_thread().name) == "viva-rounds"


def test_parts_work_until_nothing_is_left_and_the_thread_ends():
    rounds, left, done = DeviceLoop(), [3], threading.Event()

    def part() -> bool:
        if left[0] == 0:
            done.set()
            return False
        left[0] -= 1
        return True

    rounds.parts.append(part)
    before = workers()
    rounds.wake()
    assert done.wait(10) and left == [0]
    for thread in set(workers()) - set(before):
        thread.join(10)
        assert not thread.is_alive()
    assert rounds.ask(lambda: "again") == "again"


def test_texts_asked_for_together_are_made_together():
    mouth = EngineFrameGenerator(tiny_nano(dtype=torch.float32), PROMPT, pick("cpu"))
    generation = Generation(GREEDY, 12, min_new_rows=12)
    alone = list(mouth.frames(REFERENCE, "Good evening.", generation))
    before, heard = mouth.engine.steps, []

    def listen() -> None:
        heard.append(list(mouth.frames(REFERENCE, "Good evening.", generation)))

    threads = [threading.Thread(target=listen) for _ in range(6)]

    def until_all_have_asked() -> None:
        for thread in threads:
            thread.start()
        while len(mouth.rounds._asked) < len(threads):
            threading.Event().wait(0.001)

    mouth.rounds.ask(until_all_have_asked)
    for thread in threads:
        thread.join()
    assert heard == [alone] * 6
    assert mouth.engine.steps - before < 2 * 12  # six times as many, if one were made after another


def test_asking_on_the_thread_of_the_rounds_does_not_wait_for_itself():
    rounds, answered = DeviceLoop(), []
    asking = threading.Thread(
        target=lambda: answered.append(rounds.ask(lambda: rounds.ask(lambda: rounds.ask(lambda: 42)))), daemon=True
    )
    asking.start()
    asking.join(10)
    assert answered == [42]
    with pytest.raises(ZeroDivisionError):
        rounds.ask(lambda: rounds.ask(lambda: 1 // 0))


def test_a_part_that_fails_leaves_the_thread_to_the_others():
    rounds, failed = DeviceLoop(), []

    def part() -> bool:
        failed.append(True)
        raise ArithmeticError

    rounds.parts.append(part)
    rounds.ask(lambda: None)
    answered = []
    asking = threading.Thread(target=lambda: answered.append(rounds.ask(lambda: 1)), daemon=True)
    asking.start()
    asking.join(10)
    assert answered == [1] and 1 <= len(failed) <= 6
