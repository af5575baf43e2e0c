"""Stacks of running threads are read whole."""

import threading
from contextlib import suppress

from vivavoce.thread_stacks import StackFrame, thread_stacks


def test_the_stack_of_running_coroutines_holds_their_calls_only():
    is_over = threading.Event()

    async def inner_coroutine(depth: int) -> int:
        return 0 if not depth else 1 + await inner_coroutine(depth - 1)

    def run_coroutines() -> None:
        while not is_over.is_set():
            for depth in range(20):
                with suppress(StopIteration):
                    inner_coroutine(depth).send(None)

    thread = threading.Thread(target=run_coroutines)
    thread.start()
    seen: list[StackFrame] = []
    try:
        while sum(frame.function == "inner_coroutine" for frame in seen) < 100:
            frames = thread_stacks()[thread.ident]
            assert frames[-1].function == "_bootstrap"
            seen += frames
    finally:
        is_over.set()
        thread.join()
    ours = {frame.function for frame in seen if frame.file == __file__}
    assert ours == {"inner_coroutine", "run_coroutines"}


def test_the_calling_thread_is_there_innermost_first():
    frames = thread_stacks()[threading.get_ident()]
    assert [frame.function for frame in frames][:2] == [
        "thread_stacks",
        "test_the_calling_thread_is_there_innermost_first",
    ]
    assert frames[1].file == __file__
