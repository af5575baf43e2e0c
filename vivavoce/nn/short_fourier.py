"""Short-time Fourier transform and its inverse as convolutions with fixed bases: no complex numbers, any device.

Made for tiny transforms (n_fft 16), where two matrix products beat an FFT. A spectrum is [batch, 2 · bins, frame]: real
parts, then imaginary parts. Frame j is centred on sample j · hop.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


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

        Nothing is cut at the edges: sample 0 lies half a window before the centre of the first frame given.
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
    folded = torch.full((n_fft // 2 + 1, 1), 2.0, dtype=torch.float64)  # a bin stands for its mirror too
    folded[0] = folded[-1] = 1.0
    inverse = torch.cat([folded * angle.cos(), -folded * angle.sin()]) * window / n_fft
    return {"analysis": forward[:, None].float(), "synthesis": inverse[:, None].float(), "window": window.float()}
