"""`viva quantize`: calibrate, choose schemes, fine-tune, convert, and report.

`write_report` compares a float model with its quantised version in one run and writes `report.md`, `report.json`, plots
and pairs of audio files. `python -m vivavoce.quant.run mini-asr --out DIR` does all of that for every method and writes
one table: closeness of logits, audio similarity, word errors, right answers, speed and memory.
"""

import argparse
import json
import logging
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vivavoce import hub
from vivavoce.asr.backends import Moonshine
from vivavoce.audio.io import Sound, write
from vivavoce.device import pick
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.evaluation.machine import stage
from vivavoce.evaluation.scoring import DNSMOS, plot_spectrograms, word_errors
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.models.moss_speech.cpu import CpuMossSpeech
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.quant.calibration import calibrate, mixture, observer, plot_costs, roundable, scan
from vivavoce.quant.convert import Findings, quantise_folder, units
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
from vivavoce.quant.policy import METHODS, QuantMethod, QuantPolicy, method_of, policy_for
from vivavoce.quant.qat import FineTuning, fine_tune
from vivavoce.quant.report_page import STATIC, page, plot_summary, static_figures, verdict
from vivavoce.quant.speech_sets import SpeechSet, SpokenSample, project_set, read_set, scene_set, training_sets
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch, QuantSubject
from vivavoce.quant.voices import ComparedVoice, SpokenReply, code_agreement, misheard, voice_of
from vivavoce.train.front_desk import judge, normalise

READS_TEXT = ("moss_tts_nano", "cosyvoice")


@dataclass(frozen=True)
class QuantizeOptions:
    """Options of `viva quantize` besides the method."""

    parts: Sequence[str] = ()
    keep: Sequence[str] = ()
    also: Sequence[str] = ()
    eight_bits: Sequence[str] = ()
    calibration: Path | None = None
    items: int = 12
    observer: str = "mse"
    budget: int | None = None
    max_drop: float | None = None
    fine_tuning: FineTuning = field(default_factory=FineTuning)
    overwrite: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether layers get different schemes."""
        return self.budget is not None or self.max_drop is not None


def quantize(model: str, method_name: str, out: Path, options: QuantizeOptions | None = None) -> Manifest:
    """Write the quantised model of a bundled name, folder or hub id; returns its manifest."""
    options, method = options or QuantizeOptions(), method_of(method_name)
    observer(options.observer)
    if options.is_mixed and method.name != "int4-weight":
        raise InputError(f"mixed precision needs --method int4-weight, not {method.name}")
    source = hub.resolve(model)
    policy = _policy(source, options)
    if is_quantised(source):
        raise InputError(f"{source} is already quantised; give the float model it was made from")
    findings = _findings(source, method, policy, options)
    with stage(f"{model} by {method.name}"):
        return quantise_folder(source, out, method, policy, findings, overwrite=options.overwrite)


def sensitivity(model: str, out: Path, options: QuantizeOptions | None = None) -> list[dict[str, Any]]:
    """Sensitivity of each layer to 4 bits; writes `sensitivity.json` and `sensitivity.png`."""
    options = options or QuantizeOptions()
    source = hub.resolve(model)
    policy = _policy(source, options)
    subject = SUBJECTS[policy.kind]
    examples = _examples(source, policy, speech_for(policy.kind, options))
    loaded = subject.load(source)
    with stage("each layer rounded alone"):
        costs = scan(subject, loaded, roundable(loaded, policy.parts[0]), examples, "int4")
    out.mkdir(parents=True, exist_ok=True)
    listed = [asdict(cost) for cost in costs]
    (out / "sensitivity.json").write_text(json.dumps(listed, indent=2), encoding="utf8")
    plot_costs(costs, out / "sensitivity.png")
    return listed


def speech_for(kind: str, options: QuantizeOptions) -> SpeechSet:
    """Calibration data: the user's, or the bundled set."""
    if options.calibration is not None:
        return read_set(options.calibration).first(options.items)
    return (scene_set() if kind in READS_TEXT else project_set()).first(options.items)


def _policy(source: Path, options: QuantizeOptions) -> QuantPolicy:
    return policy_for(source, options.parts).overridden(options.keep, options.also, options.eight_bits)


def _findings(source: Path, method: QuantMethod, policy: QuantPolicy, options: QuantizeOptions) -> Findings:
    """Calibration results that the method needs."""
    if method.trains:
        return _tuned(source, policy, options)
    if not method.calibrates and not options.is_mixed:
        return Findings()
    speech = speech_for(policy.kind, options)
    examples = _examples(source, policy, speech)
    described = speech.described() | {"observer": options.observer}
    subject = SUBJECTS[policy.kind]
    if method.calibrates:
        with stage("the range of every layer's inputs"):
            ranges = calibrate(subject, source, examples, options.observer)
        return Findings(ranges=ranges, calibration=described)
    loaded = subject.load(source)
    with stage("schemes of layers"):
        layers = roundable(loaded, policy.parts[0])
        touched = sum(layer.bytes_as(None) for layer in layers)
        found = mixture(
            subject,
            loaded,
            layers,
            examples,
            max(0, _bytes_as_half(source, policy) - touched),
            options.budget,
            options.max_drop,
        )
    return Findings(schemes=found.schemes, calibration=described | {"bytes": found.bytes, "near": asdict(found.near)})


def _bytes_as_half(source: Path, policy: QuantPolicy) -> int:
    """Bytes of all weights of a policy in 16 bits."""
    total = 0
    for unit in units(source, policy):
        with Checkpoint(unit.source) as checkpoint:
            total += sum(2 * torch.Size(shape).numel() for shape in checkpoint.shapes.values())
    return total


def _tuned(source: Path, policy: QuantPolicy, options: QuantizeOptions) -> Findings:
    given = None if options.calibration is None else read_set(options.calibration)
    learned, judged = training_sets(policy.kind, 10 * options.items, given)
    examples, held_out = (_examples(source, policy, speech) for speech in (learned, judged.first(options.items)))
    with stage("fine-tuning with rounding in the loop"):
        tuned = fine_tune(policy.kind, source, policy.parts[0], examples, held_out, options.fine_tuning)
    return Findings(tuned=tuned.weights, calibration=learned.described(), training=tuned.training)


def _examples(source: Path, policy: QuantPolicy, speech: SpeechSet) -> list[CalibrationBatch]:
    with stage(f"replies of the model to {len(speech.items)} items of {speech.name}"):
        return SUBJECTS[policy.kind].examples(source, speech.items)


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


HEAD = ("method", "divergence", "same id", "ViSQOL", "word errors", "right", "batch 1", "batch 8", "memory", "verdict")


def tabulate(
    model: str, out: Path, methods: Sequence[str], options: QuantizeOptions, moonshine: Path | None = None
) -> dict[str, Figures]:
    """Quantise by each method, report on each, and write the table."""
    source = hub.resolve(model)
    speech = speech_for(policy_for(source).kind, options)
    found: dict[str, Figures] = {}
    lines = [row(HEAD), row(["---"] * len(HEAD))]
    print("\n".join(lines), flush=True)
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            try:
                quantize(model, method, Path(folder) / method, options)
            except InputError as error:
                lines.append(row([method, f"refused: {error}"]))
            else:
                found[method] = write_report(source, Path(folder) / method, out / method, speech, moonshine)
                lines.append(row([method, *cells(found[method])]))
        print(lines[-1], flush=True)
    (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf8")
    (out / "table.json").write_text(json.dumps(found, indent=2, ensure_ascii=False), encoding="utf8")
    return found


def cells(figures: Figures) -> list[str]:
    aligned, alone = figures.get("aligned") or {}, figures.get("alone") or {}
    words = (figures.get("transcripts") or {}).get("wer") or {n: each.get("wer") for n, each in alone.items()}
    steps, load = figures["step_ms"], figures["loading"]
    visqol = aligned.get("visqol")
    return [
        f"{figures['logits']['divergence']:.5f}",
        f"{figures['logits']['agreement']:.4f}",
        "–" if visqol is None else f"{visqol / aligned['ceiling']['visqol']:.3f}",
        _both(words),
        _both({name: each.get("right") for name, each in alone.items()}),
        *(f"{steps['float'][batch] / steps['quantised'][batch]:.2f}×" for batch in steps["float"]),
        f"{load['quantised']['memory'] / max(1, load['float']['memory']):.2f}",
        figures["verdict"].partition(";")[0],
    ]


def _both(values: dict[str, float | None]) -> str:
    before, after = values.get("float"), values.get("quantised")
    return "–" if before is None or after is None else f"{100 * before:.1f} → {100 * after:.1f} %"


def row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vivavoce.quant.run", description="Every method on one model: a report each, and one table."
    )
    parser.add_argument("model", help="bundled name or folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", type=int, default=30)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--steps", type=int, default=FineTuning.steps, help="of fine-tuning")
    parser.add_argument("--moonshine", type=Path, default=None, help="unpacked npm package, to transcribe audio with")
    given = parser.parse_args(arguments)
    options = QuantizeOptions(items=given.items, fine_tuning=FineTuning(given.steps))
    given.out.mkdir(parents=True, exist_ok=True)
    tabulate(given.model, given.out, given.methods, options, given.moonshine)


if __name__ == "__main__":
    main()
