"""The prefill kernel against plain attention in float64, on random pages.

Without a GPU it runs in Triton's interpreter, where that is installed and asked for by TRITON_INTERPRET=1.
"""

import dataclasses
import os

import pytest
import torch

from tests.nn.test_kernels import HEADS, assert_near, in_float64, random_batch
from vivavoce import kernels
from vivavoce.nn.attention import attend
from vivavoce.nn.paged_kv import TILE_ROWS, CachePiece, tiles_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and kernels.AVAILABLE
DEVICE = torch.device("cpu" if INTERPRETED and not torch.cuda.is_available() else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
SHAPES = [(torch.float32 if INTERPRETED else dtype, *sizes) for dtype, *sizes in HEADS]  # it has no dot of bfloat16
PADDING = 5  # rows that are in no tile
PIECES = {
    "a prompt": [(0, 40)],
    "whole tiles": [(0, 2 * TILE_ROWS)],
    "a later piece": [(100, 70)],
    "a single row": [(63, 1)],
    "prompts beside single rows": [(0, 33), (17, 1), (200, 31), (5, 1)],
}


def pieces_of(spans: list[tuple[int, int]]) -> list[CachePiece]:
    pieces, end = [], 0
    for slot, (position, rows) in enumerate(spans):
        pieces.append(CachePiece(slice(end, end + rows), slot, position))
        end += rows
    return pieces


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("narrow", [False] if INTERPRETED else [False, True])
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim"), SHAPES)
def test_prefill_attention(dtype, heads, kv_heads, dim, narrow, pieces):
    torch.manual_seed(0)
    spans = PIECES[pieces]
    found = pieces_of(spans)
    ends = [position + rows - 1 for position, rows in spans]
    batch = random_batch(dtype, ends, kv_heads, dim, narrow=narrow, device=DEVICE)
    rows = found[-1].rows.stop
    queries = torch.randn(rows + PADDING, heads, dim, dtype=dtype, device=DEVICE)
    tiles = torch.tensor([*tiles_of(found), (0, 0, 0, 0)], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(queries, float("nan"))
    kernels.paged_prefill(queries, 1, dataclasses.replace(batch, singles=0, tiles=tiles), out)
    exact = dataclasses.replace(in_float64(batch), pieces=tuple(found))
    assert_near(out[:rows], attend(queries[:rows].double().cpu(), 1, exact))
    assert out[rows:].isnan().all()
