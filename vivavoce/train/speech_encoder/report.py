"""What a trained ear is worth: how well words can be read from its codes, and how steady and how many they are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vivavoce.evaluation.scoring import error_rate
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.train.corpus import Corpus, Sounds
from vivavoce.train.features import BatchMel
from vivavoce.train.front_desk.answers import normalise
from vivavoce.train.speech_encoder.model import STEPS, Lattice, Probe, read

NOISE = 15.0  # dB of signal to noise
BATCH = 64


@dataclass(frozen=True)
class EncoderReport:
    """A trained ear and what reads its codes."""

    encoder: SpeechEncoder
    probe: Probe
    lattice: Lattice


@dataclass(frozen=True)
class ReadBack:
    """Sounds as the ear took them."""

    codes: list[np.ndarray]
    read: list[str]
    read_unrounded: list[str]
    texts: list[str]


@torch.no_grad()
def listen(hearing: EncoderReport, corpus: Corpus, chosen: Sequence[int], noise: float | None = None) -> ReadBack:
    """Some sounds of a corpus, clean or in pink noise, in the order of `chosen`."""
    device = hearing.encoder.conv1.weight.device
    config = hearing.encoder.config
    sounds, mel = Sounds(corpus, config, device), BatchMel(config.num_mel_bins, device)
    generator = torch.Generator(device).manual_seed(0)
    heard = ReadBack([], [], [], [normalise(corpus.texts[index]) for index in chosen])
    for begin in range(0, len(chosen), BATCH):
        samples, lengths = sounds.rows(np.asarray(chosen[begin : begin + BATCH]))
        if noise is not None:
            samples = in_pink_noise(samples, lengths, noise, generator)
        features = hearing.encoder.features(mel(samples, lengths, running=True))
        counts = lengths // sounds.samples_per_code
        codes = hearing.encoder.nearest(features)
        heard.codes.extend(row[:count].cpu().numpy() for row, count in zip(codes, counts.tolist(), strict=True))
        heard.read.extend(_read(hearing.probe, hearing.lattice.values(codes), counts))
        heard.read_unrounded.extend(_read(hearing.probe, hearing.lattice.bounded(features), counts))
    return heard


def measure(
    hearing: EncoderReport, held_out: Corpus, corpus: Corpus, reply_voice: str, most: int = 600, seed: int = 0
) -> dict[str, Any]:
    """Figures of an ear on voices and phrasings it never heard, and on the reply voice."""
    random = np.random.default_rng(seed)
    metrics: dict[str, Any] = {}
    replies = [index for index, voice in enumerate(corpus.voices) if voice == reply_voice]
    groups = {
        "held_out": (held_out, range(len(held_out.texts))),
        "training": (corpus, range(len(corpus.texts))),
        "reply_voice": (corpus, replies),
    }
    for name, (source, every) in groups.items():
        chosen = random.permutation(np.array(every, dtype=np.int64))[:most].tolist()
        if not chosen:
            continue
        clean, noisy = listen(hearing, source, chosen), listen(hearing, source, chosen, NOISE)
        metrics[name] = {
            "sentences": len(chosen),
            "cer": _rate(clean.texts, clean.read),
            "cer_unrounded": _rate(clean.texts, clean.read_unrounded),
            "cer_15db": _rate(noisy.texts, noisy.read),
            "wer": _rate([text.split() for text in clean.texts], [text.split() for text in clean.read]),
            "same_code_15db": _same(clean.codes, noisy.codes),
            **_usage(clean.codes, hearing.lattice.size),
            "examples": [list(pair) for pair in zip(clean.texts[:5], clean.read[:5], strict=True)],
        }
        if name == "held_out":
            metrics["cer_by_voice"] = _by_voice([source.voices[index] for index in chosen], clean)
    return metrics


def in_pink_noise(samples: Tensor, lengths: Tensor, decibels: float, generator: torch.Generator) -> Tensor:
    """Sounds in noise whose power falls with frequency, so many dB under the speech.  # [batch, time]"""
    white = torch.randn(samples.shape, generator=generator, device=samples.device)
    spectrum = torch.fft.rfft(white)
    frequency = torch.arange(spectrum.shape[-1], device=samples.device).clamp(min=1)
    pink = torch.fft.irfft(spectrum / frequency.sqrt(), n=samples.shape[-1])
    there = torch.arange(samples.shape[-1], device=samples.device) < lengths[:, None]
    speech = (samples.square() * there).sum(1) / lengths
    gain = (speech / pink.square().mean(1) / 10 ** (decibels / 10)).sqrt()
    return samples + pink * gain[:, None]


def _read(probe: Probe, levels: Tensor, counts: Tensor) -> list[str]:
    logits, _ = probe(levels, counts)
    best = logits.argmax(-1).tolist()
    return [read(row[: STEPS * count]) for row, count in zip(best, counts.tolist(), strict=True)]


def _same(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    equal = np.concatenate([a == b for a, b in zip(some, others, strict=True)])
    return round(float(equal.mean()), 4)


def _usage(codes: list[np.ndarray], size: int) -> dict[str, Any]:
    counts = np.bincount(np.concatenate(codes), minlength=size)
    shares = counts[counts > 0] / counts.sum()
    return {
        "codes": int(counts.sum()),
        "codes_used": int((counts > 0).sum()),
        "perplexity": round(math.exp(-(shares * np.log(shares)).sum()), 1),
    }


def _by_voice(voices: list[str], heard: ReadBack) -> dict[str, float]:
    rates = {}
    for voice in sorted(set(voices)):
        mine = [index for index, name in enumerate(voices) if name == voice]
        rates[voice] = _rate([heard.texts[i] for i in mine], [heard.read[i] for i in mine])
    return rates


def _rate(meant: Sequence[Sequence[Any]], got: Sequence[Sequence[Any]]) -> float:
    """An error rate as it is told."""
    return round(error_rate(meant, got), 4)
