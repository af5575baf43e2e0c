"""Recorded sounds that a user has on disk: ESC-50's coughs, knocks and keys, and people's voices.

Both are published for non-commercial use, so none is bundled; without them the lab makes coughs and knocks itself.
"""

import csv
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
MAX_VOICE_SECONDS = 4.0
SYNTHETIC = 24
"""Sounds of each kind that are made where none are given."""
SUNG = "03-02"
"""RAVDESS files whose name begins so are songs."""


@dataclass(frozen=True)
class ShortSound:
    """A sound at speech level, read when it is needed."""

    name: str
    samples: Callable[[], Samples] = field(repr=False)
    source: str = ""
    """Whose voice it is: the folder of the recording."""


def tics(folder: Path | None) -> list[ShortSound]:
    """Coughs, sneezes and laughs of an ESC-50 folder, else made-up coughs."""
    if folder is None:
        return [ShortSound(f"made-up cough {seed}", partial(cough, seed)) for seed in range(SYNTHETIC)]
    return _of_esc50(folder, TIC_CATEGORIES)


def noises(folder: Path | None) -> list[ShortSound]:
    """Knocks, keys, clicks, steps and doors of an ESC-50 folder, else made-up knocks."""
    if folder is None:
        return [ShortSound(f"made-up knock {seed}", partial(knock, seed)) for seed in range(SYNTHETIC)]
    return _of_esc50(folder, NOISE_CATEGORIES)


def people(folder: Path | None) -> list[ShortSound]:
    """Spoken WAV files below a folder, such as those of RAVDESS and TESS; none without one."""
    if folder is None:
        return []
    found = sorted(path for path in folder.rglob("*.wav") if not path.name.startswith(SUNG))
    if not found:
        raise InputError(f"{folder} holds no WAV files")
    return [
        ShortSound(path.stem, partial(_trimmed, path, MAX_VOICE_SECONDS), str(path.parent))
        for path in shuffled_by_name(found)
    ]


def esc50_files(folder: Path, categories: tuple[str, ...]) -> dict[str, list[Path]]:
    """The files of some categories of an ESC-50 folder, in an order that depends on their names alone."""
    index = folder / "meta" / "esc50.csv"
    if not index.is_file():
        raise InputError(f"{folder} is not ESC-50: it has no meta/esc50.csv")
    with index.open(encoding="utf8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["category"] in categories]
    by_category: dict[str, list[Path]] = {name: [] for name in categories}
    for row in rows:
        by_category[row["category"]].append(folder / "audio" / row["filename"])
    return {category: shuffled_by_name(paths) for category, paths in by_category.items()}


def _of_esc50(folder: Path, categories: tuple[str, ...]) -> list[ShortSound]:
    in_turn = zip(*esc50_files(folder, categories).values(), strict=False)
    return [
        ShortSound(f"{category} {path.stem}", partial(_trimmed, path, MAX_SECONDS))
        for group in in_turn
        for category, path in zip(categories, group, strict=True)
    ]


def shuffled_by_name(paths: list[Path]) -> list[Path]:
    """Shuffled, in an order that depends on the names alone."""
    return sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).hexdigest())


def _trimmed(path: Path, max_seconds: float) -> Samples:
    """The sound of a file without the silence around it."""
    sound = read(path, rate=RATE).samples[0]
    first, last = voiced_bounds(sound)
    if last == 0:
        raise InputError(f"{path} is silent")
    return at_level(sound[max(0, first - MARGIN) : last + MARGIN][: round(max_seconds * RATE)], SPEECH_DBFS)
