"""The thread count grows while it helps, and is left unchanged where OMP_NUM_THREADS is set."""

import pytest
import torch

from tests.models.tiny_nano import CONFIG, LetterTokenizer, tiny_nano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoPrompt
from vivavoce.nn.process_settings import torch_threads
from vivavoce.tts import nano_cpu as threads
from vivavoce.tts.nano_cpu import CpuFrameGenerator, best_threads, fastest_threads


@pytest.fixture(autouse=True)
def threads_as_before():
    """Measuring leaves torch with as many as it had."""
    before = torch.get_num_threads()
    with torch_threads.held(3):
        yield
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("milliseconds", "max_threads", "expected"),
    [
        ({1: 20, 2: 12, 4: 8, 8: 5}, 8, 8),
        ({1: 20, 2: 12, 4: 11.5, 8: 5}, 8, 2),  # hardly faster: enough
        ({1: 20, 2: 40}, 2, 1),
        ({1: 20, 2: 10, 4: 5}, 3, 2),
        ({1: 20}, 1, 1),
    ],
)
def test_threads_are_added_while_they_help(milliseconds, max_threads, expected):
    now = 0.0

    def step() -> None:
        nonlocal now
        now += milliseconds[torch.get_num_threads()]

    assert best_threads(step, max_threads, lambda: now) == expected


@pytest.fixture(scope="module")
def generator():
    return CpuFrameGenerator(tiny_nano(dtype=torch.float32), MossTTSNanoPrompt(CONFIG, LetterTokenizer()))


def test_a_small_model_takes_one(generator, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert fastest_threads(generator) == 1


def test_a_large_model_is_measured(generator, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "MIN_THREADED_WIDTH", 1)
    monkeypatch.setattr(threads, "spare_cores", lambda: 2)
    assert fastest_threads(generator) in (1, 2)


def test_what_the_user_set_holds(generator, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert fastest_threads(generator) == torch.get_num_threads()
