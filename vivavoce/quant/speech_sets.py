"""Sets of speech for calibration, training and evaluation: bundled questions and texts, or the user's recordings."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vivavoce.audio.io import Sound, read
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.evaluation.questions import QUESTIONS, bundled_questions
from vivavoce.train.front_desk import Exchange, dialogues
from vivavoce.train.voices import TRAINING, programs, speak

RATE = 16_000
QUIETEST = 10 ** (-60 / 20)  # RMS below which a recording is silent
SOUNDS = {".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".webm"}
# Texts of a front desk, for models that take text only.
SCENES = (
    "Good evening, and welcome.",
    "How may I help you tonight?",
    "Your bill comes to one hundred and twenty yuan.",
    "Today we have roast duck, steamed fish and fried rice.",
    "Thank you for coming. Goodbye, and see you soon.",
    "Your table for four is ready at half past seven.",
    "The room with a view costs eighty euros a night.",
    "Breakfast is served from seven until ten in the morning.",
)


@dataclass(frozen=True)
class SpokenSample:
    """An item: its text and audio, either of which may be missing."""

    text: str
    sound: Sound | None = None
    exchange: Exchange | None = None
    """The question and its expected answer, if known."""


@dataclass(frozen=True)
class SpeechSet:
    """Items in a fixed order, and a hash of their content."""

    name: str
    items: tuple[SpokenSample, ...]

    @property
    def hash(self) -> str:
        """SHA-256 of all texts and samples."""
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(item.text.encode())
            if item.sound is not None:
                digest.update(np.ascontiguousarray(item.sound.samples).tobytes())
        return digest.hexdigest()

    def first(self, count: int) -> "SpeechSet":
        return SpeechSet(self.name, self.items[:count])

    def described(self) -> dict[str, Any]:
        """Name, size and hash, for the manifest."""
        return {"name": self.name, "items": len(self.items), "sha256": self.hash}


def project_set() -> SpeechSet:
    """The bundled questions with expected answers, in voices not used in training."""
    items = []
    for question in bundled_questions():
        exchange = Exchange(question.intent, question.text, question.reply, question.slots)
        items.append(SpokenSample(question.text, read(QUESTIONS / question.file, rate=RATE), exchange))
    return SpeechSet("bundled questions", tuple(items))


def scene_set() -> SpeechSet:
    return SpeechSet("front desk scenes", tuple(SpokenSample(text) for text in SCENES))


def read_set(source: Path) -> SpeechSet:
    """A folder of recordings with optional `.txt` files beside them, or a `.jsonl` of `audio`, `text`."""
    if source.is_dir():
        items = [_recorded(file) for file in sorted(source.rglob("*")) if file.suffix.lower() in SOUNDS]
    elif source.suffix == ".jsonl" and source.is_file():
        items = _listed(source)
    else:
        raise InputError(f"{source} is neither a folder of recordings nor a .jsonl file to calibrate with")
    if not items:
        raise InputError(
            f"{source} holds nothing to calibrate with; give recordings ({', '.join(sorted(SOUNDS))}) or texts"
        )
    _refuse_silence(source, items)
    return SpeechSet(str(source), tuple(items))


def _recorded(file: Path) -> SpokenSample:
    words = file.with_suffix(".txt")
    text = words.read_text(encoding="utf8").strip() if words.is_file() else ""
    return SpokenSample(text, read(file, rate=RATE))


def _listed(source: Path) -> list[SpokenSample]:
    items = []
    for number, line in enumerate(source.read_text(encoding="utf8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text, audio = entry.get("text", ""), entry.get("audio")
        except (ValueError, AttributeError) as error:
            raise InputError(f"{source}, line {number}, is not a JSON object with audio and text ({error})") from error
        if not text and not audio:
            raise InputError(f"{source}, line {number}, has neither audio nor text")
        items.append(SpokenSample(text, None if audio is None else read(source.parent / audio, rate=RATE)))
    return items


def _refuse_silence(source: Path, items: Sequence[SpokenSample]) -> None:
    sounds = [item.sound for item in items if item.sound is not None]
    levels = [float(np.sqrt(np.mean(np.square(sound.samples)))) for sound in sounds]
    if levels and max(levels) < QUIETEST:
        raise InputError(
            f"all {len(levels)} recordings of {source} are silent; ranges found in silence would clip all speech"
        )


def spoken_set(count: int, seed: int = 0) -> SpeechSet:
    """Questions of the training grammar in training voices, synthesised on this machine."""
    source, found = random.Random(f"qat {seed}"), programs()
    items = []
    for (exchange,) in dialogues("train", count, 7000 + seed, (1, 1)):
        items.append(SpokenSample(exchange.user, Sound(speak(source.choice(TRAINING), exchange.user, found), RATE)))
    return SpeechSet(f"{count} questions spoken anew", tuple(items))


def training_sets(kind: str, count: int, given: SpeechSet | None = None) -> tuple[SpeechSet, SpeechSet]:
    """Disjoint training and evaluation sets."""
    if given is not None:
        held = max(1, len(given.items) // 5)
        return SpeechSet(given.name, given.items[held:] or given.items), given.first(held)
    if kind == "moss_tts_nano":
        texts = [SpokenSample(exchange.reply) for (exchange,) in dialogues("train", count, 7000, (1, 1))]
        return SpeechSet(f"{count} replies of a front desk", tuple(texts)), scene_set()
    try:
        return spoken_set(count), project_set()
    except MissingDependencyError:
        whole = project_set()
        return SpeechSet(whole.name, whole.items[10:]), whole.first(10)
