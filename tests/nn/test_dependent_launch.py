"""On a GPU: kernels of the flow and the vocoder give bitwise equal results with and without dependent launch."""

import pytest
import torch
from torch import Tensor

from vivavoce import kernels
from vivavoce.kernels import tiles
from vivavoce.kernels.tiles import CACHE_VARIABLE, CHAINED, Tile, store_tiles

pytestmark = pytest.mark.gpu
WIDTH, LAYERS = 256, 40


def chain(x: Tensor, weights: Tensor, taps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Each launch reads what the one before it, and the one before that, have just written."""
    rows, contexts = x.flatten(0, 1), torch.zeros(2, x.shape[0], 2, WIDTH, device=x.device, dtype=x.dtype)
    for weight in weights:
        wide = kernels.norm_linear(rows, weight, shift, (scale, shift, 1e-5), True, None)
        rows = kernels.norm_linear(wide, weight, None, None, False, rows)
        made = kernels.stream_conv(rows.view_as(x), contexts[0], contexts[1], taps, None)
        contexts = contexts.flip(0)
        rows = kernels.layer_norm(made, scale, shift, 1e-5, mish=True).flatten(0, 1) + 0.5 * rows
    return rows


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_chain_says_the_same_whether_its_launches_overlap_or_not(is_captured, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    torch.manual_seed(0)
    size = {"device": "cuda", "dtype": torch.float16}
    given = [torch.randn(*shape, **size) for shape in [(2, 20, WIDTH), (LAYERS, WIDTH, WIDTH), (WIDTH, WIDTH, 3)]]
    given = [given[0], given[1] / 16, given[2] / 28, torch.rand(WIDTH, **size), torch.rand(WIDTH, **size)]
    made = []
    for entries in ({}, {CHAINED: Tile(0, 0, 0, 0)}):
        store_tiles(torch.cuda.get_device_name(), entries)
        tiles.tiles.cache_clear()
        found = chain(*given)
        if is_captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = chain(*given)
            for _ in range(20):
                graph.replay()
        made.append(found.clone())
    tiles.tiles.cache_clear()
    assert torch.isfinite(made[0]).all()
    assert torch.equal(made[0], made[1])
