"""CPU implementation of Kokoro's generator on the weights of a `Generator`, one text at a time.

Time is the first axis and channels the last. Kernels are multiplied in the frequency domain: a block of 32 values
of a channel becomes 47 products instead of 7 or 11 for each of its outputs. `CompiledSnakeConv` does that with the
activation before it in one call; without a C compiler long kernels are transformed and multiplied as matrix products of
PyTorch. The scale of a Snake is folded into the norm before it and the convolution behind it, and a convolution's bias
is left out where a norm removes it again.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.cpu_speed import speed_ratio
from vivavoce.models.hift.cpu import ChannelsLastConv, MatmulConv, MatmulUpsample
from vivavoce.models.hift.model import centred_conv
from vivavoce.models.kokoro.decoder import LAST_SLOPE, UPSAMPLE_SLOPE, Generator, GeneratorBlock
from vivavoce.models.kokoro.layers import EPSILON, AdaptiveNorm, RunningStatistics
from vivavoce.models.kokoro.model import GeneratedSound, PreparedSpeech
from vivavoce.nn.snake_conv import BLOCK, CompiledSnakeConv, compiled_moments, cyclic_filters

logger = logging.getLogger(__name__)

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
        self.filters = torch.tensordot(forward, cyclic_filters(weight), 1).float()  # [point, input, output]
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


class PlainSnakeConv:
    """As `CompiledSnakeConv`, by operations of PyTorch."""

    def __init__(self, conv: nn.Conv1d, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        is_long = dtype == torch.float32 and conv.kernel_size[0] >= MIN_TAPS
        self.conv: FrequencyConv | DirectConv = (
            FrequencyConv(weight, bias, conv.dilation[0]) if is_long else DirectConv(conv, weight, bias, dtype)
        )

    def __call__(
        self, x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The result with its mean and variance over time.  # …, [2, output]"""
        activated = torch.empty_like(x)
        for rows, target in zip(x.split(ROWS), activated.split(ROWS), strict=True):
            torch.addcmul(shift, rows, scale, out=target)
            sines = target.sin()
            target.addcmul_(sines, sines)
        convolved = self.conv(activated)
        if residual is not None:
            convolved.add_(residual)
        return convolved, moments(convolved)


def snake_conv(
    conv: nn.Conv1d, alpha: Tensor, has_bias: bool, dtype: torch.dtype
) -> CompiledSnakeConv | PlainSnakeConv:
    """A convolution of α · snake(x)."""
    weight = conv.weight / alpha.flatten()[:, None]
    bias = conv.bias if has_bias else None
    if dtype == torch.float32 and CompiledSnakeConv.suits(weight) and compiled_speedup() >= 1:
        return CompiledSnakeConv(weight, bias, conv.dilation[0])
    return PlainSnakeConv(conv, weight, bias, dtype)


@cache
def compiled_speedup() -> float:
    """Speedup of the compiled convolution on this CPU over PyTorch's, which may have a better product."""
    conv, x, scale = centred_conv(128, 128, 11).requires_grad_(False), torch.ones(440, 128), torch.ones(128)
    plain = PlainSnakeConv(conv, conv.weight, conv.bias, torch.float32)
    compiled = CompiledSnakeConv(conv.weight, conv.bias, 1)
    return speed_ratio(lambda: plain(x, scale, scale), lambda: compiled(x, scale, scale))


class NormStyles:
    """Gains and biases of the norms of some blocks, times the α of the Snake behind each, by one product for all."""

    def __init__(self, blocks: Iterable[GeneratorBlock]) -> None:
        weights, biases = list[Tensor](), list[Tensor]()
        for block in blocks:
            pairs = zip(block.adain1, block.alpha1, block.adain2, block.alpha2, strict=True)
            for norm1, alpha1, norm2, alpha2 in pairs:
                for norm, alpha in ((norm1, alpha1), (norm2, alpha2)):
                    layer, factor = cast(AdaptiveNorm, norm).fc, alpha.flatten()
                    gain, bias = layer.bias.chunk(2)
                    weights.append(layer.weight * factor.repeat(2)[:, None])
                    biases.append(torch.cat([1 + gain, bias]) * factor.repeat(2))
        self.weight, self.bias, self.sizes = torch.cat(weights), torch.cat(biases), [len(each) for each in biases]

    def __call__(self, style: Tensor) -> Iterator[Tensor]:
        """Of each norm in turn.  # [1, style] → [2 · channel]"""
        return iter(torch.addmv(self.bias, self.weight, style[0]).split(self.sizes))


class CpuBlock:
    """A `GeneratorBlock`, time first."""

    def __init__(self, block: GeneratorBlock, dtype: torch.dtype) -> None:
        firsts = cast(Iterable[tuple[nn.Conv1d, Tensor]], zip(block.convs1, block.alpha1, strict=True))
        seconds = cast(Iterable[tuple[nn.Conv1d, Tensor]], zip(block.convs2, block.alpha2, strict=True))
        self.convs = [
            (snake_conv(*first, False, dtype), snake_conv(*second, True, dtype))
            for first, second in zip(firsts, seconds, strict=True)
        ]

    @property
    def is_compiled(self) -> bool:
        """Whether its convolutions are those in C."""
        return isinstance(self.convs[0][0], CompiledSnakeConv)

    def __call__(self, x: Tensor, statistics: Tensor, styles: Iterator[Tensor], running: RunningStatistics) -> Tensor:
        """`statistics`: the moments of x.  # [time, channel], [2, channel]"""
        for conv1, conv2 in self.convs:
            inner, inner_statistics = conv1(x, *affine(statistics, next(styles), running))
            x, statistics = conv2(inner, *affine(inner_statistics, next(styles), running), residual=x)
        return x


def affine(statistics: Tensor, style: Tensor, running: RunningStatistics) -> tuple[Tensor, Tensor]:
    """Scale and shift of the norm of x, which has these moments.  # [2, channel], [2 · channel] → [channel] twice"""
    mean, variance = running.merged(statistics[:1], statistics[1:])
    gain, bias = style.chunk(2)
    scale = gain * torch.rsqrt(variance[0] + EPSILON)
    return scale, torch.addcmul(bias, mean[0], scale, value=-1)


def moments(x: Tensor) -> Tensor:
    """Mean and variance over time; torch's own is several times slower along this axis.

    # [time, channel] → [2, channel]
    """
    ones = x.new_ones(1, ROWS)
    mean = sum(((ones[:, : len(rows)] @ rows) for rows in x.split(ROWS)), x.new_zeros(1, x.shape[1])) / len(x)
    squares = x.new_zeros(1, x.shape[1])
    for rows in x.split(ROWS):
        squares += ones[:, : len(rows)] @ (rows - mean).square_()
    return torch.cat([mean, squares / len(x)])


class CpuGenerator:
    """Sound of one text; products in `dtype`, norms and residuals in float32."""

    def __init__(self, generator: Generator, dtype: torch.dtype = torch.float32) -> None:
        self.generator, self.per_stage = generator, len(generator.config.resblock_kernels)
        self.ups = [MatmulUpsample(up) for up in cast(Iterable[nn.ConvTranspose1d], generator.ups)]
        self.source_convs = [MatmulConv.of(conv) for conv in cast(Iterable[nn.Conv1d], generator.noise_convs)]
        source_blocks = list(cast(Iterable[GeneratorBlock], generator.noise_res))
        blocks = list(cast(Iterable[GeneratorBlock], generator.resblocks))
        self.source_styles, self.styles = NormStyles(source_blocks), NormStyles(blocks)
        self.source_blocks = [CpuBlock(each, dtype) for each in source_blocks]
        self.blocks = [CpuBlock(each, dtype) for each in blocks]
        self.post = MatmulConv.of(generator.conv_post)
        is_compiled = self.blocks[0].is_compiled
        self.moments = compiled_moments if is_compiled else moments
        logger.info("Kokoro's convolutions are computed %s, in %s", "in C" if is_compiled else "by PyTorch", dtype)

    @torch.inference_mode()
    def __call__(self, prepared: PreparedSpeech) -> GeneratedSound:
        """The sound of a batch of one row."""
        running = RunningStatistics(prepared.row_lengths, prepared.earlier)
        x, spectrum = prepared.features[0].T, prepared.spectrum[0].T.contiguous()
        source_styles, styles = self.source_styles(prepared.style), self.styles(prepared.style)
        for stage, up in enumerate(self.ups):
            x = up(functional.leaky_relu(x, UPSAMPLE_SLOPE))
            if stage == len(self.ups) - 1:
                x = torch.cat([x[1:2], x])  # reflected
            source = self.source_convs[stage](spectrum)
            x += self.source_blocks[stage](source, self.moments(source), source_styles, running)
            statistics = self.moments(x)
            first, *others = self.blocks[stage * self.per_stage : (stage + 1) * self.per_stage]
            total = first(x, statistics, styles, running)
            for block in others:
                total += block(x, statistics, styles, running)
            x = total.mul_(1 / self.per_stage)
        spectrum = self.post(functional.leaky_relu(x, LAST_SLOPE))
        return GeneratedSound(self.generator.waves(spectrum.T[None]), running.result())
