"""Measuring a speech encoder: what its probe reads from the codes of held-out voices, and how codes are used."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vivavoce.evaluation.scoring import error_rate
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.train.corpus import Corpus
from vivavoce.train.speech_encoder import BatchMel, Lattice, Probe, Sounds
from vivavoce.train.speech_encoder.letters import STEPS, read_symbols, spelled, words

NOISE_SNR_DB = 15.0
BATCH = 64


@dataclass(frozen=True)
class TrainedEncoder:
    """A trained encoder with its probe."""

    encoder: SpeechEncoder
    probe: Probe
    lattice: Lattice


@dataclass(frozen=True)
class ProbeOutput:
    """Codes of utterances and the texts that the probe reads from them."""

    codes: list[np.ndarray]
    read: list[str]
    read_unrounded: list[str]
    texts: list[str]


@torch.no_grad()
def read_back(
    trained: TrainedEncoder, corpus: Corpus, chosen: Sequence[int], noise: float | None = None
) -> ProbeOutput:
    """Encode utterances, clean or in pink noise, and read them with the probe; in the order of `chosen`."""
    device = trained.encoder.conv1.weight.device
    config = trained.encoder.config
    sounds, mel = Sounds(corpus, config, device), BatchMel(config.num_mel_bins, device)
    generator = torch.Generator(device).manual_seed(0)
    result = ProbeOutput([], [], [], [spelled(corpus.texts[index]) for index in chosen])
    for begin in range(0, len(chosen), BATCH):
        samples, lengths = sounds.rows(np.asarray(chosen[begin : begin + BATCH]))
        if noise is not None:
            samples = in_pink_noise(samples, lengths, noise, generator)
        features = trained.encoder.features(mel(samples, lengths, running=True))
        counts = lengths // sounds.samples_per_code
        codes = trained.encoder.nearest(features)
        result.codes.extend(row[:count].cpu().numpy() for row, count in zip(codes, counts.tolist(), strict=True))
        result.read.extend(_read_texts(trained.probe, trained.lattice.values(codes), counts))
        result.read_unrounded.extend(_read_texts(trained.probe, trained.lattice.bounded(features), counts))
    return result


def measure(
    trained: TrainedEncoder,
    held_out: Corpus,
    corpus: Corpus,
    reply_voices: Container[str],
    max_sentences: int = 600,
    seed: int = 0,
) -> dict[str, Any]:
    """Metrics on held-out voices and phrasings, on training data, and on the reply voices."""
    random = np.random.default_rng(seed)
    metrics: dict[str, Any] = {}
    replies = [index for index, voice in enumerate(corpus.voices) if voice in reply_voices]
    groups = {
        "held_out": (held_out, range(len(held_out.texts))),
        "training": (corpus, range(len(corpus.texts))),
        "reply_voice": (corpus, replies),
    }
    for name, (source, indices) in groups.items():
        chosen = random.permutation(np.array(indices, dtype=np.int64))[:max_sentences].tolist()
        if not chosen:
            continue
        clean, noisy = read_back(trained, source, chosen), read_back(trained, source, chosen, NOISE_SNR_DB)
        metrics[name] = {
            "sentences": len(chosen),
            "cer": _rate(clean.texts, clean.read),
            "cer_unrounded": _rate(clean.texts, clean.read_unrounded),
            "cer_15db": _rate(noisy.texts, noisy.read),
            "wer": _rate([words(text) for text in clean.texts], [words(text) for text in clean.read]),
            "same_code_15db": _share_equal(clean.codes, noisy.codes),
            **_usage(clean.codes, trained.lattice.size),
            "examples": [list(pair) for pair in zip(clean.texts[:5], clean.read[:5], strict=True)],
        }
        if name == "held_out":
            metrics["cer_by_voice"] = _by_voice([source.voices[index] for index in chosen], clean)
    return metrics


def in_pink_noise(samples: Tensor, lengths: Tensor, decibels: float, generator: torch.Generator) -> Tensor:
    """Add pink noise at an SNR.  # [batch, time]"""
    white = torch.randn(samples.shape, generator=generator, device=samples.device)
    spectrum = torch.fft.rfft(white)
    frequency = torch.arange(spectrum.shape[-1], device=samples.device).clamp(min=1)
    pink = torch.fft.irfft(spectrum / frequency.sqrt(), n=samples.shape[-1])
    is_inside = torch.arange(samples.shape[-1], device=samples.device) < lengths[:, None]
    speech = (samples.square() * is_inside).sum(1) / lengths
    gain = (speech / pink.square().mean(1) / 10 ** (decibels / 10)).sqrt()
    return samples + pink * gain[:, None]


def _read_texts(probe: Probe, levels: Tensor, counts: Tensor) -> list[str]:
    logits, _ = probe(levels, counts)
    best = logits.argmax(-1).tolist()
    return [read_symbols(row[: STEPS * count]) for row, count in zip(best, counts.tolist(), strict=True)]


def _share_equal(codes: list[np.ndarray], other_codes: list[np.ndarray]) -> float:
    equal = np.concatenate([a == b for a, b in zip(codes, other_codes, strict=True)])
    return round(float(equal.mean()), 4)


def _usage(codes: list[np.ndarray], size: int) -> dict[str, Any]:
    counts = np.bincount(np.concatenate(codes), minlength=size)
    shares = counts[counts > 0] / counts.sum()
    return {
        "codes": int(counts.sum()),
        "codes_used": int((counts > 0).sum()),
        "perplexity": round(math.exp(-(shares * np.log(shares)).sum()), 1),
    }


def _by_voice(voices: list[str], result: ProbeOutput) -> dict[str, float]:
    rates = {}
    for voice in sorted(set(voices)):
        chosen = [index for index, name in enumerate(voices) if name == voice]
        rates[voice] = _rate([result.texts[i] for i in chosen], [result.read[i] for i in chosen])
    return rates


def _rate(references: Sequence[Sequence[Any]], hypotheses: Sequence[Sequence[Any]]) -> float:
    return round(error_rate(references, hypotheses), 4)
