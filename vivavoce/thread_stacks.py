"""The stacks of all threads of this process, while they run.

Following `frame.f_back` from `sys._current_frames()` is not safe for that: another thread runs between two steps, and
in Python 3.11 a coroutine's frame that was suspended meanwhile points to memory of another call. faulthandler reads
all stacks in one go while the calling thread holds the interpreter's lock.
"""

import faulthandler
import re
import tempfile
from dataclasses import dataclass

THREAD = re.compile(r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')


@dataclass(frozen=True)
class StackFrame:
    """One call of a stack."""

    file: str
    line: str
    function: str


def thread_stacks() -> dict[int, list[StackFrame]]:
    """The calls of every thread by its ident, innermost first, at most 100 of each."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode("ascii", "replace")
    stacks: dict[int, list[StackFrame]] = {}
    calls: list[StackFrame] = []
    for line in text.splitlines():
        if thread := THREAD.match(line):
            calls = stacks.setdefault(int(thread["ident"], 16), [])
        elif call := FRAME.match(line):
            calls.append(StackFrame(call["file"], call["line"], call["function"]))
    return stacks
