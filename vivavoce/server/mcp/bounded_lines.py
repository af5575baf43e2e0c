"""Runs a program and passes its output on, as long as no line is too long: `bounded_lines.py LIMIT PROGRAM ARGUMENT…`.

A client of the program, which reads whole lines into memory, is a process of its own in front of it. It is run as a
script, of nothing but the standard library, so that it starts in milliseconds.
"""

import contextlib
import subprocess
import sys
from typing import IO

PIECE_BYTES = 64 * 1024


def copy_lines(source: IO[bytes], target: IO[bytes], limit: int) -> bool:
    """Copy to the end; False where a line has more than `limit` bytes, no more of which were copied."""
    length = 0
    while piece := source.read1(PIECE_BYTES):  # type: ignore[attr-defined]
        lengths = [len(line) for line in piece.split(b"\n")]
        lengths[0] += length
        if max(lengths) > limit:
            return False
        length = lengths[-1]
        target.write(piece)
        target.flush()
    return True


def main() -> int:
    """The status of the program, or 1 where it was ended."""
    limit, *command = sys.argv[1:]
    program = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert program.stdout is not None
    is_whole = False
    with contextlib.suppress(BrokenPipeError):  # the reader has closed the pipe
        is_whole = copy_lines(program.stdout, sys.stdout.buffer, int(limit))
    if not is_whole:
        program.kill()
    return program.wait() if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
