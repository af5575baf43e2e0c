"""Batches for the speech encoder: every sentence clean and augmented, as log-mels with letters."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import InputError
from vivavoce.models.speech_encoder.model import SpeechEncoderConfig
from vivavoce.train.augment import AcousticAugmentation, at_positions, mask_mel, stretched_positions, warp_bands
from vivavoce.train.corpus import Corpus
from vivavoce.train.speech_encoder import BatchMel
from vivavoce.train.speech_encoder.letters import STEPS, letter_symbols

RATE = WhisperMel.RATE
MAX_LETTERS_PER_SECOND = 25  # faster speech is not trained on


@dataclass(frozen=True)
class EncoderBatchShape:
    """Fixed size of a batch, and maximum sentences per row."""

    seconds: float
    rows: int
    sentences: int = 1

    @property
    def samples(self) -> int:
        return round(self.seconds * RATE)

    @property
    def letters(self) -> int:
        return round(self.seconds * MAX_LETTERS_PER_SECOND)


@dataclass(frozen=True)
class EncoderBatchOptions:
    """Composition and augmentation of a batch; listed in `metrics.json` as `habits`."""

    reply_voice: float = 0.2  # share of rows in the reply voice, at its own pitch and tempo
    resampled: tuple[float, float] = (0.78, 1.28)
    as_recorded: float = 0.25  # share of the other rows that are not resampled
    lead: float = 0.4  # maximum seconds of silence before a sentence
    tail: float = 0.3  # maximum seconds of silence after the last
    gain: tuple[float, float] = (-9.0, 4.0)  # dB
    warped: float = 0.5  # share of clean rows whose mel axis is warped
    stretched: float = 0.5  # share of rows with random phone durations
    joined: float = 0.35  # relative frequency of rows with joined sentences
    random_offsets: float = 0.4  # share of rows with a random position offset, as in a long turn


@dataclass(frozen=True)
class EncoderSpeech:
    """A corpus on the device with its sentences as letter symbols."""

    samples: Tensor  # [time] int16
    starts: np.ndarray
    lengths: np.ndarray
    symbols: list[np.ndarray]
    is_reply_voice: np.ndarray

    @classmethod
    def of(cls, corpus: Corpus, reply_voices: Container[str], device: torch.device | str) -> "EncoderSpeech":
        starts = np.asarray(corpus.starts, dtype=np.int64)
        return cls(
            torch.as_tensor(corpus.samples).to(device),
            starts[:-1],
            np.diff(starts),
            [np.array(letter_symbols(text), dtype=np.int64) for text in corpus.texts],
            np.array([voice in reply_voices for voice in corpus.voices]),
        )


@dataclass(frozen=True)
class EncoderRows:
    """Plan of a batch: sentences, their starts, speed and gain of each row."""

    sentence: np.ndarray  # [row, slot]; −1 for none
    begin: np.ndarray  # [row, slot], samples
    speed: np.ndarray  # [row]
    gain: np.ndarray  # [row]
    ends: np.ndarray  # [row], samples


class EncoderBatches:
    """Batches of a few fixed shapes, drawn from one corpus."""

    def __init__(
        self,
        speech: EncoderSpeech,
        shapes: Sequence[EncoderBatchShape],
        config: SpeechEncoderConfig,
        acoustics: AcousticAugmentation,
        options: EncoderBatchOptions | None = None,
    ) -> None:
        self.speech, self.config, self.acoustics = speech, config, acoustics
        self.options = options or EncoderBatchOptions()
        self.shapes = tuple(shapes)
        self.device = speech.samples.device
        self.mel = BatchMel(config.num_mel_bins, self.device)
        self.pools = [
            self._pools(shape, smaller) for shape, smaller in zip(self.shapes, _next_shorter(shapes), strict=True)
        ]
        durations = np.array([speech.lengths[np.concatenate(pool)].sum() for pool in self.pools], dtype=np.float64)
        durations *= [1.0 if shape.sentences == 1 else self.options.joined for shape in self.shapes]
        if not durations.sum():
            raise InputError(f"no sentence of the corpus fits into {self.shapes[-1].seconds} s")
        self.shape_probabilities = durations / durations.sum()

    def batch(self, seed: int) -> dict[str, Tensor]:
        """The batch of a step: clean and augmented mels of the same sentences, and their symbols."""
        random = np.random.default_rng(seed)
        index = int(random.choice(len(self.shapes), p=self.shape_probabilities))
        shape = self.shapes[index]
        rows = self._plan(shape, self.pools[index], random)
        samples = self._cut(rows, shape)
        per_code = self.config.frames_per_code * WhisperMel.HOP
        codes = -(-rows.ends // per_code)
        lengths = self._to_device(codes * per_code)
        clean, augmented = self._mels(samples, lengths, rows, random, seed)
        symbols, counts = self._symbols(rows, shape)
        frames = self.config.segment_frames // 2 - shape.samples // (2 * WhisperMel.HOP)
        has_offset = random.random(shape.rows) < self.options.random_offsets
        starts = np.where(has_offset, random.integers(0, frames // STEPS, shape.rows) * STEPS, 0)
        return {
            "clean": clean,
            "augmented": augmented,
            "codes": self._to_device(codes),
            "symbols": self._to_device(symbols),
            "counts": self._to_device(counts),
            "starts": self._to_device(starts),
            "reply": self._to_device(self.speech.is_reply_voice[rows.sentence[:, 0]].astype(np.float32)),
        }

    def _pools(self, shape: EncoderBatchShape, shorter: float) -> tuple[np.ndarray, np.ndarray]:
        """Sentences for a shape: of other voices, and of the reply voice."""
        letter_counts = np.array([len(symbols) for symbols in self.speech.symbols])
        fits = (self.speech.lengths <= shape.samples) & (letter_counts > 0) & (letter_counts <= shape.letters)
        fits &= self.speech.lengths > (shorter * RATE if shape.sentences == 1 else 0)
        reply = self.speech.is_reply_voice
        return np.flatnonzero(fits & ~reply), np.flatnonzero(fits & reply)

    def _plan(
        self, shape: EncoderBatchShape, pools: tuple[np.ndarray, np.ndarray], random: np.random.Generator
    ) -> EncoderRows:
        options, others, replies = self.options, *pools
        share = 0.0 if not len(replies) else 1.0 if not len(others) else options.reply_voice
        is_reply = random.random(shape.rows) < share
        sentence = np.stack(
            [np.where(is_reply, _choose(replies, shape.rows, random), _choose(others, shape.rows, random))
             for _ in range(shape.sentences)], axis=1,
        )  # fmt: skip
        slowest, fastest = options.resampled
        speed = np.exp(random.uniform(np.log(slowest), np.log(fastest), shape.rows))
        speed[is_reply | (random.random(shape.rows) < options.as_recorded)] = 1.0
        speed = np.maximum(speed, self.speech.lengths[sentence[:, 0]] / shape.samples)
        gain = 10 ** (random.uniform(*options.gain, shape.rows) / 20)
        gain[is_reply] = 10 ** (random.uniform(-2, 2, is_reply.sum()) / 20)
        begin = np.zeros_like(sentence)
        ends = np.zeros(shape.rows, dtype=np.int64)
        letters = np.zeros(shape.rows, dtype=np.int64)
        for slot in range(shape.sentences):
            length = (self.speech.lengths[sentence[:, slot]] / speed).astype(np.int64)
            new_letters = np.array([len(self.speech.symbols[index]) + 1 for index in sentence[:, slot]])
            room = shape.samples - ends - length
            silence = (random.random(shape.rows) * np.clip(room, 0, options.lead * RATE)).astype(np.int64)
            fits = (room >= 0) & (letters + new_letters <= shape.letters + 1)
            fits |= slot == 0
            begin[:, slot] = ends + silence
            ends = np.where(fits, np.minimum(begin[:, slot] + length, shape.samples), ends)
            letters = np.where(fits, letters + new_letters, letters)
            sentence[:, slot] = np.where(fits, sentence[:, slot], -1)
        tail = (random.random(shape.rows) * options.tail * RATE).astype(np.int64)
        return EncoderRows(sentence, begin, speed, gain, np.minimum(ends + tail, shape.samples))

    def _cut(self, rows: EncoderRows, shape: EncoderBatchShape) -> Tensor:
        """The sentences of each row, resampled.  # [row, time]"""
        time = torch.arange(shape.samples, device=self.device)
        out = torch.zeros(len(rows.speed), shape.samples, device=self.device)
        speed = self._to_device(rows.speed.astype(np.float32))[:, None]
        for slot in range(shape.sentences):
            index = rows.sentence[:, slot]
            length = self._to_device(np.where(index >= 0, self.speech.lengths[index], 0))[:, None]
            start = self._to_device(self.speech.starts[index])[:, None]
            position = (time - self._to_device(rows.begin[:, slot])[:, None]) * speed
            out += self._read(start, length, position)
        return out * self._to_device((rows.gain / 32768).astype(np.float32))[:, None]

    def _read(self, start: Tensor, length: Tensor, position: Tensor) -> Tensor:
        """Catmull-Rom interpolation at fractional samples; silence outside the sentence."""
        whole = position.floor()
        fraction = position - whole
        index = whole.long()
        neighbours = []
        for step in (-1, 0, 1, 2):
            sample = index + step
            inside = (sample >= 0) & (sample < length)
            taken = self.speech.samples[(start + sample).clamp(0, len(self.speech.samples) - 1)]
            neighbours.append(taken.float().masked_fill(~inside, 0.0))
        a, b, c, d = neighbours
        slope = 0.5 * (c - a)
        bend = a - 2.5 * b + 2 * c - 0.5 * d
        twist = 0.5 * (d - a) + 1.5 * (b - c)
        return b + fraction * (slope + fraction * (bend + fraction * twist))

    def _mels(
        self, samples: Tensor, lengths: Tensor, rows: EncoderRows, random: np.random.Generator, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Clean and augmented log-mels, normalised as in streaming."""
        generator = torch.Generator(self.device).manual_seed(seed)
        noisy = self.acoustics(samples, lengths, seed)
        reply = self.speech.is_reply_voice[rows.sentence[:, 0]]
        frames = samples.shape[1] // WhisperMel.HOP
        ends = lengths // WhisperMel.HOP
        stretched = stretched_positions(ends, frames, self.options.stretched, generator)
        as_spoken = torch.arange(frames, device=self.device).float()
        position = torch.where(self._to_device(reply)[:, None], as_spoken, stretched)
        augmented = warp_bands(at_positions(self.mel(noisy, lengths, running=True), position), generator)
        clean = at_positions(self.mel(samples, lengths, running=True), position)
        warped = self._to_device((random.random(len(reply)) < self.options.warped) & ~reply)
        clean = torch.where(warped[:, None, None], warp_bands(clean, generator), clean)
        return clean, mask_mel(augmented, generator)

    def _symbols(self, rows: EncoderRows, shape: EncoderBatchShape) -> tuple[np.ndarray, np.ndarray]:
        symbols = np.zeros((len(rows.speed), shape.letters), dtype=np.int64)
        counts = np.zeros(len(rows.speed), dtype=np.int64)
        space = np.array(letter_symbols("a b"))[1:2]
        for row, slots in enumerate(rows.sentence):
            parts = [part for index in slots if index >= 0 for part in (space, self.speech.symbols[index])]
            joined = np.concatenate(parts[1:])
            symbols[row, : len(joined)] = joined
            counts[row] = len(joined)
        return symbols, counts

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)


def _next_shorter(shapes: Sequence[EncoderBatchShape]) -> list[float]:
    single = [shape.seconds for shape in shapes if shape.sentences == 1]
    return [max((seconds for seconds in single if seconds < shape.seconds), default=0.0) for shape in shapes]


def _choose(pool: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    return random.choice(pool, count) if len(pool) else np.full(count, -1)
