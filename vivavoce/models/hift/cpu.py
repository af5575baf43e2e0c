"""HiFT on a CPU: the same sound in fewer passes over memory.

A snake's scale goes into the convolutions on either side of it, so that it is a sine and one more pass; channels stand
side by side, as the libraries' convolutions want them; the excitation is looked up, its noise by its place, its sines
by their phase. Streams are decoded one by one, a short stretch at a time, so that what a layer leaves is still in the
cache when the next wants it. An end of any length is computed as one of few lengths: for a new one the libraries take
as long to get ready as for a pass. It runs on the weights of a `HiFT` and equals it but for rounding, which is coarse
where convolutions multiply in bfloat16; what they add to stays in float32.
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

NOISE_BLOCK = 24_000  # samples looked up together
SINE_PLACES = 1 << 16  # of a cycle, between which the mixture of all sines is taken to be straight
STRETCH = 80  # mel frames decoded together
LENGTHS = 20  # mel frames of which the last stretch is made a multiple
SMALLEST_ALPHA = 1e-3  # a snake that is flatter than this is not divided by
OUTER_SLOPE = 0.01


class FlatConv(nn.Module):
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


class TapProduct:
    """A convolution as one product, time first.  # [time, channel] → [place, channel]"""

    def __init__(self, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0) -> None:
        """# weight [output, tap, input]"""
        self.taps, self.stride, self.padding = weight.shape[1], stride, padding
        self.weight, self.bias = column_major_for_many_rows(weight.flatten(1).contiguous()), bias

    @classmethod
    def of(cls, conv: nn.Conv1d) -> "TapProduct":
        """The product that a convolution is."""
        return cls(conv.weight.transpose(1, 2), conv.bias, conv.stride[0], int(conv.padding[0]))

    def __call__(self, x: Tensor) -> Tensor:
        """The convolution."""
        padded = functional.pad(x, (0, 0, self.padding, self.padding)) if self.padding else x.contiguous()
        time, channels = padded.shape
        places = (time - self.taps) // self.stride + 1
        seen = padded.as_strided((places, self.taps * channels), (self.stride * channels, 1))
        return functional.linear(seen, self.weight, self.bias)


class FlatUp:
    """A transposed convolution as one product: each place sees its neighbours and becomes as many as the stride is."""

    def __init__(self, conv: nn.ConvTranspose1d) -> None:
        factor, kernel, padding = conv.stride[0], conv.kernel_size[0], int(conv.padding[0])
        self.before, self.after = (kernel - 1 - padding) // factor, (factor - 1 + padding) // factor
        seen = range(-self.before, self.after + 1)
        weight = conv.weight.new_zeros(factor, conv.out_channels, len(seen), conv.in_channels)
        for place in range(factor):
            for index, offset in enumerate(seen):
                tap = place + padding - offset * factor
                if 0 <= tap < kernel:
                    weight[place, :, index] = conv.weight[:, :, tap].T
        assert conv.bias is not None
        self.product = TapProduct(weight.flatten(0, 1), conv.bias.repeat(factor))
        self.channels = conv.out_channels

    def __call__(self, x: Tensor) -> Tensor:
        """# [time, channel] → [time · stride, channel]"""
        return self.product(functional.pad(x, (0, 0, self.before, self.after))).view(-1, self.channels)


class FlatF0(F0Predictor):
    """The f0 predictor, time first."""

    def __init__(self, predictor: F0Predictor) -> None:
        nn.Module.__init__(self)
        convolutions = [layer for layer in predictor.condnet if isinstance(layer, nn.Conv1d)]
        self.layers = [TapProduct.of(conv) for conv in convolutions]
        self.classifier = predictor.classifier

    def forward(self, mel: Tensor) -> Tensor:
        """f0 per frame.  # [batch, mel, frame] → [batch, frame]"""
        return torch.stack([self._row(row.T) for row in mel])

    def _row(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.elu_(layer(x))
        f0: Tensor = self.classifier(x).squeeze(-1)
        return f0.abs()


class FlatRound(nn.Module):
    """A convolution of a snake of a convolution of a snake, and what they are added to."""

    def __init__(self, snakes: tuple[Snake, Snake], convs: tuple[nn.Conv1d, nn.Conv1d], dtype: torch.dtype) -> None:
        super().__init__()
        alpha1, alpha2 = (snake.alpha.detach() for snake in snakes)
        conv1, conv2 = convs
        assert conv1.bias is not None
        weight = conv1.weight / alpha1[:, None] * alpha2[:, None, None]
        self.first = FlatConv(conv1, dtype, weight, conv1.bias * alpha2)
        self.second = FlatConv(conv2, dtype, conv2.weight / alpha2[:, None])
        self.alpha: Tensor = alpha1[:, None, None]
        self.dtype = dtype

    def forward(self, x: Tensor, end: int) -> Tensor:
        """The same shape; from `end` on there is nothing, before and after every convolution."""
        scaled = x * self.alpha
        sines = scaled.sin()
        inner = self.first(scaled.addcmul_(sines, sines).to(self.dtype)).to(x.dtype)
        inner[..., end:] = 0
        sines = inner.sin()
        x = self.second(inner.addcmul_(sines, sines).to(self.dtype)).to(x.dtype).add_(x)
        x[..., end:] = 0
        return x


class FlatBlock(nn.Module):
    """A residual block whose snakes give α times their value, which the convolutions behind them expect."""

    def __init__(self, block: ResBlock, dtype: torch.dtype) -> None:
        super().__init__()
        layers = zip(block.activations1, block.activations2, block.convs1, block.convs2, strict=True)
        typed = cast(Iterable[tuple[Snake, Snake, nn.Conv1d, nn.Conv1d]], layers)
        self.rounds = nn.ModuleList(FlatRound((one, two), (conv1, conv2), dtype) for one, two, conv1, conv2 in typed)

    def forward(self, x: Tensor, end: int) -> Tensor:
        """The same shape, silent from `end` on."""
        for each in self.rounds:
            x = each(x, end)
        return x


class Blend(nn.Module):
    """The mean of the residual blocks of a stage. TorchScript runs it: no other thread waits for Python meanwhile."""

    def __init__(self, blocks: Iterable[ResBlock], dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FlatBlock(block, dtype) for block in blocks)

    def forward(self, x: Tensor, end: int) -> Tensor:
        """# [1, channel, 1, time]"""
        blended = torch.zeros_like(x)
        for block in self.blocks:
            blended += block(x, end)
        return blended.mul_(1 / len(self.blocks))


class CpuSource(SineSource):
    """The excitation: harmonics are mixed before anything else is done with them, and noise is looked up."""

    def __init__(self, source: SineSource) -> None:
        nn.Module.__init__(self)
        self.rate, self.hop, self.harmonics = source.rate, source.hop, source.harmonics
        self.sine_amplitude, self.noise_amplitude = source.sine_amplitude, source.noise_amplitude
        self.voiced_above = source.voiced_above
        self.l_linear = source.l_linear
        self._mixing = tuple(source.l_linear.weight[0].tolist())
        self._fundamental = _Fundamental(source)
        places = torch.arange(SINE_PLACES + 2, dtype=torch.float64)[:, None] / SINE_PLACES
        angles = 2 * math.pi * places * torch.arange(1, self.harmonics + 1)
        self._mixture = (self.sine_amplitude * angles.sin() @ source.l_linear.weight[0].double()).float()  # [place]

    def forward(self, f0: Tensor, start: SourceStart) -> Tensor:
        """The excitation of consecutive frames.  # [batch, frame] Hz → [batch, frame · hop]"""
        voiced = (f0 > self.voiced_above)[..., None]  # [batch, frame, 1]
        mixed = self._sines(f0, start).view(*f0.shape, self.hop).mul_(voiced)
        if start.seed is not None:
            amplitude = torch.where(voiced, self.noise_amplitude, self.sine_amplitude / 3)
            mixed.addcmul_(self._mixed_noise(start, f0.shape[1]), amplitude)
        return mixed.add_(self.l_linear.bias).tanh_().flatten(1)

    def _sines(self, f0: Tensor, start: SourceStart) -> Tensor:
        """What the sines of all harmonics come to.  # [batch, sample]"""
        if float(f0.max()) * self.harmonics >= self.rate:  # the highest go round more than once between two samples
            sines = self._phase(f0, start.cycles).mul_(2 * math.pi).sin_()
            return torch.matmul(self.l_linear.weight * self.sine_amplitude, sines)[:, 0]
        before = None if start.cycles is None else start.cycles[:, :1]
        place = self._fundamental._phase(f0.double(), before)[:, 0].mul_(SINE_PLACES)
        below = place.long()
        return torch.lerp(self._mixture[below], self._mixture[below + 1], (place - below).float())

    def _mixed_noise(self, start: SourceStart, frames: int) -> Tensor:
        """What the noise of all harmonics comes to.  # [batch, frame, hop]"""
        assert start.seed is not None
        rows = []
        for seed, frame in zip(start.seed.tolist(), start.frame.tolist(), strict=True):
            first, end = frame * self.hop, (frame + frames) * self.hop
            blocks = range(first // NOISE_BLOCK, -(-end // NOISE_BLOCK))
            noise = torch.cat([_noise_block(self._mixing, seed, block) for block in blocks])
            rows.append(noise[first - blocks.start * NOISE_BLOCK :][: end - first])
        return torch.stack(rows).view(len(rows), frames, self.hop)


class _Fundamental(SineSource):
    """The lowest of a source's sines alone: its phase is that of all."""

    def __init__(self, source: SineSource) -> None:
        nn.Module.__init__(self)
        self.rate, self.hop, self.harmonics = source.rate, source.hop, 1


@lru_cache(maxsize=256)
def _noise_block(mixing: tuple[float, ...], seed: int, block: int) -> Tensor:
    """A second of noise. Replies have the same seed unless they are told otherwise, so it is made once."""
    harmonics = len(mixing)
    index = torch.arange(block * NOISE_BLOCK * harmonics, (block + 1) * NOISE_BLOCK * harmonics)
    return normal_at(torch.tensor([seed]), index).view(-1, harmonics) @ torch.tensor(mixing)


class FlatFourier(ShortFourier):
    """The transform as products, its envelope kept."""

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
        return _overlapped(frames) / self._envelope(frames.shape[1])

    def _envelope(self, frames: int) -> Tensor:
        if frames not in self._envelopes:
            if len(self._envelopes) >= 64:
                self._envelopes.clear()
            squares = self.window.square().view(-1, self.hop).expand(1, frames, -1, -1)
            self._envelopes[frames] = _overlapped(squares).clamp_min(1e-11)
        return self._envelopes[frames]


def _overlapped(frames: Tensor) -> Tensor:
    """Frames added up, each a hop behind the one before.  # [batch, frame, hops of a frame, hop] → [batch, sample]"""
    batch, count, hops, hop = frames.shape
    signal = frames.new_zeros(batch, count + hops - 1, hop)
    for place in range(hops):
        signal[:, place : place + count] += frames[:, :, place]
    return signal.flatten(1)


class CpuHiFT(HiFT):
    """A vocoder on the weights of another; most of its convolutions multiply in `dtype`.

    In bfloat16 its error on one mel is 50 dB below the sound with trained weights and 30 to 34 dB with random ones, to
    which every stage contributes about equally: any one of them in float32 gains 1 to 2 dB.
    """

    def __init__(self, hift: HiFT, dtype: torch.dtype = torch.float32) -> None:
        nn.Module.__init__(self)
        self.config: HiFTConfig = hift.config
        self.m_source, self.fourier = CpuSource(hift.m_source), FlatFourier(hift.fourier)
        self.conv_pre, self.ups = hift.conv_pre, hift.ups
        self.f0_predictor = FlatF0(hift.f0_predictor)
        self.source_downs, self.source_resblocks = hift.source_downs, hift.source_resblocks
        self.resblocks, self.conv_post = hift.resblocks, hift.conv_post
        per_stage = len(self.config.resblock_kernels)
        blocks = list(cast(Iterable[ResBlock], hift.resblocks))
        stages = [blocks[first : first + per_stage] for first in range(0, len(blocks), per_stage)]
        self._blends = [scripted(Blend(stage, dtype)) for stage in stages]
        self._source_blends = [
            scripted(Blend([block], dtype)) for block in cast(Iterable[ResBlock], hift.source_resblocks)
        ]
        self._downs = [TapProduct.of(conv) for conv in cast(Iterable[nn.Conv1d], hift.source_downs)]
        self._ups = [FlatUp(conv) for conv in cast(Iterable[nn.ConvTranspose1d], hift.ups)]
        self._pre = TapProduct.of(hift.conv_pre)
        self._post = FlatConv(hift.conv_post, torch.float32)
        self._values = self.config.rates[-1]  # of the spectrum in a mel frame

    @staticmethod
    def suits(hift: HiFT) -> bool:
        """Whether it is on a CPU, and no snake so flat that dividing by its scale would cost precision."""
        snakes = [module for module in hift.modules() if isinstance(module, Snake)]
        steep = all(float(snake.alpha.abs().min()) >= SMALLEST_ALPHA for snake in snakes)
        return hift.conv_pre.weight.device.type == "cpu" and steep

    def _sound(self, mel: Tensor, excitation: Tensor, emit: SampleSpan) -> Tensor:
        starts = range(emit.start, emit.stop, STRETCH)
        stretches = [SampleSpan(start, min(start + STRETCH, emit.stop)) for start in starts]
        rows = zip(mel.split(1), excitation.split(1), strict=True)
        return torch.cat([torch.cat([self._stretch(*row, span) for span in stretches], dim=1) for row in rows])

    def _stretch(self, mel: Tensor, excitation: Tensor, emit: SampleSpan) -> Tensor:
        frames, length = mel.shape[-1], emit.stop - emit.start
        lacks = -length % LENGTHS if emit.stop == frames else 0
        if lacks:
            mel, excitation = (functional.pad(x, (0, lacks * n)) for x, n in ((mel, 1), (excitation, self._values)))
        plan = decode_plan(self.config, SampleSpan(emit.start, emit.stop + lacks), mel.shape[-1])
        return self._waves(self._spectrum(mel, excitation, plan, frames), plan, emit)

    def _spectrum(self, mel: Tensor, excitation: Tensor, plan: DecodePlan, frames: int | None = None) -> Tensor:
        """As far as there are `frames`; what follows them is silence."""
        frames = mel.shape[-1] if frames is None else frames
        x = self._pre(mel[0].T)  # [frame, channel]
        x[frames:] = 0
        excitation = excitation[0].squeeze(1).T  # [frame, 2 · bins]
        held = SampleSpan(0, len(x))
        last = len(plan.stages) - 1
        for stage, (taken, source, mixed) in enumerate(plan.stages):
            end = frames * self.config.rates[stage] + (stage == last)
            up = self._ups[stage](functional.leaky_relu(x[taken.inside(held)], self.config.slope))
            if stage == last:
                up = torch.cat([up[1:2], up])  # reflected
            upsampled = SampleSpan(taken.start * self.config.upsample_rates[stage], 0)
            excited = self._excite(stage, excitation, source, end)
            mixture = up[mixed.inside(upsampled)] + excited[mixed.inside(source)]
            mixture[max(0, end - mixed.start) :] = 0
            x = _as_rows(self._blends[stage](_as_image(mixture), max(0, end - mixed.start)))
            held = mixed
        wanted = plan.spectrum.widened(self.config.outer_kernel // 2).within(held.stop)
        spectrum = self._post(_as_image(functional.leaky_relu(x[wanted.inside(held)], OUTER_SLOPE))).squeeze(2)
        return spectrum[..., plan.spectrum.within(frames * self._values + 1).inside(wanted)]

    def _excite(
        self, stage: int, excitation: Tensor, span: SampleSpan, end: int | None = None
    ) -> Tensor:  # [time, channel]
        stride, kernel = self.config.source_stride(stage), self.config.source_kernel(stage)
        first = span.start * stride
        length = (span.stop - span.start - 1) * stride + kernel - 2 * (stride // 2)
        lowered = self._downs[stage](excitation[first : first + length])
        end = len(lowered) if end is None else max(0, end - span.start)
        lowered[end:] = 0
        return _as_rows(self._source_blends[stage](_as_image(lowered), end))


def _as_image(x: Tensor) -> Tensor:
    """# [time, channel] → [1, channel, 1, time], where it lies"""
    return x.contiguous().view(1, 1, *x.shape).permute(0, 3, 1, 2)


def _as_rows(x: Tensor) -> Tensor:
    """# [1, channel, 1, time] → [time, channel], where it lies"""
    return x[0, :, 0].T
