"""Settings of the whole process are what they were before, also after calls that overlap, nest or fail."""

import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
import torch

from vivavoce.nn.modules import allocating
from vivavoce.nn.process_settings import SharedSetting, serving_pace, torch_threads
from vivavoce.nn.quantised import prepacked
from vivavoce.runtime.executor import DeadlineExecutor


def test_holders_may_leave_in_any_order():
    value = "found"

    def set_to(new: str) -> None:
        nonlocal value
        value = new

    setting = SharedSetting(lambda: value, set_to)
    first, second = ExitStack(), ExitStack()
    first.enter_context(setting.held("first"))
    second.enter_context(setting.held("second"))
    first.close()
    assert value == "second"
    second.close()
    assert value == "found"
    with pytest.raises(ValueError, match="inside"), setting.held("third"):
        raise ValueError("inside")
    assert value == "found"


def test_two_pipelines_that_overlap_give_the_process_back():
    before = torch.get_num_threads(), sys.getswitchinterval()
    one, two = serving_pace(True, 3, 0.001), serving_pace(True, 5, 0.002)
    with ExitStack() as later:
        with ExitStack() as earlier:
            earlier.enter_context(one)
            later.enter_context(two)
        assert torch.get_num_threads() == 5
    assert (torch.get_num_threads(), sys.getswitchinterval()) == before


def test_a_pipeline_that_sets_no_threads_leaves_those_set_meanwhile():
    before = torch.get_num_threads()
    with serving_pace(on_cpu=False):
        torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def test_models_made_in_two_threads_have_their_own_dtype_and_leave_the_usual_one():
    inside, both, made = threading.Event(), threading.Event(), {}

    def second() -> None:
        inside.wait()
        both.set()
        with allocating("cpu", torch.float64):
            made["second"] = torch.empty(1).dtype

    other = threading.Thread(target=second)
    other.start()
    with allocating("cpu", torch.bfloat16):
        inside.set()
        both.wait()
        other.join(timeout=0.2)  # it waits for this one to leave
        made["first"] = torch.empty(1).dtype
    other.join()
    assert made == {"first": torch.bfloat16, "second": torch.float64}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.skipif("onednn" not in torch.backends.quantized.supported_engines, reason="no int8 kernels")
def test_packing_for_other_kernels_leaves_those_of_the_process():
    before = torch.backends.quantized.engine
    prepacked(torch.ones(4, 4, dtype=torch.int8), torch.ones(4), kernels="onednn")
    with pytest.raises(RuntimeError):
        prepacked(torch.ones(4, 4, dtype=torch.int8), torch.ones(3), kernels="onednn")
    assert torch.backends.quantized.engine == before


def test_a_frozen_heap_is_thawed_unless_it_was_frozen_before():
    script = """
import gc
from vivavoce.nn.process_settings import FEW_OBJECTS, frozen_heap
with frozen_heap():
    assert not gc.isenabled()
    assert gc.get_freeze_count() > FEW_OBJECTS
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > FEW_OBJECTS
assert gc.get_freeze_count() == 0
gc.freeze()
with frozen_heap():
    pass
assert gc.get_freeze_count() > FEW_OBJECTS
assert gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_decorated_function_holds_its_setting_on_every_call():
    @torch_threads.held(4)
    def threads() -> int:
        return torch.get_num_threads()

    before = torch.get_num_threads()
    assert (threads(), threads()) == (4, 4)
    assert torch.get_num_threads() == before


def test_saying_something_leaves_the_process_as_it_was():
    script = """
import gc, sys, torch
def state():
    torch_state = torch.get_num_threads(), torch.get_default_dtype(), torch.backends.quantized.engine
    return *torch_state, torch.backends.cudnn.benchmark, gc.get_freeze_count(), gc.isenabled(), sys.getswitchinterval()
torch.set_num_threads(3)
before = state()
import vivavoce
from vivavoce.tts import speech_model
speaks = speech_model("mini-tts", "cpu")
speaks.warm_up()
vivavoce.say("Yes.", device="cpu")
assert state() == before, (before, state())
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=without_thread_settings())


def without_thread_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def test_threads_of_an_executor_follow_the_setting():
    """OpenMP's number of threads is each thread's own: one that began under another setting would compute with it."""
    executor = DeadlineExecutor("test", 1)
    executor.start()
    seen = []

    class Counting:
        name = "counting"

        def __init__(self) -> None:
            self.left = 0
            self.is_done = threading.Event()

        def due(self) -> float | None:
            return executor.now() if self.left else None

        def do_next(self) -> None:
            seen.append(torch.get_num_threads())
            self.left -= 1
            self.is_done.set()

        def count(self) -> None:
            self.is_done.clear()
            self.left = 1
            executor.wake()
            assert self.is_done.wait(10)

    task = Counting()
    executor.add(task)
    before = torch.get_num_threads()
    with torch_threads.held(before + 1):
        task.count()
    task.count()
    executor.remove(task)
    executor.close()
    assert seen == [before + 1, before]
