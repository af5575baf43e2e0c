"""What conversations cost and leave behind, by the benchmarks that say so, on the untrained miniature."""

import asyncio
import gc
import os
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.dialogue.voices import talk
from tests.server.harness import RunningServer, eventually
from vivavoce.audio.io import Sound
from vivavoce.bench import capacity
from vivavoce.s2s.moss_speech import MossSpeechBackend
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting import load_host

SOUND = 4 * 24_000  # bytes of a second of it: no reply keeps less


class Held:
    """What is held of what was made in its block: by Python and numpy, in tensors, and in pages of the cache."""

    def __init__(self, pipeline: MossSpeechBackend) -> None:
        self._pool = pipeline.core.scheduler.pool

    def __enter__(self) -> None:
        tracemalloc.start()

    def __exit__(self, *error: object) -> None:
        tracemalloc.stop()

    @property
    def bytes(self) -> int:
        gc.collect()
        tensors = [
            each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not isinstance(each, FakeTensor)
        ]
        return tracemalloc.get_traced_memory()[0] + sum(each.nbytes for each in tensors)

    @property
    def pages(self) -> int:
        return self._pool.size - self._pool.free


async def test_sessions_that_end_leave_no_memory_behind(model):
    questions = [Sound(talk(0.6, seed), 16_000).resampled(24_000).samples[0] for seed in range(4)]
    host = load_host(model, device="cpu")
    host.pipeline.options = replace(host.pipeline.options, admission=None)  # the machine may be busy
    async with host.pipeline:
        await host.warm_up()
        async with RunningServer(host, ServerOptions(opens_per_minute=1000)) as running:
            server, held = capacity.BenchServer(running.port, os.getpid()), Held(host.pipeline)
            tasks = len(asyncio.all_tasks())

            def all_is_over() -> bool:
                return len(asyncio.all_tasks()) <= tasks and held.pages == 0

            async def some_end() -> int:
                """Bytes that are held when they have."""
                await capacity.open_and_end(server, range(4), questions, max_tokens=15, between=0.0)
                await eventually(all_is_over, "nobody is at work, and every page is given back")
                return held.bytes

            await some_end()
            with held:
                held_bytes = [await some_end() for _ in range(4)]
                # What sessions leave behind grows every time; what other tests of this process do does not.
                assert min(after - before for before, after in pairwise(held_bytes)) < SOUND


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(capacity.VivaError, match="ended before it was ready"):
        asyncio.run(capacity.measure_sessions(str(tmp_path), [], 2, 1, 5, 0.0))


def test_a_budget_counts_every_stage_once(model, tmp_path):
    result = capacity.run_budget(model, sessions=2, out=tmp_path)
    costs = {cost["stage"]: cost for cost in result["costs"]}
    assert len(costs) == len(result["costs"]) == 8
    assert all(cost["alone_ms"] > 0 and cost["shared_ms"] > 0 for cost in costs.values())
    spoken = [cost["shared_ms"] for cost in costs.values() if cost["when"] in ("speaks", "always")]
    assert result["cores_for_all_speaking"] == pytest.approx(2 * sum(spoken) / 1e3)
    assert (tmp_path / "budget.json").is_file()
