"""Changes of sound that leave every word where it was, so that two hearings of a sentence can be compared."""

import torch
from torch import Tensor

from vivavoce.train.augment import (
    NOISES,
    Augmenter,
    at_snr,
    clipped,
    equalise,
    levelled,
    mu_law,
    noise,
    reverberate,
    telephone,
)

BEDS_A_BATCH = 2  # kinds of noise in one batch: making all of them would cost more than the learning


class Surroundings:
    """Rooms, noises and lines of an `Augmenter`, without its changes of speed."""

    def __init__(self, device: torch.device | str, strength: float = 1.0) -> None:
        self.device, self.strength = device, strength

    @torch.no_grad()
    def __call__(self, samples: Tensor, lengths: Tensor, seed: int) -> Tensor:
        """Each row elsewhere, the same for the same seed.  # [batch, time], [batch] → [batch, time]"""
        if not self.strength:
            return samples
        makes = Augmenter(self.device, seed, self.strength)
        rows, draw = len(samples), makes.uniform
        there = torch.arange(samples.shape[1], device=samples.device) < lengths[:, None]
        out = makes.maybe(0.6, samples, equalise(samples, makes.generator, 12.0 * self.strength))
        out = makes.maybe(0.5, out, reverberate(out, draw(rows, 0.1, 0.6), makes.generator))
        beds = torch.cat([noise(_kind(seed, part), rows_of, makes.generator) for part, rows_of in _parts(out)])
        out = makes.maybe(0.7, out, at_snr(out, beds, draw(rows, 0.0, 30.0), lengths))
        out = makes.maybe(0.15, out, telephone(out))
        out = makes.maybe(0.1, out, mu_law(levelled(out, 0.1)))
        out = levelled(out * there, 10 ** (draw(rows, -36.0, -14.0) / 20))
        out = makes.maybe(0.1, out, clipped(out, makes.generator))
        return out.clamp(-1, 1)


def warp_bands(mel: Tensor, generator: torch.Generator, low: float = 0.86, high: float = 1.16) -> Tensor:
    """Log-mels whose bands stand higher or lower, as those of a shorter or longer throat.  # [batch, band, frame]"""
    bins = mel.shape[1]
    stretch = torch.rand(len(mel), 1, generator=generator, device=mel.device) * (high - low) + low
    place = (torch.arange(bins, device=mel.device) * stretch).clamp(max=bins - 1)  # [batch, band]
    below = place.floor()
    part = (place - below)[..., None]
    index = below.long()[..., None].expand_as(mel)
    return torch.lerp(mel.gather(1, index), mel.gather(1, (index + 1).clamp(max=bins - 1)), part)


def _parts(samples: Tensor) -> list[tuple[int, Tensor]]:
    return list(enumerate(samples.chunk(BEDS_A_BATCH)))


def _kind(seed: int, part: int) -> str:
    return NOISES[(seed * BEDS_A_BATCH + part) % len(NOISES)]
