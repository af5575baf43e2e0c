import platform

import pytest
import torch
from torch.nn import functional

from vivavoce.kernels import cpu
from vivavoce.nn.lstm import BidirectionalLSTM
from vivavoce.nn.snake_conv import CompiledSnakeConv, compiled_moments

pytestmark = pytest.mark.skipif(cpu.synthesis_library() is None, reason="no C compiler")


def expected(x, scale, shift, weight, bias, dilation, residual):
    """In float64."""
    activated = x.double() * scale.double() + shift.double()
    activated = activated + activated.sin().square()
    padding = weight.shape[2] // 2 * dilation
    bias = None if bias is None else bias.double()
    convolved = functional.conv1d(activated.T[None], weight.double(), bias, padding=padding, dilation=dilation)[0].T
    return convolved if residual is None else convolved + residual.double()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("inputs", "outputs", "taps", "dilation", "time"),
    [(32, 32, 3, 1, 1), (32, 64, 7, 3, 100), (64, 32, 11, 5, 333), (128, 128, 11, 1, 2500), (32, 32, 31, 1, 40)],
)
def test_a_convolution_with_its_activation_bias_and_residual(threads, inputs, outputs, taps, dilation, time):
    generator = torch.Generator().manual_seed(taps)
    x, residual = (torch.randn(time, width, generator=generator) for width in (inputs, outputs))
    scale, shift = 3 * torch.randn(2, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, taps, generator=generator) / (inputs * taps) ** 0.5
    bias = torch.randn(outputs, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made, moments = CompiledSnakeConv(weight, bias, dilation)(x, scale, shift, residual)
        alone, _ = CompiledSnakeConv(weight, None, dilation)(x, scale, shift)
    finally:
        torch.set_num_threads(before)
    wanted = expected(x, scale, shift, weight, bias, dilation, residual)
    torch.testing.assert_close(made.double(), wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(moments[0].double(), wanted.mean(0), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(moments[1].double(), wanted.var(0, correction=0), atol=1e-4, rtol=1e-4)
    without = expected(x, scale, shift, weight, None, dilation, None)
    torch.testing.assert_close(alone.double(), without, atol=2e-5, rtol=2e-5)


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86")
@pytest.mark.parametrize("target", ["-mavx2 -mfma", "-march=x86-64"])
def test_older_cpus_compute_the_same(monkeypatch, tmp_path, target):
    x, scale = torch.randn(500, 128), torch.ones(128)
    weight, lstm = torch.randn(128, 128, 7) / 30, BidirectionalLSTM(64, 128).requires_grad_(False)
    wanted, wanted_moments = CompiledSnakeConv(weight, None, 3)(x, scale, scale, x)
    monkeypatch.setenv(cpu.TARGET, target)
    monkeypatch.setenv("VIVA_CACHE", str(tmp_path))
    older = cpu.synthesis_library.__wrapped__()
    assert older is not None
    monkeypatch.setattr(cpu, "synthesis_library", lambda: older)
    made, moments = CompiledSnakeConv(weight, None, 3)(x, scale, scale, x)
    torch.testing.assert_close(made, wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(moments, wanted_moments, atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        inputs = torch.randn(1, 20, 64)
        torch.testing.assert_close(lstm.run(inputs, None), lstm(inputs)[0], atol=2e-5, rtol=0)


def test_the_activation_is_exact_far_from_zero():
    values = torch.linspace(-3000, 3000, 4001)[:, None].expand(-1, 32)
    weight = torch.eye(32)[:, :, None]
    made, _ = CompiledSnakeConv(weight, None, 1)(values, torch.ones(32), torch.zeros(32))
    wanted = values.double() + values.double().sin().square()
    torch.testing.assert_close(made.double(), wanted, atol=2e-3, rtol=0)  # float32 has steps of 2.4e-4 there


def test_moments_of_values_far_from_zero():
    x = 1000 + torch.randn(5000, 32, generator=torch.Generator().manual_seed(0))
    mean, variance = compiled_moments(x)
    torch.testing.assert_close(mean.double(), x.double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(variance.double(), x.double().var(0, correction=0), rtol=1e-3, atol=0)


def test_shapes_that_the_kernel_does_not_have():
    assert CompiledSnakeConv.suits(torch.zeros(64, 32, 7))
    for shape in ((64, 33, 7), (30, 32, 7), (32, 32, 8), (32, 32, 33)):
        assert not CompiledSnakeConv.suits(torch.zeros(shape))
