"""CPU implementation of Kokoro's generator on the weights of a `Generator`, one text at a time.

Time is the first axis and channels the last. Long kernels are multiplied in the frequency domain: a block of 32 values
of a channel becomes 47 products instead of 7 or 11 for each of its outputs, and the transforms are matrix products, as
are the products themselves. The scale of a Snake is folded into the norm before it and the convolution behind it, and
a convolution's bias is left out where a norm removes it again.
"""

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.hift.cpu import ChannelsLastConv, MatmulConv, MatmulUpsample
from vivavoce.models.kokoro.decoder import LAST_SLOPE, UPSAMPLE_SLOPE, Generator, GeneratorBlock
from vivavoce.models.kokoro.layers import EPSILON, AdaptiveNorm, RunningStatistics
from vivavoce.models.kokoro.model import GeneratedSound, PreparedSpeech

BLOCK = 32  # values of a channel that are transformed together
MIN_TAPS = 7  # shorter kernels are faster directly
ROWS = 2048  # of an elementwise pass, so that its intermediate values stay in the cache


def cyclic_products(size: int) -> tuple[Tensor, Tensor]:
    """Matrices of a cyclic convolution by products: y = inverse @ ((forward @ x) * (forward @ filter)).

    A real transform whose complex products take three real ones.  # forward [point, size], inverse [size, point]
    """
    sample = torch.arange(size, dtype=torch.float64)
    forward, inverse = list[Tensor](), list[Tensor]()
    for frequency in range(size // 2 + 1):
        angle = 2 * math.pi * frequency * sample / size
        real, imaginary = angle.cos(), -angle.sin()
        if frequency in (0, size // 2):
            forward.append(real)
            inverse.append(real / size)
        else:
            forward += [real, imaginary, real + imaginary]
            to_real, to_imaginary = 2 * real / size, 2 * imaginary / size
            inverse += [to_real - to_imaginary, -to_real - to_imaginary, to_imaginary]
    return torch.stack(forward), torch.stack(inverse, dim=1)


class FrequencyConv:
    """A centred convolution by blockwise cyclic convolutions, time first.  # [time, channel] → [time, channel]"""

    def __init__(self, weight: Tensor, bias: Tensor | None, dilation: int) -> None:
        """# weight [output, input, tap]"""
        self.taps, self.dilation, self.bias = weight.shape[2], dilation, bias
        self.new = BLOCK - self.taps + 1  # outputs of a block
        forward, inverse = cyclic_products(BLOCK)
        filters = weight.new_zeros(BLOCK, weight.shape[1], weight.shape[0], dtype=torch.float64)
        for tap in range(self.taps):
            filters[-tap] = weight[:, :, tap].T.double()
        self.filters = torch.tensordot(forward, filters, 1).float()  # [point, input, output]
        self.forward, self.inverse = forward.float(), inverse[: self.new].float().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """The convolution, some blocks at a time, so that their transforms stay in the cache."""
        time, channels = x.shape
        phases, left = self.dilation, self.taps // 2 * self.dilation
        width, stretch = phases * channels, self.new * phases  # values and rows of a block
        blocks = -(-time // stretch)
        rows = blocks * stretch + (self.taps - 1) * phases
        padded = functional.pad(x, (0, 0, left, rows - left - time))
        convolved = x.new_empty(blocks, self.new, phases * self.filters.shape[2])
        at_once = max(1, ROWS // stretch)
        for first in range(0, blocks, at_once):
            count = min(at_once, blocks - first)
            overlapping = padded.as_strided(
                (BLOCK, count, width), (width, self.new * width, 1), first * self.new * width
            )
            spectra = self.forward @ overlapping.reshape(BLOCK, -1)
            products = torch.bmm(spectra.view(len(spectra), -1, channels), self.filters)
            outputs = (self.inverse @ products.flatten(1)).view(self.new, count, -1)
            convolved[first : first + count] = outputs.transpose(0, 1)
        result = convolved.view(blocks * stretch, -1)[:time]
        return result if self.bias is None else result.add_(self.bias)


class DirectConv:
    """A centred convolution by oneDNN, time first, multiplied in `dtype`.  # [time, channel] → [time, channel]"""

    def __init__(self, conv: nn.Conv1d, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        missing = torch.zeros(conv.out_channels) if bias is None else bias
        self.conv, self.dtype = ChannelsLastConv(conv, dtype, weight, missing), dtype

    def __call__(self, x: Tensor) -> Tensor:
        """The convolution."""
        image = x.to(self.dtype).view(1, 1, *x.shape).permute(0, 3, 1, 2)
        convolved: Tensor = self.conv(image)[0, :, 0].T.to(x.dtype)
        return convolved


def convolution(conv: nn.Conv1d, alpha: Tensor, has_bias: bool, dtype: torch.dtype) -> FrequencyConv | DirectConv:
    """A convolution of α · snake(x)."""
    weight = conv.weight / alpha.flatten()[:, None]
    bias = conv.bias if has_bias else None
    if dtype == torch.float32 and conv.kernel_size[0] >= MIN_TAPS:
        return FrequencyConv(weight, bias, conv.dilation[0])
    return DirectConv(conv, weight, bias, dtype)


class CpuBlock:
    """A `GeneratorBlock`, time first."""

    def __init__(self, block: GeneratorBlock, dtype: torch.dtype) -> None:
        self.norms = list(
            cast(Iterable[tuple[AdaptiveNorm, AdaptiveNorm]], zip(block.adain1, block.adain2, strict=True))
        )
        self.alphas = [(one.flatten(), two.flatten()) for one, two in zip(block.alpha1, block.alpha2, strict=True)]
        convs = cast(Iterable[tuple[nn.Conv1d, nn.Conv1d]], zip(block.convs1, block.convs2, strict=True))
        self.convs = [
            (convolution(conv1, alpha1, False, dtype), convolution(conv2, alpha2, True, dtype))
            for (conv1, conv2), (alpha1, alpha2) in zip(convs, self.alphas, strict=True)
        ]

    def __call__(self, x: Tensor, style: Tensor, running: RunningStatistics) -> Tensor:
        """# [time, channel], [1, style]"""
        for norms, alphas, (conv1, conv2) in zip(self.norms, self.alphas, self.convs, strict=True):
            inner = conv1(scaled_snake(x, norms[0], style, alphas[0], running))
            x = conv2(scaled_snake(inner, norms[1], style, alphas[1], running)).add_(x)
        return x


def scaled_snake(x: Tensor, norm: AdaptiveNorm, style: Tensor, alpha: Tensor, running: RunningStatistics) -> Tensor:
    """α · snake(norm(x)).  # [time, channel]"""
    mean, variance = (each[0] for each in running.merged(*moments(x)))
    gain, bias = norm.fc(style)[0].chunk(2)
    scale = (1 + gain) * torch.rsqrt(variance + EPSILON)
    shift, scale = (bias - mean * scale) * alpha, scale * alpha
    activated = torch.empty_like(x)
    for rows, target in zip(x.split(ROWS), activated.split(ROWS), strict=True):
        torch.addcmul(shift, rows, scale, out=target)
        sines = target.sin()
        target.addcmul_(sines, sines)
    return activated


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over time; torch's own is several times slower along this axis.

    # [time, channel] → [1, channel] twice
    """
    ones = x.new_ones(1, ROWS)
    mean = sum(((ones[:, : len(rows)] @ rows) for rows in x.split(ROWS)), x.new_zeros(1, x.shape[1])) / len(x)
    squares = x.new_zeros(1, x.shape[1])
    for rows in x.split(ROWS):
        squares += ones[:, : len(rows)] @ (rows - mean).square_()
    return mean, squares / len(x)


class CpuGenerator:
    """Sound of one text; products in `dtype`, norms and residuals in float32."""

    def __init__(self, generator: Generator, dtype: torch.dtype = torch.float32) -> None:
        self.generator, self.per_stage = generator, len(generator.config.resblock_kernels)
        self.ups = [MatmulUpsample(up) for up in cast(Iterable[nn.ConvTranspose1d], generator.ups)]
        self.source_convs = [MatmulConv.of(conv) for conv in cast(Iterable[nn.Conv1d], generator.noise_convs)]
        self.source_blocks = [CpuBlock(each, dtype) for each in cast(Iterable[GeneratorBlock], generator.noise_res)]
        self.blocks = [CpuBlock(each, dtype) for each in cast(Iterable[GeneratorBlock], generator.resblocks)]
        self.post = MatmulConv.of(generator.conv_post)

    @torch.inference_mode()
    def __call__(self, prepared: PreparedSpeech) -> GeneratedSound:
        """The sound of a batch of one row."""
        running = RunningStatistics(prepared.row_lengths, prepared.earlier)
        x, spectrum, style = prepared.features[0].T, prepared.spectrum[0].T.contiguous(), prepared.style
        for stage, up in enumerate(self.ups):
            x = up(functional.leaky_relu(x, UPSAMPLE_SLOPE))
            if stage == len(self.ups) - 1:
                x = torch.cat([x[1:2], x])  # reflected
            x += self.source_blocks[stage](self.source_convs[stage](spectrum), style, running)
            first, *others = self.blocks[stage * self.per_stage : (stage + 1) * self.per_stage]
            total = first(x, style, running)
            for block in others:
                total += block(x, style, running)
            x = total.mul_(1 / self.per_stage)
        spectrum = self.post(functional.leaky_relu(x, LAST_SLOPE))
        return GeneratedSound(self.generator.waves(spectrum.T[None]), running.result())
