"""Layers of neural vocoders: sine source, STFT, causal convolutions, snake activations, anti-aliased activations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels
from vivavoce.nn.vq import normal_at


@dataclass(frozen=True)
class SourceStart:
    """Position and phase at the first frame of a piece of a stream, one row per stream."""

    cycles: Tensor | None  # [batch, harmonic] phase before the piece in cycles, float64; None: start of the stream
    frame: Tensor  # [batch] int64
    seed: Tensor | None  # [batch] int64; None: no noise

    def rows(self, which: slice) -> "SourceStart":
        """Some of the streams."""
        cycles = None if self.cycles is None else self.cycles[which]
        return SourceStart(cycles, self.frame[which], None if self.seed is None else self.seed[which])


def stacked_starts(starts: Sequence[SourceStart]) -> SourceStart:
    """Starts as one batch; all or none of them have a past, and likewise noise."""
    cycles = [start.cycles for start in starts if start.cycles is not None]
    seeds = [start.seed for start in starts if start.seed is not None]
    frames = torch.cat([start.frame for start in starts])
    return SourceStart(torch.cat(cycles) if cycles else None, frames, torch.cat(seeds) if seeds else None)


class SineSource(nn.Module):
    """f0 per frame → excitation at the output rate: nine sines (or noise where unvoiced), mixed and squashed."""

    noise_at = staticmethod(normal_at)

    def __init__(
        self,
        rate: int,
        hop: int,
        overtones: int = 8,
        sine_amplitude: float = 0.1,
        noise_amplitude: float = 0.003,
        voiced_above: float = 10.0,
    ) -> None:
        super().__init__()
        self.rate, self.hop, self.harmonics = rate, hop, overtones + 1
        self.sine_amplitude, self.noise_amplitude = sine_amplitude, noise_amplitude
        self.voiced_above = voiced_above
        self.l_linear = nn.Linear(self.harmonics, 1)

    def start(self, batch: int, seed: int | None = 0) -> SourceStart:
        """The start of a stream."""
        zeros = torch.zeros(batch, dtype=torch.int64, device=self.l_linear.weight.device)
        return SourceStart(None, zeros, None if seed is None else zeros + seed)

    def forward(self, f0: Tensor, start: SourceStart) -> Tensor:
        """The excitation of consecutive frames.  # [batch, frame] Hz → [batch, frame · hop]"""
        voiced = (f0 > self.voiced_above).repeat_interleave(self.hop, dim=1)[..., None]  # [batch, sample, 1]
        sines = self.sine_amplitude * torch.sin(2 * math.pi * self._phase(f0, start.cycles)).transpose(1, 2)
        mixed = torch.where(voiced, sines, 0.0)
        if start.seed is not None:
            amplitude = torch.where(voiced, self.noise_amplitude, self.sine_amplitude / 3)
            mixed = mixed + amplitude * self._noise(start, mixed.shape[1]).to(mixed.dtype)
        return torch.tanh(self.l_linear(mixed).squeeze(-1))

    def advance(self, f0: Tensor, start: SourceStart) -> SourceStart:
        """The start of the next piece."""
        cycles = self._cycles_per_frame(f0).double().sum(-1)
        if start.cycles is not None:
            cycles = cycles + start.cycles
        return SourceStart(cycles.frac(), start.frame + f0.shape[1], start.seed)

    def _cycles_per_frame(self, f0: Tensor) -> Tensor:  # [batch, harmonic, frame]
        multiples = torch.arange(1, self.harmonics + 1, device=f0.device)
        return (f0[:, None] * multiples[:, None] / self.rate) % 1 * self.hop

    def _phase(self, f0: Tensor, previous: Tensor | None) -> Tensor:
        """Phase in cycles: summed at frame centres, linear between them, constant outside the outermost centres.

        # [batch, harmonic, sample]
        """
        added = self._cycles_per_frame(f0)
        sums = added.double().cumsum(-1)
        if previous is not None:
            sums = sums + previous[..., None]
        at_centre = sums.frac().to(f0.dtype)
        if previous is None:  # the first half frame has no centre before it
            from_centre, slope = torch.cat([at_centre[..., :1], at_centre], -1), added.clone()
            slope[..., 0] = 0
        else:
            from_centre, slope = torch.cat([previous[..., None].to(f0.dtype), at_centre], -1), added
        slope = torch.cat([slope, torch.zeros_like(slope[..., :1])], -1)  # [.., frame + 1], from centre to centre
        between = (torch.arange(self.hop, device=f0.device) + 0.5) / self.hop
        phase = from_centre[..., None] + slope[..., None] * between
        half = self.hop // 2
        return phase.flatten(-2)[..., half : half + f0.shape[1] * self.hop].frac()

    def _noise(self, start: SourceStart, samples: int) -> Tensor:  # [batch, sample, harmonic]
        assert start.seed is not None
        count = torch.arange(samples * self.harmonics, device=start.frame.device)
        index = start.frame[:, None] * (self.hop * self.harmonics) + count
        return self.noise_at(start.seed[:, None], index).reshape(-1, samples, self.harmonics)


class ShortFourier(nn.Module):
    """STFT and inverse STFT with a periodic Hann window."""

    analysis: Tensor
    synthesis: Tensor
    window: Tensor

    def __init__(self, n_fft: int, hop: int) -> None:
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        for name, value in _bases(n_fft).items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, signal: Tensor) -> Tensor:
        """The spectrum, edges reflected.  # [batch, time] → [batch, 2 · bins, time / hop + 1]"""
        half = self.n_fft // 2
        padded = functional.pad(signal[:, None], (half, half), mode="reflect")
        return functional.conv1d(padded, self.analysis, stride=self.hop)

    def inverse(self, spectrum: Tensor) -> Tensor:
        """The signal by weighted overlap-add.  # [batch, 2 · bins, frame] → [batch, (frame - 1) · hop + n_fft]

        The edges are not trimmed: sample 0 is half a window before the centre of the first frame given.
        """
        signal = functional.conv_transpose1d(spectrum, self.synthesis, stride=self.hop)
        ones = torch.ones(1, 1, spectrum.shape[-1], dtype=spectrum.dtype, device=spectrum.device)
        squares = self.window.square()[None, None]
        envelope = functional.conv_transpose1d(ones, squares, stride=self.hop)
        return (signal / envelope.clamp_min(1e-11)).squeeze(1)


def _bases(n_fft: int) -> dict[str, Tensor]:
    sample = torch.arange(n_fft, dtype=torch.float64)
    frequency = torch.arange(n_fft // 2 + 1, dtype=torch.float64)
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * sample / n_fft)
    angle = 2 * math.pi * frequency[:, None] * sample / n_fft  # [bin, sample]
    forward = torch.cat([angle.cos(), -angle.sin()]) * window
    folded = torch.full((n_fft // 2 + 1, 1), 2.0, dtype=torch.float64)  # a bin also counts for its mirror
    folded[0] = folded[-1] = 1.0
    inverse = torch.cat([folded * angle.cos(), -folded * angle.sin()]) * window / n_fft
    return {"analysis": forward[:, None].float(), "synthesis": inverse[:, None].float(), "window": window.float()}


class CausalConv1d(nn.Conv1d):
    """A causal Conv1d: the input is padded with `(kernel - 1) * dilation` zeros on the left.

    In a stream, the state of `step` has the last inputs in place of the zeros, so any split of the input into multiples
    of the stride gives the same output.
    """

    @property
    def context(self) -> int:
        """Past inputs that an output depends on."""
        return (self.kernel_size[0] - 1) * self.dilation[0]

    def initial_state(self, batch: int) -> Tensor:
        """The state before the first sample: zeros.  # [batch, channel, context]"""
        return torch.zeros(batch, self.in_channels, self.context, dtype=self.weight.dtype, device=self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal.  # [batch, channel, time] → [batch, channel, time / stride]"""
        return super().forward(functional.pad(x, (self.context, 0)))

    def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output of the next piece of a stream, and the next state."""
        joined = torch.cat([state, x], dim=-1)
        return super().forward(joined), joined[..., joined.shape[-1] - self.context :]


NEVER_ZERO = 1e-9


class Snake(nn.Module):
    """x + sin²(αx) / α with one α per channel, on a linear scale."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:  # [batch, channel, time]
        """The activation of every sample."""
        if kernels.usable(x) and x.stride(-1) == 1 and x.numel() and not self.alpha.requires_grad:
            return kernels.snake(x, self.alpha, NEVER_ZERO)
        alpha = self.alpha[:, None]
        return x + torch.sin(x * alpha).square() / (alpha + NEVER_ZERO)


class SnakeBeta(nn.Module):
    """x + sin²(αx) / β with one α and one β per channel, stored as logarithms unless `log_scale` is off."""

    def __init__(self, channels: int, log_scale: bool = True) -> None:
        super().__init__()
        self.log_scale = log_scale
        neutral = torch.zeros(channels) if log_scale else torch.ones(channels)
        self.alpha = nn.Parameter(neutral)
        self.beta = nn.Parameter(neutral.clone())

    def forward(self, x: Tensor) -> Tensor:  # [batch, channel, time]
        """The activation of every sample."""
        alpha, beta = self.alpha[:, None], self.beta[:, None]
        if self.log_scale:
            alpha, beta = alpha.exp(), beta.exp()
        return x + torch.sin(x * alpha).square() / (beta + NEVER_ZERO)


TAPS = 12
REACH = 5  # an output of AntiAliased depends on this many inputs to either side of its own


def kaiser_sinc(cutoff: float = 0.25, half_width: float = 0.3, taps: int = TAPS) -> Tensor:
    """A low-pass filter whose gain at 0 Hz is 1; `cutoff` and `half_width` in cycles per sample.  # [1, 1, taps]"""
    attenuation = 2.285 * (taps // 2 - 1) * math.pi * 4 * half_width + 7.95
    window = torch.kaiser_window(taps, periodic=False, beta=_kaiser_beta(attenuation), dtype=torch.float64)
    time = torch.arange(taps, dtype=torch.float64) - (taps - 1) / 2
    response = window * torch.sinc(2 * cutoff * time)
    return (response / response.sum()).float().view(1, 1, taps)


def _kaiser_beta(attenuation: float) -> float:
    """Kaiser's own formula for the window that reaches an attenuation in dB."""
    if attenuation > 50:
        return 0.1102 * (attenuation - 8.7)
    if attenuation >= 21:
        return 0.5842 * (attenuation - 21) ** 0.4 + 0.07886 * (attenuation - 21)
    return 0.0


class Upsample2(nn.Module):
    """Upsampling by 2; the edges are replicated."""

    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", kaiser_sinc())

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, channel, time] → [batch, channel, 2 time]"""
        channels, edge = x.shape[1], TAPS // 2 - 1
        held = functional.pad(x, (edge, edge), mode="replicate")
        raised = functional.conv_transpose1d(held, 2 * self.filter.expand(channels, -1, -1), stride=2, groups=channels)
        surplus = 3 * edge  # two samples for each replicated input, and the tail of the filter
        return raised[..., surplus:-surplus]


class LowPass(nn.Module):
    """Holds the downsampling filter under its published name."""

    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", kaiser_sinc())


class Downsample2(nn.Module):
    """Downsampling by 2; the edges are replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.lowpass = LowPass()

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, channel, 2 time] → [batch, channel, time]"""
        channels = x.shape[1]
        held = functional.pad(x, (TAPS // 2 - 1, TAPS // 2), mode="replicate")
        return functional.conv1d(held, self.lowpass.filter.expand(channels, -1, -1), stride=2, groups=channels)


class AntiAliased(nn.Module):
    """`act` at twice the rate of its input, filtered on the way up and on the way down."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act
        self.upsample = Upsample2()
        self.downsample = Downsample2()

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, channel, time] → the same"""
        activated: Tensor = self.downsample(self.act(self.upsample(x)))
        return activated
