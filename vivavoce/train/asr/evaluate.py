"""Evaluate a trained ASR model: batched greedy transcription, error rates, and the choice of alignment heads."""

import argparse
import re
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.audio.io import read
from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import InputError
from vivavoce.evaluation.asterisk_prompts import PACKAGE, prompt_files
from vivavoce.evaluation.scoring import edit_distance
from vivavoce.models.whisper.alignment import cross_attention_weights
from vivavoce.models.whisper.decoding import LogitRule, Suppress, decode
from vivavoce.models.whisper.model import Whisper
from vivavoce.train import add_option
from vivavoce.train.asr import LANGUAGE, Vocabulary
from vivavoce.train.asr.batches import RATE, Recordings
from vivavoce.train.augment import at_snr, noise
from vivavoce.train.corpus import FULL_SCALE, Corpus
from vivavoce.train.front_desk.answers import normalise

Padding = Literal["full", "trim"]
CONDITIONS: tuple[tuple[str, Padding, float | None], ...] = (
    ("whole windows", "full", None),
    ("trimmed windows", "trim", None),
    ("at 15 dB", "full", 15.0),
)
MIN_SAMPLES = 2 * RATE  # as short as training windows get
ROWS = 64
MAX_TOKENS = 100  # no evaluated sentence is longer; stops texts that do not end
ALIGNMENT_HEADS = 4
POSITIONS_PER_SECOND = 50
POCKETSPHINX = Path("/usr/share/pocketsphinx/test/data")


def human_recordings() -> list[tuple[NDArray[np.float32], str, str]]:
    """Human speech with known texts at 16 kHz: samples, text, Debian package; empty if none is installed."""
    prompts = [(read(file, rate=RATE).samples[0], text, PACKAGE) for file, text in prompt_files()]
    return [*prompts, *_pocketsphinx_clips()]


def _pocketsphinx_clips() -> Iterator[tuple[NDArray[np.float32], str, str]]:
    """LibriVox sentences and card names (Debian: pocketsphinx-testdata)."""
    for transcript in (POCKETSPHINX / "librivox" / "transcription", POCKETSPHINX / "cards" / "cards.transcription"):
        lines = transcript.read_text().splitlines() if transcript.exists() else []
        for text, name in (match.groups() for line in lines if (match := re.match(r"<s>(.*)</s>\s*\((.*)\)", line))):
            with wave.open(str(transcript.with_name(f"{name}.wav"))) as file:
                samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / FULL_SCALE
            yield samples, text.strip(), "pocketsphinx-testdata"


@dataclass(frozen=True)
class RecognitionScores:
    """Word and character errors, and the worst hypotheses with their references."""

    words: int
    word_errors: int
    letters: int
    letter_errors: int
    sentences: int
    right_sentences: int
    worst: list[tuple[str, str]]

    @property
    def word_error_rate(self) -> float:
        return self.word_errors / max(1, self.words)

    def line(self) -> str:
        letters = self.letter_errors / max(1, self.letters)
        whole = self.right_sentences / max(1, self.sentences)
        return f"WER {self.word_error_rate:.1%}  CER {letters:.1%}  whole sentences {whole:.1%} of {self.sentences}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "wer": round(self.word_error_rate, 4),
            "cer": round(self.letter_errors / max(1, self.letters), 4),
            "right_sentences": round(self.right_sentences / max(1, self.sentences), 4),
            "sentences": self.sentences,
            "worst": self.worst,
        }


def score_texts(hypotheses: Sequence[str], references: Sequence[str], shown: int = 12) -> RecognitionScores:
    """Score hypotheses against references, both normalised."""
    pairs = [
        (normalise(hypothesis), normalise(reference))
        for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]
    by_words = [edit_distance(hypothesis.split(), reference.split()) for hypothesis, reference in pairs]
    by_letters = [edit_distance(hypothesis, reference) for hypothesis, reference in pairs]
    order = sorted(range(len(pairs)), key=lambda index: -by_words[index])
    return RecognitionScores(
        words=sum(len(reference.split()) for _, reference in pairs),
        word_errors=sum(by_words),
        letters=sum(len(reference) for _, reference in pairs),
        letter_errors=sum(by_letters),
        sentences=len(pairs),
        right_sentences=sum(errors == 0 for errors in by_words),
        worst=[pairs[index] for index in order[:shown] if by_words[index]],
    )


@torch.inference_mode()
def transcribe_all(
    model: Whisper,
    vocabulary: Vocabulary,
    recordings: Recordings,
    padding: Padding = "full",
    decibels: float | None = None,
    rows: int = ROWS,
) -> list[str]:
    """Greedy text of each recording, cut at one window; with `trim`, a window is as long as its longest row.

    With `decibels`, pink noise is added at that SNR.
    """
    tokens = vocabulary.tokens
    rules: list[LogitRule] = [Suppress([*tokens.specials, *range(tokens.notimestamps, vocabulary.size)])]
    order = sorted(range(len(recordings)), key=lambda index: int(recordings.lengths[index]))
    texts = [""] * len(recordings)
    generator = torch.Generator(recordings.samples.device).manual_seed(0)
    mel = WhisperMel(model.config.num_mel_bins).to(recordings.samples.device)
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        windows = windows_of(model, recordings, chosen, padding)
        if decibels is not None:
            lengths = recordings.lengths[chosen].to(windows.device)
            windows = at_snr(windows, noise("pink", windows, generator), decibels, lengths)
        memory = model.decoder.cross_kv(model.encoder(mel(windows)))
        prompt = tokens.prompt(LANGUAGE)
        max_tokens = min(MAX_TOKENS, model.config.max_target_positions - len(prompt))
        decoded = decode(model, tokens, memory, [prompt] * len(chosen), rules, max_tokens=max_tokens)
        for index, text in zip(chosen, decoded, strict=True):
            texts[index] = vocabulary.decode(text.tokens).strip()
    return texts


def windows_of(model: Whisper, recordings: Recordings, chosen: Sequence[int], padding: Padding) -> Tensor:
    """The chosen recordings, padded with zeros.  # [row, time]"""
    max_samples = int(model.config.window_seconds * RATE)
    lengths = [min(max_samples, int(recordings.lengths[index])) for index in chosen]
    size = max_samples if padding == "full" else min(max_samples, max(MIN_SAMPLES, -(-max(lengths) // 320) * 320))
    windows = torch.zeros(len(chosen), size, device=recordings.samples.device)
    for row, (index, length) in enumerate(zip(chosen, lengths, strict=True)):
        start = int(recordings.starts[index])
        windows[row, :length] = recordings.samples[start : start + length].float() / 32768.0
    return windows


def _human_corpus(model: Whisper) -> Corpus:
    """Human recordings that fit in a window."""
    max_samples = int(model.config.window_seconds * RATE)
    recordings = [recorded for recorded in human_recordings() if len(recorded[0]) <= max_samples]
    if not recordings:
        raise InputError(
            "no human recordings are installed: apt install asterisk-core-sounds-en-g722 pocketsphinx-testdata"
        )
    return Corpus.of([((samples * 32767).astype(np.int16), text, source) for samples, text, source in recordings])


@torch.inference_mode()
def timing_heads(
    model: Whisper, vocabulary: Vocabulary, recordings: Recordings, count: int = ALIGNMENT_HEADS
) -> list[tuple[int, int]]:
    """Layer and head of the alignment heads: those whose attention moves most steadily through the audio."""
    config, tokens = model.config, vocabulary.tokens
    pairs = [(layer, head) for layer in range(config.decoder_layers) for head in range(config.decoder_attention_heads)]
    prompt = tokens.prompt(LANGUAGE)
    mel = WhisperMel(config.num_mel_bins).to(recordings.samples.device)
    steadiness_sums = torch.zeros(len(pairs))
    for index, text in enumerate(recordings.texts):
        windows = windows_of(model, recordings, [index], "full")
        memory = model.decoder.cross_kv(model.encoder(mel(windows)))
        room = config.max_target_positions - len(prompt) - 1
        text_tokens = torch.tensor([[*prompt, *vocabulary.encode(text)[:room]]], device=windows.device)
        positions = min(int(recordings.lengths[index]), windows.shape[1]) * POSITIONS_PER_SECOND // RATE + 1
        attention = cross_attention_weights(model.decoder, text_tokens, memory, pairs, positions)[
            0, :, len(prompt) - 1 :
        ]
        steadiness_sums += steadiness(attention).cpu()
    best = steadiness_sums.topk(min(count, len(pairs))).indices.sort().values
    return [pairs[index] for index in best.tolist()]


def steadiness(attention: Tensor) -> Tensor:
    """Correlation of the centre of attention with the token index, for each head.

    # [head, token, position] → [head]
    """
    positions = torch.arange(attention.shape[-1], device=attention.device, dtype=torch.float32)
    middle = (attention.float() * positions).sum(-1) / attention.float().sum(-1)
    steps = torch.arange(attention.shape[1], device=attention.device, dtype=torch.float32)
    steps, middle = steps - steps.mean(), middle - middle.mean(-1, keepdim=True)
    return (middle * steps).sum(-1) / (middle.norm(dim=-1) * steps.norm()).clamp_min(1e-6)


def main(arguments: Sequence[str] | None = None) -> None:
    """`viva train evaluate-asr --model DIR --corpus PATH`: error rates of a saved model."""
    parser = argparse.ArgumentParser(
        description="Word error rates of a trained mini-asr on a corpus, or on human recordings."
    )
    parser.add_argument("--model", type=Path, required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", type=Path)
    add_option(
        source, "--human-recordings", "--people", action="store_true", help="human recordings from Debian packages"
    )
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    model, vocabulary = Whisper.load(options.model, options.device), Vocabulary.read(options.model)
    recordings = Recordings.of_corpus(_human_corpus(model) if options.human_recordings else Corpus.load(options.corpus))
    recordings = recordings.to(options.device)
    for condition, padding, decibels in CONDITIONS:
        texts = transcribe_all(model, vocabulary, recordings, padding, decibels)
        scores = score_texts(texts, recordings.texts)
        print(f"{condition}: {scores.line()}")
        for hypothesis, reference in scores.worst[:5]:
            print(f"    {reference!r} was transcribed as {hypothesis!r}")


if __name__ == "__main__":
    main()
