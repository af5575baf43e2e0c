"""CPU implementation of HiFT, on the weights of a `HiFT`; tests hold the two equal up to rounding.

What changes: the scale of a Snake activation is folded into the convolutions around it, memory is channels-last, as
oneDNN prefers, and the excitation's sines and noise come from lookup tables. Streams are decoded one by one in short
stretches, so that activations stay in the CPU cache; the last stretch is padded to one of few lengths, because oneDNN
prepares a primitive for every new shape. Convolutions may multiply in bfloat16; residuals stay in float32.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.hift.model import DecodePlan, F0Predictor, HiFT, HiFTConfig, ResBlock, SampleSpan, decode_plan
from vivavoce.nn.linear import column_major_for_many_rows
from vivavoce.nn.modules import scripted
from vivavoce.nn.vocoder import ShortFourier, SineSource, Snake, SourceStart
from vivavoce.nn.vq import normal_at

NOISE_BLOCK = 24_000  # samples of one table
SINE_TABLE_SIZE = 1 << 16  # entries per cycle, linearly interpolated
STRETCH = 80  # mel frames of one stretch
STRETCH_MULTIPLE = 20  # mel frames; the last stretch is padded to a multiple
MIN_ALPHA = 1e-3  # of a Snake; dividing by less would cost precision
OUTER_SLOPE = 0.01


class ChannelsLastConv(nn.Module):
    """A convolution over channels-last memory.  # [batch, channel, 1, time]"""

    def __init__(
        self, conv: nn.Conv1d, dtype: torch.dtype, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        weight, bias = conv.weight if weight is None else weight, conv.bias if bias is None else bias
        assert bias is not None
        self.weight: Tensor = weight.detach().to(dtype).unsqueeze(2).contiguous(memory_format=torch.channels_last)
        self.bias: Tensor = bias.detach().to(dtype)
        self.stride, self.padding, self.dilation = conv.stride[0], int(conv.padding[0]), conv.dilation[0]

    def forward(self, x: Tensor) -> Tensor:
        """The convolution."""
        return functional.conv2d(x, self.weight, self.bias, [1, self.stride], [0, self.padding], [1, self.dilation])


class MatmulConv:
    """A convolution as one matrix product, time first.  # [time, channel] → [position, channel]"""

    def __init__(self, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0) -> None:
        """# weight [output, tap, input]"""
        self.taps, self.stride, self.padding = weight.shape[1], stride, padding
        self.weight, self.bias = column_major_for_many_rows(weight.flatten(1).contiguous()), bias

    @classmethod
    def of(cls, conv: nn.Conv1d) -> "MatmulConv":
        """The equivalent of a `Conv1d`."""
        return cls(conv.weight.transpose(1, 2), conv.bias, conv.stride[0], int(conv.padding[0]))

    def __call__(self, x: Tensor) -> Tensor:
        """The convolution."""
        padded = functional.pad(x, (0, 0, self.padding, self.padding)) if self.padding else x.contiguous()
        time, channels = padded.shape
        positions = (time - self.taps) // self.stride + 1
        patches = padded.as_strided((positions, self.taps * channels), (self.stride * channels, 1))
        return functional.linear(patches, self.weight, self.bias)


class MatmulUpsample:
    """A transposed convolution as one matrix product: each input position gives `stride` output positions."""

    def __init__(self, conv: nn.ConvTranspose1d) -> None:
        weight, self.left, self.right = upsample_weight(conv)
        assert conv.bias is not None
        self.product = MatmulConv(weight, conv.bias.repeat(conv.stride[0]))
        self.channels = conv.out_channels

    def __call__(self, x: Tensor) -> Tensor:
        """# [time, channel] → [time · stride, channel]"""
        return self.product(functional.pad(x, (0, 0, self.left, self.right))).view(-1, self.channels)


def upsample_weight(conv: nn.ConvTranspose1d) -> tuple[Tensor, int, int]:
    """A transposed convolution as a plain one that gives all outputs of a position, and its padding left and right.

    # [stride · output, tap, input]
    """
    factor, kernel, padding = conv.stride[0], conv.kernel_size[0], int(conv.padding[0])
    left, right = (kernel - 1 - padding) // factor, (factor - 1 + padding) // factor
    offsets = range(-left, right + 1)
    weight = conv.weight.new_zeros(factor, conv.out_channels, len(offsets), conv.in_channels)
    for position in range(factor):
        for index, offset in enumerate(offsets):
            tap = position + padding - offset * factor
            if 0 <= tap < kernel:
                weight[position, :, index] = conv.weight[:, :, tap].T
    return weight.flatten(0, 1), left, right


class CpuF0Predictor(F0Predictor):
    """The f0 predictor, time first."""

    def __init__(self, predictor: F0Predictor) -> None:
        nn.Module.__init__(self)
        convolutions = [layer for layer in predictor.condnet if isinstance(layer, nn.Conv1d)]
        self.layers = [MatmulConv.of(conv) for conv in convolutions]
        self.classifier = predictor.classifier

    def forward(self, mel: Tensor) -> Tensor:
        """f0 per frame.  # [batch, mel, frame] → [batch, frame]"""
        return torch.stack([self._row(row.T) for row in mel])

    def _row(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.elu_(layer(x))
        f0: Tensor = self.classifier(x).squeeze(-1)
        return f0.abs()


class CpuResidualUnit(nn.Module):
    """x + conv(snake(conv(snake(x)))) with the Snake scales folded into the convolutions."""

    def __init__(self, snakes: tuple[Snake, Snake], convs: tuple[nn.Conv1d, nn.Conv1d], dtype: torch.dtype) -> None:
        super().__init__()
        alpha1, alpha2 = (snake.alpha.detach() for snake in snakes)
        conv1, conv2 = convs
        assert conv1.bias is not None
        weight = conv1.weight / alpha1[:, None] * alpha2[:, None, None]
        self.first = ChannelsLastConv(conv1, dtype, weight, conv1.bias * alpha2)
        self.second = ChannelsLastConv(conv2, dtype, conv2.weight / alpha2[:, None])
        self.alpha: Tensor = alpha1[:, None, None]
        self.dtype = dtype

    def forward(self, x: Tensor, end: int) -> Tensor:
        """Positions from `end` on are zeroed after every convolution, as padding would be."""
        scaled = x * self.alpha
        sines = scaled.sin()
        inner = self.first(scaled.addcmul_(sines, sines).to(self.dtype)).to(x.dtype)
        inner[..., end:] = 0
        sines = inner.sin()
        x = self.second(inner.addcmul_(sines, sines).to(self.dtype)).to(x.dtype).add_(x)
        x[..., end:] = 0
        return x


class CpuResBlock(nn.Module):
    """A residual block with folded Snake scales."""

    def __init__(self, block: ResBlock, dtype: torch.dtype) -> None:
        super().__init__()
        layers = zip(block.activations1, block.activations2, block.convs1, block.convs2, strict=True)
        typed = cast(Iterable[tuple[Snake, Snake, nn.Conv1d, nn.Conv1d]], layers)
        self.rounds = nn.ModuleList(
            CpuResidualUnit((one, two), (conv1, conv2), dtype) for one, two, conv1, conv2 in typed
        )

    def forward(self, x: Tensor, end: int) -> Tensor:
        """Positions from `end` on are zero."""
        for each in self.rounds:
            x = each(x, end)
        return x


class CpuBlockMean(nn.Module):
    """The mean of the residual blocks of a stage, run by TorchScript without the GIL."""

    def __init__(self, blocks: Iterable[ResBlock], dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CpuResBlock(block, dtype) for block in blocks)

    def forward(self, x: Tensor, end: int) -> Tensor:
        """# [1, channel, 1, time]"""
        total = torch.zeros_like(x)
        for block in self.blocks:
            total += block(x, end)
        return total.mul_(1 / len(self.blocks))


class CpuSineSource(SineSource):
    """The excitation: the mixed harmonics and the mixed noise come from tables."""

    def __init__(self, source: SineSource) -> None:
        nn.Module.__init__(self)
        self.rate, self.hop, self.harmonics = source.rate, source.hop, source.harmonics
        self.sine_amplitude, self.noise_amplitude = source.sine_amplitude, source.noise_amplitude
        self.voiced_above = source.voiced_above
        self.l_linear = source.l_linear
        self._mixing = tuple(source.l_linear.weight[0].tolist())
        self._fundamental = _Fundamental(source)
        positions = torch.arange(SINE_TABLE_SIZE + 2, dtype=torch.float64)[:, None] / SINE_TABLE_SIZE
        angles = 2 * math.pi * positions * torch.arange(1, self.harmonics + 1)
        self._sine_table = (self.sine_amplitude * angles.sin() @ source.l_linear.weight[0].double()).float()  # [entry]

    def forward(self, f0: Tensor, start: SourceStart) -> Tensor:
        """The excitation of consecutive frames.  # [batch, frame] Hz → [batch, frame · hop]"""
        voiced = (f0 > self.voiced_above)[..., None]  # [batch, frame, 1]
        mixed = self._sines(f0, start).view(*f0.shape, self.hop).mul_(voiced)
        if start.seed is not None:
            amplitude = torch.where(voiced, self.noise_amplitude, self.sine_amplitude / 3)
            mixed.addcmul_(self._noise(start, f0.shape[1]), amplitude)
        return mixed.add_(self.l_linear.bias).tanh_().flatten(1)

    def _sines(self, f0: Tensor, start: SourceStart) -> Tensor:
        """The mixed sines of all harmonics.  # [batch, sample]"""
        if float(f0.max()) * self.harmonics >= self.rate:  # above Nyquist the table does not apply
            sines = self._phase(f0, start.cycles).mul_(2 * math.pi).sin_()
            return torch.matmul(self.l_linear.weight * self.sine_amplitude, sines)[:, 0]
        start_cycles = None if start.cycles is None else start.cycles[:, :1]
        position = self._fundamental._phase(f0.double(), start_cycles)[:, 0].mul_(SINE_TABLE_SIZE)
        below = position.long()
        return torch.lerp(self._sine_table[below], self._sine_table[below + 1], (position - below).float())

    def _noise(self, start: SourceStart, frames: int) -> Tensor:
        """The mixed noise of all harmonics.  # [batch, frame, hop]"""
        assert start.seed is not None
        rows = []
        for seed, frame in zip(start.seed.tolist(), start.frame.tolist(), strict=True):
            first, end = frame * self.hop, (frame + frames) * self.hop
            blocks = range(first // NOISE_BLOCK, -(-end // NOISE_BLOCK))
            noise = torch.cat([_noise_block(self._mixing, seed, block) for block in blocks])
            rows.append(noise[first - blocks.start * NOISE_BLOCK :][: end - first])
        return torch.stack(rows).view(len(rows), frames, self.hop)


class _Fundamental(SineSource):
    """Phase of the fundamental, of which all harmonics are multiples."""

    def __init__(self, source: SineSource) -> None:
        nn.Module.__init__(self)
        self.rate, self.hop, self.harmonics = source.rate, source.hop, 1


@lru_cache(maxsize=256)
def _noise_block(mixing: tuple[float, ...], seed: int, block: int) -> Tensor:
    """A second of mixed noise; cached, because replies share a seed by default."""
    harmonics = len(mixing)
    index = torch.arange(block * NOISE_BLOCK * harmonics, (block + 1) * NOISE_BLOCK * harmonics)
    return normal_at(torch.tensor([seed]), index).view(-1, harmonics) @ torch.tensor(mixing)


class CpuFourier(ShortFourier):
    """The transform as matrix products with a cached envelope."""

    def __init__(self, fourier: ShortFourier) -> None:
        nn.Module.__init__(self)
        self.n_fft, self.hop = fourier.n_fft, fourier.hop
        self.analysis, self.synthesis, self.window = fourier.analysis, fourier.synthesis, fourier.window
        self._envelopes: dict[int, Tensor] = {}

    def forward(self, signal: Tensor) -> Tensor:
        """The spectrum, edges reflected, channels last.  # [batch, time] → [batch, 2 · bins, 1, time / hop + 1]"""
        half = self.n_fft // 2
        padded = functional.pad(signal[:, None], (half, half), mode="reflect")[:, 0]
        return (padded.unfold(-1, self.n_fft, self.hop) @ self.analysis[:, 0].T).transpose(1, 2).unsqueeze(2)

    def inverse(self, spectrum: Tensor) -> Tensor:
        """The signal by weighted overlap-add.  # [batch, 2 · bins, frame] → [batch, (frame - 1) · hop + n_fft]"""
        frames = (spectrum.transpose(1, 2) @ self.synthesis[:, 0]).unflatten(-1, (-1, self.hop))
        return _overlap_add(frames) / self._envelope(frames.shape[1])

    def _envelope(self, frames: int) -> Tensor:
        if frames not in self._envelopes:
            if len(self._envelopes) >= 64:
                self._envelopes.clear()
            squares = self.window.square().view(-1, self.hop).expand(1, frames, -1, -1)
            self._envelopes[frames] = _overlap_add(squares).clamp_min(1e-11)
        return self._envelopes[frames]


def _overlap_add(frames: Tensor) -> Tensor:
    """Overlap-add with a shift of one hop per frame.  # [batch, frame, hops of a frame, hop] → [batch, sample]"""
    batch, count, hops, hop = frames.shape
    signal = frames.new_zeros(batch, count + hops - 1, hop)
    for position in range(hops):
        signal[:, position : position + count] += frames[:, :, position]
    return signal.flatten(1)


class CpuHiFT(HiFT):
    """CPU implementation of `HiFT` on its weights; most convolutions multiply in `dtype`.

    In bfloat16 its error on one mel is 50 dB below the sound with trained weights and 30 to 34 dB with random ones.
    Every stage contributes about equally: computing one of them in float32 gains 1 to 2 dB.
    """

    def __init__(self, hift: HiFT, dtype: torch.dtype = torch.float32) -> None:
        nn.Module.__init__(self)
        self.config: HiFTConfig = hift.config
        self.m_source, self.fourier = CpuSineSource(hift.m_source), CpuFourier(hift.fourier)
        self.conv_pre, self.ups = hift.conv_pre, hift.ups
        self.f0_predictor = CpuF0Predictor(hift.f0_predictor)
        self.source_downs, self.source_resblocks = hift.source_downs, hift.source_resblocks
        self.resblocks, self.conv_post = hift.resblocks, hift.conv_post
        per_stage = len(self.config.resblock_kernels)
        blocks = list(cast(Iterable[ResBlock], hift.resblocks))
        stages = [blocks[first : first + per_stage] for first in range(0, len(blocks), per_stage)]
        self._block_means = [scripted(CpuBlockMean(stage, dtype)) for stage in stages]
        self._source_block_means = [
            scripted(CpuBlockMean([block], dtype)) for block in cast(Iterable[ResBlock], hift.source_resblocks)
        ]
        self._downs = [MatmulConv.of(conv) for conv in cast(Iterable[nn.Conv1d], hift.source_downs)]
        self._ups = [MatmulUpsample(conv) for conv in cast(Iterable[nn.ConvTranspose1d], hift.ups)]
        self._pre = MatmulConv.of(hift.conv_pre)
        self._post = ChannelsLastConv(hift.conv_post, torch.float32)
        self._spectrum_rate = self.config.rates[-1]  # spectrum frames per mel frame

    @staticmethod
    def suits(hift: HiFT) -> bool:
        """Whether the weights are on a CPU and every Snake's alpha is large enough to divide by."""
        snakes = [module for module in hift.modules() if isinstance(module, Snake)]
        steep = all(float(snake.alpha.abs().min()) >= MIN_ALPHA for snake in snakes)
        return hift.conv_pre.weight.device.type == "cpu" and steep

    def _sound(self, mel: Tensor, excitation: Tensor, emit: SampleSpan) -> Tensor:
        starts = range(emit.start, emit.stop, STRETCH)
        stretches = [SampleSpan(start, min(start + STRETCH, emit.stop)) for start in starts]
        rows = zip(mel.split(1), excitation.split(1), strict=True)
        return torch.cat([torch.cat([self._decode_stretch(*row, span) for span in stretches], dim=1) for row in rows])

    def _decode_stretch(self, mel: Tensor, excitation: Tensor, emit: SampleSpan) -> Tensor:
        frames, length = mel.shape[-1], emit.stop - emit.start
        missing = -length % STRETCH_MULTIPLE if emit.stop == frames else 0
        if missing:
            mel, excitation = (
                functional.pad(x, (0, missing * n)) for x, n in ((mel, 1), (excitation, self._spectrum_rate))
            )
        plan = decode_plan(self.config, SampleSpan(emit.start, emit.stop + missing), mel.shape[-1])
        return self._waves(self._spectrum(mel, excitation, plan, frames), plan, emit)

    def _spectrum(self, mel: Tensor, excitation: Tensor, plan: DecodePlan, frames: int | None = None) -> Tensor:
        """The spectrum of `frames` mel frames; later ones are padding."""
        frames = mel.shape[-1] if frames is None else frames
        x = self._pre(mel[0].T)  # [frame, channel]
        x[frames:] = 0
        excitation = excitation[0].squeeze(1).T  # [frame, 2 · bins]
        span = SampleSpan(0, len(x))
        last = len(plan.stages) - 1
        for stage, (inputs, source, mixed) in enumerate(plan.stages):
            end = frames * self.config.rates[stage] + (stage == last)
            up = self._ups[stage](functional.leaky_relu(x[inputs.inside(span)], self.config.slope))
            if stage == last:
                up = torch.cat([up[1:2], up])  # reflected
            upsampled = SampleSpan(inputs.start * self.config.upsample_rates[stage], 0)
            excited = self._excite(stage, excitation, source, end)
            mixture = up[mixed.inside(upsampled)] + excited[mixed.inside(source)]
            mixture[max(0, end - mixed.start) :] = 0
            x = _as_rows(self._block_means[stage](_as_image(mixture), max(0, end - mixed.start)))
            span = mixed
        needed = plan.spectrum.widened(self.config.outer_kernel // 2).within(span.stop)
        spectrum = self._post(_as_image(functional.leaky_relu(x[needed.inside(span)], OUTER_SLOPE))).squeeze(2)
        return spectrum[..., plan.spectrum.within(frames * self._spectrum_rate + 1).inside(needed)]

    def _excite(
        self, stage: int, excitation: Tensor, span: SampleSpan, end: int | None = None
    ) -> Tensor:  # [time, channel]
        stride, kernel = self.config.source_stride(stage), self.config.source_kernel(stage)
        first = span.start * stride
        length = (span.stop - span.start - 1) * stride + kernel - 2 * (stride // 2)
        downsampled = self._downs[stage](excitation[first : first + length])
        end = len(downsampled) if end is None else max(0, end - span.start)
        downsampled[end:] = 0
        return _as_rows(self._source_block_means[stage](_as_image(downsampled), end))


def _as_image(x: Tensor) -> Tensor:
    """A view.  # [time, channel] → [1, channel, 1, time]"""
    return x.contiguous().view(1, 1, *x.shape).permute(0, 3, 1, 2)


def _as_rows(x: Tensor) -> Tensor:
    """A view.  # [1, channel, 1, time] → [time, channel]"""
    return x[0, :, 0].T
