"""Which layers hurt most when they are rounded: one at a time, all others left in float."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vivavoce.errors import MissingDependencyError
from vivavoce.models.quantised import linears, weight_names
from vivavoce.nn.linear import Linear
from vivavoce.nn.quantised_weight import Scheme, group_of, quantise
from vivavoce.quant.comparison import closeness, opinions
from vivavoce.quant.policy import ModelPart
from vivavoce.quant.subjects import CalibrationBatch, QuantSubject

SHOWN = 40


@dataclass(frozen=True)
class RatedLayer:
    """A linear layer that may be rounded, and the names of the matrices it holds."""

    names: tuple[str, ...]
    linear: Linear | nn.Linear

    @property
    def name(self) -> str:
        """One name for all of it: what its matrices have in common, and their last words."""
        stem, last = self.names[0].removesuffix(".weight").rsplit(".", 1)
        others = [name.removesuffix(".weight").rsplit(".", 1)[1] for name in self.names[1:]]
        return f"{stem}.{'+'.join([last, *others])}"

    def bytes_as(self, scheme: Scheme | None) -> int:
        """What its matrices take on disk and in memory; None: as 16-bit floats."""
        outputs, inputs = self.linear.weight.shape
        if scheme == "int4":
            return outputs * inputs // 2 + 4 * outputs * (inputs // group_of(inputs))
        if scheme in ("int8", "float8"):
            return outputs * inputs + 4 * outputs
        return 2 * outputs * inputs


@dataclass(frozen=True)
class LayerCost:
    """What rounding one layer alone does to what the model thinks."""

    layer: str
    scheme: Scheme
    divergence: float
    drop: float
    bytes: int


def roundable(model: nn.Module, part: ModelPart, wanted: Scheme = "int4") -> list[RatedLayer]:
    """The layers of a model that a policy lets be rounded."""
    found = []
    for _, _, prefix, linear in linears(model):
        names = weight_names(linear, prefix)
        if all(part.scheme_of(name, linear.weight.shape, wanted) is not None for name in names):
            found.append(RatedLayer(tuple(names), linear))
    return found


@contextmanager
def rounded(layers: Mapping[RatedLayer, Scheme | None]) -> Iterator[None]:
    """The layers' matrices are as if they had been rounded, until the end."""
    before: list[tuple[Tensor, Tensor]] = []
    try:
        for layer, scheme in layers.items():
            weight = layer.linear.weight.data
            if scheme is not None:
                before.append((weight, weight.clone()))
                weight.copy_(quantise(weight, scheme).dequantised(weight.dtype))
        yield
    finally:
        for weight, exact in before:
            weight.copy_(exact)


@torch.no_grad()
def scan(
    subject: QuantSubject,
    model: nn.Module,
    layers: Sequence[RatedLayer],
    lessons: Sequence[CalibrationBatch],
    scheme: Scheme,
) -> list[LayerCost]:
    """The cost of every layer by itself, dearest first."""
    exact = opinions(subject, model, lessons)
    costs = []
    for layer in layers:
        with rounded({layer: scheme}):
            near = closeness(exact, opinions(subject, model, lessons))
        costs.append(LayerCost(layer.name, scheme, near.divergence, near.drop, layer.bytes_as(scheme)))
    return sorted(costs, key=lambda cost: -cost.divergence)


def plot_costs(costs: Sequence[LayerCost], file: Path) -> None:
    """The dearest layers as bars."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'vivavoce[plot]'") from error
    shown = list(costs[:SHOWN])
    figure = Figure(figsize=(9, 0.22 * len(shown) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.barh([cost.layer for cost in shown], [cost.divergence for cost in shown], color="#3b7dd8")
    axes.invert_yaxis()
    axes.tick_params(labelsize=6)
    axes.set_xscale("log")
    axes.set_xlabel("divergence from float, nats a place")
    axes.set_title(f"layers that {shown[0].scheme} hurts most, each rounded alone", fontsize=9)
    figure.savefig(file, dpi=120)
