"""The kernels of streaming state against their PyTorch references in float64, on random inputs."""

import pytest
import torch
from torch import nn

from vivavoce import kernels
from vivavoce.nn.attention import KeySpan, attention_bias, visible, visible_slots
from vivavoce.nn.linear import layer_norm, norm_linear, norm_mish
from vivavoce.nn.streaming import StreamPast, addresses
from vivavoce.nn.vocoder import CausalConv1d

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)
LAYERS, ROWS = 3, 2


def assert_near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    error = (ours.double().cpu() - exact.cpu()).norm() / exact.cpu().norm()
    assert error < TOLERANCE[ours.dtype], f"relative error {error:.2e}"


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=CUDA)


def random_bias(shape: tuple[int, ...], lengths: list[int], prefix_slots: int, dtype: torch.dtype) -> torch.Tensor:
    """Noise, −inf at a third of the past and wherever a prefix has ended."""
    bias = random(*shape, dtype=dtype)
    past = shape[-1] - shape[-2]
    bias[..., :past].masked_fill_(torch.rand(*shape[:-1], past, device=CUDA) < 0.3, float("-inf"))
    for stream, length in enumerate(lengths):
        bias[stream * ROWS : (stream + 1) * ROWS, ..., length:prefix_slots] = float("-inf")
    return bias


SIZES = [
    # heads, dim, time, slots, lengths of the prefixes, heads of the bias
    (8, 64, 20, 160, [500], 1),
    (8, 64, 40, 160, [500, 500], 1),
    (2, 8, 5, 7, [3, 0, 11], 2),
    (3, 16, 80, 60, [25], 3),
    (8, 64, 80, 160, [480] * 8, 1),
    (2, 64, 20, 160, [40, 300] * 20, 1),
    (2, 32, 1, 0, [9], 1),
    (2, 32, 9, 4, [0], 2),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "time", "slots", "lengths", "bias_heads"), SIZES)
def test_chunk_attention(dtype, heads, dim, time, slots, lengths, bias_heads):
    streams = len(lengths)
    rows, max_length = streams * ROWS, max(lengths) + 2
    prefixes = [random(LAYERS, 2, ROWS, heads, length, dim, dtype=dtype) for length in lengths]
    windows = [random(LAYERS, 2, ROWS, heads, slots, dim, dtype=dtype) for _ in lengths]
    packed = random(rows, time, 3, heads, dim, dtype=dtype).permute(2, 0, 3, 1, 4)
    bias = random_bias((rows, bias_heads, time, max_length + slots + time), lengths, max_length, dtype)
    padded = [nn.functional.pad(prefix.double(), (0, 0, 0, max_length - prefix.shape[-2])) for prefix in prefixes]
    exact_windows = torch.stack(windows, dim=2).double()
    past = StreamPast(padded, exact_windows, [])
    following = [torch.full_like(window, float("nan")) for window in windows]
    arrived = torch.zeros(rows * heads, dtype=torch.int32, device=CUDA)
    for layer in range(LAYERS):
        exact = past.attend(packed[0].double(), packed[1:].double(), bias.double())
        ours = kernels.chunk_attention(
            packed[0], packed[1:], bias, addresses(prefixes), torch.tensor(lengths, device=CUDA),
            addresses(windows), addresses(following), windows[0].stride()[:2], slots, max_length, layer, arrived,
        )  # fmt: skip
        assert_near(ours, exact)
        assert not arrived.any()
    assert torch.equal(torch.stack(following, dim=2).double(), exact_windows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("time", "left_chunks", "streams"), [(20, 8, 1), (40, 8, 5), (80, 8, 16), (60, 2, 32), (20, 0, 2)]
)
def test_chunk_attention_by_ranges_equals_that_by_bias_in_every_run(dtype, time, left_chunks, streams):
    """Hops of 80 frames: a product read shared memory that a later load overwrote, in most runs at a few positions."""
    heads, dim, chunk, sink = 8, 64, 20, 480
    slots, prefix_slots = left_chunks * chunk, sink + chunk
    prefix = random(1, 2, ROWS, heads, sink, dim, dtype=dtype)
    windows = [random(1, 2, ROWS, heads, slots, dim, dtype=dtype) for _ in range(streams)]
    following = [torch.empty_like(window) for window in windows]
    packed = random(streams * ROWS, time, 3, heads, dim, dtype=dtype).permute(2, 0, 3, 1, 4)
    lengths = torch.full((streams,), sink, device=CUDA)
    starts = lengths + chunk * torch.arange(streams, device=CUDA)  # the first windows are empty or half full
    span = KeySpan(starts, time, lengths, prefix_slots, slots, starts + time - 7)
    bias = attention_bias(visible(span, chunk, left_chunks), torch.float64).repeat_interleave(ROWS, 0)
    padded = nn.functional.pad(prefix.double(), (0, 0, 0, chunk))
    past = StreamPast([padded], torch.stack(windows, dim=2).double(), [])
    exact = past.attend(packed[0].double(), packed[1:].double(), bias)
    arrived = torch.zeros(streams * ROWS * heads, dtype=torch.int32, device=CUDA)
    where = addresses([prefix] * streams), lengths, addresses(windows), addresses(following)
    seen = visible_slots(span, chunk, left_chunks)
    for _ in range(10):
        ours = kernels.chunk_attention(
            packed[0], packed[1:], None, *where, windows[0].stride()[:2], slots, prefix_slots, 0, arrived, seen
        )  # fmt: skip
        assert_near(ours, exact)
        assert (ours.double() - exact).abs().max() < 10 * TOLERANCE[dtype]
    assert torch.equal(torch.stack(following, dim=2).double(), past._windows)


def test_chunk_attention_of_a_stream_without_a_window_writes_nothing():
    new, query = random(2, 2, 2, 4, 16, dtype=torch.float32), random(2, 2, 4, 16, dtype=torch.float32)
    nothing, window = torch.zeros(2, dtype=torch.int64, device=CUDA), random(1, 2, 1, 2, 6, 16, dtype=torch.float32)
    following = torch.empty_like(window)
    bias = torch.zeros(2, 1, 4, 10, device=CUDA)
    bias[1, :, :, :6] = float("-inf")
    arrived = torch.zeros(4, dtype=torch.int32, device=CUDA)
    where, where_next = (torch.cat([addresses([each]), nothing[:1]]) for each in (window, following))
    ours = kernels.chunk_attention(
        query, new, bias, nothing, nothing, where, where_next, window.stride()[:2], 6, 0, 0, arrived
    )  # fmt: skip
    exact = nn.functional.scaled_dot_product_attention(query[1].double(), *new[:, 1].double())
    assert_near(ours[1], exact)
    assert torch.equal(following[..., :2, :], window[..., 4:, :])
    assert torch.equal(following[0, :, 0, :, 2:], new[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(40, 256, 1536), (40, 1024, 256), (300, 512, 80), (3, 12, 7)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_norm_linear(dtype, rows, inputs, outputs, normed, around):
    x, weight = random(2, rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype) * inputs**-0.5
    norm = random_norm(inputs, dtype) if normed else None
    bias, residual = (random(outputs, dtype=dtype), random(2, rows, outputs, dtype=dtype)) if around else (None, None)
    ours = norm_linear(x, weight, bias, norm, around, residual)
    exact_norm = norm.double().cpu() if norm else None
    doubles = [None if tensor is None else tensor.double().cpu() for tensor in (x, weight, bias, residual)]
    assert_near(ours, norm_linear(*doubles[:3], exact_norm, around, doubles[3]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(40, 256), (1001, 256), (7, 512), (3, 12), (700, 12)])
def test_layer_norm(dtype, rows, size):
    x, norm = 30 * random(2, rows, size, dtype=dtype) + 5, random_norm(size, dtype)
    assert_near(layer_norm(x, norm), norm.double().cpu()(x.double().cpu()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(40, 256), (1001, 256), (7, 512), (3, 12)])
@pytest.mark.parametrize("add", [False, True])
def test_norm_mish(dtype, rows, size, add):
    x, norm = 30 * random(2, rows, size, dtype=dtype) + 5, random_norm(size, dtype, scale=9)
    added = random(size, dtype=dtype) if add else None
    ours = norm_mish(x, norm, added)
    assert_near(ours, norm_mish(x.double().cpu(), norm.double().cpu(), added.double().cpu() if add else None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "time", "channels", "outputs", "kernel"),
    [(2, 20, 256, 256, 3), (2, 20, 320, 256, 3), (9, 40, 512, 256, 3)],
)
def test_stream_conv(dtype, rows, time, channels, outputs, kernel):
    check_stream_conv(dtype, rows, time, channels, outputs, kernel)


@pytest.mark.parametrize(("rows", "time", "kernel"), [(3, 2, 3), (2, 7, 5), (1, 100, 2)])
def test_stream_conv_of_other_sizes(rows, time, kernel):
    check_stream_conv(torch.float32, rows, time, 12, 7, kernel)


def check_stream_conv(dtype, rows, time, channels, outputs, kernel):
    conv = CausalConv1d(channels, outputs, kernel).requires_grad_(False).to(CUDA, dtype)
    contexts = random(rows, conv.context, channels + 3, dtype=dtype)[..., 2 : 2 + channels]
    following = torch.full_like(contexts, float("nan"))
    x = random(rows, time, channels, dtype=dtype)
    y = kernels.stream_conv(x, contexts, following, conv.weight, conv.bias)
    apart = conv.weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(kernels.stream_conv(x, contexts, following, apart, conv.bias), y)
    exact, state = conv.double().cpu().step(contexts.double().cpu().mT, x.double().cpu().mT)
    assert_near(y, exact.mT)
    assert torch.equal(following.double().cpu(), state.mT)


def random_norm(size: int, dtype: torch.dtype, scale: float = 1.0) -> nn.LayerNorm:
    norm = nn.LayerNorm(size).requires_grad_(False).to(CUDA, dtype)
    norm.weight.normal_(0, scale)
    norm.bias.normal_()
    return norm
