"""How many threads a CPU makes frames with: measured, since more are often slower, by far where cores are shared."""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from vivavoce.nn.process_settings import torch_threads
from vivavoce.speech.mouth import CpuFrameGenerator, FrameGenerator
from vivavoce.speech.settings import SpeechSettings
from vivavoce.speech.sounding import spare_cores

REPEATS = 5
WORTH = 0.9  # of the time before: less gain than this is not worth a core
SMALLEST_SHARED = 512  # hidden size; the products of smaller models are done before a second thread is awake


def fastest_threads(mouth: FrameGenerator) -> int:
    """How many of torch's threads this model speaks fastest with, one core left to the codec.

    What OMP_NUM_THREADS says, holds.
    """
    if not isinstance(mouth, CpuFrameGenerator) or "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    config = mouth.decoder.model.config
    most = max(1, spare_cores()) if config.hidden_size >= SMALLEST_SHARED else 1
    if most == 1:
        return 1
    usual = SpeechSettings().generation(config.n_vq, 1, 0)
    endless = replace(usual, max_new_rows=100, min_new_rows=101)
    frames = mouth.frames((), "a", endless)
    try:
        return best_threads(lambda: next(frames), most)
    finally:
        frames.close()


def best_threads(step: Callable[[], object], most: int, clock: Callable[[], float] = time.perf_counter) -> int:
    """The fewest threads that more of are not clearly faster than."""
    best, fastest, count = 1, float("inf"), 1
    while count <= most:
        with torch_threads.held(count):
            seconds = _median_seconds(step, clock)
        if seconds > fastest * WORTH:
            break
        best, fastest, count = count, seconds, 2 * count
    return best


def _median_seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    step()
    times = []
    for _ in range(REPEATS):
        began = clock()
        step()
        times.append(clock() - began)
    return sorted(times)[REPEATS // 2]
