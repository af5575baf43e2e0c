"""Vocos: mel-like frames to sound. ConvNeXt blocks at the frame rate, then one inverse Fourier transform.

It never leaves the frame rate until the last step, which makes it far cheaper than upsampling vocoders.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

KERNEL = 7
LOUDEST_BIN = 1e2


class ConvNeXtBlock(nn.Module):
    """x + scale · pointwise(gelu(pointwise(norm(depthwise conv(x)))))."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv1d(dim, dim, KERNEL, padding=KERNEL // 2, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, inner)
        self.pwconv2 = nn.Linear(inner, dim)
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, dim, frame] → the same"""
        y = self.norm(self.dwconv(x).transpose(1, 2))
        y = self.gamma * self.pwconv2(functional.gelu(self.pwconv1(y)))
        return x + y.transpose(1, 2)


class VocosBackbone(nn.Module):
    """Frames to features, each seeing `3 · (layers + 1)` frames to either side."""

    def __init__(self, channels: int, dim: int, inner: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Conv1d(channels, dim, KERNEL, padding=KERNEL // 2)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.convnext = nn.ModuleList(ConvNeXtBlock(dim, inner) for _ in range(layers))
        self.final_layer_norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, channel, frame] → [batch, frame, dim]"""
        x = self.norm(self.embed(x).transpose(1, 2)).transpose(1, 2)
        for block in self.convnext:
            x = block(x)
        out: Tensor = self.final_layer_norm(x.transpose(1, 2))
        return out


class InverseSTFT(nn.Module):
    """Overlap-add of windowed frames, cut so that every frame gives exactly one hop."""

    window: Tensor

    def __init__(self, n_fft: int, hop: int) -> None:
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, spectrum: Tensor) -> Tensor:
        """# complex [batch, frame, n_fft/2 + 1] → [batch, frame * hop]"""
        window = self.window.float()
        frames = torch.fft.irfft(spectrum, self.n_fft) * window
        weight = self._overlap_add(window.square().expand(1, frames.shape[1], -1))
        return self._overlap_add(frames) / weight

    def _overlap_add(self, frames: Tensor) -> Tensor:
        length = (frames.shape[1] - 1) * self.hop + self.n_fft
        added = functional.fold(frames.transpose(1, 2), (1, length), (1, self.n_fft), stride=(1, self.hop))
        margin = (self.n_fft - self.hop) // 2
        return added[:, 0, 0, margin : length - margin]


class FourierHead(nn.Module):
    """Features to a spectrum, log-magnitude and phase, and on to sound."""

    def __init__(self, dim: int, n_fft: int, hop: int) -> None:
        super().__init__()
        self.out = nn.Linear(dim, n_fft + 2)
        self.istft = InverseSTFT(n_fft, hop)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, frame, dim] → [batch, frame * hop], float32"""
        log_magnitude, phase = self.out(x).float().chunk(2, dim=-1)
        sound: Tensor = self.istft(torch.polar(log_magnitude.exp().clamp(max=LOUDEST_BIN), phase))
        return sound


class Vocos(nn.Module):
    """Backbone and head under their published names."""

    def __init__(self, channels: int, dim: int, inner: int, layers: int, n_fft: int, hop: int) -> None:
        super().__init__()
        self.backbone = VocosBackbone(channels, dim, inner, layers)
        self.head = FourierHead(dim, n_fft, hop)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, channel, frame] → [batch, frame * hop]"""
        sound: Tensor = self.head(self.backbone(x))
        return sound
