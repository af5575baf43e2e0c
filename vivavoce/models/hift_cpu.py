"""HiFT on a CPU: the same sound in fewer passes over memory.

A snake's scale goes into the convolutions on either side of it, so that it is a sine and one more pass; channels stand
side by side, as the libraries' convolutions want them; the excitation's noise, which is a function of its place, is
looked up. It runs on the weights of a `HiFT` and equals it but for rounding.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.hift import HiFT, ResBlock
from vivavoce.models.hift_geometry import DecodePlan, HiFTConfig, Span
from vivavoce.nn.counter_noise import normal_at
from vivavoce.nn.short_fourier import ShortFourier
from vivavoce.nn.sine_source import SineSource, SourceStart
from vivavoce.nn.snake import Snake

NOISE_BLOCK = 24_000  # samples looked up together
SMALLEST_ALPHA = 1e-3  # a snake that is flatter than this is not divided by
OUTER_SLOPE = 0.01


class FlatConv:
    """A convolution over channels-last memory.  # [batch, channel, 1, time]"""

    def __init__(self, conv: nn.Conv1d, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        weight = conv.weight if weight is None else weight
        self.weight = weight.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        self.bias = conv.bias if bias is None else bias
        self.stride, self.padding, self.dilation = (
            (1, conv.stride[0]),
            (0, int(conv.padding[0])),
            (1, conv.dilation[0]),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """The convolution."""
        return functional.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation)


class FlatBlock:
    """A residual block whose snakes give α times their value, which the convolutions behind them expect."""

    def __init__(self, block: ResBlock) -> None:
        self.rounds = []
        layers = zip(block.activations1, block.convs1, block.activations2, block.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in cast(Iterable[tuple[Snake, nn.Conv1d, Snake, nn.Conv1d]], layers):
            alpha1, alpha2 = snake1.alpha, snake2.alpha
            assert conv1.bias is not None
            first = FlatConv(conv1, conv1.weight / alpha1[:, None] * alpha2[:, None, None], conv1.bias * alpha2)
            second = FlatConv(conv2, conv2.weight / alpha2[:, None])
            self.rounds.append((alpha1[:, None, None], first, second))

    def __call__(self, x: Tensor) -> Tensor:
        """The same shape."""
        for alpha, first, second in self.rounds:
            x = second(_snake(first(_snake(x * alpha)))).add_(x)
        return x


class CpuSource(SineSource):
    """The excitation: harmonics are mixed before anything else is done with them, and noise is looked up."""

    def __init__(self, source: SineSource) -> None:
        nn.Module.__init__(self)
        self.rate, self.hop, self.harmonics = source.rate, source.hop, source.harmonics
        self.sine_amplitude, self.noise_amplitude = source.sine_amplitude, source.noise_amplitude
        self.voiced_above = source.voiced_above
        self.l_linear = source.l_linear
        self._mixing = tuple(source.l_linear.weight[0].tolist())

    def forward(self, f0: Tensor, start: SourceStart) -> Tensor:
        """The excitation of consecutive frames.  # [batch, frame] Hz → [batch, frame · hop]"""
        voiced = (f0 > self.voiced_above)[..., None]  # [batch, frame, 1]
        sines = self._phase(f0, start.cycles).mul_(2 * math.pi).sin_()
        mixed = torch.matmul(self.l_linear.weight * self.sine_amplitude, sines).view(*f0.shape, self.hop)
        mixed = mixed.mul_(voiced)
        if start.seed is not None:
            amplitude = torch.where(voiced, self.noise_amplitude, self.sine_amplitude / 3)
            mixed.addcmul_(self._mixed_noise(start, f0.shape[1]), amplitude)
        return mixed.add_(self.l_linear.bias).tanh_().flatten(1)

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
    """A vocoder on the weights of another."""

    def __init__(self, hift: HiFT) -> None:
        nn.Module.__init__(self)
        self.config: HiFTConfig = hift.config
        self.m_source, self.fourier = CpuSource(hift.m_source), FlatFourier(hift.fourier)
        self.conv_pre, self.ups, self.f0_predictor = hift.conv_pre, hift.ups, hift.f0_predictor
        self.source_downs, self.source_resblocks = hift.source_downs, hift.source_resblocks
        self.resblocks, self.conv_post = hift.resblocks, hift.conv_post
        self._blocks = [FlatBlock(block) for block in cast(Iterable[ResBlock], hift.resblocks)]
        self._source_blocks = [FlatBlock(block) for block in cast(Iterable[ResBlock], hift.source_resblocks)]
        self._downs = [FlatConv(conv) for conv in cast(Iterable[nn.Conv1d], hift.source_downs)]
        self._post = FlatConv(hift.conv_post)

    @staticmethod
    def suits(hift: HiFT) -> bool:
        """Whether it is on a CPU, and no snake so flat that dividing by its scale would cost precision."""
        snakes = [module for module in hift.modules() if isinstance(module, Snake)]
        steep = all(float(snake.alpha.abs().min()) >= SMALLEST_ALPHA for snake in snakes)
        return hift.conv_pre.weight.device.type == "cpu" and steep

    def _spectrum(self, mel: Tensor, excitation: Tensor, plan: DecodePlan) -> Tensor:
        x: Tensor = self.conv_pre(mel)
        held = Span(0, x.shape[-1])
        per_stage, last = len(self.config.resblock_kernels), len(plan.stages) - 1
        for stage, (taken, source, mixed) in enumerate(plan.stages):
            up = self.ups[stage](functional.leaky_relu(x[..., taken.inside(held)].flatten(1, -2), self.config.slope))
            if stage == last:
                up = functional.pad(up, (1, 0), mode="reflect")
            upsampled = Span(taken.start * self.config.upsample_rates[stage], 0)
            x = _channels_last(up[..., mixed.inside(upsampled)])
            x = x + self._excite(stage, excitation, source)[..., mixed.inside(source)]
            first, *others = [block(x) for block in self._blocks[stage * per_stage : (stage + 1) * per_stage]]
            for other in others:
                first += other
            x = first.mul_(1 / per_stage)
            held = mixed
        wanted = plan.spectrum.widened(self.config.outer_kernel // 2).within(held.stop)
        x = self._post(functional.leaky_relu(x[..., wanted.inside(held)], OUTER_SLOPE)).squeeze(2)
        return x[..., plan.spectrum.inside(wanted)]

    def _excite(self, stage: int, excitation: Tensor, span: Span) -> Tensor:
        stride, kernel = self.config.source_stride(stage), self.config.source_kernel(stage)
        first = span.start * stride
        length = (span.stop - span.start - 1) * stride + kernel - 2 * (stride // 2)
        return self._source_blocks[stage](self._downs[stage](excitation[..., first : first + length]))


def _snake(scaled: Tensor) -> Tensor:
    """α · snake(x) of αx, in its place."""
    sines = scaled.sin()
    return scaled.addcmul_(sines, sines)


def _channels_last(x: Tensor) -> Tensor:
    """# [batch, channel, time] → [batch, channel, 1, time]"""
    return x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
