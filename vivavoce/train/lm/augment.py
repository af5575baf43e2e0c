"""Spoken sentences as an ear hears them in live sessions: silence around them, other voices, rooms and noises."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vivavoce.audio.mel import WhisperMel
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.train.augment import NOISES, Augmenter, at_snr, noise
from vivavoce.train.corpus import Corpus, Sounds, encode_batch
from vivavoce.train.features import BatchMel
from vivavoce.train.speech_encoder.batches import other_lengths, taken_at, warp_bands

RATE = 16_000
SLOWEST = 1.3  # how much longer an augmenter may make a sound
FLOOR_DB = (-100.0, -66.0)  # level of the rush that is under every microphone

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SilenceAugmentation:
    """Milliseconds of quiet before and after a sound, besides what the synthesizer leaves."""

    before: tuple[float, float] = (0.0, 0.0)
    after: tuple[float, float] = (0.0, 0.0)


NONE = SilenceAugmentation()
LIVE = SilenceAugmentation(before=(0.0, 330.0), after=(0.0, 250.0))


class CodeExtractor:
    """An ear, and a corpus on its device."""

    def __init__(self, encoder: SpeechEncoder, corpus: Corpus, device: torch.device | str) -> None:
        self.encoder = encoder.to(device).eval()
        self.sounds = Sounds(corpus, encoder.config, device)
        self.mel = BatchMel(encoder.config.num_mel_bins, device)
        self.device = torch.device(device)

    @torch.no_grad()
    def codes(
        self,
        chosen: NDArray[np.int64],
        silence: SilenceAugmentation,
        seed: int,
        change: Change | None = None,
        batch: int = 256,
    ) -> list[NDArray[np.int16]]:
        """Codes of the chosen sounds, in their order."""
        generator = torch.Generator(self.device).manual_seed(seed)
        found: dict[int, NDArray[np.int16]] = {}
        wanted = set(chosen.tolist())
        for group in self.sounds.alike(batch):
            here = np.array([index for index in group if int(index) in wanted], dtype=np.int64)
            if len(here):
                samples, lengths = self._surrounded(here, silence, generator)
                if change is not None:
                    samples, lengths = change(functional.pad(samples, (0, self._spare(samples))), lengths)
                found.update(zip(here.tolist(), self._encode(samples, lengths, change), strict=True))
        return [found[index] for index in chosen.tolist()]

    def _surrounded(
        self, chosen: NDArray[np.int64], silence: SilenceAugmentation, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Sounds with quiet around them and a rush under all.  # [row, time], [row]"""
        samples, _ = self.sounds.rows(chosen)
        lengths = torch.from_numpy(self.sounds.lengths[chosen]).to(self.device)
        before, after = (self._uniform(len(chosen), *span, generator) for span in (silence.before, silence.after))
        before, after = (before * RATE / 1000).long(), (after * RATE / 1000).long()
        total = before + lengths + after
        place = torch.arange(self._whole(int(total.max())), device=self.device) - before[:, None]
        heard = samples.gather(1, place.clamp(0, samples.shape[1] - 1))
        heard = heard.masked_fill((place < 0) | (place >= lengths[:, None]), 0.0)
        if silence is NONE:
            return heard, total
        level = 10 ** (self._uniform(len(chosen), *FLOOR_DB, generator) / 20)
        return heard + level[:, None] * torch.randn(heard.shape, generator=generator, device=self.device), total

    def _encode(self, samples: Tensor, lengths: Tensor, change: Change | None) -> list[NDArray[np.int16]]:
        per_code = self.sounds.samples_per_code
        whole = ((lengths + per_code - 1) // per_code * per_code).clamp(max=samples.shape[1])
        there = torch.arange(samples.shape[1], device=self.device) < lengths[:, None]
        mel, frames = self.mel(samples * there, whole, running=True), whole // WhisperMel.HOP
        if isinstance(change, Elsewhere):
            mel = change.of_mel(mel, frames)
        codes = encode_batch(self.encoder, mel, frames)
        flat = torch.cat(codes).to(torch.int16).cpu().numpy()
        return np.split(flat, np.cumsum([len(row) for row in codes])[:-1])

    def _whole(self, samples: int) -> int:
        return -(-samples // self.sounds.samples_per_code) * self.sounds.samples_per_code

    def _spare(self, samples: Tensor) -> int:
        return self._whole(int(samples.shape[1] * SLOWEST)) - samples.shape[1]

    def _uniform(self, count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
        return torch.rand(count, generator=generator, device=self.device) * (high - low) + low


class Elsewhere(Augmenter):
    """Changes of sounds, and of the mels made from them: other throats, and sounds that last longer or shorter."""

    def of_mel(self, mel: Tensor, frames: Tensor) -> Tensor:
        """Mels of rows of so many frames.  # [batch, band, frame], [batch]"""
        uneven = taken_at(mel, other_lengths(frames, mel.shape[2], 0.5, self.generator))
        return self.chance(0.5, warp_bands(uneven, self.generator), uneven)


def elsewhere(device: torch.device | str, seed: int, strength: float = 1.0) -> Change:
    """What makes each sound another person's, in another place."""
    return Elsewhere(device, seed, strength)


def over_noise(device: torch.device | str, seed: int, decibels: float) -> Change:
    """What lays a noise under each sound, of all kinds by turns, at one distance."""
    generator = torch.Generator(device).manual_seed(seed)
    turn = iter(range(1_000_000))

    def change(samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        bed = noise(NOISES[next(turn) % len(NOISES)], samples, generator)
        return at_snr(samples, bed, decibels, lengths).clamp(-1, 1), lengths

    return change


class Straying:
    """Moves codes of a lattice to others near them: by chance, and as a voice does, which always errs alike."""

    def __init__(self, levels: Sequence[int], device: torch.device | str) -> None:
        self.size = math.prod(levels)
        self.levels = torch.tensor(list(levels), device=device)
        self.strides = torch.tensor([math.prod(levels[place + 1 :]) for place in range(len(levels))], device=device)

    def __call__(self, codes: Tensor, chance: Tensor) -> Tensor:
        """Each number of a code moves by a step at a chance of its line, and again wherever its line's voice has it so.

        # [line, row], [line, 1] → [line, row]
        """
        lines, dimensions = codes.shape[0], len(self.levels)
        steps = codes[..., None] // self.strides % self.levels
        here = torch.rand((*codes.shape, dimensions), device=codes.device)
        of_voice = torch.rand((lines, self.size, dimensions), device=codes.device)
        of_voice = of_voice.gather(1, codes[..., None].expand(-1, -1, dimensions))
        chance = chance[..., None]
        moved = steps + _step(here, chance) + _step(of_voice, chance)
        return (moved.clamp(min=0).minimum(self.levels - 1) * self.strides).sum(-1)


def _step(drawn: Tensor, chance: Tensor) -> Tensor:
    return (drawn > 1 - chance / 2).long() - (drawn < chance / 2).long()
