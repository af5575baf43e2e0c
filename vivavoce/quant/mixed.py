"""Mixed precision: each layer as small as a budget of bytes, or a bound on what is lost, allows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vivavoce.errors import CapacityError, InputError, MissingDependencyError
from vivavoce.models.quantised import linears, weight_names
from vivavoce.nn.linear import Linear
from vivavoce.nn.quantised_weight import Scheme, group_of, quantise
from vivavoce.quant.measure import Closeness, closeness, opinions
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


LADDER: tuple[Scheme | None, ...] = ("int4", "int8", None)  # from small to exact


@dataclass(frozen=True)
class Mixture:
    """How each layer is to be kept, what that takes, and how near it was found to be."""

    schemes: Mapping[str, Scheme | None]
    bytes: int
    near: Closeness


@dataclass(frozen=True)
class _Step:
    """One layer kept one rung higher: what that gains for each byte it costs."""

    layer: RatedLayer
    scheme: Scheme | None
    gain: float


def mixture(
    subject: QuantSubject,
    model: nn.Module,
    layers: Sequence[RatedLayer],
    lessons: Sequence[CalibrationBatch],
    untouched: int,
    budget: int | None = None,
    most_drop: float | None = None,
) -> Mixture:
    """The schemes that fit: as near to float as `budget` bytes allow, or as small as `most_drop` allows.

    `untouched` are the bytes of everything else in the model.
    """
    if (budget is None) == (most_drop is None):
        raise InputError("give either a budget of bytes or the most that may be lost, not both or neither")
    least = untouched + sum(layer.bytes_as(LADDER[0]) for layer in layers)
    if budget is not None and budget < least:
        raise CapacityError(
            f"even at 4 bits this model takes {least / 1e9:.2f} GB; the budget is {budget / 1e9:.2f} GB"
        )
    steps = _steps(subject, model, layers, lessons)
    exact = opinions(subject, model, lessons)

    def nearness(count: int) -> Closeness:
        with rounded(_after(layers, steps, count)):
            return closeness(exact, opinions(subject, model, lessons))

    if budget is not None:
        count = _most_within(layers, steps, untouched, budget)
    else:
        assert most_drop is not None
        count = _fewest(len(steps), lambda count: nearness(count).drop <= most_drop)
    chosen = _after(layers, steps, count)
    named = {f"lm:{name}": scheme for layer, scheme in chosen.items() for name in layer.names}
    return Mixture(named, untouched + _bytes(chosen), nearness(count))


def _steps(
    subject: QuantSubject, model: nn.Module, layers: Sequence[RatedLayer], lessons: Sequence[CalibrationBatch]
) -> list[_Step]:
    """Every rung of every layer, the one that gains most for a byte first, none before the rung below it."""
    by_name = {layer.name: layer for layer in layers}
    costs = {
        scheme: {cost.layer: cost.divergence for cost in scan(subject, model, layers, lessons, scheme)}
        for scheme in ("int4", "int8")
    }
    steps = []
    for name, layer in by_name.items():
        small, middle = costs["int4"][name], min(costs["int8"][name], costs["int4"][name])
        first = (small - middle) / (layer.bytes_as("int8") - layer.bytes_as("int4"))
        second = min(first, middle / (layer.bytes_as(None) - layer.bytes_as("int8")))
        steps += [_Step(layer, "int8", first), _Step(layer, None, second)]
    return sorted(steps, key=lambda step: (-step.gain, step.scheme is None))


def _after(layers: Sequence[RatedLayer], steps: Sequence[_Step], count: int) -> dict[RatedLayer, Scheme | None]:
    chosen: dict[RatedLayer, Scheme | None] = dict.fromkeys(layers, LADDER[0])
    for step in steps[:count]:
        chosen[step.layer] = step.scheme
    return chosen


def _bytes(chosen: Mapping[RatedLayer, Scheme | None]) -> int:
    return sum(layer.bytes_as(scheme) for layer, scheme in chosen.items())


def _most_within(layers: Sequence[RatedLayer], steps: Sequence[_Step], untouched: int, budget: int) -> int:
    """How many steps up the bytes allow."""
    for count in range(len(steps), 0, -1):
        if untouched + _bytes(_after(layers, steps, count)) <= budget:
            return count
    return 0


def _fewest(most: int, is_enough: Callable[[int], bool]) -> int:
    """The smallest count that is enough, looked for by halving."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return low
