"""`viva quantize` from one end to the other: calibrate, choose, fine-tune, convert, report."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vivavoce import hub
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import stage
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.quant.calibration import calibrate, observer
from vivavoce.quant.convert import Findings, quantise_folder, units
from vivavoce.quant.manifest import Manifest, is_quantised
from vivavoce.quant.mixed import mixture, plot_costs, roundable, scan
from vivavoce.quant.policy import QuantMethod, QuantPolicy, method_of, policy_for
from vivavoce.quant.qat import FineTuning, fine_tune
from vivavoce.quant.speech_set import SpeechSet, lesson_sets, project_set, read_set, scene_set
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch

READS_TEXT = ("moss_tts_nano", "cosyvoice")


@dataclass(frozen=True)
class Wishes:
    """What a person may say beside the method."""

    parts: Sequence[str] = ()
    keep: Sequence[str] = ()
    also: Sequence[str] = ()
    eight_bits: Sequence[str] = ()
    calibration: Path | None = None
    items: int = 12
    observer: str = "mse"
    budget: int | None = None
    most_drop: float | None = None
    course: FineTuning = field(default_factory=FineTuning)
    overwrite: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether layers are to be kept in different ways."""
        return self.budget is not None or self.most_drop is not None


def quantize(model: str, method_name: str, out: Path, wishes: Wishes | None = None) -> Manifest:
    """Write the quantised model of a bundled name, folder or hub id; its manifest says what was done."""
    wishes, method = wishes or Wishes(), method_of(method_name)
    observer(wishes.observer)
    if wishes.is_mixed and method.name != "int4-weight":
        raise InputError(f"mixed precision mixes ways to keep weights: give --method int4-weight, not {method.name}")
    source = hub.resolve(model)
    policy = _policy(source, wishes)
    if is_quantised(source):
        raise InputError(f"{source} is quantised already; give the float model it was made of")
    findings = _findings(source, method, policy, wishes)
    with stage(f"{model} by {method.name}"):
        return quantise_folder(source, out, method, policy, findings, overwrite=wishes.overwrite)


def sensitivity(model: str, out: Path, wishes: Wishes | None = None) -> list[dict[str, Any]]:
    """Which layers 4 bits hurt most; `sensitivity.json` and `sensitivity.png` in a folder."""
    wishes = wishes or Wishes()
    source = hub.resolve(model)
    policy = _policy(source, wishes)
    subject = SUBJECTS[policy.kind]
    lessons = _lessons(source, policy, speech_for(policy.kind, wishes))
    loaded = subject.load(source)
    with stage("each layer rounded alone"):
        costs = scan(subject, loaded, roundable(loaded, policy.parts[0]), lessons, "int4")
    out.mkdir(parents=True, exist_ok=True)
    listed = [asdict(cost) for cost in costs]
    (out / "sensitivity.json").write_text(json.dumps(listed, indent=2), encoding="utf8")
    plot_costs(costs, out / "sensitivity.png")
    return listed


def speech_for(kind: str, wishes: Wishes) -> SpeechSet:
    """What to calibrate with: a person's own, or the project's."""
    if wishes.calibration is not None:
        return read_set(wishes.calibration).first(wishes.items)
    return (scene_set() if kind in READS_TEXT else project_set()).first(wishes.items)


def _policy(source: Path, wishes: Wishes) -> QuantPolicy:
    return policy_for(source, wishes.parts).overridden(wishes.keep, wishes.also, wishes.eight_bits)


def _findings(source: Path, method: QuantMethod, policy: QuantPolicy, wishes: Wishes) -> Findings:
    """Whatever the method needs to know of the model."""
    if method.trains:
        return _tuned(source, policy, wishes)
    if not method.calibrates and not wishes.is_mixed:
        return Findings()
    speech = speech_for(policy.kind, wishes)
    lessons = _lessons(source, policy, speech)
    described = speech.described() | {"observer": wishes.observer}
    subject = SUBJECTS[policy.kind]
    if method.calibrates:
        with stage("the range of every layer's inputs"):
            ranges = calibrate(subject, source, lessons, wishes.observer)
        return Findings(ranges=ranges, calibration=described)
    loaded = subject.load(source)
    with stage("how each layer can be kept"):
        layers = roundable(loaded, policy.parts[0])
        touched = sum(layer.bytes_as(None) for layer in layers)
        found = mixture(
            subject,
            loaded,
            layers,
            lessons,
            max(0, _bytes_as_half(source, policy) - touched),
            wishes.budget,
            wishes.most_drop,
        )
    return Findings(schemes=found.schemes, calibration=described | {"bytes": found.bytes, "near": asdict(found.near)})


def _bytes_as_half(source: Path, policy: QuantPolicy) -> int:
    """All weights a policy speaks of in 16 bits, whatever they are stored in."""
    total = 0
    for unit in units(source, policy):
        with Checkpoint(unit.source) as checkpoint:
            total += sum(2 * torch.Size(shape).numel() for shape in checkpoint.shapes.values())
    return total


def _tuned(source: Path, policy: QuantPolicy, wishes: Wishes) -> Findings:
    given = None if wishes.calibration is None else read_set(wishes.calibration)
    learned, judged = lesson_sets(policy.kind, 10 * wishes.items, given)
    lessons, held_out = (_lessons(source, policy, speech) for speech in (learned, judged.first(wishes.items)))
    with stage("fine-tuning with rounding in the loop"):
        tuned = fine_tune(policy.kind, source, policy.parts[0], lessons, held_out, wishes.course)
    return Findings(tuned=tuned.weights, calibration=learned.described(), training=tuned.training)


def _lessons(source: Path, policy: QuantPolicy, speech: SpeechSet) -> list[CalibrationBatch]:
    with stage(f"what the model replies to {len(speech.items)} items of {speech.name}"):
        return SUBJECTS[policy.kind].lessons(source, speech.items)
