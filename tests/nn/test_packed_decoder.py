"""Steps of one row through packed layers: the same states, keys and values as layer by layer."""

import copy

import gguf
import pytest
import torch

from tests.models.test_qwen_gguf import tiny_peer, write_gguf
from vivavoce.kernels import cpu
from vivavoce.models.llama import Llama
from vivavoce.nn.packed_decoder import PackedDecoderStep
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="needs a C compiler")
PAGES = torch.tensor([[9, 9, 9, 9, 9], [3, 7, 1, 0, 5]], dtype=torch.int32)
PAGE_SIZE, ROWS, SLOT = 4, 19, 1


@pytest.fixture(params=["qwen2", "qwen3"])
def model(request, tmp_path):
    write_gguf(tiny_peer(request.param), request.param, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    return Llama.load(tmp_path / "m.gguf", is_packed=True)[0]


@torch.inference_mode()
def states(model):
    """The states of rows that are read one by one, and the cache behind them."""
    cache = PagedCache.allocate(model.kv_shape, 10, PAGE_SIZE, torch.float32, torch.device("cpu"))
    found = []
    for position in range(ROWS):
        batch = RowBatch(
            cache,
            PAGES,
            torch.tensor([SLOT], dtype=torch.int32),
            torch.tensor([position], dtype=torch.int32),
            0,
            (CachePiece(slice(0, 1), SLOT, position),),
        )
        found.append(model(torch.tensor([[5 + 7 * position]]), batch))
    return torch.cat(found), cache


def assert_close(one, other):
    assert (one - other).norm() <= 0.01 * other.norm()  # inputs near the middle of two codes are rounded either way


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_is_that_of_the_layers(model, threads, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast, fast_cache = states(model)
    finally:
        torch.set_num_threads(before)
    assert model.model._packed_step._decoder is not None  # it was taken
    monkeypatch.setattr(PackedDecoderStep, "takes", lambda *arguments: False)
    plain, plain_cache = states(model)
    assert_close(fast, plain)
    for ours, exact in zip(fast_cache.tensors(), plain_cache.tensors(), strict=True):
        assert_close(ours, exact)
        assert not ours[:, [2, 4, 6, 8, 9]].any(), "pages of others"


def test_a_copy_has_its_own_weights(model):
    expected, _ = states(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.zero_()
    assert torch.equal(states(copied)[0], expected)
    assert not torch.equal(states(model)[0], expected)


def test_weights_that_are_moved_are_found_again(model):
    expected, _ = states(model)
    model.model.to(torch.float64).to(torch.float32)
    assert torch.equal(states(model)[0], expected)
