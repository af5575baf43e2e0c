"""Quantisation-aware fine-tuning: the float model distils into its quantised copy.

Only matrices that will be rounded are trained, with the same rounding as the conversion and a straight-through
estimator. The training data are the float model's own replies, so no transcripts or labels are needed.
`python -m vivavoce.quant.qat --help`.
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
from vivavoce.quant.measure import Closeness, closeness, log_probabilities
from vivavoce.quant.policy import METHODS, ModelPart, policy_for
from vivavoce.quant.speech_sets import training_sets
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch, QuantSubject

NOT_TRAINED = {"cosyvoice": "its forward pass is the engine's, which has no gradients"}
EXAMPLES_PER_STEP = 4
CHECKED_EVERY = 25  # steps
MEAN_DECAY = 0.96  # decay of the running mean per step


class RoundedLinear(nn.Module):
    """A linear layer with rounded weights in the forward pass and float master weights."""

    def __init__(self, linear: Linear | nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self.linear, self.scheme = linear, scheme
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the rounding error, once per step."""
        self.error = quantise(self.linear.weight, self.scheme).dequantised() - self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.linear.weight + self.error, self.linear.bias)


@dataclass(frozen=True)
class FineTuning:
    """Training settings."""

    steps: int = 300
    rate: float = 2e-5
    seed: int = 0
    max_seconds: float = 600.0
    device: str = "cpu"


@dataclass(frozen=True)
class Tuned:
    """Trained matrices, and closeness to float before and after."""

    weights: Mapping[str, Tensor]
    before: Closeness
    after: Closeness
    training: dict[str, Any]


def fine_tune(
    kind: str,
    folder: Path,
    part: ModelPart,
    examples: Sequence[CalibrationBatch],
    held_out: Sequence[CalibrationBatch],
    fine_tuning: FineTuning | None = None,
    report: Callable[[str], None] | None = None,
) -> Tuned:
    """Train a model's matrices so that rounding by the `qat` method costs less."""
    if kind in NOT_TRAINED:
        raise InputError(f"qat is not for {kind} models: {NOT_TRAINED[kind]}; use int8-weight or int4-weight")
    if not examples:
        raise InputError("there is nothing to fine-tune with: the model gave no reply to any item")
    fine_tuning, subject = fine_tuning or FineTuning(), SUBJECTS[kind]
    examples, held_out = ([example.to(fine_tuning.device) for example in some] for some in (examples, held_out))
    teacher, student = (subject.load(folder).to(fine_tuning.device) for _ in range(2))
    taught, held_out_targets = (log_probabilities(subject, teacher, some) for some in (examples, held_out))
    layers = _insert_rounding(student, part, METHODS["qat"].scheme)
    before = closeness(held_out_targets, log_probabilities(subject, student, held_out))
    took = _run(subject, student, layers, _TrainingData(examples, taught), fine_tuning, report)
    after = closeness(held_out_targets, log_probabilities(subject, student, held_out))
    for parent, name, layer in layers:
        setattr(parent, name, layer.linear)
    rounds = {name: part.scheme_of(name, tensor.shape, "int4") for name, tensor in published_tensors(student).items()}
    weights = {
        f"{part.name}:{name}": tensor.detach().cpu().clone()
        for name, tensor in published_tensors(student).items()
        if rounds[name] is not None
    }
    training = {
        "lessons": len(examples), "held_out": len(held_out), **took,
        "divergence_before": before.divergence, "divergence_after": after.divergence,
        "agreement_before": before.agreement, "agreement_after": after.agreement,
    }  # fmt: skip
    return Tuned(weights, before, after, training)


RoundedLayers = list[tuple[nn.Module, str, RoundedLinear]]


def _insert_rounding(model: nn.Module, part: ModelPart, wanted: Scheme) -> RoundedLayers:
    model.requires_grad_(False)
    layers: RoundedLayers = []
    for parent, attribute, prefix, linear in list(linears(model)):
        schemes = {part.scheme_of(name, linear.weight.shape, wanted) for name in weight_names(linear, prefix)}
        scheme = schemes.pop()
        if scheme is None or schemes:
            continue
        linear.weight.requires_grad_(True)
        layer = RoundedLinear(linear, scheme)
        setattr(parent, attribute, layer)
        layers.append((parent, attribute, layer))
    return layers


class _TrainingData:
    """Training examples, a tenth of which are held out to select the best step."""

    def __init__(self, examples: Sequence[CalibrationBatch], taught: Sequence[Tensor]) -> None:
        checked_count = max(1, len(examples) // 10) if len(examples) > 1 else 0
        self.examples, self.taught = examples[checked_count:], taught[checked_count:]
        self.checks, self.checked = examples[:checked_count] or examples, taught[:checked_count] or taught


def _run(
    subject: QuantSubject,
    student: nn.Module,
    layers: RoundedLayers,
    material: _TrainingData,
    fine_tuning: FineTuning,
    report: Callable[[str], None] | None,
) -> dict[str, float]:
    weights = [layer.linear.weight for _, _, layer in layers]
    optimiser = torch.optim.AdamW(weights, lr=fine_tuning.rate, betas=(0.9, 0.95), weight_decay=0.0)
    source, started, step = random.Random(fine_tuning.seed), time.perf_counter(), 0
    # Codes flip back and forth between steps, so single checkpoints are noisy; the running mean is smoother.
    mean = [weight.detach().clone() for weight in weights]

    def loss() -> float:
        return closeness(material.checked, log_probabilities(subject, student, material.checks)).divergence

    best, best_step, best_weights = loss(), 0, [weight.clone() for weight in mean]
    while step < fine_tuning.steps and (elapsed := time.perf_counter() - started) < fine_tuning.max_seconds:
        progress = max(step / fine_tuning.steps, elapsed / fine_tuning.max_seconds)
        for group in optimiser.param_groups:
            group["lr"] = fine_tuning.rate * min(1.0, 10 * progress + 0.1) * (1 - progress)
        _accumulate_gradients(subject, student, material, source)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        for _, _, layer in layers:
            layer.refresh()
        step += 1
        share = min(MEAN_DECAY, step / (step + 1))
        torch._foreach_lerp_(mean, [weight.detach() for weight in weights], 1 - share)
        if step % CHECKED_EVERY == 0 or step == fine_tuning.steps:
            current, found = [weight.detach().clone() for weight in weights], loss()
            _set_weights(layers, mean)
            for candidate, divergence in ((current, found), (mean, loss())):
                if divergence < best:
                    best, best_step, best_weights = divergence, step, [weight.clone() for weight in candidate]
            _set_weights(layers, current)
            if report is not None:
                report(f"step {step}: divergence {found:.5f}, best {best:.5f}")
    _set_weights(layers, best_weights)
    return {"steps": step, "best_step": best_step, "seconds": round(time.perf_counter() - started, 1)}


@torch.no_grad()
def _set_weights(layers: RoundedLayers, weights: Sequence[Tensor]) -> None:
    """Set the weights and recompute their rounding."""
    for (_, _, layer), weight in zip(layers, weights, strict=True):
        layer.linear.weight.copy_(weight)
        layer.refresh()


def _accumulate_gradients(
    subject: QuantSubject, student: nn.Module, material: _TrainingData, source: random.Random
) -> None:
    """Accumulate the gradients of a few examples."""
    count = min(EXAMPLES_PER_STEP, len(material.examples))
    for number in source.sample(range(len(material.examples)), count):
        log_probs = subject.logits(student, material.examples[number]).float().log_softmax(-1)
        divergence = functional.kl_div(log_probs, material.taught[number], reduction="batchmean", log_target=True)
        (divergence / count).backward()


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune a model for 4 bits and write it."""
    parser = argparse.ArgumentParser(prog="python -m vivavoce.quant.qat", description=__doc__)
    parser.add_argument("model", help="bundled name or folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200, help="questions to generate training examples from")
    parser.add_argument("--steps", type=int, default=FineTuning.steps)
    parser.add_argument("--rate", type=float, default=FineTuning.rate)
    parser.add_argument("--seconds", type=float, default=FineTuning.max_seconds)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--overwrite", action="store_true")
    options = parser.parse_args(arguments)
    folder = hub.resolve(options.model)
    policy = policy_for(folder)
    learned, judged = training_sets(policy.kind, options.count)
    subject = SUBJECTS[policy.kind]
    print(f"examples of {learned.name}", flush=True)
    examples, held_out = subject.examples(folder, learned.items), subject.examples(folder, judged.items)
    fine_tuning = FineTuning(options.steps, options.rate, max_seconds=options.seconds, device=options.device)
    tuned = fine_tune(
        policy.kind, folder, policy.parts[0], examples, held_out, fine_tuning, lambda line: print(line, flush=True)
    )
    findings = Findings(tuned=tuned.weights, calibration=learned.described(), training=tuned.training)
    quantise_folder(folder, options.out, METHODS["qat"], policy, findings, overwrite=options.overwrite)
    print(
        f"divergence {tuned.before.divergence:.4f} → {tuned.after.divergence:.4f}, "
        f"agreement {tuned.before.agreement:.3f} → {tuned.after.agreement:.3f}"
    )


if __name__ == "__main__":
    main()
