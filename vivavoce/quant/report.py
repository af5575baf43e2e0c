"""What quantising cost and gained: a float model and its quantised self, measured and heard in one run.

`write_report` leaves `report.md`, `report.json`, pictures, and pairs of sounds to listen to.
"""

import json
import logging
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vivavoce.asr.backends.moonshine import Moonshine
from vivavoce.audio.io import Sound, write
from vivavoce.device import pick
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.evaluation.machine import stage
from vivavoce.evaluation.scoring import Listeners, plot_spectrograms, word_errors
from vivavoce.models.moss_speech.cpu import CpuMossSpeech
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.quant.manifest import Manifest, is_quantised
from vivavoce.quant.measure import AudioMetrics, Likeness, bytes_on_disk, closeness, loading, opinions, step_seconds
from vivavoce.quant.report_page import STATIC, page, plot_summary, static_figures, verdict
from vivavoce.quant.speech_set import SpeechSet, SpokenSample
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch, QuantSubject
from vivavoce.quant.voices import ComparedVoice, Said, code_agreement, voice_of
from vivavoce.train.front_desk import judge, normalise

logger = logging.getLogger(__name__)

FLOAT, QUANTISED = "float", "quantised"
PAIRS_KEPT = 3
Figures = dict[str, Any]


def write_report(source: Path, quantised: Path, out: Path, speech: SpeechSet, moonshine: Path | None = None) -> Figures:
    """Measure both, write the report into a folder, and return its figures."""
    if not is_quantised(quantised):
        raise InputError(f"{quantised} was not made by `viva quantize`; a report needs its manifest")
    manifest = Manifest.read(quantised)
    subject = SUBJECTS[manifest.kind]
    out.mkdir(parents=True, exist_ok=True)
    with stage("what the float model replies"):
        lessons = subject.lessons(source, speech.items)
    with stage("what both think of it"):
        models = {FLOAT: subject.load(source), QUANTISED: subject.load(quantised)}
        figures = _thoughts(subject, models, quantised, lessons, speech.items)
    with stage("time and memory"):
        figures |= _costs(manifest.kind, subject, models, {FLOAT: source, QUANTISED: quantised}, lessons)
    with stage("how both sound"):
        figures |= _sounds(
            manifest.kind, subject, models, {FLOAT: source, QUANTISED: quantised}, lessons, speech, out, moonshine
        )
    if manifest.method == STATIC:
        with stage("static beside dynamic, and outliers"):
            figures |= static_figures(subject, source, models[FLOAT], models[QUANTISED], lessons)
    if manifest.kind == "whisper":
        figures |= _transcripts({FLOAT: source, QUANTISED: quantised}, speech.items)
    figures |= {
        "method": manifest.method, "kind": manifest.kind, "tensors": manifest.tensors, "training": manifest.training,
        "set": speech.described(), "machine": pick("cpu").name, "threads": torch.get_num_threads(),
        "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip
    figures["verdict"] = verdict(figures)
    (out / "report.json").write_text(json.dumps(figures, indent=2, ensure_ascii=False), encoding="utf8")
    plot_summary(figures, out / "summary.png")
    (out / "report.md").write_text(page(figures), encoding="utf8")
    return figures


def _thoughts(
    subject: QuantSubject,
    models: dict[str, nn.Module],
    folder: Path,
    lessons: Sequence[CalibrationBatch],
    items: Sequence[SpokenSample],
) -> Figures:
    near = closeness(opinions(subject, models[FLOAT], lessons), opinions(subject, models[QUANTISED], lessons))
    agreement = code_agreement(lessons, subject.lessons(folder, items))
    return {"logits": asdict(near), "code_agreement": agreement, "lessons": len(lessons)}


def _costs(
    kind: str,
    subject: QuantSubject,
    models: dict[str, nn.Module],
    folders: dict[str, Path],
    lessons: Sequence[CalibrationBatch],
) -> Figures:
    """Bytes, memory, and the time of steps; the float model of a kind that has a path of its own for CPUs takes it."""
    fast: dict[str, nn.Module] = {
        name: CpuMossSpeech(model) if isinstance(model, MossSpeech) and CpuMossSpeech.suits(model) else model
        for name, model in models.items()
    }
    steps = step_seconds(subject, fast, lessons)
    float_bytes = 4 * sum(parameter.numel() for parameter in models[FLOAT].parameters())
    return {
        "float32_bytes": float_bytes,
        "disk_bytes": {name: bytes_on_disk(folder) for name, folder in folders.items()},
        "loading": {name: asdict(each) for name, each in loading(kind, folders).items()},
        "step_ms": {name: {str(batch): 1e3 * taken for batch, taken in each.items()} for name, each in steps.items()},
    }


def _sounds(
    kind: str,
    subject: QuantSubject,
    models: dict[str, nn.Module],
    folders: dict[str, Path],
    lessons: Sequence[CalibrationBatch],
    speech: SpeechSet,
    out: Path,
    moonshine: Path | None,
) -> Figures:
    voices = {name: voice_of(kind, folder) for name, folder in folders.items()}
    exact, other = voices[FLOAT], voices[QUANTISED]
    if exact is None or other is None:
        return {}
    ears = AudioMetrics()
    pairs = [
        (exact.aligned(subject, models[FLOAT], lesson), other.aligned(subject, models[QUANTISED], lesson))
        for lesson in lessons
    ]
    heard = [(one, two) for one, two in pairs if one is not None and two is not None]
    scores = [ears.compare(one, two) for one, two in heard]
    ceiling = [ears.compare(one, one) for one, _ in heard[:2]]
    _keep_pairs(heard, out)
    figures: Figures = {
        "aligned": _means(scores) | {"pairs": len(scores), "ceiling": _means(ceiling), "absent_judges": ears.absent}
    }
    replies = {name: _alone(voice, speech.items) for name, voice in (("float", exact), ("quantised", other))}
    figures["alone"] = {name: _judged(kind, said, speech.items, moonshine) for name, said in replies.items()}
    similar = [ears.compare(one.sound, two.sound).speaker for one, two in zip(*replies.values(), strict=True)]
    figures["speaker_similarity"] = _mean(similar)
    for number, (one, two) in enumerate(zip(*replies.values(), strict=True)):
        if number < PAIRS_KEPT:
            write(out / f"alone-{number}-float.wav", one.sound)
            write(out / f"alone-{number}-quantised.wav", two.sound)
    return figures


def _alone(voice: ComparedVoice, items: Sequence[SpokenSample]) -> list[Said]:
    return [voice.say(item, seed=number) for number, item in enumerate(items)]


def _judged(kind: str, said: Sequence[Said], items: Sequence[SpokenSample], moonshine: Path | None) -> Figures:
    """Work a second of sound, the first sound, opinions, and what a foreign recogniser understood."""
    seconds = sum(each.sound.seconds for each in said)
    found: Figures = {
        "rtf": sum(each.seconds for each in said) / max(seconds, 1e-9),
        "first_sound_ms": 1e3 * float(np.median([each.first for each in said])),
        "sound_seconds": seconds,
        "dnsmos": _opinion([each.sound for each in said]),
    }
    if moonshine is None:
        return found
    listener = Moonshine(moonshine)
    texts = [listener.transcribe(each.sound) if each.sound.seconds > 0.3 else "" for each in said]
    wanted = [_wanted(kind, item) for item in items]
    errors = sum(word_errors(normalise(want), normalise(text)) for want, text in zip(wanted, texts, strict=True))
    found["wer"] = errors / max(1, sum(len(normalise(want).split()) for want in wanted))
    judged = [judge(text, item.exchange) for text, item in zip(texts, items, strict=True) if item.exchange]
    if kind == "moss_speech" and judged:
        found["right"] = float(np.mean(judged))
    return found


def _wanted(kind: str, item: SpokenSample) -> str:
    return item.exchange.reply if kind == "moss_speech" and item.exchange is not None else item.text


def _opinion(sounds: Sequence[Sound]) -> float | None:
    try:
        listeners = Listeners()
    except MissingDependencyError:
        return None
    return _mean([listeners.overall(sound) for sound in sounds if sound.seconds > 0.5])


def _transcripts(folders: dict[str, Path], items: Sequence[SpokenSample]) -> Figures:
    """Word errors of a recogniser on recordings whose words are known."""
    rates: dict[str, float] = {}
    each: list[tuple[int, int]] = []
    for name, folder in folders.items():
        try:
            each = misheard(folder, items)
        except Exception as error:  # a bare checkpoint has no tokenizer to write with
            logger.debug("transcripts cannot be compared", exc_info=True)
            return {"transcripts": {"why_not": str(error)}}
        rates[name] = sum(wrong for wrong, _ in each) / max(1, sum(of for _, of in each))
    return {"transcripts": {"wer": rates, "recordings": len(each)}}


def misheard(folder: Path, items: Sequence[SpokenSample]) -> list[tuple[int, int]]:
    """Words that a recogniser gets wrong in each recording whose words are known, and how many it has."""
    listener, found = WhisperTranscriber.load(folder), []
    for item in items:
        if item.sound is not None and item.text:
            segments = listener.segments(torch.from_numpy(item.sound.samples[0].copy()))
            found.append(misheard_words(item.text, " ".join(segment.text for segment in segments)))
    return found


def misheard_words(text: str, heard: str) -> tuple[int, int]:
    """Words of a text that were heard wrongly, and how many it has."""
    meant = normalise(text)
    return word_errors(meant, normalise(heard)), len(meant.split())


def _keep_pairs(pairs: Sequence[tuple[Sound, Sound]], out: Path) -> None:
    for number, (one, two) in enumerate(pairs[:PAIRS_KEPT]):
        write(out / f"aligned-{number}-float.wav", one)
        write(out / f"aligned-{number}-quantised.wav", two)
        plot_spectrograms(one, two, "quantised", out / f"aligned-{number}.png")


def _means(scores: Sequence[Likeness]) -> dict[str, float | None]:
    return {name: _mean([getattr(score, name) for score in scores]) for name in ("visqol", "pesq", "stoi", "speaker")}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
