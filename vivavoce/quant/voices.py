"""Comparison of the audio of two versions of a model, teacher-forced (aligned) and free-running (alone).

Aligned audio: at every position each version takes its argmax code given the float model's history, so both have the
same length and can be compared sample by sample. Free-running audio is what a listener would hear.

`Readers` counts the words an independent recogniser misses in texts read aloud. A sampled reading differs each time, so
there are two trials. *Beside* float, a version samples at every position of float's reading with the same noise, which
isolates the effect of its logits; the divergence over whole readings is the sum over positions, so no error accumulates
that this would hide. *Alone* it runs freely; the spread by chance is given by a bootstrap interval over texts, and by
float reading once more.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vivavoce.asr.backends import Moonshine
from vivavoce.audio.io import Sound
from vivavoce.engine.sampling import Generation
from vivavoce.evaluation.scoring import word_errors
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_speech.codec import DECODER_RATE
from vivavoce.models.moss_speech.model import AUDIO
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Turn
from vivavoce.models.moss_tts_nano.model import TEXT
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.quant.speech_sets import SpokenSample
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch, QuantSubject
from vivavoce.s2s.moss_speech import load_moss_speech
from vivavoce.train.front_desk import general_sentences, normalise, reply_sentences
from vivavoce.train.tts.train import SEED
from vivavoce.tts.frame_sampling import SequenceSampler
from vivavoce.tts.interface import SpeakingStyle, SpeechSettings, open_speech_model

MAX_REPLY_CODES = 250  # maximum codes of a reply
SILENCE = np.zeros(1, np.float32)


@dataclass(frozen=True)
class SpokenReply:
    """A free-running reply: audio, seconds to first audio and in total."""

    sound: Sound
    first: float
    seconds: float


class ComparedVoice(Protocol):
    """The audio output of a model version."""

    def aligned(self, subject: QuantSubject, model: nn.Module, example: CalibrationBatch) -> Sound | None:
        """Audio of the argmax codes along an example's reply; None for text replies."""
        ...

    def say(self, item: SpokenSample, seed: int) -> SpokenReply:
        """Free-running reply to an item, or reading of its text."""
        ...


class MossSpeechVoice:
    """MOSS-Speech: spoken answers to questions."""

    def __init__(self, folder: Path) -> None:
        self.pipeline = load_moss_speech(folder, device="cpu")

    @torch.no_grad()
    def aligned(self, subject: QuantSubject, model: nn.Module, example: CalibrationBatch) -> Sound | None:
        if example.head != AUDIO:
            return None
        chosen = subject.logits(model, example).argmax(-1)
        end = self.pipeline.model.config.eosp_token_id
        heard = example.rows[example.start :, AUDIO]
        count = int((heard < end).long().cumprod(0).sum())
        codes = torch.where(chosen < end, chosen, heard)[:count]
        return self._spoken(codes)[0] if count else None

    @torch.no_grad()
    def say(self, item: SpokenSample, seed: int) -> SpokenReply:
        assert item.sound is not None
        pipeline = self.pipeline
        codes = pipeline.codec.encode(item.sound).tolist()
        started = time.perf_counter()
        turns = [Turn("system", DEFAULT_SYSTEM["speech"]), Turn("user", codes)]
        sequence = pipeline.core.open(pipeline.prompt.rows(turns, "speech"))
        sampling = pipeline.options.sampling
        rows = pipeline.core.complete(sequence, Generation(sampling, max_new_rows=MAX_REPLY_CODES, seed=seed))
        pipeline.core.close(sequence)
        spoken = pipeline.model.spoken_codes(rows)
        generation_seconds = time.perf_counter() - started
        if not spoken:
            return SpokenReply(Sound(SILENCE, DECODER_RATE), generation_seconds, generation_seconds)
        sound, first = self._spoken(torch.tensor(spoken))
        # A stream would have its first chunk after its share of the rows.
        share = min(1.0, self._first_codes / len(rows))
        return SpokenReply(sound, generation_seconds * share + first, time.perf_counter() - started)

    @property
    def _first_codes(self) -> int:
        config = self.pipeline.codec.flow.config
        return config.chunk + config.lookahead

    def _spoken(self, codes: Tensor) -> tuple[Sound, float]:
        """Audio of codes, and the seconds of its first chunk."""
        codec, options = self.pipeline.codec, self.pipeline.options
        state = codec.start(self.pipeline.voice_of(None), options.left_chunks)
        started, first = time.perf_counter(), 0.0
        pieces: list[Tensor] = []
        cut = min(self._first_codes, len(codes))
        for part, is_last in ((codes[:cut], cut == len(codes)), (codes[cut:], True)):
            if len(part) or not pieces:
                sound, state = codec.step(state, part, final=is_last)
                pieces.append(sound.float().cpu())
            first = first or time.perf_counter() - started
        return Sound(torch.cat(pieces).numpy(), DECODER_RATE), first


class NanoVoice:
    """MOSS-TTS-Nano: texts read aloud."""

    def __init__(self, folder: Path) -> None:
        self.speaker = open_speech_model(str(folder), "cpu", "float32")
        self.codec = MossAudioTokenizerNano.load(folder / "codec")

    @torch.no_grad()
    def aligned(self, subject: QuantSubject, model: nn.Module, example: CalibrationBatch) -> Sound | None:
        books = example.rows.shape[1] - 1
        codes = subject.logits(model, example).argmax(-1).view(-1, books).T
        return Sound(self.codec.decode(codes[None])[0].float().numpy(), self.speaker.rate)

    def say(self, item: SpokenSample, seed: int) -> SpokenReply:
        started, first, pieces = time.perf_counter(), 0.0, []
        for piece in self.speaker.stream(item.text, style=SpeakingStyle(seed=seed), clock=None):
            first = first or time.perf_counter() - started
            pieces.append(piece)
        sound = Sound(np.concatenate(pieces, axis=1), self.speaker.rate)
        return SpokenReply(sound, first, time.perf_counter() - started)


VOICES: dict[str, type[MossSpeechVoice] | type[NanoVoice]] = {
    "moss_speech": MossSpeechVoice,
    "moss_tts_nano": NanoVoice,
}


def voice_of(kind: str, folder: Path) -> ComparedVoice | None:
    """The audio output of a version; None for models without audio or without a codec folder."""
    if kind not in VOICES or not (folder / "codec").is_dir():
        return None
    return VOICES[kind](folder)


def code_agreement(exact: Sequence[CalibrationBatch], other: Sequence[CalibrationBatch]) -> float:
    """Share of equal rows of greedy replies, aligned by edit distance."""
    changes = rows = 0
    for one, two in zip(exact, other, strict=True):
        texts = [_words(example) for example in (one, two)]
        changes += word_errors(*texts)
        rows += max(len(text.split()) for text in texts)
    return 1 - changes / max(1, rows)


def _words(example: CalibrationBatch) -> str:
    rows = example.rows.T if example.mel is not None else example.rows
    return " ".join("-".join(map(str, row)) for row in rows[example.start :].tolist())


def misheard(folder: Path, items: Sequence[SpokenSample]) -> list[tuple[int, int]]:
    """Word errors and word count of a recogniser for each labelled recording."""
    listener, found = WhisperTranscriber.load(folder), []
    for item in items:
        if item.sound is not None and item.text:
            segments = listener.segments(torch.from_numpy(item.sound.samples[0].copy()))
            found.append(misheard_words(item.text, " ".join(segment.text for segment in segments)))
    return found


def misheard_words(text: str, heard: str) -> tuple[int, int]:
    """Word errors of a transcript, and words of the text."""
    meant = normalise(text)
    return word_errors(meant, normalise(heard)), len(meant.split())


KIND = "moss_tts_nano"
RESAMPLED, LEVEL = 2000, 95  # bootstrap samples; confidence level in per cent


@dataclass(frozen=True)
class Misses:
    """Word errors and word counts by text."""

    wrong: tuple[int, ...]
    of: tuple[int, ...]

    @property
    def share(self) -> float:
        """Word error rate in per cent."""
        return 100 * sum(self.wrong) / max(1, sum(self.of))


@dataclass(frozen=True)
class TextSpan:
    """A difference in percentage points with its confidence interval."""

    points: float
    low: float
    high: float


def difference(before: Misses, after: Misses) -> TextSpan:
    """Difference on the same texts, with a bootstrap interval over texts."""
    if not sum(before.of):
        return TextSpan(0.0, 0.0, 0.0)
    lost, of = (np.array(after.wrong) - before.wrong).astype(float), np.array(before.of, float)
    chosen = np.random.default_rng(0).integers(0, len(of), (RESAMPLED, len(of)))
    means = 100 * lost[chosen].sum(axis=1) / of[chosen].sum(axis=1)
    low, high = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return TextSpan(100 * float(lost.sum() / of.sum()), float(low), float(high))


def texts_to_read(count: int) -> list[str]:
    """Front desk replies, and as many general sentences, none of them from training."""
    half = count // 2
    return [*reply_sentences(count - half, SEED), *general_sentences(half, SEED)]


class Readers:
    """The float model's readings of some texts, and evaluation of other versions on them."""

    def __init__(self, source: Path, texts: Sequence[str], listener: Moonshine, draws: int = 1) -> None:
        self.texts, self.draws, self.listener = list(texts), draws, listener
        self.subject, self.settings = SUBJECTS[KIND], SpeechSettings.read(source)
        self.codec = MossAudioTokenizerNano.load(source / "codec")
        self._known: dict[tuple[str, bytes], tuple[int, int]] = {}
        self.examples = self._readings(source)

    def own(self, draws: int = 1) -> Misses:
        """Misses of float's first readings of each text."""
        return self._heard([_codes(example) for example in self.examples[: draws * len(self.texts)]])

    @torch.no_grad()
    def beside(self, model: nn.Module) -> Misses:
        """Misses of a version that samples along float's first readings."""
        own = enumerate(self.examples[: len(self.texts)])
        return self._heard([self._drawn(model, example, seed) for seed, example in own])

    def alone(self, folder: Path, skipped: int = 0) -> Misses:
        """Misses of a free-running version; its first draws may be skipped."""
        return self._heard([_codes(example) for example in self._readings(folder, skipped)])

    def _readings(self, folder: Path, skipped: int = 0) -> list[CalibrationBatch]:
        items = [SpokenSample(text) for text in self.texts]
        return self.subject.examples(folder, items * (skipped + self.draws))[skipped * len(items) :]

    def _drawn(self, model: nn.Module, example: CalibrationBatch, seed: int) -> Tensor:
        """Codes a version samples given float's history.  # [frame, codebook]"""
        books = example.rows.shape[1] - 1
        logits = self.subject.logits(model, example).unflatten(0, (-1, books)).numpy()
        samplings = self.settings.generation(books, 0, seed).per_channel(books + 1)
        sampler, frames = SequenceSampler(samplings, seed, logits.shape[-1]), []
        for position, frame in enumerate(logits, start=example.start):
            sampler.start_row(position)
            frames.append([sampler.sample(TEXT + 1 + book, scores) for book, scores in enumerate(frame)])
        return torch.tensor(frames)

    def _heard(self, readings: Sequence[Tensor]) -> Misses:
        """Sum over the readings of one text, because they are not independent."""
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


def _codes(example: CalibrationBatch) -> Tensor:
    return example.rows[example.start :, TEXT + 1 :]  # [frame, codebook]
