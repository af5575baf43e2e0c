"""While kernels are compiled ahead, none is launched and no graph is captured."""

import sys
import threading
from contextlib import ExitStack
from types import ModuleType

import pytest
import torch

from vivavoce import kernels
from vivavoce.nn.cuda_graphs import Graphed, compiling_ahead, is_compiling_ahead

if kernels.AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def _fill(ptr, SIZE: tl.constexpr):
        tl.store(ptr + tl.arange(0, SIZE), 1.0)


def filled(key, tensors):
    y = torch.zeros_like(tensors[0])
    _fill[(1,)](y, SIZE=key)
    return (y,)


def test_it_is_over_when_it_is_left():
    with compiling_ahead():
        pass
    assert not is_compiling_ahead()


@pytest.mark.skipif(kernels.AVAILABLE, reason="there is something to compile")
def test_nothing_is_done_where_there_are_no_kernels():
    with compiling_ahead() as is_ahead:
        assert not is_ahead
        assert not is_compiling_ahead()


class StandInKernel:
    """A Triton kernel as far as compiling ahead touches it: launched or only compiled."""

    def __init__(self):
        self.launches, self.device_caches = [], {0: ({},)}

    def run(self, *args, grid, warmup, **kwargs):
        self._do_compile("key", "signature", 0)
        self.launches.append(warmup)

    def _do_compile(self, key, signature, device):
        return f"compiled {key}"


@pytest.fixture
def kernel(monkeypatch):
    """A kernel of a stand-in for Triton; afterwards its class must be as it was."""

    class JITFunction(StandInKernel):
        pass

    triton_, runtime, jit = ModuleType("triton"), ModuleType("triton.runtime"), ModuleType("triton.runtime.jit")
    triton_.AsyncCompileMode, jit.JITFunction = lambda executor: ExitStack(), JITFunction
    for name, module in (("triton", triton_), ("triton.runtime", runtime), ("triton.runtime.jit", jit)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernels, "AVAILABLE", True)
    before = JITFunction.run, JITFunction._do_compile
    yield JITFunction()
    assert (JITFunction.run, JITFunction._do_compile) == before


def test_warm_ups_that_overlap_leave_no_patch_behind(kernel):
    inside, leave = threading.Event(), threading.Event()

    def first():
        with compiling_ahead():
            inside.set()
            leave.wait()

    other = threading.Thread(target=first)
    other.start()
    inside.wait()
    with compiling_ahead():
        leave.set()
        other.join()  # the first to come is the first to leave
        kernel.run(grid=(1,), warmup=False)
        assert kernel.device_caches[0][0] == {"key": "compiled key"}
    kernel.run(grid=(1,), warmup=False)
    assert kernel.launches == [True, False]


def test_other_threads_launch_their_kernels_meanwhile(kernel):
    with compiling_ahead():
        other = threading.Thread(target=kernel.run, kwargs={"grid": (1,), "warmup": False})
        other.start()
        other.join()
    assert kernel.launches == [False]
    assert kernel.device_caches[0][0] == {}


def test_nested_it_ends_with_the_outermost(kernel):
    with compiling_ahead():
        with compiling_ahead() as is_ahead:
            assert is_ahead
        assert is_compiling_ahead()
        kernel.run(grid=(1,), warmup=False)
    assert not is_compiling_ahead()
    assert kernel.launches == [True]


def test_what_fails_inside_or_on_entering_leaves_no_patch(kernel, monkeypatch):
    with pytest.raises(ValueError, match="inside"), compiling_ahead():
        raise ValueError("inside")
    monkeypatch.setattr(sys.modules["triton"], "AsyncCompileMode", None)
    with pytest.raises(TypeError), compiling_ahead():
        pass
    assert not is_compiling_ahead()
    kernel.run(grid=(1,), warmup=False)
    assert kernel.launches == [False]


@pytest.mark.gpu
def test_a_kernel_is_launched_only_afterwards():
    y = torch.zeros(16, device="cuda")
    with compiling_ahead() as is_ahead:
        assert is_ahead
        for _ in range(2):
            _fill[(1,)](y, SIZE=16)
    assert y.sum() == 0
    _fill[(1,)](y, SIZE=16)
    assert y.sum() == 16


@pytest.mark.gpu
def test_graphs_are_captured_afterwards_and_give_what_the_function_gives():
    graphs, beside, x = Graphed(filled), Graphed(filled), torch.zeros(64, device="cuda")
    beside.blank = graphs.blank
    with compiling_ahead():
        for key in (32, 64):
            assert graphs(key, [x])[0].sum() == 0
        assert not graphs.captured
    for each in (graphs, beside):
        for key in (32, 64):
            assert each(key, [x])[0].sum() == key
        assert each.captured == 2
