"""`StreamPast` against offline convolution and attention over the whole past."""

import pytest
import torch
from torch.nn import functional

from vivavoce.nn.streaming import Silence, StreamPast
from vivavoce.nn.vocoder import CausalConv1d

ROWS, HEADS, DIM, CHANNELS = 2, 3, 4, 5


@pytest.fixture
def conv():
    torch.manual_seed(0)
    return CausalConv1d(CHANNELS, 7, 3).requires_grad_(False)


def random_keys_values(time):
    return torch.randn(2, ROWS, HEADS, time, DIM)


def stream_past(windows, contexts=(), prefix=None, grown=None):
    empty = torch.zeros(1, 2, 1, HEADS, 0, DIM)
    return StreamPast([empty if prefix is None else prefix], windows, contexts, grown)


def test_convolution_from_silence_is_the_causal_convolution(conv):
    x = torch.randn(ROWS, 9, CHANNELS)
    expected = conv(x.transpose(1, 2)).transpose(1, 2)
    assert torch.allclose(Silence().convolve(conv, x), expected, atol=1e-6)


@pytest.mark.parametrize("sizes", [[9], [1] * 9, [4, 1, 4]])
def test_convolution_goes_on_from_its_context(conv, sizes):
    x = torch.randn(ROWS, 9, CHANNELS)
    windows = torch.zeros(1, 2, ROWS, 1, HEADS, 0, DIM)
    context = torch.zeros(ROWS, conv.context, CHANNELS)
    pieces = [stream_past(windows, [context]).convolve(conv, piece) for piece in x.split(sizes, dim=1)]
    assert torch.allclose(torch.cat(pieces, dim=1), Silence().convolve(conv, x), atol=1e-6)


def test_a_strided_convolution_is_refused():
    with pytest.raises(ValueError, match="not a plain convolution"):
        Silence().convolve(CausalConv1d(CHANNELS, 7, 3, stride=2), torch.zeros(1, 8, CHANNELS))


def test_attention_sees_prefix_window_and_what_is_new_and_the_window_moves_on():
    prefix, past, new = random_keys_values(2)[:, :1], random_keys_values(3), random_keys_values(2)
    query = torch.randn(ROWS, HEADS, 2, DIM)
    windows = past[None, :, :, None].clone()
    attended = stream_past(windows, prefix=prefix[None]).attend(query, new, None)
    keys, values = torch.cat([prefix.expand(-1, ROWS, -1, -1, -1), past, new], dim=-2)
    assert torch.allclose(attended, functional.scaled_dot_product_attention(query, keys, values), atol=1e-6)
    assert torch.equal(windows[0, :, :, 0], torch.cat([past, new], dim=-2)[..., -3:, :])


def test_a_window_that_grows_keeps_everything():
    past, new = random_keys_values(3), random_keys_values(2)
    windows, grown = past[None, :, :, None].clone(), torch.zeros(1, 2, ROWS, 1, HEADS, 5, DIM)
    stream_past(windows, grown=grown).attend(torch.randn(ROWS, HEADS, 2, DIM), new, None)
    assert torch.equal(grown[0, :, :, 0], torch.cat([past, new], dim=-2))
    assert torch.equal(windows[0, :, :, 0], past)
