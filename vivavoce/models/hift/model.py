"""HiFT, the vocoder of MOSS-Speech and CosyVoice 2: mel → 24 kHz sound.

f0 is predicted from the mel and drives a harmonic excitation. The mel is upsampled 120 times in three stages; each adds
the excitation's spectrum, downsampled to its rate, and applies three residual blocks. The last layer predicts magnitude
and phase of a 16-point spectrum, whose inverse gives four samples per frame.

Nothing is causal, but every layer has a finite receptive field: `decode` can compute a part of the sound from the mel
around it, and each stage computes only what that part needs. Streaming is in `hift/stream.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import InputError
from vivavoce.models.checkpoint import Checkpoint, fold_weight_norm, load_weights
from vivavoce.nn.modules import allocating
from vivavoce.nn.vocoder import ShortFourier, SineSource, Snake


@dataclass(frozen=True)
class HiFTConfig:
    """The published values."""

    mels: int = 80
    channels: int = 512
    rate: int = 24_000
    overtones: int = 8
    upsample_rates: tuple[int, ...] = (8, 5, 3)
    upsample_kernels: tuple[int, ...] = (16, 11, 7)
    n_fft: int = 16
    fft_hop: int = 4
    resblock_kernels: tuple[int, ...] = (3, 7, 11)
    source_resblock_kernels: tuple[int, ...] = (7, 7, 11)
    dilations: tuple[int, ...] = (1, 3, 5)
    outer_kernel: int = 7  # of the first and the last convolution
    f0_channels: int = 512
    f0_layers: int = 5
    f0_kernel: int = 3
    slope: float = 0.1
    audio_limit: float = 0.99
    plain_spectrum: bool = False  # not published: predict real and imaginary parts, not magnitude and angle

    @property
    def rates(self) -> tuple[int, ...]:
        """Values per mel frame after each stage."""
        rates = [1]
        for factor in self.upsample_rates:
            rates.append(rates[-1] * factor)
        return tuple(rates[1:])

    @property
    def hop(self) -> int:
        """Samples per mel frame."""
        return self.fft_hop * self.rates[-1]

    def source_stride(self, stage: int) -> int:
        """Excitation spectrum frames per value of a stage."""
        return self.rates[-1] // self.rates[stage]

    def source_kernel(self, stage: int) -> int:
        """Kernel of the convolution that downsamples the excitation's spectrum to a stage."""
        stride = self.source_stride(stage)
        return 1 if stride == 1 else 2 * stride

    def block_reach(self, kernel: int) -> int:
        """Receptive field of a residual block to either side."""
        return kernel // 2 * sum(dilation + 1 for dilation in self.dilations)

    @property
    def f0_reach(self) -> int:
        """Receptive field of the f0 predictor to either side, in mel frames."""
        return self.f0_layers * (self.f0_kernel // 2)


class SampleSpan(NamedTuple):
    """Indices start … stop - 1 of a time axis."""

    start: int
    stop: int

    def widened(self, by: int) -> "SampleSpan":
        """Extended at both ends."""
        return SampleSpan(self.start - by, self.stop + by)

    def within(self, length: int) -> "SampleSpan":
        """Clipped to [0, length)."""
        return SampleSpan(max(0, self.start), min(length, self.stop))

    def inside(self, other: "SampleSpan") -> slice:
        """This span as a slice of an array that covers `other`."""
        return slice(self.start - other.start, self.stop - other.start)


class StagePlan(NamedTuple):
    """The spans that one upsampling stage computes."""

    inputs: SampleSpan  # of the previous stage
    source: SampleSpan  # of the excitation; its first and last value are edge effects
    mixed: SampleSpan  # of this stage, input of the residual blocks


class DecodePlan(NamedTuple):
    """The spans to compute for a part of the sound, per stage and of the final spectrum."""

    stages: tuple[StagePlan, ...]
    spectrum: SampleSpan


class Reach(NamedTuple):
    """Receptive field of a frame of sound: mel frames before and after it."""

    left: int
    right: int


@lru_cache(maxsize=256)
def decode_plan(config: HiFTConfig, emit: SampleSpan, frames: int) -> DecodePlan:
    """The spans of each stage for the sound of the mel frames `emit` out of `frames`."""
    last = len(config.upsample_rates) - 1
    around = config.n_fft // 2 - 1
    spectrum = SampleSpan(
        -((around - emit.start * config.hop) // config.fft_hop),
        (emit.stop * config.hop - 1 + around) // config.fft_hop + 1,
    ).within(frames * config.rates[-1] + 1)
    needed = spectrum.widened(config.outer_kernel // 2)
    stages: list[StagePlan] = []
    for stage in range(last, -1, -1):
        shift = 1 if stage == last else 0  # the last stage repeats one value in front
        length = frames * config.rates[stage] + shift
        mixed = needed.within(length).widened(config.block_reach(max(config.resblock_kernels))).within(length)
        source = mixed.widened(config.block_reach(config.source_resblock_kernels[stage]) + 1).within(length)
        needed = _upsampled_from(config, stage, SampleSpan(mixed.start - shift, mixed.stop - shift))
        needed = needed.within(length // config.upsample_rates[stage])
        stages.append(StagePlan(needed, source, mixed))
    return DecodePlan(tuple(reversed(stages)), spectrum)


def _upsampled_from(config: HiFTConfig, stage: int, needed: SampleSpan) -> SampleSpan:
    factor, kernel = config.upsample_rates[stage], config.upsample_kernels[stage]
    padding = (kernel - factor) // 2
    first = -((kernel - 1 - padding - needed.start) // factor)
    return SampleSpan(first, (needed.stop - 1 + padding) // factor + 1)


@lru_cache(maxsize=16)
def reach(config: HiFTConfig) -> Reach:
    """The receptive field: with it a frame's sound equals that of the whole mel."""
    frame = 1000
    plan = decode_plan(config, SampleSpan(frame, frame + 1), 2 * frame)
    around_mel = config.outer_kernel // 2
    lefts = [plan.stages[0].inputs.start - around_mel, frame - config.f0_reach]
    rights = [plan.stages[0].inputs.stop - 1 + around_mel]
    for stage, (_, source, _) in enumerate(plan.stages):
        stride, kernel = config.source_stride(stage), config.source_kernel(stage)
        first = config.fft_hop * (source.start * stride - stride // 2) - config.n_fft // 2
        final = config.fft_hop * ((source.stop - 1) * stride - stride // 2 + kernel - 1) + config.n_fft // 2 - 1
        lefts.append((first - config.hop // 2) // config.hop)
        rights.append((final - config.hop // 2) // config.hop + 1 + config.f0_reach)
    return Reach(frame - min(lefts), max(rights) - frame)


LOUDEST_BIN = 100.0


def centred_conv(inputs: int, outputs: int, kernel: int, dilation: int = 1) -> nn.Conv1d:
    """A convolution with symmetric padding."""
    return nn.Conv1d(inputs, outputs, kernel, dilation=dilation, padding=kernel // 2 * dilation)


class ResBlock(nn.Module):
    """x + conv(snake(conv(snake(x)))) once per dilation."""

    def __init__(
        self,
        channels: int,
        kernel: int,
        dilations: tuple[int, ...],
        conv: Callable[[int, int, int, int], nn.Conv1d] = centred_conv,
    ) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(conv(channels, channels, kernel, dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(conv(channels, channels, kernel, 1) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:  # [batch, channel, time]
        for snake1, conv1, snake2, conv2 in zip(
            self.activations1, self.convs1, self.activations2, self.convs2, strict=True
        ):
            x = x + conv2(snake2(conv1(snake1(x))))
        return x


class F0Predictor(nn.Module):
    """Mel frames → f0 in Hz."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.condnet = nn.Sequential()
        for layer in range(config.f0_layers):
            inputs = config.mels if layer == 0 else config.f0_channels
            self.condnet.extend([centred_conv(inputs, config.f0_channels, config.f0_kernel), nn.ELU()])
        self.classifier = nn.Linear(config.f0_channels, 1)

    def forward(self, mel: Tensor) -> Tensor:  # [batch, mel, frame] → [batch, frame]
        f0: Tensor = self.classifier(self.condnet(mel).transpose(1, 2)).squeeze(-1)
        return f0.abs()


def stage_layers(
    config: HiFTConfig,
    up: Callable[[int, int, int], nn.Module],  # (stage, inputs, outputs)
    down: Callable[[int, int, int], nn.Module],
    conv: Callable[[int, int, int, int], nn.Conv1d],
) -> Iterator[nn.ModuleList]:
    """The published module lists `ups`, `source_downs`, `source_resblocks` and `resblocks`."""
    lists = [nn.ModuleList() for _ in range(4)]
    ups, downs, source_blocks, blocks = lists
    inputs = config.channels
    for stage, source_kernel in enumerate(config.source_resblock_kernels):
        width = inputs // 2
        ups.append(up(stage, inputs, width))
        downs.append(down(stage, config.n_fft + 2, width))
        source_blocks.append(ResBlock(width, source_kernel, config.dilations, conv))
        blocks.extend(ResBlock(width, kernel, config.dilations, conv) for kernel in config.resblock_kernels)
        inputs = width
    return iter(lists)


Vocoder = TypeVar("Vocoder", bound=nn.Module)


def load_vocoder(make: Callable[[], Vocoder], file: str | Path, device: torch.device | str) -> Vocoder:
    """A vocoder with the weights of a published `hift.pt`, weight norm folded away."""
    with allocating(device, torch.float32):
        hift = make().eval().requires_grad_(False)
    with Checkpoint(file) as published:
        renamed = published.renamed(lambda name: name.removeprefix("generator."))
        load_weights(hift, fold_weight_norm(renamed))
    return hift


def polar_to_rectangular(spectrum: Tensor, plain: bool = False) -> Tensor:
    """Log magnitudes and angles to real and imaginary parts, unless `plain`.  # [batch, 2 · bin, frame]"""
    if plain:
        return spectrum
    magnitude, angle = spectrum.chunk(2, dim=1)
    magnitude, angle = magnitude.exp().clamp(max=LOUDEST_BIN), angle.sin()  # within a radian
    return torch.cat([magnitude * angle.cos(), magnitude * angle.sin()], dim=1)


class HiFT(nn.Module):
    """Mel → sound in [-0.99, 0.99], always in float32."""

    def __init__(self, config: HiFTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or HiFTConfig()
        self.m_source = SineSource(config.rate, config.hop, config.overtones)
        self.conv_pre = centred_conv(config.mels, config.channels, config.outer_kernel)
        stages = stage_layers(config, self._up, self._down, centred_conv)
        self.ups, self.source_downs, self.source_resblocks, self.resblocks = stages
        last_width = config.channels >> len(config.rates)
        self.conv_post = centred_conv(last_width, config.n_fft + 2, config.outer_kernel)
        self.f0_predictor = F0Predictor(config)
        self.fourier = ShortFourier(config.n_fft, config.fft_hop)

    @classmethod
    def load(cls, file: str | Path, device: torch.device | str = "cpu", config: HiFTConfig | None = None) -> "HiFT":
        """The published vocoder of `hift.pt`, weight norm folded away."""
        return load_vocoder(lambda: cls(config), file, device)

    def _up(self, stage: int, inputs: int, outputs: int) -> nn.Module:
        factor, kernel = self.config.upsample_rates[stage], self.config.upsample_kernels[stage]
        return nn.ConvTranspose1d(inputs, outputs, kernel, factor, padding=(kernel - factor) // 2)

    def _down(self, stage: int, inputs: int, outputs: int) -> nn.Module:
        stride = self.config.source_stride(stage)
        return nn.Conv1d(inputs, outputs, self.config.source_kernel(stage), stride, padding=stride // 2)

    def forward(self, mel: Tensor, seed: int | None = 0) -> Tensor:
        """Sound of whole mels; `seed` draws the excitation's noise, None omits it.

        # [batch, mel, frame] → [batch, frame · 480]
        """
        self.check(mel)
        mel = mel.to(self.conv_pre.weight.dtype)
        source = self.m_source(self.f0_predictor(mel), self.m_source.start(mel.shape[0], seed))
        return self.limit(self.decode(mel, source))

    def limit(self, sound: Tensor) -> Tensor:
        """Clamp to ±`audio_limit`."""
        return sound.clamp(-self.config.audio_limit, self.config.audio_limit)

    def decode(self, mel: Tensor, source: Tensor, emit: SampleSpan | None = None) -> Tensor:
        """Sound of the frames `emit` (all, if None), not clamped.

        # [batch, mel, frame], [batch, frame · 480] → [batch, emitted · 480]
        """
        return self._sound(mel, self.fourier(source), emit or SampleSpan(0, mel.shape[-1]))

    def _sound(self, mel: Tensor, excitation: Tensor, emit: SampleSpan) -> Tensor:
        """# excitation: its spectrum [batch, 2 · bins, frame · 120 + 1] → [batch, emitted · 480]"""
        plan = decode_plan(self.config, emit, mel.shape[-1])
        return self._waves(self._spectrum(mel, excitation, plan), plan, emit)

    def _waves(self, spectrum: Tensor, plan: DecodePlan, emit: SampleSpan) -> Tensor:
        """The sound of the frames `emit` from their spectrum.  # [batch, 2 · bins, frame] → [batch, emitted · 480]"""
        sound = self.fourier.inverse(polar_to_rectangular(spectrum, self.config.plain_spectrum))
        begin = plan.spectrum.start * self.config.fft_hop - self.config.n_fft // 2
        hop = self.config.hop
        return sound[:, emit.start * hop - begin : emit.stop * hop - begin]

    def _spectrum(self, mel: Tensor, excitation: Tensor, plan: DecodePlan) -> Tensor:
        x: Tensor = self.conv_pre(mel)
        span = SampleSpan(0, x.shape[-1])
        blocks = list(cast(Iterable[ResBlock], self.resblocks))
        per_stage, last = len(self.config.resblock_kernels), len(plan.stages) - 1
        for stage, (inputs, source, mixed) in enumerate(plan.stages):
            x = self.ups[stage](functional.leaky_relu(x[..., inputs.inside(span)], self.config.slope))
            if stage == last:
                x = functional.pad(x, (1, 0), mode="reflect")
            upsampled = SampleSpan(inputs.start * self.config.upsample_rates[stage], 0)
            x = x[..., mixed.inside(upsampled)]
            x = x + self._excite(stage, excitation, source)[..., mixed.inside(source)]
            x = torch.stack([block(x) for block in blocks[stage * per_stage : (stage + 1) * per_stage]]).mean(0)
            span = mixed
        needed = plan.spectrum.widened(self.config.outer_kernel // 2).within(span.stop)
        x = self.conv_post(functional.leaky_relu(x[..., needed.inside(span)]))
        return x[..., plan.spectrum.inside(needed)]

    def _excite(self, stage: int, excitation: Tensor, span: SampleSpan) -> Tensor:
        stride, kernel = self.config.source_stride(stage), self.config.source_kernel(stage)
        first = span.start * stride
        length = (span.stop - span.start - 1) * stride + kernel - 2 * (stride // 2)
        excited: Tensor = self.source_resblocks[stage](
            self.source_downs[stage](excitation[..., first : first + length])
        )
        return excited

    def check(self, mel: Tensor) -> None:
        """Raise `InputError` unless this is a finite mel with frames."""
        check_mel(mel, self.config.mels)


def check_mel(mel: Tensor, bins: int) -> None:
    """Raise `InputError` unless this is a finite mel with frames."""
    if mel.ndim != 3 or mel.shape[1] != bins:
        raise InputError(f"the vocoder takes mels [batch, {bins}, frame], not {list(mel.shape)}")
    if mel.shape[-1] == 0:
        raise InputError("the mel has no frames; give at least one")
    if not torch.isfinite(mel).all():
        raise InputError("the mel has NaN or infinite values; check the model that produced it")
