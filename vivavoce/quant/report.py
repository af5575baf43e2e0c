"""The report on a quantised model: it and its float model, compared in one run.

`write_report` writes `report.md`, `report.json`, plots and pairs of audio files; `report_page.py` has the page and the
verdict.
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

from vivavoce.asr.backends import Moonshine
from vivavoce.audio.io import Sound, write
from vivavoce.device import pick
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.evaluation.machine import stage
from vivavoce.evaluation.scoring import DNSMOS, plot_spectrograms, word_errors
from vivavoce.models.moss_speech.cpu import CpuMossSpeech
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.quant.manifest import Manifest, is_quantised
from vivavoce.quant.measure import (
    AudioMetrics,
    Likeness,
    bytes_on_disk,
    closeness,
    loading,
    log_probabilities,
    step_seconds,
)
from vivavoce.quant.report_page import STATIC, page, plot_summary, static_figures, verdict
from vivavoce.quant.speech_sets import SpeechSet, SpokenSample
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch, QuantSubject
from vivavoce.quant.voices import ComparedVoice, SpokenReply, code_agreement, misheard, voice_of
from vivavoce.train.front_desk import judge, normalise

logger = logging.getLogger(__name__)

FLOAT, QUANTISED = "float", "quantised"
PAIRS_KEPT = 3
Figures = dict[str, Any]


def write_report(source: Path, quantised: Path, out: Path, speech: SpeechSet, moonshine: Path | None = None) -> Figures:
    """Measure both, write the report into a folder, and return its figures."""
    if not is_quantised(quantised):
        raise InputError(f"{quantised} was not written by `viva quantize`; a report needs its manifest")
    manifest = Manifest.read(quantised)
    subject = SUBJECTS[manifest.kind]
    out.mkdir(parents=True, exist_ok=True)
    with stage("replies of the float model"):
        examples = subject.examples(source, speech.items)
    with stage("logits of both"):
        models = {FLOAT: subject.load(source), QUANTISED: subject.load(quantised)}
        figures = _logit_figures(subject, models, quantised, examples, speech.items)
    with stage("time and memory"):
        figures |= _cost_figures(manifest.kind, subject, models, {FLOAT: source, QUANTISED: quantised}, examples)
    with stage("audio of both"):
        figures |= _sound_figures(
            manifest.kind, subject, models, {FLOAT: source, QUANTISED: quantised}, examples, speech, out, moonshine
        )
    if manifest.method == STATIC:
        with stage("static beside dynamic, and outliers"):
            figures |= static_figures(subject, source, models[FLOAT], models[QUANTISED], examples)
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


def _logit_figures(
    subject: QuantSubject,
    models: dict[str, nn.Module],
    folder: Path,
    examples: Sequence[CalibrationBatch],
    items: Sequence[SpokenSample],
) -> Figures:
    near = closeness(
        log_probabilities(subject, models[FLOAT], examples), log_probabilities(subject, models[QUANTISED], examples)
    )
    agreement = code_agreement(examples, subject.examples(folder, items))
    return {"logits": asdict(near), "code_agreement": agreement, "lessons": len(examples)}


def _cost_figures(
    kind: str,
    subject: QuantSubject,
    models: dict[str, nn.Module],
    folders: dict[str, Path],
    examples: Sequence[CalibrationBatch],
) -> Figures:
    """Disk size, memory and step times; the float model uses its CPU implementation if it has one."""
    fast: dict[str, nn.Module] = {
        name: CpuMossSpeech(model) if isinstance(model, MossSpeech) and CpuMossSpeech.suits(model) else model
        for name, model in models.items()
    }
    steps = step_seconds(subject, fast, examples)
    float_bytes = 4 * sum(parameter.numel() for parameter in models[FLOAT].parameters())
    return {
        "float32_bytes": float_bytes,
        "disk_bytes": {name: bytes_on_disk(folder) for name, folder in folders.items()},
        "loading": {name: asdict(each) for name, each in loading(kind, folders).items()},
        "step_ms": {name: {str(batch): 1e3 * taken for batch, taken in each.items()} for name, each in steps.items()},
    }


def _sound_figures(
    kind: str,
    subject: QuantSubject,
    models: dict[str, nn.Module],
    folders: dict[str, Path],
    examples: Sequence[CalibrationBatch],
    speech: SpeechSet,
    out: Path,
    moonshine: Path | None,
) -> Figures:
    voices = {name: voice_of(kind, folder) for name, folder in folders.items()}
    exact, other = voices[FLOAT], voices[QUANTISED]
    if exact is None or other is None:
        return {}
    metrics = AudioMetrics()
    pairs = [
        (exact.aligned(subject, models[FLOAT], example), other.aligned(subject, models[QUANTISED], example))
        for example in examples
    ]
    heard = [(one, two) for one, two in pairs if one is not None and two is not None]
    scores = [metrics.compare(one, two) for one, two in heard]
    ceiling = [metrics.compare(one, one) for one, _ in heard[:2]]
    _write_pairs(heard, out)
    figures: Figures = {
        "aligned": _means(scores) | {"pairs": len(scores), "ceiling": _means(ceiling), "absent_judges": metrics.absent}
    }
    replies = {
        name: _free_running_replies(voice, speech.items) for name, voice in (("float", exact), ("quantised", other))
    }
    figures["alone"] = {name: _judged(kind, said, speech.items, moonshine) for name, said in replies.items()}
    similar = [metrics.compare(one.sound, two.sound).speaker for one, two in zip(*replies.values(), strict=True)]
    figures["speaker_similarity"] = _mean(similar)
    for number, (one, two) in enumerate(zip(*replies.values(), strict=True)):
        if number < PAIRS_KEPT:
            write(out / f"alone-{number}-float.wav", one.sound)
            write(out / f"alone-{number}-quantised.wav", two.sound)
    return figures


def _free_running_replies(voice: ComparedVoice, items: Sequence[SpokenSample]) -> list[SpokenReply]:
    return [voice.say(item, seed=number) for number, item in enumerate(items)]


def _judged(kind: str, said: Sequence[SpokenReply], items: Sequence[SpokenSample], moonshine: Path | None) -> Figures:
    """RTF, time to first audio, DNSMOS, and word errors by an independent recogniser."""
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
        dnsmos = DNSMOS()
    except MissingDependencyError:
        return None
    return _mean([dnsmos.overall(sound) for sound in sounds if sound.seconds > 0.5])


def _transcripts(folders: dict[str, Path], items: Sequence[SpokenSample]) -> Figures:
    """Word error rates of a recogniser on the labelled recordings."""
    rates: dict[str, float] = {}
    each: list[tuple[int, int]] = []
    for name, folder in folders.items():
        try:
            each = misheard(folder, items)
        except Exception as error:  # a bare checkpoint has no tokenizer
            logger.debug("transcripts cannot be compared", exc_info=True)
            return {"transcripts": {"why_not": str(error)}}
        rates[name] = sum(wrong for wrong, _ in each) / max(1, sum(of for _, of in each))
    return {"transcripts": {"wer": rates, "recordings": len(each)}}


def _write_pairs(pairs: Sequence[tuple[Sound, Sound]], out: Path) -> None:
    for number, (one, two) in enumerate(pairs[:PAIRS_KEPT]):
        write(out / f"aligned-{number}-float.wav", one)
        write(out / f"aligned-{number}-quantised.wav", two)
        plot_spectrograms(one, two, "quantised", out / f"aligned-{number}.png")


def _means(scores: Sequence[Likeness]) -> dict[str, float | None]:
    return {name: _mean([getattr(score, name) for score in scores]) for name in ("visqol", "pesq", "stoi", "speaker")}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
