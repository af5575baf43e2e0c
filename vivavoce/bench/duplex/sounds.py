"""Recorded sounds that a user has on disk: ESC-50's coughs, knocks and keys, and people's voices.

Both are published for non-commercial use, so none is bundled; without them the lab makes coughs and knocks itself.
"""

import csv
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from vivavoce.audio.io import read
from vivavoce.bench.turn_sounds import (
    MARGIN,
    RATE,
    SPEECH_DBFS,
    Samples,
    at_level,
    cough,
    knock,
    voiced_bounds,
)
from vivavoce.errors import InputError

TIC_CATEGORIES = ("coughing", "sneezing", "laughing")
NOISE_CATEGORIES = ("door_wood_knock", "keyboard_typing", "mouse_click", "footsteps", "door_wood_creaks")
MAX_SECONDS = 1.5
SYNTHETIC = 24
"""Sounds of each kind that are made where none are given."""
SUNG = "03-02"
"""RAVDESS files whose name begins so are songs."""


@dataclass(frozen=True)
class RecordedSound:
    """A short sound at speech level."""

    name: str
    path: Path | None = None
    seed: int = 0
    _kind: str = field(default="", repr=False)

    def samples(self) -> Samples:
        """The sound without the silence around it, at most 1.5 s unless it is a voice."""
        if self.path is None:
            return cough(self.seed) if self._kind == "cough" else knock(self.seed)
        sound = read(self.path, rate=RATE).samples[0]
        first, last = voiced_bounds(sound)
        if last == 0:
            raise InputError(f"{self.path} is silent")
        kept = sound[max(0, first - MARGIN) : last + MARGIN]
        return at_level(kept if self._kind == "voice" else kept[: round(MAX_SECONDS * RATE)], SPEECH_DBFS)


def tics(folder: Path | None) -> list[RecordedSound]:
    """Coughs, sneezes and laughs of an ESC-50 folder, else made-up coughs."""
    if folder is None:
        return [RecordedSound(f"made-up cough {seed}", seed=seed, _kind="cough") for seed in range(SYNTHETIC)]
    return _of_esc50(folder, TIC_CATEGORIES)


def noises(folder: Path | None) -> list[RecordedSound]:
    """Knocks, keys, clicks, steps and doors of an ESC-50 folder, else made-up knocks."""
    if folder is None:
        return [RecordedSound(f"made-up knock {seed}", seed=seed, _kind="knock") for seed in range(SYNTHETIC)]
    return _of_esc50(folder, NOISE_CATEGORIES)


def people(folder: Path | None) -> list[RecordedSound]:
    """Spoken WAV files below a folder, such as those of RAVDESS and TESS; none without one."""
    if folder is None:
        return []
    found = sorted(path for path in folder.rglob("*.wav") if not path.name.startswith(SUNG))
    if not found:
        raise InputError(f"{folder} holds no WAV files")
    return [RecordedSound(path.stem, path, _kind="voice") for path in _shuffled(found)]


def _of_esc50(folder: Path, categories: tuple[str, ...]) -> list[RecordedSound]:
    index = folder / "meta" / "esc50.csv"
    if not index.is_file():
        raise InputError(f"{folder} is not ESC-50: it has no meta/esc50.csv")
    with index.open(encoding="utf8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["category"] in categories]
    by_category: dict[str, list[Path]] = {name: [] for name in categories}
    for row in rows:
        by_category[row["category"]].append(folder / "audio" / row["filename"])
    in_turn = [group for group in zip(*(_shuffled(paths) for paths in by_category.values()), strict=False)]
    return [
        RecordedSound(f"{category} {path.stem}", path)
        for group in in_turn
        for category, path in zip(categories, group, strict=True)
    ]


def _shuffled(paths: list[Path]) -> list[Path]:
    """In an order that depends on the names alone."""
    return sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).hexdigest())
