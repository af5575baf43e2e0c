"""What was measured is found again, and nothing that lies in its place can do harm."""

import pytest
import torch

from vivavoce.kernels import tiles
from vivavoce.kernels.tiles import (
    FILE,
    FITTING_BATCH,
    FITTING_MORE,
    FITTING_ONE,
    Tile,
    store_tiles,
    tile_for,
    tile_name,
)
from vivavoce.nn.quantised import CudaLinear
from vivavoce.nn.quantised_weight import quantise


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(tiles.CACHE_VARIABLE, str(tmp_path))
    tiles.tiles.cache_clear()
    yield tmp_path
    tiles.tiles.cache_clear()


def test_a_kept_tile_is_taken_and_one_the_library_beat_is_not():
    weight, x = torch.zeros(64, 128, dtype=torch.bfloat16), torch.zeros(1, 128, dtype=torch.bfloat16)
    assert tile_for(weight, x, gated=False) is None
    store_tiles("cpu", {tile_name("bfloat16", 128, 64, 1, False): Tile(16, 64, 3, 2, early=True)})
    store_tiles(
        "cpu",
        {tile_name("bfloat16", 128, 64, 5, False): Tile(32, 64, 3, 2), tile_name("int8", 128, 64, 1, False): None},
    )
    assert tile_for(weight, x, gated=False) == Tile(16, 64, 3, 2, early=True)
    assert tile_for(weight, x.expand(8, -1), gated=False) == Tile(32, 64, 3, 2)
    assert tile_for(weight, x, gated=True) is None
    assert tile_for(weight, x.expand(65, -1), gated=False) is None
    quantised = quantise(torch.randn(64, 128), "int8")
    assert tile_for(quantised, x.expand(3, -1), gated=False) is None
    narrow = quantised.for_tensor_cores()
    assert tile_for(narrow, x, gated=False) is None
    assert tile_for(narrow, x.expand(3, -1), gated=False) == FITTING_BATCH
    uneven = quantise(torch.randn(64, 80), "int8").for_tensor_cores()
    assert tile_for(uneven, x[:, :80].expand(3, -1), gated=False) == FITTING_MORE["int8"]
    assert tile_for(uneven, x[:, :80].expand(65, -1), gated=False) is None


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"cpu": {"bfloat16 128x64 rows 1": {"width": 3}}}'])
def test_a_spoilt_file_is_as_good_as_none(folder, content):
    (folder / FILE).write_text(content)
    assert tile_for(torch.zeros(64, 128, dtype=torch.bfloat16), torch.zeros(1, 128), gated=False) is None


def test_groups_are_taken_only_where_scale_and_offset_lie_together():
    weight = quantise(torch.randn(32, 128), "int4")
    x = torch.zeros(1, 128)
    assert tile_for(weight, x, gated=False) is None
    linear = CudaLinear(weight, None, torch.float32)
    assert tile_for(linear.quantised, x, gated=False) == FITTING_ONE["int4"]
    assert torch.equal(linear.weight, weight.dequantised(torch.float32))
