"""Convolutions of Snake activations on CPUs, by `vivavoce.kernels.cpu`: all from activation to residual in one call."""

import ctypes

import torch
from torch import Tensor

from vivavoce.kernels import cpu

BLOCK = 32  # samples that are transformed together


class CompiledSnakeConv:
    """out = conv(s + sin²(s)) + bias + residual with s = x · scale + shift; centred, time first.

    # [time, input] → [time, output]
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dilation: int) -> None:
        """# weight [output, input, tap]"""
        outputs, inputs, taps = weight.shape
        kernels = cpu.synthesis_library()
        assert kernels is not None
        assert self.suits(weight)
        self._kernels, self._outputs = kernels, outputs
        panels = points(weight).view(-1, inputs, outputs // kernels.snake_conv_panel(), kernels.snake_conv_panel())
        self._filters = panels.transpose(1, 2).contiguous()
        self._bias = None if bias is None else bias.detach().float().contiguous()
        address = None if self._bias is None else self._bias.data_ptr()
        self._conv = cpu.SnakeConv(self._filters.data_ptr(), address, inputs, outputs, taps, dilation)

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Whether the kernels are there and have this shape."""
        kernels = cpu.synthesis_library()
        if kernels is None:
            return False
        outputs, inputs, taps = weight.shape
        panel = kernels.snake_conv_panel()
        return inputs % panel == 0 and outputs % panel == 0 and taps % 2 == 1 and taps < BLOCK

    def __call__(
        self, x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The result with its mean and variance over time; all tensors are float32.  # …, [2, output]"""
        given = [None if each is None else each.contiguous() for each in (x, scale, shift, residual)]
        addresses = [None if each is None else each.data_ptr() for each in given]
        time, threads, conv = len(x), torch.get_num_threads(), ctypes.byref(self._conv)
        out, moments = torch.empty(time, self._outputs), torch.empty(2, self._outputs)
        scratch = torch.empty(self._kernels.snake_conv_scratch(conv, time, threads))
        made = (each.data_ptr() for each in (out, moments, scratch))
        self._kernels.snake_conv(conv, *addresses[:3], time, addresses[3], *made, threads)
        return out, moments


def compiled_moments(x: Tensor) -> Tensor:
    """Mean and variance over time, where `CompiledSnakeConv` is.  # [time, channel] → [2, channel]"""
    kernels = cpu.synthesis_library()
    assert kernels is not None
    x, (time, channels) = x.contiguous(), x.shape
    moments, scratch = torch.empty(2, channels), torch.empty(2 * channels + 1)
    kernels.channel_moments(x.data_ptr(), time, channels, moments.data_ptr(), scratch.data_ptr())
    return moments


def cyclic_filters(weight: Tensor) -> Tensor:
    """The taps in a block, so that its cyclic convolution begins with the outputs of the convolution, in float64.

    # [output, input, tap] → [sample, input, output]
    """
    filters = weight.new_zeros(BLOCK, weight.shape[1], weight.shape[0], dtype=torch.float64)
    for tap in range(weight.shape[2]):
        filters[-tap] = weight[:, :, tap].T.double()
    return filters


def points(weight: Tensor) -> Tensor:
    """The filters in the frequency domain, as the kernel orders them, with the factor of the inverse transform.

    The two real frequencies, then of each other one its real part, its imaginary part and their sum.
    # [output, input, tap] → [point, input, output]
    """
    spectrum = torch.fft.rfft(cyclic_filters(weight), dim=0) * (2 / BLOCK)
    real, imaginary = spectrum.real, spectrum.imag
    others = torch.stack([real, imaginary, real + imaginary], dim=1)[1:-1].flatten(0, 1)
    return torch.cat([real[:1] / 2, real[-1:] / 2, others]).float()
