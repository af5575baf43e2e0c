"""Two versions of a model that speaks, heard side by side: at the same places of the same replies, and left alone.

Aligned sounds follow one history: at every place each version chooses its likeliest codes, given what the float model
had said so far. So they last equally long, and can be compared sample by sample. Left alone, each goes its own way,
which is what a listener would hear.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vivavoce.audio.io import Sound
from vivavoce.engine.sampling import Generation
from vivavoce.evaluation.scoring import word_errors
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_speech.codec import VOICE_RATE
from vivavoce.models.moss_speech.model import AUDIO
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Turn
from vivavoce.quant.speech_set import SpokenSample
from vivavoce.quant.subjects import CalibrationBatch, QuantSubject
from vivavoce.s2s.loading import load_moss_speech
from vivavoce.tts.interface import SpeakingStyle, open_speech_model

LONGEST_REPLY = 250  # codes
SILENCE = np.zeros(1, np.float32)


@dataclass(frozen=True)
class Said:
    """A reply left alone: its sound, and seconds of work until its first sound and in all."""

    sound: Sound
    first: float
    seconds: float


class ComparedVoice(Protocol):
    """A version that speaks."""

    def aligned(self, subject: QuantSubject, model: nn.Module, lesson: CalibrationBatch) -> Sound | None:
        """What its likeliest codes at the places of a reply sound like; None where a lesson is not spoken."""
        ...

    def say(self, item: SpokenSample, seed: int) -> Said:
        """Its own reply to an item, or its reading of it."""
        ...


class MossSpeechVoice:
    """Answers to questions."""

    def __init__(self, folder: Path) -> None:
        self.pipeline = load_moss_speech(folder, device="cpu")

    @torch.no_grad()
    def aligned(self, subject: QuantSubject, model: nn.Module, lesson: CalibrationBatch) -> Sound | None:
        """By its own codec."""
        if lesson.head != AUDIO:
            return None
        chosen = subject.logits(model, lesson).argmax(-1)
        end = self.pipeline.model.config.eosp_token_id
        heard = lesson.rows[lesson.start :, AUDIO]
        count = int((heard < end).long().cumprod(0).sum())
        codes = torch.where(chosen < end, chosen, heard)[:count]
        return self._spoken(codes)[0] if count else None

    @torch.no_grad()
    def say(self, item: SpokenSample, seed: int) -> Said:
        """Its answer."""
        assert item.sound is not None
        pipeline = self.pipeline
        codes = pipeline.codec.encode(item.sound).tolist()
        begun = time.perf_counter()
        turns = [Turn("system", DEFAULT_SYSTEM["speech"]), Turn("user", codes)]
        sequence = pipeline.core.open(pipeline.prompt.rows(turns, "speech"))
        sampling = pipeline.options.sampling
        rows = pipeline.core.complete(sequence, Generation(sampling, max_new_rows=LONGEST_REPLY, seed=seed))
        pipeline.core.close(sequence)
        spoken = pipeline.model.spoken_codes(rows)
        made = time.perf_counter() - begun
        if not spoken:
            return Said(Sound(SILENCE, VOICE_RATE), made, made)
        sound, first = self._spoken(torch.tensor(spoken))
        # A stream would have had its first chunk when the share of rows that it needs was made.
        share = min(1.0, self._first_codes / len(rows))
        return Said(sound, made * share + first, time.perf_counter() - begun)

    @property
    def _first_codes(self) -> int:
        config = self.pipeline.codec.flow.config
        return config.chunk + config.lookahead

    def _spoken(self, codes: Tensor) -> tuple[Sound, float]:
        """The sound of codes, and the seconds its first chunk took."""
        codec, options = self.pipeline.codec, self.pipeline.options
        state = codec.start(self.pipeline.voice_of(None), options.left_chunks)
        begun, first = time.perf_counter(), 0.0
        pieces: list[Tensor] = []
        cut = min(self._first_codes, len(codes))
        for part, is_last in ((codes[:cut], cut == len(codes)), (codes[cut:], True)):
            if len(part) or not pieces:
                sound, state = codec.step(state, part, final=is_last)
                pieces.append(sound.float().cpu())
            first = first or time.perf_counter() - begun
        return Sound(torch.cat(pieces).numpy(), VOICE_RATE), first


class NanoVoice:
    """Texts read aloud."""

    def __init__(self, folder: Path) -> None:
        self.speaker = open_speech_model(str(folder), "cpu", "float32")
        self.codec = MossAudioTokenizerNano.load(folder / "codec")

    @torch.no_grad()
    def aligned(self, subject: QuantSubject, model: nn.Module, lesson: CalibrationBatch) -> Sound | None:
        """By the codec that both versions have."""
        books = lesson.rows.shape[1] - 1
        codes = subject.logits(model, lesson).argmax(-1).view(-1, books).T
        return Sound(self.codec.decode(codes[None])[0].float().numpy(), self.speaker.rate)

    def say(self, item: SpokenSample, seed: int) -> Said:
        """Its reading."""
        begun, first, pieces = time.perf_counter(), 0.0, []
        for piece in self.speaker.stream(item.text, manner=SpeakingStyle(seed=seed), clock=None):
            first = first or time.perf_counter() - begun
            pieces.append(piece)
        sound = Sound(np.concatenate(pieces, axis=1), self.speaker.rate)
        return Said(sound, first, time.perf_counter() - begun)


VOICES: dict[str, type[MossSpeechVoice] | type[NanoVoice]] = {
    "moss_speech": MossSpeechVoice,
    "moss_tts_nano": NanoVoice,
}


def voice_of(kind: str, folder: Path) -> ComparedVoice | None:
    """A version's voice; None for models that make no sound, or that carry nothing to make it with."""
    if kind not in VOICES or not (folder / "codec").is_dir():
        return None
    return VOICES[kind](folder)


def code_agreement(exact: Sequence[CalibrationBatch], other: Sequence[CalibrationBatch]) -> float:
    """The share of greedy replies' rows that are the same, replies aligned by the fewest changes."""
    changes = rows = 0
    for one, two in zip(exact, other, strict=True):
        said = [_words(lesson) for lesson in (one, two)]
        changes += word_errors(*said)
        rows += max(len(text.split()) for text in said)
    return 1 - changes / max(1, rows)


def _words(lesson: CalibrationBatch) -> str:
    rows = lesson.rows.T if lesson.mel is not None else lesson.rows
    return " ".join("-".join(map(str, row)) for row in rows[lesson.start :].tolist())
