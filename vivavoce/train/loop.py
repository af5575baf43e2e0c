"""Training on one device: optimiser steps captured as CUDA graphs, and logged, resumable runs.

Small models are bound by launches: replaying forward, backward and optimiser as one graph is several times faster. It
requires batches of a few fixed shapes, and losses that neither synchronise nor use generators other than the device's
default. Hidden matrices are trained by Muon, everything else by AdamW, with one learning rate.
"""

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.cpu_speed import is_bfloat16_fast
from vivavoce.errors import CheckpointError, InputError

Batch = Mapping[str, Tensor]
LossFunction = Callable[[Batch], dict[str, Tensor]]
"""Scalars by name; "loss" is minimised, the others are only logged."""

EAGER_STEPS = 3  # libraries select kernels before graph capture
STATE = "state.pt"
LOG = "log.jsonl"


MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # moves singular values between 0 and 1 towards 1
ADAM_SIZE = 0.2  # typical RMS of an AdamW update


class Muon:
    """Muon optimiser for hidden matrices: updates along the orthogonalised momentum, without host synchronisation."""

    def __init__(self, matrices: Sequence[Tensor], weight_decay: float) -> None:
        self.matrices, self.weight_decay = list(matrices), weight_decay
        self.momenta = [torch.zeros_like(matrix) for matrix in self.matrices]
        by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, matrix in enumerate(self.matrices):
            by_shape[tuple(matrix.shape)].append(index)
        self._groups = list(by_shape.values())

    @torch.no_grad()
    def step(self, rate: Tensor) -> None:
        gradients = [torch.zeros_like(m) if m.grad is None else m.grad for m in self.matrices]
        torch._foreach_mul_(self.momenta, MOMENTUM)
        torch._foreach_add_(self.momenta, gradients)
        torch._foreach_mul_(self.matrices, 1 - rate * self.weight_decay)
        lookahead = torch._foreach_add(gradients, self.momenta, alpha=MOMENTUM)
        for indices in self._groups:
            directions = orthogonal(torch.stack([lookahead[index] for index in indices]))
            size = ADAM_SIZE * max(directions.shape[1:]) ** 0.5
            changes = (directions * (-rate * size)).unbind()
            torch._foreach_add_([self.matrices[index] for index in indices], list(changes))

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": self.momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for momentum, stored in zip(self.momenta, state["momenta"], strict=True):
            momentum.copy_(stored)


def orthogonal(matrices: Tensor) -> Tensor:
    """Newton–Schulz iteration to a nearby matrix with singular values about 1.  # [matrix, row, column]"""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices).to(torch.bfloat16 if matrices.is_cuda else matrices.dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = POLYNOMIAL
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


class Learner:
    """Modules trained together, their optimiser, and one training step."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        loss: LossFunction,
        peak_rate: float,
        *,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.98),
        clip: float = 1.0,
        average: float | None = None,
        use_graph: bool = True,
        half: bool = True,
        half_on_cpu: bool = False,
        orthogonal: bool = False,
    ) -> None:
        self.modules = dict(modules)
        self.loss, self.peak_rate, self.clip, self.average = loss, peak_rate, clip, average
        named = [(n, p) for module in self.modules.values() for n, p in module.named_parameters() if p.requires_grad]
        self.parameters = [parameter for _, parameter in named]
        if not self.parameters:
            raise InputError("no parameter of the modules requires a gradient")
        self.device = self.parameters[0].device
        on_cuda = self.device.type == "cuda"
        self.use_graph = use_graph and on_cuda
        self.half = half if on_cuda else half_on_cpu and is_bfloat16_fast()
        self.rate = torch.tensor(0.0, device=self.device)
        hidden = [p for n, p in named if orthogonal and is_hidden_matrix(n, p)]
        self.muon = Muon(hidden, weight_decay) if hidden else None
        muon_ids = {id(parameter) for parameter in hidden}
        matrices = [p for p in self.parameters if p.ndim > 1 and id(p) not in muon_ids]
        vectors = [p for p in self.parameters if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.rate if on_cuda else 0.0,
            betas=betas,
            capturable=on_cuda,
            fused=on_cuda or None,
        )
        self.averaged = [p.detach().clone() for p in self.parameters] if average else []
        self.average_rate = torch.tensor(1.0, device=self.device)  # update rate of the weight average
        self.steps_taken = 0
        self._eager_steps = 0
        self._shapes = set[tuple[Any, ...]]()
        self._graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, dict[str, Tensor], dict[str, Tensor]]] = {}

    def step(self, batch: Batch, rate_share: float) -> dict[str, Tensor]:
        """One training step at this share of the peak rate; returns the loss's scalars on the device."""
        rate = self.peak_rate * rate_share
        self.rate.fill_(rate)
        if self.device.type != "cuda":
            for group in self.optimiser.param_groups:
                group["lr"] = rate
        self.steps_taken += 1
        # Early on the average follows fast, so that initial weights are soon forgotten.
        self.average_rate.fill_(max(1 - (self.average or 0.0), 9 / (9 + self.steps_taken)))
        if not self.use_graph:
            return self._train_step(batch)
        self._eager_steps += 1
        shape = _shape_of(batch)
        is_new = shape not in self._shapes
        self._shapes.add(shape)
        # The first batch of a shape runs eagerly too: cuDNN benchmarks its engines, which cannot be captured.
        return (
            self._train_step_on_side_stream(batch)
            if is_new or self._eager_steps <= EAGER_STEPS
            else self._replay(batch)
        )

    @torch.no_grad()
    def swap_average(self) -> None:
        """Swap the averaged weights with the trained ones."""
        for parameter, averaged in zip(self.parameters, self.averaged, strict=True):
            trained = parameter.clone()
            parameter.copy_(averaged)
            averaged.copy_(trained)

    def state(self) -> dict[str, Any]:
        """State for resuming."""
        modules = {name: module.state_dict() for name, module in self.modules.items()}
        stored = {"modules": modules, "optimiser": self.optimiser.state_dict(), "averaged": self.averaged}
        return stored | {"taken": self.steps_taken, "muon": self.muon.state_dict() if self.muon else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.steps_taken = state["taken"]
        if self.muon:
            self.muon.load_state_dict(state["muon"])
        if self.device.type == "cuda":
            for group in self.optimiser.param_groups:
                group["lr"] = self.rate
        with torch.no_grad():
            for averaged, stored in zip(self.averaged, state["averaged"], strict=True):
                averaged.copy_(stored)

    def _train_step(self, batch: Batch) -> dict[str, Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            scalars = self.loss(batch)
        gradients = torch.autograd.grad(scalars["loss"], self.parameters, allow_unused=True)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else with_strides_of(parameter, gradient)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.clip, foreach=True)
        self.optimiser.step()
        if self.muon:
            self.muon.step(self.rate)
        if self.average:
            with torch.no_grad():
                change = torch._foreach_sub(list[Tensor](self.parameters), self.averaged)
                torch._foreach_mul_(change, self.average_rate)
                torch._foreach_add_(self.averaged, change)
        return {name: value.detach() for name, value in scalars.items()} | {"gradient": norm.detach()}

    def _train_step_on_side_stream(self, batch: Batch) -> dict[str, Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            scalars = self._train_step(batch)
        torch.cuda.current_stream().wait_stream(side)
        return scalars

    def _replay(self, batch: Batch) -> dict[str, Tensor]:
        shape = _shape_of(batch)
        if shape not in self._graphs:
            static = {name: tensor.clone() for name, tensor in batch.items()}
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # batches are prepared by another thread
                scalars = self._train_step(static)
            self._graphs[shape] = (graph, static, scalars)
        graph, static, scalars = self._graphs[shape]
        for name, tensor in batch.items():
            static[name].copy_(tensor)
        graph.replay()
        return {name: value.clone() for name, value in scalars.items()}


def _shape_of(batch: Batch) -> tuple[Any, ...]:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items())


def with_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the parameter's strides, which fused optimisers require and `einsum` does not keep."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter maps hidden states to hidden states: no embedding and no output head."""
    tables = ("embed", "head", "codebook", "letters", "pieces", "mel")
    return parameter.ndim == 2 and min(parameter.shape) >= 16 and not any(table in name for table in tables)


@dataclass(frozen=True)
class Budget:
    """Length of a run: steps, or seconds if they run out first; the rate schedule follows the nearer end."""

    steps: int
    seconds: float | None = None
    warmup: int = 200
    final_share: float = 0.02

    def progress(self, step: int, elapsed: float) -> float:
        """From 0 at the start to 1 at the end."""
        by_time = elapsed / self.seconds if self.seconds else 0.0
        return min(1.0, max(step / self.steps, by_time))

    def rate_share(self, step: int, elapsed: float) -> float:
        """Share of the peak rate: linear warm-up, cosine decay."""
        fall = 0.5 * (1 + math.cos(math.pi * self.progress(step, elapsed)))
        return min(1.0, (step + 1) / self.warmup) * (self.final_share + (1 - self.final_share) * fall)


@dataclass(frozen=True)
class TrainingStep:
    """A step of a run: number, share of the peak rate, progress of the run, and seed."""

    number: int
    rate_share: float
    progress: float
    seed: int

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator seeded for this step, so that resumed runs are reproducible."""
        return torch.Generator(device).manual_seed(self.seed)


class TrainingRun:
    """A resumable training run: iterate for steps; logs what `record` gets and saves checkpoints."""

    def __init__(
        self,
        folder: str | Path,
        learners: Mapping[str, Learner],
        budget: Budget,
        seed: int = 0,
        log_every: int = 50,
        save_every: float = 120.0,
        report: Callable[[str], None] = print,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.learners, self.budget, self.seed = dict(learners), budget, seed
        self.log_every, self.save_every, self.report = log_every, save_every, report
        self.number, self.elapsed = 0, 0.0
        self._recorded: dict[str, list[Tensor]] = {}
        if (self.folder / STATE).is_file():
            self._resume()

    def __iter__(self) -> Iterator[TrainingStep]:
        started, saved = time.monotonic() - self.elapsed, time.monotonic()
        while self.budget.progress(self.number, self.elapsed) < 1.0:
            share = self.budget.rate_share(self.number, self.elapsed)
            progress = self.budget.progress(self.number, self.elapsed)
            yield TrainingStep(self.number, share, progress, (self.seed << 32) + self.number)
            self.number += 1
            self.elapsed = time.monotonic() - started
            if self.number % self.log_every == 0:
                self._log(share)
            if time.monotonic() - saved > self.save_every:
                self.save()
                saved = time.monotonic()
        self._log(0.0)
        self.save()

    def record(self, scalars: Mapping[str, Tensor], prefix: str = "") -> None:
        """Collect a step's scalars; their means are logged."""
        for name, value in scalars.items():
            self._recorded.setdefault(prefix + name, []).append(value)

    def save(self) -> None:
        """Write a checkpoint of the run."""
        state: dict[str, Any] = {"number": self.number, "elapsed": self.elapsed, "random": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda_random"] = torch.cuda.get_rng_state()
        state["learners"] = {name: learner.state() for name, learner in self.learners.items()}
        partial = self.folder / (STATE + ".partial")
        torch.save(state, partial)
        os.replace(partial, self.folder / STATE)

    def _resume(self) -> None:
        file = self.folder / STATE
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            self.number, self.elapsed = state["number"], state["elapsed"]
            for name, learner in self.learners.items():
                learner.restore(state["learners"][name])
        except (RuntimeError, KeyError, ValueError, OSError) as error:
            raise CheckpointError(
                f"{file} is not the state of a run with these modules ({error}); remove it to start again"
            ) from error
        torch.set_rng_state(state["random"])
        if "cuda_random" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda_random"])
        self.report(f"resuming after step {self.number} ({self.elapsed:.0f} s)")

    def _log(self, share: float) -> None:
        if not self._recorded:
            return
        means = {name: torch.stack(values).float().mean().item() for name, values in self._recorded.items()}
        self._recorded.clear()
        line = {"step": self.number, "seconds": round(self.elapsed, 1), "rate_share": round(share, 4)} | means
        with (self.folder / LOG).open("a", encoding="utf8") as log:
            log.write(json.dumps(line) + "\n")
        shown = "  ".join(f"{name} {value:.4g}" for name, value in means.items())
        self.report(f"step {self.number}  {self.elapsed:.0f} s  {shown}")


def plot_curves(folder: str | Path) -> Path | None:
    """Plot the log of a run, one panel per scalar; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    folder = Path(folder)
    lines = [json.loads(line) for line in (folder / LOG).read_text(encoding="utf8").splitlines()]
    names = [name for name in lines[-1] if name not in ("step", "seconds", "rate_share")] if lines else []
    if not names:
        return None
    columns, rows = min(4, len(names)), -(-len(names) // 4)
    width, height = 3.2 * columns, 2.4 * rows
    figure = Figure(figsize=(width, height))  # fixed margins in inches: equal panels without layout computation
    figure.subplots_adjust(0.5 / width, 0.3 / height, 1 - 0.1 / width, 1 - 0.3 / height, wspace=0.22, hspace=0.25)
    for index, name in enumerate(names, start=1):
        axes = figure.add_subplot(rows, columns, index)
        points = [(line["step"], line[name]) for line in lines if name in line]
        axes.plot(*zip(*points, strict=True), linewidth=0.8)
        axes.set_title(name, fontsize=8)
        axes.tick_params(labelsize=6)
    picture = folder / "curves.png"
    figure.savefig(picture, dpi=110)
    return picture
