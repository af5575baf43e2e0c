"""Sizes of HiFT, and which part of every stage a part of the sound needs."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


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
    plain_spectrum: bool = False  # ours: real and imaginary parts as the network says them, not magnitude and angle

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
        """Spectrum frames of the excitation per value of a stage."""
        return self.rates[-1] // self.rates[stage]

    def source_kernel(self, stage: int) -> int:
        """Width of the convolution that brings the excitation's spectrum to a stage."""
        stride = self.source_stride(stage)
        return 1 if stride == 1 else 2 * stride

    def block_reach(self, kernel: int) -> int:
        """How far a residual block looks to either side."""
        return kernel // 2 * sum(dilation + 1 for dilation in self.dilations)

    @property
    def f0_reach(self) -> int:
        """How many mel frames the f0 predictor looks to either side."""
        return self.f0_layers * (self.f0_kernel // 2)


class SampleSpan(NamedTuple):
    """Indices start … stop - 1 of a time axis."""

    start: int
    stop: int

    def widened(self, by: int) -> "SampleSpan":
        """Longer by so much at both ends."""
        return SampleSpan(self.start - by, self.stop + by)

    def within(self, length: int) -> "SampleSpan":
        """The part that exists."""
        return SampleSpan(max(0, self.start), min(length, self.stop))

    def inside(self, other: "SampleSpan") -> slice:
        """Where this span lies in an array that holds the other."""
        return slice(self.start - other.start, self.stop - other.start)


class StagePlan(NamedTuple):
    """What one upsampling stage computes."""

    taken: SampleSpan  # of the stage before
    source: SampleSpan  # of the excitation, one value more at either end than is right there
    mixed: SampleSpan  # of this stage, into the residual blocks


class DecodePlan(NamedTuple):
    """What a part of the sound needs: per stage, and of the final spectrum."""

    stages: tuple[StagePlan, ...]
    spectrum: SampleSpan


class Reach(NamedTuple):
    """Mel frames that a frame of sound depends on, besides its own."""

    left: int
    right: int


@lru_cache(maxsize=256)
def decode_plan(config: HiFTConfig, emit: SampleSpan, frames: int) -> DecodePlan:
    """What to compute of each stage for the sound of the mel frames `emit` out of `frames`."""
    last = len(config.upsample_rates) - 1
    around = config.n_fft // 2 - 1
    spectrum = SampleSpan(
        -((around - emit.start * config.hop) // config.fft_hop),
        (emit.stop * config.hop - 1 + around) // config.fft_hop + 1,
    ).within(frames * config.rates[-1] + 1)
    wanted = spectrum.widened(config.outer_kernel // 2)
    stages: list[StagePlan] = []
    for stage in range(last, -1, -1):
        shift = 1 if stage == last else 0  # the last stage repeats one value in front
        length = frames * config.rates[stage] + shift
        mixed = wanted.within(length).widened(config.block_reach(max(config.resblock_kernels))).within(length)
        source = mixed.widened(config.block_reach(config.source_resblock_kernels[stage]) + 1).within(length)
        wanted = _upsampled_from(config, stage, SampleSpan(mixed.start - shift, mixed.stop - shift))
        wanted = wanted.within(length // config.upsample_rates[stage])
        stages.append(StagePlan(wanted, source, mixed))
    return DecodePlan(tuple(reversed(stages)), spectrum)


def _upsampled_from(config: HiFTConfig, stage: int, wanted: SampleSpan) -> SampleSpan:
    factor, kernel = config.upsample_rates[stage], config.upsample_kernels[stage]
    padding = (kernel - factor) // 2
    first = -((kernel - 1 - padding - wanted.start) // factor)
    return SampleSpan(first, (wanted.stop - 1 + padding) // factor + 1)


@lru_cache(maxsize=16)
def reach(config: HiFTConfig) -> Reach:
    """How much mel a frame of sound needs on either side so that it is the sound of the whole mel."""
    frame = 1000
    plan = decode_plan(config, SampleSpan(frame, frame + 1), 2 * frame)
    around_mel = config.outer_kernel // 2
    lefts = [plan.stages[0].taken.start - around_mel, frame - config.f0_reach]
    rights = [plan.stages[0].taken.stop - 1 + around_mel]
    for stage, (_, source, _) in enumerate(plan.stages):
        stride, kernel = config.source_stride(stage), config.source_kernel(stage)
        first = config.fft_hop * (source.start * stride - stride // 2) - config.n_fft // 2
        final = config.fft_hop * ((source.stop - 1) * stride - stride // 2 + kernel - 1) + config.n_fft // 2 - 1
        lefts.append((first - config.hop // 2) // config.hop)
        rights.append((final - config.hop // 2) // config.hop + 1 + config.f0_reach)
    return Reach(frame - min(lefts), max(rights) - frame)
