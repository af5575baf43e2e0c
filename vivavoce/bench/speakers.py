"""`viva bench speakers FOLDER`: how well speaker embeddings tell voices apart.

The folder holds recordings in one folder for each speaker (`Actor_01/….wav`); folders of the same name count as one.
Only windows with speech are used. A pair of recordings is of one speaker or of two; at the threshold where as many
pairs of one speaker are refused as pairs of two are accepted, that share is the equal error rate.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.audio.io import read
from vivavoce.audio.vad import RATE, voice_activity
from vivavoce.audio.voiced import voiced_samples
from vivavoce.bench.turn_sounds import SPEECH_DBFS, at_level
from vivavoce.errors import InputError
from vivavoce.models.campplus import SpeakerEncoder, mean_voice

Array = NDArray[np.float32]
SUFFIXES = (".wav", ".flac", ".opus", ".ogg")
LENGTHS = (2.0, 1.5, 1.0, 0.7, 0.5, 0.35)
"""Seconds of speech of the shortened side of a pair."""
ENROLLED = (1, 2, 3, 5)
"""Recordings whose mean is compared with a single one."""
MIN_SECONDS = 0.5


@dataclass(frozen=True)
class Recording:
    """The speech in a recording, and whose it is."""

    speaker: str
    name: str
    speech: Array


def choose(folder: Path, per_speaker: int, skip: Sequence[str] = ()) -> dict[str, list[Path]]:
    """Recordings of each speaker, in an order that depends on their names alone."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in SUFFIXES and not any(fnmatch(path.name, pattern) for pattern in skip):
            found.setdefault(path.parent.name, []).append(path)
    chosen = {name: sorted(paths, key=_shuffled)[:per_speaker] for name, paths in sorted(found.items())}
    if len(chosen) < 2:
        raise InputError(f"{folder} needs recordings in one folder for each speaker, of two speakers or more")
    return chosen


def _shuffled(path: Path) -> str:
    return hashlib.sha256(path.name.encode()).hexdigest()


def read_recordings(chosen: dict[str, list[Path]]) -> list[Recording]:
    """The recordings that have at least half a second of speech."""
    detector, found = voice_activity(), []
    for speaker, paths in chosen.items():
        for path in paths:
            sound = at_level(read(path, rate=RATE).samples[0], SPEECH_DBFS)
            speech = voiced_samples(sound, detector)
            if len(speech) >= MIN_SECONDS * RATE:
                found.append(Recording(speaker, path.name, speech))
    return found


def equal_error_rate(same: Array, different: Array) -> tuple[float, float]:
    """The share of errors where both kinds are equally frequent, and the threshold there."""
    if not len(same) or not len(different):
        raise InputError("an equal error rate needs pairs of one speaker and pairs of two")
    thresholds = np.unique(np.concatenate([same, different]))
    refused = np.searchsorted(np.sort(same), thresholds) / len(same)
    accepted = 1 - np.searchsorted(np.sort(different), thresholds) / len(different)
    best = int(np.abs(refused - accepted).argmin())
    return float((refused[best] + accepted[best]) / 2), float(thresholds[best])


def all_pairs(one: Array, other: Array, speakers: NDArray[np.str_]) -> tuple[Array, Array]:
    """Scores of all pairs of different recordings: of one speaker, and of two.  # [recording, 192] twice"""
    scores = one @ other.T
    is_same = speakers[:, None] == speakers
    is_pair = ~np.eye(len(speakers), dtype=bool)
    return scores[is_same & is_pair], scores[~is_same]


def enrolled_pairs(vectors: Array, speakers: NDArray[np.str_], count: int) -> tuple[Array, Array]:
    """Scores of the mean of each speaker's first `count` recordings with the others of all speakers."""
    same: list[Array] = []
    different: list[Array] = []
    means, rest = {}, {}
    for speaker in np.unique(speakers):
        own = vectors[speakers == speaker]
        means[speaker], rest[speaker] = mean_voice(list(own[:count])), own[count:]
    for speaker, mean in means.items():
        for other, trials in rest.items():
            (same if other == speaker else different).append(trials @ mean)
    return np.concatenate(same), np.concatenate(different)


def measure(recordings: Sequence[Recording], encoder: SpeakerEncoder) -> dict[str, Any]:
    """Equal error rates of whole and of shortened recordings, and of enrolment by several."""
    speakers = np.array([each.speaker for each in recordings])
    began = time.process_time()
    whole = np.stack([encoder.embed(each.speech) for each in recordings])
    spent = time.process_time() - began
    seconds = sum(len(each.speech) for each in recordings) / RATE
    rows = [_row("whole recordings", *all_pairs(whole, whole, speakers))]
    for length in LENGTHS:
        short = np.stack([encoder.embed(each.speech[: round(length * RATE)]) for each in recordings])
        rows.append(_row(f"{length:g} s with whole ones", *all_pairs(short, whole, speakers)))
    for count in ENROLLED:
        if (np.unique(speakers, return_counts=True)[1] > count).all():
            pairs = enrolled_pairs(whole, speakers, count)
            rows.append(_row(f"one with the mean of {count}", *pairs))
    return {
        "speakers": len(np.unique(speakers)),
        "recordings": len(recordings),
        "speech_seconds": seconds,
        "cpu_ms_a_second": 1e3 * spent / seconds,
        "rows": rows,
    }


def _row(name: str, same: Array, different: Array) -> dict[str, Any]:
    rate, threshold = equal_error_rate(same, different)
    return {
        "name": name,
        "pairs": [len(same), len(different)],
        "equal_error_rate": rate,
        "threshold": threshold,
        "same_mean": float(same.mean()),
        "different_mean": float(different.mean()),
    }


def run(
    folder: Path,
    model: str = "campplus",
    per_speaker: int = 20,
    skip: Sequence[str] = (),
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure, print a table, write `speakers.json` to `out`."""
    from rich.console import Console
    from rich.table import Table

    recordings = read_recordings(choose(folder, per_speaker, skip))
    measured = measure(recordings, SpeakerEncoder.load(hub.resolve(model)))
    table = Table(
        title=f"{model}: {measured['recordings']} recordings of {measured['speakers']} speakers, "
        f"{measured['speech_seconds']:.0f} s of speech; {measured['cpu_ms_a_second']:.0f} ms of CPU a second"
    )
    for title in ("compared", "pairs of one", "of two", "error rate", "at", "means"):
        table.add_column(title, justify="left" if title == "compared" else "right")
    for row in measured["rows"]:
        means = f"{row['same_mean']:.2f}, {row['different_mean']:.2f}"
        figures = (f"{row['equal_error_rate']:.2%}", f"{row['threshold']:.3f}", means)
        table.add_row(row["name"], *map(str, row["pairs"]), *figures)
    Console(stderr=True).print(table)
    result = {"what": "speaker embeddings", "model": model, "folder": folder.name, **measured}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "speakers.json").write_text(json.dumps(result, indent=1), encoding="utf8")
    return result
