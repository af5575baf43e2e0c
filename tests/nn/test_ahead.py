"""Kernels that are compiled ahead are not launched, and graphs are not captured, until that is over."""

import pytest
import torch

from vivavoce.nn import kernels
from vivavoce.nn.ahead import compiling_ahead, is_compiling_ahead
from vivavoce.nn.graphed import Graphed

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
