"""Kokoro's generator on CUDA: channels last, in 16 bits, captured once for each number of rows and length.

Convolutions are cuDNN's; between them one kernel applies norm and Snake, and one adds the residual and takes the
moments for the next norm. A convolution's bias is left out where a norm removes it, and else added with the residual.
Statistics, the excitation's convolutions and the last layers are float32.
"""

import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels
from vivavoce.models.hift.cpu import upsample_weight
from vivavoce.models.kokoro.decoder import LAST_SLOPE, UPSAMPLE_SLOPE, Generator, GeneratorBlock, snake, time_mask
from vivavoce.models.kokoro.layers import EPSILON, AdaptiveNorm, NormStatistics, RunningStatistics
from vivavoce.models.kokoro.model import GeneratedSound, PreparedSpeech
from vivavoce.nn.cuda_graphs import Graphed, bucket_for

LENGTHS = (64, 96, 128, 160, 192, 256, 320, 400, 512, 640, 800, 1024)  # features; longer ones are not captured
ROWS = (1, 2, 4, 8, 16, 32, 64)
COMMON_LENGTHS = LENGTHS[1:8]  # of windows, captured before the first text


class Positions(NamedTuple):
    """Where the rows of a stage end: a row has `features · rate + extra` positions."""

    features: Tensor  # [batch]
    rate: int
    extra: int

    def mask(self, time: int) -> Tensor:
        """# [batch, time, 1]"""
        return time_mask(self.features * self.rate + self.extra, time).transpose(1, 2)


class LastChannelConv:
    """A convolution without bias.  # [batch, time, channel] → [batch, time, channel]"""

    def __init__(self, weight: Tensor, left: int, right: int, dilation: int, dtype: torch.dtype) -> None:
        """# weight [output, input, tap]"""
        self.weight = weight.detach().to(dtype)[:, :, None].contiguous(memory_format=torch.channels_last)
        self.left, self.right, self.dilation = left, right, dilation

    @classmethod
    def of(cls, conv: nn.Conv1d, dtype: torch.dtype) -> "LastChannelConv":
        """The equivalent of a centred `Conv1d`."""
        padding = int(conv.padding[0])
        return cls(conv.weight, padding, padding, conv.dilation[0], dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """The convolution."""
        padding = self.left
        if self.left != self.right:
            x, padding = functional.pad(x, (0, 0, self.left, self.right)), 0
        image = x[:, None].permute(0, 3, 1, 2)  # [batch, channel, 1, time], channels last
        convolved = functional.conv2d(image, self.weight, None, 1, (0, padding), (1, self.dilation))
        return convolved.permute(0, 2, 3, 1)[:, 0].contiguous()


class NormSpan(NamedTuple):
    """Where a norm's channels are among those of all norms."""

    start: int
    width: int


class PassState:
    """What the norms of one pass read and write."""

    def __init__(self, gains: Tensor, earlier: NormStatistics) -> None:
        """`gains` [batch, 2 · channel of all norms]: each norm's gains and biases by the style, norm by norm."""
        self.gains, self.weight = gains, earlier.features
        self.earlier = torch.stack([earlier.means, earlier.variances], dim=1)
        self.statistics = torch.empty_like(self.earlier)  # [batch, 2, channel]

    def affine(self, moments: Tensor, positions: Positions, span: NormSpan) -> Tensor:
        """The factor and summand of a norm.  # [batch, 2, channel]"""
        gains = self.gains[:, 2 * span.start : 2 * (span.start + span.width)]
        channels = slice(span.start, span.start + span.width)
        earlier, statistics = self.earlier[:, :, channels], self.statistics[:, :, channels]
        if kernels.usable(moments):
            return kernels.norm_affine(moments, *positions, gains, earlier, self.weight, statistics, EPSILON)
        before = NormStatistics(earlier[:, 0], earlier[:, 1], self.weight)
        mean, variance = RunningStatistics(positions.features, before).merged(*moments.unbind(1))
        statistics[:, 0], statistics[:, 1] = mean, variance
        gain, bias = gains.chunk(2, dim=1)
        scale = (1 + gain) * torch.rsqrt(variance + EPSILON)
        return torch.stack([scale, bias - mean * scale], dim=1)


def add_moments(x: Tensor, added: tuple[Tensor, Tensor] | None, positions: Positions) -> tuple[Tensor, Tensor]:
    """The sum with a tensor and a bias, zero behind the end of a row, and what `PassState.affine` reads of it."""
    if kernels.usable(x):
        return kernels.add_moments(x, added, *positions)
    mask = positions.mask(x.shape[1])
    if added is not None:
        x = (x + added[0] + added[1]) * mask
    count = mask.sum(1)
    mean = (x * mask).sum(1) / count
    variance = ((x - mean[:, None]).square() * mask).sum(1) / count
    return x, torch.stack([mean, variance], dim=1)


def scaled_snake(x: Tensor, affine: Tensor, alpha: Tensor, positions: Positions) -> Tensor:
    """snake(x · scale + shift), zero behind the end of a row."""
    if kernels.usable(x):
        return kernels.scaled_snake(x, affine, alpha, *positions)
    scale, shift = affine[:, :1], affine[:, 1:]
    return snake(x * scale + shift, alpha) * positions.mask(x.shape[1])


class LastChannelBlock:
    """A `GeneratorBlock`."""

    def __init__(self, block: GeneratorBlock, spans: Sequence[NormSpan], dtype: torch.dtype) -> None:
        self.spans = list(zip(spans[::2], spans[1::2], strict=True))
        alphas = zip(block.alpha1, block.alpha2, strict=True)
        self.alphas = [(one.flatten().float(), two.flatten().float()) for one, two in alphas]
        convs = list(cast(Iterable[tuple[nn.Conv1d, nn.Conv1d]], zip(block.convs1, block.convs2, strict=True)))
        self.convs = [(LastChannelConv.of(one, dtype), LastChannelConv.of(two, dtype)) for one, two in convs]
        self.biases = [cast(Tensor, two.bias).float() for _, two in convs]

    def __call__(self, x: Tensor, moments: Tensor, positions: Positions, state: PassState) -> Tensor:
        """# [batch, time, channel]; `moments` are those of `x`"""
        units = zip(self.spans, self.alphas, self.convs, self.biases, strict=True)
        for (span1, span2), (alpha1, alpha2), (conv1, conv2), bias in units:
            inner = conv1(scaled_snake(x, state.affine(moments, positions, span1), alpha1, positions))
            inner, moments = add_moments(inner, None, positions)
            inner = conv2(scaled_snake(inner, state.affine(moments, positions, span2), alpha2, positions))
            x, moments = add_moments(inner, (x, bias), positions)
        return x


class LastChannelGenerator:
    """A `Generator` whose tensors have the channels last; its convolutions multiply in `dtype`."""

    def __init__(self, generator: Generator, dtype: torch.dtype) -> None:
        self.generator, self.config, self.dtype = generator, generator.config, dtype
        blocks, norms = list[GeneratorBlock](), list[AdaptiveNorm]()
        per_stage = len(self.config.resblock_kernels)
        sources = list(cast(Iterable[GeneratorBlock], generator.noise_res))
        residuals = list(cast(Iterable[GeneratorBlock], generator.resblocks))
        for stage, source in enumerate(sources):
            blocks += [source, *residuals[stage * per_stage : (stage + 1) * per_stage]]
        for block in blocks:
            pairs = cast(Iterable[tuple[AdaptiveNorm, AdaptiveNorm]], zip(block.adain1, block.adain2, strict=True))
            norms += [norm for pair in pairs for norm in pair]
        widths = [norm.fc.out_features // 2 for norm in norms]
        spans = [NormSpan(*each) for each in zip([0, *accumulate(widths[:-1])], widths, strict=True)]
        self.channels = sum(widths)
        self.gain_weight = torch.cat([norm.fc.weight for norm in norms]).detach()
        self.gain_bias = torch.cat([norm.fc.bias for norm in norms]).detach()
        each = 2 * len(self.config.dilations)
        made = [LastChannelBlock(block, spans[i * each : (i + 1) * each], dtype) for i, block in enumerate(blocks)]
        self.stages = [(made[i], made[i + 1 : i + 1 + per_stage]) for i in range(0, len(made), 1 + per_stage)]
        self.ups = list[LastChannelConv]()
        for up in cast(Iterable[nn.ConvTranspose1d], generator.ups):
            weight, left, right = upsample_weight(up)
            self.ups.append(LastChannelConv(weight.transpose(1, 2), left, right, 1, dtype))

    def __call__(
        self, features: Tensor, style: Tensor, spectrum: Tensor, lengths: Tensor, earlier: NormStatistics
    ) -> tuple[Tensor, Tensor]:
        """# [batch, channel, time], [batch, style], [batch, 2 · bin, time · 60 + 1], [batch] → [batch, time · 300],
        [batch, 2, channel of all norms]"""
        state = PassState(functional.linear(style, self.gain_weight, self.gain_bias), earlier)
        x, last = features.transpose(1, 2).to(self.dtype), len(self.stages) - 1
        rate = 1
        for stage, (source_block, blocks) in enumerate(self.stages):
            x = self.ups[stage](functional.leaky_relu(x, UPSAMPLE_SLOPE))
            rate *= self.config.upsample_rates[stage]
            up = cast(nn.ConvTranspose1d, self.generator.ups[stage])
            x = x.unflatten(2, (-1, up.out_channels)).flatten(1, 2)
            if stage == last:
                x = torch.cat([x[:, 1:2], x], dim=1)  # reflected
            positions = Positions(lengths, rate, int(stage == last))
            source = self.generator.noise_convs[stage](spectrum).transpose(1, 2).to(self.dtype).contiguous()
            source, moments = add_moments(source, None, positions)
            source = source_block(source, moments, positions, state)
            x, moments = add_moments(x, (source, cast(Tensor, up.bias)), positions)
            total = blocks[0](x, moments, positions, state)
            for block in blocks[1:]:
                total = total + block(x, moments, positions, state)
            x = total / len(blocks)
        x = self.generator.conv_post(functional.leaky_relu(x, LAST_SLOPE).transpose(1, 2).float())
        mask = time_mask(lengths * rate + 1, x.shape[-1])
        return self.generator.waves(x, mask), state.statistics


class GraphedGenerator:
    """Sound of a batch; rows and lengths are padded to those of a captured graph. Thread-safe."""

    def __init__(self, generator: Generator, dtype: torch.dtype = torch.float16) -> None:
        self.generator = LastChannelGenerator(generator, dtype)
        self.graphs: Graphed[tuple[int, int]] = Graphed(self._function)
        self._lock = threading.Lock()

    @torch.inference_mode()
    def __call__(self, prepared: PreparedSpeech) -> GeneratedSound:
        """The sound, and the statistics of its norms."""
        rows, _, length = prepared.features.shape
        lengths, config = prepared.row_lengths, self.generator.config
        earlier = prepared.earlier
        if earlier is None:
            none = prepared.features.new_zeros(rows, self.generator.channels)
            earlier = NormStatistics(none, none, none[:, 0])
        height, time = rows, length
        if length <= LENGTHS[-1] and rows <= ROWS[-1]:
            height, time = bucket_for(ROWS, rows), bucket_for(LENGTHS, length)
        rate, beside = config.hop // config.fft_hop, height - rows
        tensors = [
            functional.pad(prepared.features, (0, time - length, 0, 0, 0, beside)),
            functional.pad(prepared.style, (0, 0, 0, beside)),
            functional.pad(prepared.spectrum, (0, (time - length) * rate, 0, 0, 0, beside)),
            functional.pad(lengths, (0, beside), value=1),
            functional.pad(earlier.means, (0, 0, 0, beside)),
            functional.pad(earlier.variances, (0, 0, 0, beside)),
            functional.pad(earlier.features, (0, beside)),
        ]
        with self._lock:
            is_common = time in LENGTHS and height in ROWS
            samples, statistics = (
                self.graphs((height, time), tensors) if is_common else self._function((height, time), tensors)
            )
        features = lengths + earlier.features
        merged = NormStatistics(statistics[:rows, 0], statistics[:rows, 1], features)
        return GeneratedSound(samples[:rows, : length * config.hop], merged)

    def _function(self, key: tuple[int, int], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        features, style, spectrum, lengths, *statistics = tensors
        return self.generator(features, style, spectrum, lengths, NormStatistics(*statistics))
