"""How far two sounds are apart by ear: log-mels of many resolutions, on one scale."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel_filters import slaney_filters

RESOLUTIONS = ((64, 6), (128, 12), (256, 24), (512, 48), (1024, 80), (2048, 128))  # samples of a window, mel bands
HARMONICS = ((1024, 1500.0), (2048, 1000.0))  # samples of a window, Hz up to which its bins are compared one by one
FLOOR = 2e-5  # of full scale, added to every mel: what is softer is not heard

HARMONIC_FLOOR = 2e-4


class SpectralDistance(nn.Module):
    """The mean absolute difference of log10-mels, over all resolutions: 0.1 is 2 dB."""

    def __init__(self, rate: int) -> None:
        super().__init__()
        for size, bands in RESOLUTIONS:
            filters = slaney_filters(rate, size, bands)
            window = torch.hann_window(size)
            # Both summing up to 1, a mel is a share of full scale whatever the resolution.
            self.register_buffer(
                f"filters{size}", filters / filters.sum(-1, keepdim=True).clamp(min=1e-9), persistent=False
            )
            self.register_buffer(f"window{size}", window / window.sum(), persistent=False)

    def forward(self, made: Tensor, given: Tensor) -> Tensor:
        """The distance of batches.  # [sound, sample] twice → a scalar"""
        differences = [functional.l1_loss(*self._log_mels(torch.stack([made, given]), size)) for size, _ in RESOLUTIONS]
        return torch.stack(differences).mean()

    def _log_mels(self, sounds: Tensor, size: int) -> Tensor:
        window, filters = (cast(Tensor, getattr(self, f"{name}{size}")) for name in ("window", "filters"))
        spectrum = torch.fft.rfft(sounds.unfold(-1, size, size // 4) * window)
        power = spectrum.real.square() + spectrum.imag.square()
        magnitude = (power + 1e-14).sqrt()  # [2, sound, frame, bin]
        return (functional.linear(magnitude, filters) + FLOOR).log10()


class HarmonicDistance(nn.Module):
    """The same of single low bins of long windows: whether a voice's lowest harmonics stand alone, which mels blur."""

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.bins = {size: int(highest / rate * size) for size, highest in HARMONICS}
        for size in self.bins:
            window = torch.hann_window(size)
            self.register_buffer(f"window{size}", window / window.sum(), persistent=False)

    def forward(self, made: Tensor, given: Tensor) -> Tensor:
        """The distance of batches.  # [sound, sample] twice → a scalar"""
        differences = [functional.l1_loss(*self._low_bins(torch.stack([made, given]), size)) for size in self.bins]
        return torch.stack(differences).mean()

    def _low_bins(self, sounds: Tensor, size: int) -> Tensor:
        window = cast(Tensor, getattr(self, f"window{size}"))
        spectrum = torch.fft.rfft(sounds.unfold(-1, size, size // 8) * window)[..., 2 : self.bins[size]]
        power = spectrum.real.square() + spectrum.imag.square()
        return ((power + 1e-14).sqrt() + HARMONIC_FLOOR).log10()
