"""The excitation of a neural source-filter vocoder: harmonics of f0 whose phase is accumulated frame by frame."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vivavoce.nn.counter_noise import normal_at


@dataclass(frozen=True)
class SourceStart:
    """Where the first frame of a piece lies in its stream, one row per stream."""

    cycles: Tensor | None  # [batch, harmonic] phase up to the piece in cycles, float64; None where the stream begins
    frame: Tensor  # [batch] int64
    seed: Tensor | None  # [batch] int64; None leaves the noise out

    def rows(self, which: slice) -> "SourceStart":
        """Some of the streams."""
        cycles = None if self.cycles is None else self.cycles[which]
        return SourceStart(cycles, self.frame[which], None if self.seed is None else self.seed[which])


def stacked_starts(starts: Sequence[SourceStart]) -> SourceStart:
    """Starts side by side; they must agree in having a past and in having noise."""
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
        """The beginning of a stream."""
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
        """Where the piece after these frames starts."""
        cycles = self._cycles_per_frame(f0).double().sum(-1)
        if start.cycles is not None:
            cycles = cycles + start.cycles
        return SourceStart(cycles.frac(), start.frame + f0.shape[1], start.seed)

    def _cycles_per_frame(self, f0: Tensor) -> Tensor:  # [batch, harmonic, frame]
        multiples = torch.arange(1, self.harmonics + 1, device=f0.device)
        return (f0[:, None] * multiples[:, None] / self.rate) % 1 * self.hop

    def _phase(self, f0: Tensor, before: Tensor | None) -> Tensor:
        """Phase in cycles: summed at frame centres, straight between them, constant outside the outermost centres.

        # [batch, harmonic, sample]
        """
        added = self._cycles_per_frame(f0)
        sums = added.double().cumsum(-1)
        if before is not None:
            sums = sums + before[..., None]
        at_centre = sums.frac().to(f0.dtype)
        if before is None:  # the first half frame has no centre before it
            from_centre, slope = torch.cat([at_centre[..., :1], at_centre], -1), added.clone()
            slope[..., 0] = 0
        else:
            from_centre, slope = torch.cat([before[..., None].to(f0.dtype), at_centre], -1), added
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
