"""Each Triton kernel against its plain twin in float64, on fresh random inputs; outputs are poisoned first."""

import pytest
import torch
from torch.nn import functional

from vivavoce import kernels
from vivavoce.engine.sampling import gumbel_noise
from vivavoce.nn.attention import PagedAttention, RotaryTable, attend
from vivavoce.nn.linear import rms_norm
from vivavoce.nn.paged_kv import FP8, CachePiece, PagedCache, RowBatch, to_fp8

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


@pytest.mark.parametrize("rows", [1, 16, 33, 100, 130, 600])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 64), (1280, 5120), (5120, 1280)])
def test_float32_products_on_tensor_cores_are_as_exact_as_plain_ones(rows, inputs, outputs):
    x, weight = torch.randn(rows, inputs, device=CUDA), torch.randn(outputs, inputs, device=CUDA)
    bias = torch.randn(outputs, device=CUDA)
    assert kernels.takes_float32(x, weight)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    ours, plain = kernels.float32_linear(x, weight, bias), functional.linear(x, weight, bias)
    assert (ours - exact).norm() <= max(2 * (plain - exact).norm(), 1e-6 * exact.norm())
    torch.testing.assert_close(ours, kernels.float32_linear(x, weight, bias), rtol=0, atol=0)


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


def random_batch(dtype, positions, heads, dim, page_size=16, layers=2, narrow=False, device=CUDA) -> RowBatch:
    """Single rows at these positions, each of a sequence of its own, its pages scattered over the cache."""
    width = max(positions) // page_size + 1
    pages = len(positions) * width + 1
    shape = (layers, pages, page_size, heads, dim)
    cache = PagedCache(*(torch.randn(shape, dtype=dtype, device=device) for _ in range(2)))
    if narrow:
        (keys, key_scales), (values, value_scales) = to_fp8(cache.keys), to_fp8(cache.values)
        cache = PagedCache(keys.view(FP8), values.view(FP8), key_scales, value_scales)
    table = (torch.randperm(pages - 1, device=device).to(torch.int32) + 1).view(len(positions), width)
    slots = torch.arange(len(positions), dtype=torch.int32, device=device)
    return RowBatch(cache, table, slots, torch.tensor(positions, dtype=torch.int32, device=device), len(positions), ())


def in_float64(batch: RowBatch) -> RowBatch:
    """The same batch for the plain twin: float64, every row a piece. A narrow cache stays what it is."""
    cache = PagedCache(batch.cache.keys.double().cpu(), batch.cache.values.double().cpu())
    if batch.cache.is_fp8:
        keys, values, *scales = (tensor.cpu() for tensor in batch.cache.tensors())
        cache = PagedCache(keys.view(FP8), values.view(FP8), *scales)
    places = zip(batch.slots.tolist(), batch.positions.tolist(), strict=True)
    pieces = tuple(CachePiece(slice(row, row + 1), slot, position) for row, (slot, position) in enumerate(places))
    return RowBatch(cache, batch.page_table.cpu(), batch.slots.cpu(), batch.positions.cpu(), 0, pieces)


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(
    ("positions", "narrow"),
    [([0], False), ([1000], False), ([5, 0, 31, 32, 4095], False), (list(range(70)), False), ([1000], True),
     (list(range(70)), True)],
)  # fmt: skip
def test_paged_decode(dtype, heads, kv_heads, dim, positions, narrow):
    batch = random_batch(dtype, positions, kv_heads, dim, narrow=narrow)
    queries = torch.randn(len(positions), heads, dim, dtype=dtype, device=CUDA)
    poison(len(positions), heads, dim, dtype=dtype)
    ours = kernels.paged_decode(queries, 1, batch)
    assert_near(ours, attend(queries.double().cpu(), 1, in_float64(batch)))


def attention(dtype, heads, kv_heads, dim, normed) -> tuple[PagedAttention, RotaryTable]:
    with CUDA:
        layer = PagedAttention(64, heads, kv_heads, dim, eps=1e-6, qk_norm=normed)
        for norm in (layer.q_norm, layer.k_norm) if normed else ():
            norm.weight.data = torch.randn(dim).to(dtype)
        return layer, RotaryTable(dim, 1024, 10000.0)


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("normed", "narrow"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("rows", [5, 80])
def test_norm_rotate_store(dtype, heads, kv_heads, dim, normed, narrow, rows):
    positions = ([0, 3, 17, 511, 90] * 16)[:rows]
    batch = random_batch(dtype, positions, kv_heads, dim, narrow=narrow)
    exact_batch = in_float64(batch)
    layer, rotary = attention(dtype, heads, kv_heads, dim, normed)
    packed = torch.randn(len(positions), heads + 2 * kv_heads, dim, dtype=dtype, device=CUDA)
    queries = layer._store(packed, rotary, 1, batch)
    exact_queries = layer.cpu().double()._store(packed.double().cpu(), rotary.cpu(), 1, exact_batch)
    assert_near(queries, exact_queries)
    for piece in exact_batch.pieces:
        found, exact = batch.read(1, piece, dtype), exact_batch.read(1, piece, torch.float64)
        if narrow:  # a number between two of float8 may go either way: a step of a tenth in a few hundredths of them
            assert all((a.double().cpu() - b).norm() < 0.03 * b.norm() for a, b in zip(found, exact, strict=True))
        else:
            assert_near(found[0], exact[0])
            assert_near(found[1], exact[1])


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim"), [*HEADS[:2], (torch.float32, 4, 2, 32)])
@pytest.mark.parametrize("position", [0, 33, 1000])
@pytest.mark.parametrize("normed", [True, False])
def test_one_row_decode(dtype, heads, kv_heads, dim, position, normed):
    batch = random_batch(dtype, [position], kv_heads, dim)
    exact_batch = in_float64(batch)
    layer, rotary = attention(dtype, heads, kv_heads, dim, normed)
    packed = torch.randn(1, heads + 2 * kv_heads, dim, dtype=dtype, device=CUDA)
    assert kernels.takes_one_row(packed, batch, kv_heads)
    poison(1, heads, dim, dtype=dtype)
    ours = kernels.one_row_decode(packed, layer._norms(), rotary.cos, rotary.sin, 1, batch, kv_heads)
    exact_queries = layer.cpu().double()._store(packed.double().cpu(), rotary.cpu(), 1, exact_batch)
    assert_near(ours, attend(exact_queries, 1, exact_batch))
    assert_near(batch.cache.keys, exact_batch.cache.keys)
    assert_near(batch.cache.values, exact_batch.cache.values)
