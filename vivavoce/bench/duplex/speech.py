"""Spoken sentences of the duplex lab: made by Kokoro once, then read from the disk."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vivavoce.audio.io import Sound, read, write
from vivavoce.bench.turn_sounds import FRAME, MARGIN, RATE, SPEECH_DBFS, Samples, at_level, voiced_bounds
from vivavoce.evaluation.machine import stage
from vivavoce.models.kokoro.windows import WHOLE_SENTENCES
from vivavoce.tts.kokoro import KokoroTTS, WordTime

MODEL = "kokoro-82m"
NEAR = RATE // 16
"""A cut is made at the quietest place this many samples around the end of a word."""

Speak = Callable[[str, str], "SpokenText"]
"""The utterance of a text in a voice."""


@dataclass(frozen=True)
class SpokenText:
    """A spoken sentence at the wire's rate and speech level, with the samples where a `|` of its text is."""

    text: str
    voice: str
    sound: Samples = field(repr=False)
    cuts: tuple[int, ...] = ()

    def with_pauses(self, seconds: float) -> tuple[Samples, tuple[tuple[int, int], ...]]:
        """The sound with a pause at each cut, and the sample ranges of the pauses."""
        silence = np.zeros(round(seconds * RATE), np.float32)
        pieces: list[Samples] = []
        pauses: list[tuple[int, int]] = []
        begin = length = 0
        for cut in (*self.cuts, len(self.sound)):
            pieces.append(_faded(self.sound[begin:cut], begin > 0, cut < len(self.sound)))
            length += cut - begin
            if cut < len(self.sound):
                pauses.append((length, length + len(silence)))
                pieces.append(silence)
                length += len(silence)
            begin = cut
        return np.concatenate(pieces), tuple(pauses)


class SpokenTexts:
    """Utterances by text and voice, kept in `folder`; the model is loaded when one is missing."""

    def __init__(self, folder: Path, model: str = MODEL) -> None:
        self.folder, self.name = folder, model
        self.made = 0
        """Utterances that were not on the disk."""
        self._model: KokoroTTS | None = None

    def path(self, text: str, voice: str) -> Path:
        """Where the sound of a text is kept; a JSON file beside it has its cuts."""
        key = hashlib.sha256(f"{self.name}\n{voice}\n{text}".encode()).hexdigest()[:24]
        return self.folder / f"{key}.wav"

    def __call__(self, text: str, voice: str) -> SpokenText:
        path = self.path(text, voice)
        if not path.is_file():
            self._make(path, text, voice)
        cuts = tuple(json.loads(path.with_suffix(".json").read_text(encoding="utf8"))["cuts"])
        return SpokenText(text, voice, read(path, rate=RATE).samples[0], cuts)

    def _make(self, path: Path, text: str, voice: str) -> None:
        if self._model is None:
            with stage(f"loading {self.name} to speak the scenes"):
                self._model = KokoroTTS.load(self.name, windows=WHOLE_SENTENCES)
        pieces = list(self._model.speak(text.replace("|", " "), voice))
        samples = np.concatenate([piece.samples for piece in pieces], axis=1)
        sound = Sound(samples, self._model.rate).resampled(RATE).samples[0]
        words = [word for piece in pieces for word in piece.words]
        cuts = [_quietest(sound, round(moment * RATE)) for moment in _pause_times(text, words)]
        first, last = voiced_bounds(sound)
        begin = max(0, first - MARGIN)
        trimmed = at_level(sound[begin : last + MARGIN], SPEECH_DBFS)
        self.made += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {"text": text, "voice": voice, "model": self.name, "cuts": [cut - begin for cut in cuts]}
        path.with_suffix(".json").write_text(json.dumps(about, ensure_ascii=False), encoding="utf8")
        unfinished = path.with_suffix(f".{os.getpid()}.wav")  # another run may be writing the same one
        write(unfinished, Sound(trimmed[None], RATE))
        unfinished.replace(path)


def _pause_times(text: str, words: list[WordTime]) -> list[float]:
    """The time of each `|`: the end of the word before it."""
    before = [len(_letters(text[: mark.start()])) for mark in re.finditer(r"\|", text)]
    found, letters = [], 0
    for word in words:
        letters += len(_letters(word.word))
        while before and letters >= before[0]:
            found.append(word.end)
            before.pop(0)
    return found


def _letters(text: str) -> str:
    return "".join(re.findall(r"\w", text))


def _quietest(sound: Samples, near: int) -> int:
    begin = max(0, near - NEAR)
    frames = sound[begin : near + NEAR]
    frames = frames[: len(frames) // FRAME * FRAME].reshape(-1, FRAME)
    return begin + int(np.square(frames).mean(axis=1).argmin()) * FRAME if len(frames) else near


def _faded(sound: Samples, at_begin: bool, at_end: bool) -> Samples:
    """Without clicks at its cut ends."""
    ramp = np.linspace(0, 1, min(FRAME, len(sound)), dtype=np.float32)
    faded = sound.copy()
    if at_begin:
        faded[: len(ramp)] *= ramp
    if at_end:
        faded[-len(ramp) :] *= ramp[::-1]
    return faded
