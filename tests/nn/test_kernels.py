"""Each Triton kernel against its plain twin in float64, on fresh random inputs; outputs are poisoned first."""

import pytest
import torch
from torch.nn import functional

from vivavoce.engine.sampling import gumbel_noise
from vivavoce.nn import kernels
from vivavoce.nn.attention import PagedAttention, _attend_piece, attend
from vivavoce.nn.norm import rms_norm
from vivavoce.nn.paged import PagedCache, Piece, RowBatch
from vivavoce.nn.rope import RotaryTable

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)
HEADS = [
    (torch.bfloat16, 32, 8, 128),
    (torch.float16, 14, 2, 64),
    (torch.float32, 4, 2, 16),
]  # each kernel once a shape


def assert_near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    error = (ours.double().cpu() - exact.cpu()).norm() / exact.cpu().norm()
    assert error < TOLERANCE[ours.dtype], f"relative error {error:.2e}"


def poison(*shape: int, dtype: torch.dtype) -> None:
    """Leave NaN where the allocator will put the next tensor of this size."""
    torch.full(shape, float("nan"), dtype=dtype, device=CUDA)


@pytest.mark.parametrize(
    ("dtype", "rows", "size"),
    [(torch.bfloat16, 1, 4096), (torch.float16, 7, 4096), (torch.float32, 130, 96), (torch.float32, 3, 1)],
)
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(dtype, rows, size, add):
    x = torch.randn(rows, size, dtype=dtype, device=CUDA)
    residual = torch.randn_like(x) if add else None
    weight = torch.randn(size, dtype=dtype, device=CUDA)
    poison(rows, size, dtype=dtype)
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    exact = x.double() + (residual.double() if add else 0)
    assert_near(total, exact)
    assert_near(normed, rms_norm(exact, weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(33, 12288), (2, 1025)])
def test_silu_multiply(dtype, rows, inner):
    both = torch.randn(rows, 2 * inner, dtype=dtype, device=CUDA)
    poison(rows, inner, dtype=dtype)
    gate, up = both.double().chunk(2, dim=-1)
    assert_near(kernels.silu_multiply(both), functional.silu(gate) * up)


def test_gumbel_noise():
    """Every bit of the hash is the same as on the CPU; only the last digit of a logarithm may differ."""
    seeds = torch.tensor([0, 1, 2**63 - 1, 123456789012345], device=CUDA)
    positions = torch.tensor([0, 7, 40959, 12], device=CUDA)
    ids = torch.randint(0, 151680, (4, 3000), device=CUDA)
    for channel in (0, 1, 16):
        exact = gumbel_noise(seeds.cpu(), positions.cpu(), channel, ids.cpu())
        ours = kernels.gumbel_noise(seeds, positions, channel, ids)
        torch.testing.assert_close(ours.cpu(), exact, rtol=1e-12, atol=1e-12)


def random_batch(dtype, positions, heads, dim, page_size=16, layers=2) -> RowBatch:
    """Single rows at these positions, each of a sequence of its own, its pages scattered over the cache."""
    width = max(positions) // page_size + 1
    pages = len(positions) * width + 1
    shape = (layers, pages, page_size, heads, dim)
    cache = PagedCache(torch.randn(shape, dtype=dtype, device=CUDA), torch.randn(shape, dtype=dtype, device=CUDA))
    table = (torch.randperm(pages - 1, device=CUDA).to(torch.int32) + 1).view(len(positions), width)
    slots = torch.arange(len(positions), dtype=torch.int32, device=CUDA)
    return RowBatch(cache, table, slots, torch.tensor(positions, dtype=torch.int32, device=CUDA), len(positions), ())


def in_float64(batch: RowBatch) -> RowBatch:
    """The same batch for the plain twin: float64, every row a piece."""
    cache = PagedCache(batch.cache.keys.double().cpu(), batch.cache.values.double().cpu())
    places = zip(batch.slots.tolist(), batch.positions.tolist(), strict=True)
    pieces = tuple(Piece(slice(row, row + 1), slot, position) for row, (slot, position) in enumerate(places))
    return RowBatch(cache, batch.page_table.cpu(), batch.slots.cpu(), batch.positions.cpu(), 0, pieces)


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("positions", [[0], [1000], [5, 0, 31, 32, 4095], list(range(70))])
def test_paged_decode(dtype, heads, kv_heads, dim, positions):
    batch = random_batch(dtype, positions, kv_heads, dim)
    queries = torch.randn(len(positions), heads, dim, dtype=dtype, device=CUDA)
    poison(len(positions), heads, dim, dtype=dtype)
    ours = kernels.paged_decode(queries, 1, batch)
    assert_near(ours, attend(queries.double().cpu(), 1, in_float64(batch)))


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("normed", [True, False])
def test_norm_rotate_store(dtype, heads, kv_heads, dim, normed):
    positions = [0, 3, 17, 511, 90]
    batch = random_batch(dtype, positions, kv_heads, dim)
    exact_batch = in_float64(batch)
    with CUDA:
        layer = PagedAttention(64, heads, kv_heads, dim, eps=1e-6, qk_norm=normed)
        rotary = RotaryTable(dim, 512, 10000.0)
        for norm in (layer.q_norm, layer.k_norm) if normed else ():
            norm.weight.data = torch.randn(dim).to(dtype)
    packed = torch.randn(len(positions), heads + 2 * kv_heads, dim, dtype=dtype, device=CUDA)
    queries = layer._store(packed, rotary, 1, batch)
    exact_queries = layer.cpu().double()._store(packed.double().cpu(), rotary.cpu(), 1, exact_batch)
    assert_near(queries, exact_queries)
    assert_near(batch.cache.keys, exact_batch.cache.keys)
    assert_near(batch.cache.values, exact_batch.cache.values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("position", "rows"), [(0, 40), (100, 7), (63, 1)])
def test_flash_attention_is_the_same_attention(dtype, position, rows):
    pytest.importorskip("flash_attn")
    batch = random_batch(dtype, [position + rows - 1], heads=2, dim=64)
    piece = Piece(slice(0, rows), slot=0, position=position)
    queries = torch.randn(rows, 8, 64, dtype=dtype, device=CUDA)
    ours = _attend_piece(queries, *batch.read(1, piece), piece)
    exact = in_float64(batch)
    assert_near(ours, _attend_piece(queries.double().cpu(), *exact.read(1, piece), piece))
