"""`viva quantize`: calibrate, choose schemes, fine-tune and convert.

`python -m vivavoce.quant.run mini-asr --out DIR` does that by every method, reports on each, and writes one table:
closeness of logits, audio similarity, word errors, right answers, speed and memory.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vivavoce import hub
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import stage
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.quant.calibration import calibrate, mixture, observer, plot_costs, roundable, scan
from vivavoce.quant.convert import Findings, quantise_folder, units
from vivavoce.quant.manifest import Manifest, is_quantised
from vivavoce.quant.policy import METHODS, QuantMethod, QuantPolicy, method_of, policy_for
from vivavoce.quant.qat import FineTuning, fine_tune
from vivavoce.quant.report import Figures, write_report
from vivavoce.quant.speech_sets import SpeechSet, project_set, read_set, scene_set, training_sets
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch

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
