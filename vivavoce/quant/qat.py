"""Fine-tuning with rounding in the loop: the float model teaches its rounded self to think as it does.

Only matrices that will be rounded move, and they move under the very rounding that conversion uses: the forward pass
sees rounded weights, gradients go to the float ones behind them. Lessons are the float model's own replies, so no
transcripts or labels are needed. `python -m vivavoce.quant.qat --help`.
"""

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import hub
from vivavoce.errors import InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.quantised import linears, weight_names
from vivavoce.nn.linear import Linear
from vivavoce.nn.quantised_weight import Scheme, quantise
from vivavoce.quant.convert import Findings, quantise_folder
from vivavoce.quant.measure import Closeness, closeness, opinions
from vivavoce.quant.policy import METHODS, ModelPart, policy_for
from vivavoce.quant.speech_set import lesson_sets
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch, QuantSubject

NOT_TRAINED = {"cosyvoice": "its forward pass here is the engine's, through which no gradient goes"}
LESSONS_A_STEP = 4
CHECKED_EVERY = 25  # steps
REMEMBERED = 0.96  # of the running mean, a step


class RoundedLinear(nn.Module):
    """A linear layer that computes with rounded weights and learns in float."""

    def __init__(self, linear: Linear | nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self.linear, self.scheme = linear, scheme
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round anew, once a step."""
        self.error = quantise(self.linear.weight, self.scheme).dequantised() - self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return functional.linear(x, self.linear.weight + self.error, self.linear.bias)


@dataclass(frozen=True)
class FineTuning:
    """How long, how fast, and where."""

    steps: int = 300
    rate: float = 2e-5
    seed: int = 0
    most_seconds: float = 600.0
    device: str = "cpu"


@dataclass(frozen=True)
class Tuned:
    """Matrices after the course, and how near the rounded model is to float before and after it."""

    weights: Mapping[str, Tensor]
    before: Closeness
    after: Closeness
    training: dict[str, Any]


def fine_tune(
    kind: str,
    folder: Path,
    part: ModelPart,
    lessons: Sequence[CalibrationBatch],
    held_out: Sequence[CalibrationBatch],
    course: FineTuning | None = None,
    report: Callable[[str], None] | None = None,
) -> Tuned:
    """The matrices of a model, moved so that rounding to the `qat` method's bits costs less."""
    if kind in NOT_TRAINED:
        raise InputError(f"qat is not for {kind} models: {NOT_TRAINED[kind]}; use int8-weight or int4-weight")
    if not lessons:
        raise InputError("there is nothing to fine-tune with: the model replied to none of the items")
    course, subject = course or FineTuning(), SUBJECTS[kind]
    lessons, held_out = ([lesson.to(course.device) for lesson in some] for some in (lessons, held_out))
    teacher, student = (subject.load(folder).to(course.device) for _ in range(2))
    taught, judged = opinions(subject, teacher, lessons), opinions(subject, teacher, held_out)
    layers = _put_rounding_in(student, part, METHODS["qat"].scheme)
    before = closeness(judged, opinions(subject, student, held_out))
    took = _run(subject, student, layers, _Material(lessons, taught), course, report)
    after = closeness(judged, opinions(subject, student, held_out))
    for parent, name, layer in layers:
        setattr(parent, name, layer.linear)
    rounds = {name: part.scheme_of(name, tensor.shape, "int4") for name, tensor in published_tensors(student).items()}
    weights = {
        f"{part.name}:{name}": tensor.detach().cpu().clone()
        for name, tensor in published_tensors(student).items()
        if rounds[name] is not None
    }
    training = {
        "lessons": len(lessons), "held_out": len(held_out), **took,
        "divergence_before": before.divergence, "divergence_after": after.divergence,
        "agreement_before": before.agreement, "agreement_after": after.agreement,
    }  # fmt: skip
    return Tuned(weights, before, after, training)


Placed = list[tuple[nn.Module, str, RoundedLinear]]


def _put_rounding_in(model: nn.Module, part: ModelPart, wanted: Scheme) -> Placed:
    model.requires_grad_(False)
    placed: Placed = []
    for parent, attribute, prefix, linear in list(linears(model)):
        schemes = {part.scheme_of(name, linear.weight.shape, wanted) for name in weight_names(linear, prefix)}
        scheme = schemes.pop()
        if scheme is None or schemes:
            continue
        linear.weight.requires_grad_(True)
        layer = RoundedLinear(linear, scheme)
        setattr(parent, attribute, layer)
        placed.append((parent, attribute, layer))
    return placed


class _Material:
    """Lessons to learn from, and a tenth of them by which the best moment of the course is known."""

    def __init__(self, lessons: Sequence[CalibrationBatch], taught: Sequence[Tensor]) -> None:
        apart = max(1, len(lessons) // 10) if len(lessons) > 1 else 0
        self.lessons, self.taught = lessons[apart:], taught[apart:]
        self.checks, self.checked = lessons[:apart] or lessons, taught[:apart] or taught


def _run(
    subject: QuantSubject,
    student: nn.Module,
    layers: Placed,
    material: _Material,
    course: FineTuning,
    report: Callable[[str], None] | None,
) -> dict[str, float]:
    moved = [layer.linear.weight for _, _, layer in layers]
    optimiser = torch.optim.AdamW(moved, lr=course.rate, betas=(0.9, 0.95), weight_decay=0.0)
    source, begun, step = random.Random(course.seed), time.perf_counter(), 0
    # A step turns some numbers over to the next code and back, so single moments jump; their running mean does not.
    mean = [weight.detach().clone() for weight in moved]

    def loss() -> float:
        return closeness(material.checked, opinions(subject, student, material.checks)).divergence

    best, best_step, best_weights = loss(), 0, [weight.clone() for weight in mean]
    while step < course.steps and (elapsed := time.perf_counter() - begun) < course.most_seconds:
        progress = max(step / course.steps, elapsed / course.most_seconds)
        for group in optimiser.param_groups:
            group["lr"] = course.rate * min(1.0, 10 * progress + 0.1) * (1 - progress)
        _learn(subject, student, material, source)
        torch.nn.utils.clip_grad_norm_(moved, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        for _, _, layer in layers:
            layer.refresh()
        step += 1
        share = min(REMEMBERED, step / (step + 1))
        torch._foreach_lerp_(mean, [weight.detach() for weight in moved], 1 - share)
        if step % CHECKED_EVERY == 0 or step == course.steps:
            moment, found = [weight.detach().clone() for weight in moved], loss()
            _put(layers, mean)
            for weights, divergence in ((moment, found), (mean, loss())):
                if divergence < best:
                    best, best_step, best_weights = divergence, step, [weight.clone() for weight in weights]
            _put(layers, moment)
            if report is not None:
                report(f"step {step}: divergence {found:.5f}, best {best:.5f}")
    _put(layers, best_weights)
    return {"steps": step, "best_step": best_step, "seconds": round(time.perf_counter() - begun, 1)}


@torch.no_grad()
def _put(layers: Placed, weights: Sequence[Tensor]) -> None:
    """These weights, rounded anew."""
    for (_, _, layer), weight in zip(layers, weights, strict=True):
        layer.linear.weight.copy_(weight)
        layer.refresh()


def _learn(subject: QuantSubject, student: nn.Module, material: _Material, source: random.Random) -> None:
    """Gradients of some lessons."""
    count = min(LESSONS_A_STEP, len(material.lessons))
    for number in source.sample(range(len(material.lessons)), count):
        said = subject.logits(student, material.lessons[number]).float().log_softmax(-1)
        divergence = functional.kl_div(said, material.taught[number], reduction="batchmean", log_target=True)
        (divergence / count).backward()


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune a model for 4 bits and write it."""
    parser = argparse.ArgumentParser(prog="python -m vivavoce.quant.qat", description=__doc__)
    parser.add_argument("model", help="bundled name or folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200, help="questions to make lessons of")
    parser.add_argument("--steps", type=int, default=FineTuning.steps)
    parser.add_argument("--rate", type=float, default=FineTuning.rate)
    parser.add_argument("--seconds", type=float, default=FineTuning.most_seconds)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--overwrite", action="store_true")
    options = parser.parse_args(arguments)
    folder = hub.resolve(options.model)
    policy = policy_for(folder)
    learned, judged = lesson_sets(policy.kind, options.count)
    subject = SUBJECTS[policy.kind]
    print(f"lessons of {learned.name}", flush=True)
    lessons, held_out = subject.lessons(folder, learned.items), subject.lessons(folder, judged.items)
    course = FineTuning(options.steps, options.rate, most_seconds=options.seconds, device=options.device)
    tuned = fine_tune(
        policy.kind, folder, policy.parts[0], lessons, held_out, course, lambda line: print(line, flush=True)
    )
    findings = Findings(tuned=tuned.weights, calibration=learned.described(), training=tuned.training)
    quantise_folder(folder, options.out, METHODS["qat"], policy, findings, overwrite=options.overwrite)
    print(
        f"divergence {tuned.before.divergence:.4f} → {tuned.after.divergence:.4f}, "
        f"agreement {tuned.before.agreement:.3f} → {tuned.after.agreement:.3f}"
    )


if __name__ == "__main__":
    main()
