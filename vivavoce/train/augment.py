"""Augmentation of audio (speed, equaliser, reverberation, noise, telephone line) and of log-mels.

Batched on the device, seeded, and without host synchronisation.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

RATE = 16_000
TAPS = 16  # of the windowed-sinc interpolator
BEDS_A_BATCH = 2  # kinds of noise per batch: generating all would cost more than training
KNOTS = 6  # random shifts along the mel axis, interpolated
FRAMES_A_KNOT = 12  # about one phone
NOISES = ("white", "pink", "brown", "hum", "babble", "cafe")


class Augmenter:
    """Random changes of speaker, room, noise and line for each utterance of a batch; shapes stay."""

    def __init__(self, device: torch.device | str, seed: int, strength: float = 1.0) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.strength = strength
        self.batches = 0

    @torch.no_grad()
    def __call__(self, samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Augmented samples [batch, time] and lengths; audio that a stretch moves past the end is cut off."""
        draw = self.uniform
        factor = 1 + self.strength * (draw(len(samples), 0.78, 1.28) - 1)
        samples, lengths = resample(samples, lengths, self.apply_to_share(0.8, factor, torch.ones_like(factor)))
        spoken = inside(lengths, samples.shape[1])
        samples = self.change_share(0.6, samples, equalise(samples, self.generator, 12.0 * self.strength))
        samples = self.change_share(0.5, samples, reverberate(samples, draw(len(samples), 0.1, 0.6), self.generator))
        samples = self.change_share(0.7, samples, self._with_noise(samples, lengths))
        samples = self.change_share(0.15, samples, telephone(samples))
        samples = self.change_share(0.1, samples, mu_law(levelled(samples, 0.1)))
        samples = levelled(samples * spoken, 10 ** (draw(len(samples), -36.0, -14.0) / 20))
        samples = (
            samples * (lengths[:, None] / samples.shape[1]).clamp_min(0.05).sqrt()
        )  # level of the speech without padding
        samples = self.change_share(0.1, samples, clipped(samples, self.generator))
        return (samples * spoken).clamp(-1, 1), lengths

    def uniform(self, count: int, low: float, high: float) -> Tensor:
        return torch.rand(count, generator=self.generator, device=self.device) * (high - low) + low

    def apply_to_share(self, share: float, changed: Tensor, unchanged: Tensor) -> Tensor:
        """Each utterance changed with this probability (scaled by the strength)."""
        applied = torch.rand(len(changed), generator=self.generator, device=self.device) < share * min(
            1.0, self.strength
        )
        return torch.where(applied.view(-1, *[1] * (changed.ndim - 1)), changed, unchanged)

    def change_share(self, share: float, unchanged: Tensor, changed: Tensor) -> Tensor:
        """`apply_to_share` with its arguments in reading order for a chain of changes."""
        return self.apply_to_share(share, changed, unchanged)

    def _with_noise(self, samples: Tensor, lengths: Tensor) -> Tensor:
        """Add noise at 0 to 30 dB SNR; each kind is generated only for its share of rows."""
        first_kind = self.batches % len(NOISES)
        self.batches += 1
        order = torch.rand(len(samples), generator=self.generator, device=self.device).argsort()
        bed = torch.empty_like(samples)
        for kind, rows in zip(NOISES[first_kind:] + NOISES[:first_kind], order.chunk(len(NOISES)), strict=False):
            bed[rows] = noise(kind, samples[rows], self.generator)
        return at_snr(samples, bed, self.uniform(len(samples), 0.0, 30.0), lengths)


def inside(lengths: Tensor, time: int) -> Tensor:
    """Mask: 1 inside the utterance, 0 after its end.  # [batch, time]"""
    return (torch.arange(time, device=lengths.device) < lengths[:, None]).float()


def resample(samples: Tensor, lengths: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Resample by a factor per utterance: tempo, pitch and formants change together. The shape stays."""
    time = samples.shape[1]
    spectrum = torch.fft.rfft(samples, dim=-1)
    frequency = torch.linspace(0, 1, spectrum.shape[1], device=samples.device)
    spectrum = spectrum * (frequency < 1 / factor.clamp_min(1.0)[:, None])  # anti-aliasing
    source = torch.fft.irfft(spectrum, n=time, dim=-1)
    position = torch.arange(time, device=samples.device)[None] * factor[:, None]  # [batch, time]
    whole = position.floor()
    fraction = position - whole
    output = torch.zeros_like(samples)
    for offset in range(1 - TAPS // 2, TAPS // 2 + 1):
        index = whole.long() + offset
        taken = source.gather(1, index.clamp(0, time - 1)) * ((index >= 0) & (index < time))
        output = output + taken * _tap(fraction - offset)
    new_lengths = (lengths / factor).ceil().long().clamp(max=time)
    return output * inside(new_lengths, time), new_lengths


def _tap(distance: Tensor) -> Tensor:
    return torch.sinc(distance) * torch.cos(math.pi * distance / TAPS).square()


def equalise(samples: Tensor, generator: torch.Generator, decibels: float = 12.0, bands: int = 8) -> Tensor:
    """A smooth random frequency response per utterance, within ± `decibels`."""
    spectrum = torch.fft.rfft(samples, dim=-1)
    points = torch.rand(len(samples), 1, bands, generator=generator, device=samples.device) * 2 - 1
    curve = F.interpolate(points, size=spectrum.shape[1], mode="linear", align_corners=True)[:, 0]
    return torch.fft.irfft(spectrum * 10 ** (curve * decibels / 20), n=samples.shape[1], dim=-1)


def reverberate(samples: Tensor, reverberation_seconds: Tensor, generator: torch.Generator) -> Tensor:
    """A random room per utterance: direct sound, early reflections, and a tail with the given RT60."""
    size = int(0.5 * RATE)
    clock = torch.arange(size, device=samples.device) / RATE
    tail = torch.randn(len(samples), size, generator=generator, device=samples.device)
    tail = tail * torch.exp(-6.908 * clock / reverberation_seconds[:, None]) * (clock > 0.002)
    early = torch.rand(len(samples), size, generator=generator, device=samples.device) < 0.004
    response = tail * (0.3 + 3.0 * early * (clock < 0.08))
    energy = response.square().sum(1, keepdim=True).sqrt() + 1e-9
    wetness = torch.rand(len(samples), 1, generator=generator, device=samples.device) * 0.9 + 0.1
    response = response / energy * wetness
    response[:, 0] = 1.0
    return convolve(samples, response)


def convolve(samples: Tensor, response: Tensor) -> Tensor:
    """Causal convolution with a response per utterance; the tail past the end is dropped."""
    size = samples.shape[1] + response.shape[1]
    product = torch.fft.rfft(samples, n=size) * torch.fft.rfft(response, n=size)
    return torch.fft.irfft(product, n=size)[:, : samples.shape[1]]


def noise(kind: str, samples: Tensor, generator: torch.Generator) -> Tensor:
    """Noise of one of NOISES in the shape of the samples at unit level; babble is mixed from the batch itself."""
    return _BEDS[kind](samples, generator)


def _coloured(exponent: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    def bed(samples: Tensor, generator: torch.Generator) -> Tensor:
        white = torch.randn(samples.shape, generator=generator, device=samples.device)
        spectrum = torch.fft.rfft(white, dim=-1)
        frequency = torch.arange(spectrum.shape[1], device=samples.device) * (RATE / samples.shape[1])
        return levelled(torch.fft.irfft(spectrum * frequency.clamp_min(50.0) ** -exponent, n=samples.shape[1]), 1.0)

    return bed


def _hum(samples: Tensor, generator: torch.Generator) -> Tensor:
    """Mains hum with harmonics, and fan noise."""
    batch, time = samples.shape
    mains = torch.where(torch.rand(batch, 1, generator=generator, device=samples.device) < 0.5, 50.0, 60.0)
    clock = torch.arange(time, device=samples.device) / RATE
    loudness = torch.rand(batch, 8, generator=generator, device=samples.device)
    tones = sum(
        loudness[:, harmonic - 1 : harmonic] * torch.sin(2 * math.pi * harmonic * mains * clock) / harmonic
        for harmonic in range(1, 9)
    )
    return levelled(tones + 0.3 * _coloured(1.0)(samples, generator), 1.0)


def _babble(samples: Tensor, generator: torch.Generator, voices: int = 5) -> Tensor:
    """Other utterances of the batch, reversed and shifted, so that no word is intelligible."""
    total = torch.zeros_like(samples)
    loud = levelled(samples, 1.0)
    for _ in range(voices):
        order = torch.rand(len(samples), generator=generator, device=samples.device).argsort()
        shift = torch.randint(samples.shape[1], (len(samples), 1), generator=generator, device=samples.device)
        index = (torch.arange(samples.shape[1], device=samples.device) + shift) % samples.shape[1]
        total = total + loud[order].gather(1, index).flip(1)
    return levelled(total, 1.0)


def _cafe(samples: Tensor, generator: torch.Generator) -> Tensor:
    """Reverberant babble of changing level, with background noise and an occasional clink."""
    voices = _babble(samples, generator, voices=8)
    seconds = torch.full((len(samples),), 0.5, device=samples.device)
    swell = torch.rand(len(samples), 1, 12, generator=generator, device=samples.device) * 0.8 + 0.4
    hall = reverberate(voices, seconds, generator) * F.interpolate(swell, size=samples.shape[1], mode="linear")[:, 0]
    strike = torch.rand(samples.shape, generator=generator, device=samples.device) < 1 / RATE
    clock = torch.arange(RATE // 10, device=samples.device) / RATE
    clink = torch.sin(2 * math.pi * 3200 * clock) * torch.exp(-60 * clock)
    clinks = convolve(strike.float(), clink.expand(len(samples), -1))
    return levelled(levelled(hall, 1.0) + 0.3 * _coloured(0.5)(samples, generator) + 1.5 * clinks, 1.0)


_BEDS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "white": _coloured(0.0),
    "pink": _coloured(0.5),
    "brown": _coloured(1.0),
    "hum": _hum,
    "babble": _babble,
    "cafe": _cafe,
}


def at_snr(samples: Tensor, bed: Tensor, decibels: Tensor | float, lengths: Tensor | None = None) -> Tensor:
    """Add a noise bed at an SNR, both measured inside the utterance."""
    inside_mask = torch.ones_like(samples) if lengths is None else inside(lengths, samples.shape[1])
    count = inside_mask.sum(1, keepdim=True).clamp_min(1.0)
    speech_power = (samples * inside_mask).square().sum(1, keepdim=True) / count
    noise_power = (bed * inside_mask).square().sum(1, keepdim=True) / count
    gain = 10 ** (-(decibels[:, None] if isinstance(decibels, Tensor) else decibels) / 20)
    return samples + bed * (speech_power / noise_power.clamp_min(1e-12)).sqrt() * gain


def levelled(samples: Tensor, level: Tensor | float) -> Tensor:
    """Scale each row to this RMS level."""
    current = samples.square().mean(-1, keepdim=True).sqrt()
    return samples * ((level[:, None] if isinstance(level, Tensor) else level) / current.clamp_min(1e-6))


def telephone(samples: Tensor) -> Tensor:
    """Telephone band: 300 to 3400 Hz with soft edges."""
    spectrum = torch.fft.rfft(samples, dim=-1)
    frequency = torch.arange(spectrum.shape[1], device=samples.device) * (RATE / samples.shape[1])
    passed = torch.sigmoid((frequency - 300) / 25) * torch.sigmoid((3400 - frequency) / 60)
    return torch.fft.irfft(spectrum * passed, n=samples.shape[1], dim=-1)


def mu_law(samples: Tensor) -> Tensor:
    """G.711 µ-law quantisation."""
    limited = samples.clamp(-1, 1)
    compressed = limited.sign() * torch.log1p(255 * limited.abs()) / math.log(256)
    coded = (compressed * 127).round() / 127
    return coded.sign() * (torch.exp(coded.abs() * math.log(256)) - 1) / 255


def clipped(samples: Tensor, generator: torch.Generator) -> Tensor:
    """Clip at 25 to 90 % of each utterance's peak."""
    height = torch.rand(len(samples), 1, generator=generator, device=samples.device) * 0.65 + 0.25
    limit = samples.abs().amax(1, keepdim=True) * height
    return samples.clamp(-limit, limit)


def mask_mel(
    mel: Tensor, generator: torch.Generator, bands: int = 2, band: int = 14, spans: int = 3, span: int = 25
) -> Tensor:
    """SpecAugment on log-mels [batch, mel, frame]: random bands and time spans replaced by the utterance's mean."""
    is_masked = torch.zeros_like(mel, dtype=torch.bool)
    for count, widest, axis in ((bands, band, 1), (spans, span, 2)):
        size = mel.shape[axis]
        indices = torch.arange(size, device=mel.device)
        for _ in range(count):
            width = torch.rand(len(mel), 1, generator=generator, device=mel.device) * widest
            start = torch.rand(len(mel), 1, generator=generator, device=mel.device) * (size - width)
            covered = (indices >= start) & (indices < start + width)
            is_masked = is_masked | (covered[:, :, None] if axis == 1 else covered[:, None, :])
    return torch.where(is_masked, mel.mean(dim=(1, 2), keepdim=True), mel)


class AcousticAugmentation:
    """Room, noise and line augmentation of an `Augmenter`, without speed changes."""

    def __init__(self, device: torch.device | str, strength: float = 1.0) -> None:
        self.device, self.strength = device, strength

    @torch.no_grad()
    def __call__(self, samples: Tensor, lengths: Tensor, seed: int) -> Tensor:
        """Deterministic for a seed.  # [batch, time], [batch] → [batch, time]"""
        if not self.strength:
            return samples
        augmenter = Augmenter(self.device, seed, self.strength)
        rows, draw = len(samples), augmenter.uniform
        inside_mask = torch.arange(samples.shape[1], device=samples.device) < lengths[:, None]
        out = augmenter.change_share(0.6, samples, equalise(samples, augmenter.generator, 12.0 * self.strength))
        out = augmenter.change_share(0.5, out, reverberate(out, draw(rows, 0.1, 0.6), augmenter.generator))
        beds = torch.cat([noise(_kind(seed, part), rows_of, augmenter.generator) for part, rows_of in _parts(out)])
        out = augmenter.change_share(0.7, out, at_snr(out, beds, draw(rows, 0.0, 30.0), lengths))
        out = augmenter.change_share(0.15, out, telephone(out))
        out = augmenter.change_share(0.1, out, mu_law(levelled(out, 0.1)))
        out = levelled(out * inside_mask, 10 ** (draw(rows, -36.0, -14.0) / 20))
        out = augmenter.change_share(0.1, out, clipped(out, augmenter.generator))
        return out.clamp(-1, 1)


def warp_bands(
    mel: Tensor, generator: torch.Generator, low: float = 0.86, high: float = 1.16, max_shift: float = 2.0
) -> Tensor:
    """Vocal tract length perturbation: scale the mel axis, and shift bands locally by up to `max_shift` bands.

    # [batch, band, frame]
    """
    rows, bins = mel.shape[:2]
    stretch = torch.rand(rows, 1, generator=generator, device=mel.device) * (high - low) + low
    knots = (torch.rand(rows, 1, KNOTS, generator=generator, device=mel.device) * 2 - 1) * max_shift
    offset = F.interpolate(knots, size=bins, mode="linear", align_corners=True)[:, 0]
    position = (torch.arange(bins, device=mel.device) * stretch + offset).clamp(0, bins - 1)  # [batch, band]
    below = position.floor()
    fraction = (position - below)[..., None]
    index = below.long()[..., None].expand_as(mel)
    return torch.lerp(mel.gather(1, index), mel.gather(1, (index + 1).clamp(max=bins - 1)), fraction)


def stretched_positions(
    ends: Tensor, frames: int, share: float, generator: torch.Generator, deviation: float = 0.35
) -> Tensor:
    """Source positions of frames under random local time stretching; row lengths stay.

    # frames [batch] → [batch, frame]
    """
    rows, device = len(ends), ends.device
    knots = torch.randn(rows, 1, frames // FRAMES_A_KNOT + 2, generator=generator, device=device) * deviation
    warped = F.interpolate(knots, size=frames, mode="linear", align_corners=True)[:, 0].exp().cumsum(1)
    total = warped.gather(1, (ends[:, None] - 1).clamp(0, frames - 1))
    time = torch.arange(frames, device=device).expand(rows, -1)
    is_stretched = torch.rand(rows, 1, generator=generator, device=device) < share
    position = (warped / total * ends[:, None] - 1).clamp(min=0)
    return torch.where(
        is_stretched & (time < ends[:, None]), torch.minimum(position, ends[:, None] - 1.0), time.float()
    )


def at_positions(mel: Tensor, position: Tensor) -> Tensor:
    """Log-mels interpolated at fractional frames.  # [batch, band, frame], [batch, frame]"""
    below = position.floor()
    index = below.long()[:, None].expand_as(mel)
    above = (index + 1).clamp(max=mel.shape[2] - 1)
    return torch.lerp(mel.gather(2, index), mel.gather(2, above), (position - below)[:, None])


def _parts(samples: Tensor) -> list[tuple[int, Tensor]]:
    return list(enumerate(samples.chunk(BEDS_A_BATCH)))


def _kind(seed: int, part: int) -> str:
    return NOISES[(seed * BEDS_A_BATCH + part) % len(NOISES)]
