"""Changes of sound that leave every word where it was, so that two hearings of a sentence can be compared."""

import torch
from torch import Tensor
from torch.nn import functional

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
KNOTS = 6  # of the mel axis, between which bands move together
FRAMES_A_KNOT = 12  # of time: about one sound


class AcousticAugmentation:
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


def warp_bands(
    mel: Tensor, generator: torch.Generator, low: float = 0.86, high: float = 1.16, moved: float = 2.0
) -> Tensor:
    """Log-mels of another throat: bands stand higher or lower, and here and there by up to `moved` bands besides.

    # [batch, band, frame]
    """
    rows, bins = mel.shape[:2]
    stretch = torch.rand(rows, 1, generator=generator, device=mel.device) * (high - low) + low
    knots = (torch.rand(rows, 1, KNOTS, generator=generator, device=mel.device) * 2 - 1) * moved
    apart = functional.interpolate(knots, size=bins, mode="linear", align_corners=True)[:, 0]
    place = (torch.arange(bins, device=mel.device) * stretch + apart).clamp(0, bins - 1)  # [batch, band]
    below = place.floor()
    part = (place - below)[..., None]
    index = below.long()[..., None].expand_as(mel)
    return torch.lerp(mel.gather(1, index), mel.gather(1, (index + 1).clamp(max=bins - 1)), part)


def other_lengths(
    ends: Tensor, frames: int, share: float, generator: torch.Generator, deviation: float = 0.35
) -> Tensor:
    """Where each frame is taken from if sounds last longer or shorter by chance, and rows as long as before.

    # frames [batch] → [batch, frame]
    """
    rows, device = len(ends), ends.device
    knots = torch.randn(rows, 1, frames // FRAMES_A_KNOT + 2, generator=generator, device=device) * deviation
    passed = functional.interpolate(knots, size=frames, mode="linear", align_corners=True)[:, 0].exp().cumsum(1)
    whole = passed.gather(1, (ends[:, None] - 1).clamp(0, frames - 1))
    time = torch.arange(frames, device=device).expand(rows, -1)
    changes = torch.rand(rows, 1, generator=generator, device=device) < share
    place = (passed / whole * ends[:, None] - 1).clamp(min=0)
    return torch.where(changes & (time < ends[:, None]), torch.minimum(place, ends[:, None] - 1.0), time.float())


def taken_at(mel: Tensor, place: Tensor) -> Tensor:
    """Log-mels at times between frames.  # [batch, band, frame], [batch, frame]"""
    below = place.floor()
    index = below.long()[:, None].expand_as(mel)
    after = (index + 1).clamp(max=mel.shape[2] - 1)
    return torch.lerp(mel.gather(2, index), mel.gather(2, after), (place - below)[:, None])


def _parts(samples: Tensor) -> list[tuple[int, Tensor]]:
    return list(enumerate(samples.chunk(BEDS_A_BATCH)))


def _kind(seed: int, part: int) -> str:
    return NOISES[(seed * BEDS_A_BATCH + part) % len(NOISES)]
