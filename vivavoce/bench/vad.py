"""`viva bench vad FOLDER`: precision and recall of voice activity detectors on recordings with labels of speech.

The folder is laid out as TEN-VAD's testset: `NAME.wav` with 16 kHz sound and `NAME.scv` with one line
`NAME,start,end,label,start,end,label,…` in seconds, the label 1 for speech. Each detector is scored on its own windows.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio import vad
from vivavoce.audio.batched_vad import batched_activity
from vivavoce.audio.denoise import denoised
from vivavoce.audio.io import float_to_pcm16, read
from vivavoce.bench.noisy_speech import noise_beds
from vivavoce.errors import InputError, MissingDependencyError

Array = NDArray[np.float32]
Flags = NDArray[np.bool_]
TEN_WINDOW = 256
THRESHOLDS = np.arange(0.0, 1.0, 0.01)


@dataclass(frozen=True)
class LabelledSound:
    """A recording, and its stretches of speech in seconds."""

    name: str
    samples: Array
    speech: tuple[tuple[float, float], ...]
    labelled_seconds: float

    def labels(self, window: int, count: int) -> Flags:
        """Whether the middle of each window is in speech.  # [window]"""
        middles = (np.arange(count) + 0.5) * window / vad.RATE
        found: Flags = np.zeros(count, np.bool_)
        for start, end in self.speech:
            found |= (middles >= start) & (middles < end)
        return found


@dataclass(frozen=True)
class Detector:
    """A detector: its probabilities of speech for every window of some recordings."""

    name: str
    window: int
    probabilities: Callable[[Sequence[Array]], list[Array]]


def read_labelled(folder: Path) -> list[LabelledSound]:
    """The labelled recordings of a folder, by name."""
    found = [_read_one(path) for path in sorted(folder.glob("*.scv"))]
    if not found:
        raise InputError(
            f"{folder} holds no labelled recordings; it needs NAME.wav with NAME.scv, as TEN-VAD's testset"
        )
    return found


def _read_one(path: Path) -> LabelledSound:
    fields = path.read_text(encoding="utf8").split("\n")[0].strip().split(",")[1:]
    try:
        spans = [(float(fields[i]), float(fields[i + 1]), int(fields[i + 2])) for i in range(0, len(fields), 3)]
    except (ValueError, IndexError) as error:
        raise InputError(f"{path} must be NAME,start,end,label,… in one line") from error
    speech = tuple((start, end) for start, end, label in spans if label)
    samples = read(path.with_suffix(".wav"), rate=vad.RATE).samples[0]
    return LabelledSound(path.stem, samples, speech, spans[-1][1] if spans else 0.0)


def silero() -> Detector:
    """Silero as the server runs it: all recordings in one batch."""
    return Detector("Silero (bundled, batched)", vad.WINDOW, _batched_silero)


def ten() -> Detector:
    """TEN-VAD, if its package and its library can be loaded."""
    try:
        from ten_vad import TenVad

        TenVad(TEN_WINDOW, 0.5)
    except (ImportError, OSError) as error:
        raise MissingDependencyError(f"TEN-VAD needs ten-vad and libc++: pip install ten-vad ({error})") from error

    def probabilities(sounds: Sequence[Array]) -> list[Array]:
        found = []
        for samples in sounds:
            stream, pcm = TenVad(TEN_WINDOW, 0.5), float_to_pcm16(samples)
            windows = pcm[: len(pcm) // TEN_WINDOW * TEN_WINDOW].reshape(-1, TEN_WINDOW)
            each = np.array([stream.process(window)[0] for window in windows], np.float32)
            found.append(each[1:])  # its answer is one window late
        return found

    return Detector("TEN-VAD", TEN_WINDOW, probabilities)


def _batched_silero(sounds: Sequence[Array]) -> list[Array]:
    detector = batched_activity(vad.voice_activity())
    rows = [detector.join() for _ in sounds]
    counts = [len(samples) // vad.WINDOW for samples in sounds]
    found: list[list[float]] = [[] for _ in sounds]
    for window in range(max(counts, default=0)):
        active = [index for index, count in enumerate(counts) if window < count]
        begin = window * vad.WINDOW
        windows = np.stack([sounds[index][begin : begin + vad.WINDOW] for index in active])
        answers = detector.step(np.array([rows[index] for index in active], np.intp), windows)
        for index, probability in zip(active, answers, strict=True):
            found[index].append(float(probability))
    return [np.array(each, np.float32) for each in found]


def average_precision(scores: Array, labels: Flags) -> float:
    """Area under the precision-recall curve: the mean over all positives of the precision at their score."""
    order = np.argsort(-scores, kind="stable")
    sorted_scores, positives = scores[order], labels[order]
    last = np.flatnonzero(np.diff(sorted_scores, append=-np.inf))  # equal scores are one point of the curve
    true = np.cumsum(positives)[last]
    precision, recall = true / (last + 1), true / max(1, int(positives.sum()))
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def curve(scores: Array, labels: Flags) -> list[dict[str, float]]:
    """Precision and recall at thresholds from 0 to 0.99."""
    found = []
    for threshold in THRESHOLDS:
        said = scores >= threshold
        hits = int((said & labels).sum())
        precision, recall = hits / max(1, int(said.sum())), hits / max(1, int(labels.sum()))
        found.append({"threshold": float(threshold), "precision": precision, "recall": recall})
    return found


def score(detector: Detector, sounds: Sequence[LabelledSound]) -> dict[str, Any]:
    """Average precision, the best F1 and the curve of a detector over all windows of all recordings."""
    scores, labels = [], []
    answers = detector.probabilities([each.samples for each in sounds])
    for sound, probabilities in zip(sounds, answers, strict=True):
        count = min(len(probabilities), int(sound.labelled_seconds * vad.RATE / detector.window))
        scores.append(probabilities[:count])
        labels.append(sound.labels(detector.window, count))
    all_scores, all_labels = np.concatenate(scores), np.concatenate(labels)
    points = curve(all_scores, all_labels)
    best = max(points, key=_f1)
    return {
        "name": detector.name,
        "window_ms": 1000 * detector.window / vad.RATE,
        "windows": len(all_labels),
        "speech": float(all_labels.mean()),
        "average_precision": average_precision(all_scores, all_labels),
        "best_f1": _f1(best),
        "best_threshold": best["threshold"],
        "curve": points,
    }


def without_noise(detector: Detector) -> Detector:
    """The detector behind noise suppression, as in a conversation."""

    def probabilities(sounds: Sequence[Array]) -> list[Array]:
        return detector.probabilities([denoised(samples).speech[0] for samples in sounds])

    return Detector(f"{detector.name}, noise suppressed", detector.window, probabilities)


def run(
    folder: Path,
    out: Path | None = None,
    snr: float | None = None,
    noise: Path | None = None,
    denoise: bool = False,
) -> dict[str, Any]:
    """Score Silero, and TEN-VAD if it is installed; print a table, write `vad.json` to `out`.

    With `snr` noise is added, of the files of a folder or synthetic. With `denoise` detectors are also scored on sound
    whose noise is suppressed.
    """
    from rich.console import Console
    from rich.table import Table

    console, sounds = Console(stderr=True), read_labelled(folder)
    if (beds := noise_beds(snr, noise)) is not None:
        sounds = [replace(each, samples=beds.added(each.samples, number)) for number, each in enumerate(sounds)]
    detectors = [silero()]
    try:
        detectors.append(ten())
    except MissingDependencyError as error:
        console.print(str(error))
    if denoise:
        detectors += [without_noise(each) for each in detectors]
    scored = [score(each, sounds) for each in detectors]
    table = Table(title=f"{len(sounds)} recordings, {sum(each.labelled_seconds for each in sounds):.0f} s")
    for title in ("detector", "window ms", "average precision", "best F1", "at threshold"):
        table.add_column(title, justify="left" if title == "detector" else "right")
    for each in scored:
        row = (f"{each['window_ms']:.0f}", f"{each['average_precision']:.4f}", f"{each['best_f1']:.4f}")
        table.add_row(each["name"], *row, f"{each['best_threshold']:.2f}")
    console.print(table)
    result = {"what": "voice activity against labels", "folder": folder.name, "snr_db": snr, "detectors": scored}
    if out is not None:
        (out / "vad.json").write_text(json.dumps(result, indent=1), encoding="utf8")
    return result


def _f1(point: dict[str, float]) -> float:
    total = point["precision"] + point["recall"]
    return 2 * point["precision"] * point["recall"] / total if total else 0.0
