"""Captures come after an eager run and one at a time; what cannot be captured is run instead and gives the same."""

import logging
import threading
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

from vivavoce.nn.cuda_graphs import EagerReplay, GraphCapture, Graphed
from vivavoce.nn.process_settings import cudnn_benchmark

POOL = (0, 7)


class StandInGraph:
    """`torch.cuda.CUDAGraph` on a CPU: what is done between begin and end is only recorded to have been asked for."""

    capturing: "StandInGraph | None" = None
    unended: ClassVar[set[tuple[int, int]]] = set()

    def capture_begin(self, pool, capture_error_mode):
        assert StandInGraph.capturing is None
        assert capture_error_mode == "thread_local"
        assert pool == POOL
        StandInGraph.capturing = self
        StandInGraph.unended.add(pool)
        self.is_invalid = False

    def capture_end(self):
        if StandInGraph.capturing is not self:
            raise RuntimeError("not capturing")
        StandInGraph.capturing = None
        if self.is_invalid:  # as torch's, before it tells the allocator
            raise RuntimeError("operation failed due to a previous error during capture")
        StandInGraph.unended.discard(POOL)

    def reset(self):
        pass


@pytest.fixture
def device(monkeypatch):
    """A CPU with what captures ask of CUDA."""

    class Stream:
        device = torch.device("cpu", 0)

        def __init__(self, device=None, priority=0):
            self.priority = priority

        def wait_stream(self, other):
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    end = lambda index, pool: StandInGraph.unended.remove(pool)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda index, pool: None)
    monkeypatch.setattr(StandInGraph, "capturing", None)
    monkeypatch.setattr(StandInGraph, "unended", set())


def fails_while_captured():
    if StandInGraph.capturing is not None:
        StandInGraph.capturing.is_invalid = True
        raise RuntimeError("FIND was unable to find an engine to execute this computation")


@pytest.mark.usefixtures("device")
def test_an_action_is_run_before_it_is_captured_and_never_while_engines_are_timed():
    seen = []
    with cudnn_benchmark.held(True):
        GraphCapture()(lambda: seen.append((StandInGraph.capturing is not None, torch.backends.cudnn.benchmark)))
        assert torch.backends.cudnn.benchmark
    assert seen == [(False, False), (True, False)]


@pytest.mark.usefixtures("device")
def test_what_cannot_be_captured_is_run_and_says_so(caplog):
    x = torch.ones(3)

    def doubled():
        fails_while_captured()
        return 2 * x, x + 1

    with caplog.at_level(logging.WARNING), torch.inference_mode():
        graph, (twice, more) = GraphCapture()(doubled)
    assert isinstance(graph, EagerReplay)
    assert "could not be captured" in caplog.text
    assert "FIND was unable" in caplog.text
    assert StandInGraph.capturing is None
    assert not StandInGraph.unended
    for value in (5.0, 7.0):  # outside inference mode, where it was captured inside
        x.fill_(value)
        graph.replay()
        assert twice.tolist() == [2 * value] * 3
        assert more.tolist() == [value + 1] * 3


@pytest.mark.usefixtures("device")
def test_an_action_without_results_is_run_too():
    x = torch.zeros(1)

    def count():
        fails_while_captured()
        x.add_(1)

    graph, made = GraphCapture()(count)
    assert made is None
    before = x.item()
    graph.replay()
    assert x.item() == before + 1


@pytest.mark.usefixtures("device")
def test_captures_go_on_after_one_that_failed():
    capture = GraphCapture()
    capture(fails_while_captured)
    graph, _ = capture(lambda: None)
    assert isinstance(graph, StandInGraph)


@pytest.mark.usefixtures("device")
def test_an_action_is_divided_at_its_cuts_only_where_replays_pause(monkeypatch):
    capture, order = GraphCapture(), []
    monkeypatch.setattr(StandInGraph, "replay", lambda part, order=order: order.append(part), raising=False)

    def in_three_parts():
        for _ in range(2):
            capture.cut()

    whole, _ = capture(in_three_parts)
    assert isinstance(whole, StandInGraph)
    capture.before_part = lambda: order.append("pause")
    divided, _ = capture(in_three_parts)
    divided.replay()
    assert len(set(divided.parts)) == 3
    assert order == [step for part in divided.parts for step in ("pause", part)]
    assert StandInGraph.capturing is None
    assert not StandInGraph.unended


@pytest.mark.usefixtures("device")
def test_a_capture_that_fails_after_a_cut_is_run_instead(caplog):
    capture = GraphCapture()
    capture.before_part = lambda: None

    def doubled():
        capture.cut()
        fails_while_captured()
        return torch.ones(2) * 2

    with caplog.at_level(logging.WARNING):
        graph, twice = capture(doubled)
    assert isinstance(graph, EagerReplay)
    assert twice.tolist() == [2, 2]
    assert StandInGraph.capturing is None
    assert not StandInGraph.unended


@pytest.mark.usefixtures("device")
def test_an_action_that_fails_by_itself_raises():
    def broken():
        raise RuntimeError("by itself")

    with pytest.raises(RuntimeError, match="by itself"):
        GraphCapture()(broken)


@pytest.mark.usefixtures("device")
def test_threads_capture_one_after_another():
    errors = []

    def captured():
        try:
            for _ in range(50):
                GraphCapture()(lambda: torch.zeros(2))
        except AssertionError as error:  # the stand-in graph's: another one was being captured
            errors.append(error)

    threads = [threading.Thread(target=captured) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def convolved(key, tensors):
    """A convolution whose shape is the key's."""
    weight = torch.ones(8, 8, 3, device=tensors[0].device)
    return (torch.nn.functional.conv1d(tensors[0], weight, padding=1),)


def convolutions(seed, count=6):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(1, 8, 40 + 7 * n + seed, device="cuda", generator=generator) for n in range(count)]


@pytest.mark.gpu
def test_convolutions_are_captured_in_cudnns_benchmark_mode():
    graphs = Graphed(convolved)
    with cudnn_benchmark.held(True):
        for x in convolutions(0):
            torch.testing.assert_close(graphs(x.shape, [x])[0], convolved(None, [x])[0], rtol=1e-3, atol=1e-3)
        assert torch.backends.cudnn.benchmark
    assert all(isinstance(graph, torch.cuda.CUDAGraph) for graph, _, _ in graphs._captured.values())


@pytest.mark.gpu
def test_the_device_works_on_after_a_failed_capture(caplog):
    def reads_back(key, tensors):
        y = convolved(key, tensors)[0]
        return (y * float(y.abs().max()),)  # waits for the device, which no capture may

    spoilt, graphs = Graphed(reads_back), Graphed(convolved)
    xs = convolutions(1)
    for x in xs[:2]:
        for scale in (1, 2):
            found = spoilt(x.shape, [scale * x])[0]
            torch.testing.assert_close(found, reads_back(None, [scale * x])[0], rtol=1e-3, atol=1e-3)
    assert caplog.text.count("could not be captured") == 2
    assert torch.randn(100, device="cuda").std() > 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for x in xs:
        torch.testing.assert_close(graphs(x.shape, [x])[0], convolved(None, [x])[0], rtol=1e-3, atol=1e-3)
    assert all(isinstance(graph, torch.cuda.CUDAGraph) for graph, _, _ in graphs._captured.values())


@pytest.mark.gpu
def test_threads_capture_while_others_work():
    failures = []

    def work(seed):
        graphs = Graphed(convolved)
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for x in convolutions(seed, count=10):
                found, wanted = graphs(x.shape, [x])[0], convolved(None, [x])[0]
                if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-3):
                    failures.append((seed, x.shape))
                torch.empty(1 << 22, device="cuda").fill_(seed)
        if not all(isinstance(graph, torch.cuda.CUDAGraph) for graph, _, _ in graphs._captured.values()):
            failures.append((seed, "not captured"))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
