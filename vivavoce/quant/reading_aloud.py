"""How many words of texts read aloud a foreign recogniser misses: by a float voice, and by a quantised version of it.

A voice that draws its codes says a text otherwise each time, and a version that differs in one code has gone another
way from there on. So there are two trials. *Beside* float, a version draws at every place of float's own reading, by
the same noise: what differs is its opinion and nothing else. Since the divergence of two voices over whole readings is
the sum of theirs at the places of one, nothing builds up that this would hide. *Alone* it reads by itself, as a
listener hears it; how far chance goes there is told by an interval over texts, and by float reading once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vivavoce.asr.backends.moonshine import Moonshine
from vivavoce.audio.io import Sound
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import TEXT
from vivavoce.quant.report import misheard_words
from vivavoce.quant.speech_set import SpokenSample
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch
from vivavoce.train.front_desk import general_sentences, reply_sentences
from vivavoce.train.tts.train import SEED
from vivavoce.tts.interface import SpeechSettings
from vivavoce.tts.nano_cpu import SequenceDraw

KIND = "moss_tts_nano"
RESAMPLED, LEVEL = 2000, 95  # times; hundredths of them that an interval holds


@dataclass(frozen=True)
class Misses:
    """Words that were missed in each text, of how many."""

    wrong: tuple[int, ...]
    of: tuple[int, ...]

    @property
    def share(self) -> float:
        """In hundredths."""
        return 100 * sum(self.wrong) / max(1, sum(self.of))


@dataclass(frozen=True)
class TextSpan:
    """Between what bounds a difference lies in hundredths, as far as the texts at hand can tell."""

    points: float
    low: float
    high: float


def difference(before: Misses, after: Misses) -> TextSpan:
    """What the same texts lost; its interval is by drawing texts anew."""
    if not sum(before.of):
        return TextSpan(0.0, 0.0, 0.0)
    lost, of = (np.array(after.wrong) - before.wrong).astype(float), np.array(before.of, float)
    chosen = np.random.default_rng(0).integers(0, len(of), (RESAMPLED, len(of)))
    means = 100 * lost[chosen].sum(axis=1) / of[chosen].sum(axis=1)
    low, high = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return TextSpan(100 * float(lost.sum() / of.sum()), float(low), float(high))


def texts_to_read(count: int) -> list[str]:
    """Replies of a front desk, and as many sentences about anything that training never drew."""
    half = count // 2
    return [*reply_sentences(count - half, SEED), *general_sentences(half, SEED)]


class Readers:
    """A float voice's readings of some texts, and the trials of its other versions."""

    def __init__(self, source: Path, texts: Sequence[str], listener: Moonshine, draws: int = 1) -> None:
        self.texts, self.draws, self.listener = list(texts), draws, listener
        self.subject, self.settings = SUBJECTS[KIND], SpeechSettings.read(source)
        self.codec = MossAudioTokenizerNano.load(source / "codec")
        self._known: dict[tuple[str, bytes], tuple[int, int]] = {}
        self.lessons = self._readings(source)

    def own(self, draws: int = 1) -> Misses:
        """Of float's first readings of each text."""
        return self._heard([_codes(lesson) for lesson in self.lessons[: draws * len(self.texts)]])

    @torch.no_grad()
    def beside(self, model: nn.Module) -> Misses:
        """Of a version that draws at the places of float's first readings."""
        own = enumerate(self.lessons[: len(self.texts)])
        return self._heard([self._drawn(model, lesson, seed) for seed, lesson in own])

    def alone(self, folder: Path, skipped: int = 0) -> Misses:
        """Of a version that reads by itself; its first draws may be skipped."""
        return self._heard([_codes(lesson) for lesson in self._readings(folder, skipped)])

    def _readings(self, folder: Path, skipped: int = 0) -> list[CalibrationBatch]:
        items = [SpokenSample(text) for text in self.texts]
        return self.subject.lessons(folder, items * (skipped + self.draws))[skipped * len(items) :]

    def _drawn(self, model: nn.Module, lesson: CalibrationBatch, seed: int) -> Tensor:
        """What a version would have drawn given float's codes so far.  # [frame, codebook]"""
        books = lesson.rows.shape[1] - 1
        logits = self.subject.logits(model, lesson).unflatten(0, (-1, books)).numpy()
        samplings = self.settings.generation(books, 0, seed).per_channel(books + 1)
        draw, frames = SequenceDraw(samplings, seed, logits.shape[-1]), []
        for place, frame in enumerate(logits, start=lesson.start):
            draw.start_row(place)
            frames.append([draw.sample(TEXT + 1 + book, scores) for book, scores in enumerate(frame)])
        return torch.tensor(frames)

    def _heard(self, readings: Sequence[Tensor]) -> Misses:
        """The draws of one text are one item, because they are not independent of one another."""
        missed = [self._missed(text, codes) for text, codes in zip(cycle(self.texts), readings, strict=False)]
        wrong, of = np.reshape(missed, (-1, len(self.texts), 2)).sum(axis=0).T.tolist()
        return Misses(tuple(wrong), tuple(of))

    @torch.no_grad()
    def _missed(self, text: str, codes: Tensor) -> tuple[int, int]:
        key = (text, codes.numpy().tobytes())
        if key not in self._known:
            samples = self.codec.decode(codes.T[None])[0].float().numpy()
            heard = self.listener.transcribe(Sound(samples, self.codec.config.sample_rate))
            self._known[key] = misheard_words(text, heard)
        return self._known[key]


def _codes(lesson: CalibrationBatch) -> Tensor:
    return lesson.rows[lesson.start :, TEXT + 1 :]  # [frame, codebook]
