"""Per-layer analysis on calibration examples: input ranges for static int8, layer sensitivity, and mixed precision.

Observers collect the range of a layer's inputs. `scan` rounds each layer alone; `mixture` chooses a scheme per layer
within a budget of bytes or a bound on lost agreement.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from vivavoce.errors import CapacityError, InputError, MissingDependencyError
from vivavoce.models.quantised import linears, weight_names
from vivavoce.nn.linear import Linear
from vivavoce.nn.quantised_weight import InputRange, Scheme, group_of, quantise
from vivavoce.quant.measure import Closeness, closeness, log_probabilities
from vivavoce.quant.policy import ModelPart
from vivavoce.quant.subjects import CalibrationBatch, QuantSubject

ObserverName = Literal["minmax", "percentile", "mse"]
OBSERVERS: tuple[ObserverName, ...] = get_args(ObserverName)
LEVELS = 255
BINS = 2048
KEPT_SHARE = 0.9995  # share of values between the percentiles
SHRUNK = tuple(1 - 0.025 * step for step in range(32))
MIN_SPAN = 1e-6


class Observer(Protocol):
    """Observes a layer's inputs and returns their range."""

    def observe(self, x: Tensor) -> None: ...

    def span(self) -> tuple[float, float]:
        """Lowest and highest value that are not clipped."""
        ...


class MinMax:
    """Minimum and maximum of all inputs; sensitive to outliers."""

    def __init__(self) -> None:
        self.low, self.high = float("inf"), float("-inf")

    def observe(self, x: Tensor) -> None:
        self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))

    def span(self) -> tuple[float, float]:
        return self.low, self.high


class Histogram:
    """Histogram of the inputs, rebinned when their range grows."""

    def __init__(self) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.float64)
        self.low = self.high = 0.0

    def observe(self, x: Tensor) -> None:
        values = x.detach().flatten().float()
        low, high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        if (low, high) != (self.low, self.high):
            self._widen(low, max(high, low + MIN_SPAN))
        self.counts += torch.histc(values, BINS, self.low, self.high).double()

    def _widen(self, low: float, high: float) -> None:
        old = self.centres()
        counts, self.counts = self.counts, torch.zeros_like(self.counts)
        self.low, self.high = low, high
        indices = ((old - low) / (high - low) * BINS).long().clamp(0, BINS - 1)
        self.counts.index_add_(0, indices, counts)

    def centres(self) -> Tensor:
        return self.low + (torch.arange(BINS, dtype=torch.float64) + 0.5) * (self.high - self.low) / BINS


class Percentile(Histogram):
    """Range of all but a small share of the values; the rest is clipped."""

    def span(self) -> tuple[float, float]:
        share = self.counts.cumsum(0) / self.counts.sum()
        tail = (1 - KEPT_SHARE) / 2
        centres = self.centres()
        low = int((share < tail).sum())
        high = int((share < 1 - tail).sum().clamp(max=BINS - 1))
        return min(0.0, float(centres[low])), max(0.0, float(centres[high]))


class MinSquaredError(Histogram):
    """Range with the smallest squared error of rounding and clipping."""

    def span(self) -> tuple[float, float]:
        """The best of several fractions of the observed range."""
        centres, best, found = self.centres(), float("inf"), (self.low, self.high)
        for share in SHRUNK:
            low, high = self.low * share, self.high * share
            step = max(high - low, MIN_SPAN) / LEVELS
            inside = centres.clamp(low, high)
            error = (((inside / step).round() * step - centres).square() * self.counts).sum()
            if error < best:
                best, found = float(error), (low, high)
        return found


def observer(name: str) -> Observer:
    if name == "minmax":
        return MinMax()
    if name == "percentile":
        return Percentile()
    if name == "mse":
        return MinSquaredError()
    raise InputError(f"there is no observer {name!r}; use one of {', '.join(OBSERVERS)}")


def input_range(low: float, high: float) -> InputRange:
    """Quantisation steps that cover a span; zero is exact, so that padding stays zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    if not (torch.isfinite(torch.tensor([low, high])).all()):
        raise InputError(f"calibration observed inputs from {low} to {high}; the model produces NaN or infinite values")
    scale = max(high - low, MIN_SPAN) / LEVELS
    return InputRange(scale, max(0, min(LEVELS, round(-low / scale))))


PART = "lm"
CHECKED = 4  # examples
EPSILON = 1e-12
MAX_COARSENING = 1.75  # allowed ratio of the error of a static range to that of per-row ranges


@contextmanager
def observing_inputs(model: nn.Module, observe: Callable[[tuple[str, ...], Tensor], None]) -> Iterator[None]:
    """Call `observe` with every linear layer's inputs and the names of its matrices."""
    handles = []
    for _, _, prefix, linear in linears(model):
        names = tuple(weight_names(linear, prefix))

        def hook(module: nn.Module, given: tuple[Tensor, ...], names: tuple[str, ...] = names) -> None:
            observe(names, given[0])

        handles.append(linear.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def calibrate(
    subject: QuantSubject, folder: Path, examples: Sequence[CalibrationBatch], name: str = "mse"
) -> dict[str, InputRange]:
    """Input ranges of layers over the examples, by the keys of `Findings`.

    A layer is left out if rows differ so much in size that a static range is much coarser than per-row ranges, as is
    common for attention outputs and the hidden layer of feed-forwards, but not after a norm.
    """
    if not examples:
        raise InputError("there is nothing to calibrate with: the model gave no reply to any item")
    model = subject.load(folder)
    seen: dict[tuple[str, ...], Observer] = {}

    def observe(names: tuple[str, ...], x: Tensor) -> None:
        seen.setdefault(names, observer(name)).observe(x)

    with observing_inputs(model, observe):
        for example in examples:
            subject.logits(model, example)
    ranges = {names: input_range(*each.span()) for names, each in seen.items()}
    coarser = _coarser(subject, model, examples[:CHECKED], ranges)
    return {f"{PART}:{one}": span for names, span in ranges.items() for one in names if coarser[names] < MAX_COARSENING}


def _coarser(
    subject: QuantSubject,
    model: nn.Module,
    examples: Sequence[CalibrationBatch],
    ranges: Mapping[tuple[str, ...], InputRange],
) -> dict[tuple[str, ...], float]:
    """Ratio of the rounding error with the static range to that with per-row ranges, by layer."""
    errors: dict[tuple[str, ...], Tensor] = {}

    def observe(names: tuple[str, ...], x: Tensor) -> None:
        rows = x.flatten(0, -2).float()
        size = rows.norm(dim=-1).clamp_min(EPSILON)
        both = (_rounded(rows, ranges[names].scale, ranges[names].zero), _rounded_by_row(rows))
        found = torch.stack([((rounded - rows).norm(dim=-1) / size).sum() for rounded in both])
        errors[names] = errors.get(names, torch.zeros(2)) + found

    with observing_inputs(model, observe):
        for example in examples:
            subject.logits(model, example)
    return {names: float(static / dynamic.clamp_min(EPSILON)) for names, (static, dynamic) in errors.items()}


def _rounded_by_row(rows: Tensor) -> Tensor:
    low, high = rows.amin(-1, keepdim=True).clamp(max=0), rows.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / LEVELS).clamp_min(EPSILON)
    return _rounded(rows, scale, (-low / scale).round())


def _rounded(rows: Tensor, scale: Tensor | float, zero: Tensor | int) -> Tensor:
    return (((rows / scale).round() + zero).clamp(0, LEVELS) - zero) * scale


SHOWN = 40


@dataclass(frozen=True)
class RatedLayer:
    """A linear layer that may be rounded, and the names of its matrices."""

    names: tuple[str, ...]
    linear: Linear | nn.Linear

    @property
    def name(self) -> str:
        """Common prefix of its matrices and their last components, such as `layers.0.attn.q+k+v`."""
        stem, last = self.names[0].removesuffix(".weight").rsplit(".", 1)
        others = [name.removesuffix(".weight").rsplit(".", 1)[1] for name in self.names[1:]]
        return f"{stem}.{'+'.join([last, *others])}"

    def bytes_as(self, scheme: Scheme | None) -> int:
        """Bytes of its matrices in a scheme; None: 16-bit floats."""
        outputs, inputs = self.linear.weight.shape
        if scheme == "int4":
            return outputs * inputs // 2 + 4 * outputs * (inputs // group_of(inputs))
        if scheme in ("int8", "float8"):
            return outputs * inputs + 4 * outputs
        return 2 * outputs * inputs


@dataclass(frozen=True)
class LayerCost:
    """Effect on the model's logits of rounding one layer alone."""

    layer: str
    scheme: Scheme
    divergence: float
    drop: float
    bytes: int


def roundable(model: nn.Module, part: ModelPart, wanted: Scheme = "int4") -> list[RatedLayer]:
    """Layers of a model that a policy allows to round."""
    found = []
    for _, _, prefix, linear in linears(model):
        names = weight_names(linear, prefix)
        if all(part.scheme_of(name, linear.weight.shape, wanted) is not None for name in names):
            found.append(RatedLayer(tuple(names), linear))
    return found


@contextmanager
def rounded(layers: Mapping[RatedLayer, Scheme | None]) -> Iterator[None]:
    """Replace the layers' matrices by their rounded values within the block."""
    originals: list[tuple[Tensor, Tensor]] = []
    try:
        for layer, scheme in layers.items():
            weight = layer.linear.weight.data
            if scheme is not None:
                originals.append((weight, weight.clone()))
                weight.copy_(quantise(weight, scheme).dequantised(weight.dtype))
        yield
    finally:
        for weight, exact in originals:
            weight.copy_(exact)


@torch.no_grad()
def scan(
    subject: QuantSubject,
    model: nn.Module,
    layers: Sequence[RatedLayer],
    examples: Sequence[CalibrationBatch],
    scheme: Scheme,
) -> list[LayerCost]:
    """Cost of rounding each layer alone, most sensitive first."""
    exact = log_probabilities(subject, model, examples)
    costs = []
    for layer in layers:
        with rounded({layer: scheme}):
            near = closeness(exact, log_probabilities(subject, model, examples))
        costs.append(LayerCost(layer.name, scheme, near.divergence, near.drop, layer.bytes_as(scheme)))
    return sorted(costs, key=lambda cost: -cost.divergence)


def plot_costs(costs: Sequence[LayerCost], file: Path) -> None:
    """Bar chart of the most sensitive layers."""
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
    axes.set_xlabel("divergence from float, nats per position")
    axes.set_title(f"layers most sensitive to {shown[0].scheme}, each rounded alone", fontsize=9)
    figure.savefig(file, dpi=120)


LADDER: tuple[Scheme | None, ...] = ("int4", "int8", None)  # from small to exact


@dataclass(frozen=True)
class Mixture:
    """Scheme of each layer, total bytes, and closeness to float."""

    schemes: Mapping[str, Scheme | None]
    bytes: int
    near: Closeness


@dataclass(frozen=True)
class _Step:
    """Raising one layer's precision by one rung, and the gain per byte."""

    layer: RatedLayer
    scheme: Scheme | None
    gain: float


def mixture(
    subject: QuantSubject,
    model: nn.Module,
    layers: Sequence[RatedLayer],
    examples: Sequence[CalibrationBatch],
    untouched: int,
    budget: int | None = None,
    max_drop: float | None = None,
) -> Mixture:
    """Choose schemes: as near to float as `budget` bytes allow, or as small as `max_drop` allows.

    `untouched` are the bytes of everything else in the model.
    """
    if (budget is None) == (max_drop is None):
        raise InputError("give either a budget of bytes or a maximum drop, not both or neither")
    min_bytes = untouched + sum(layer.bytes_as(LADDER[0]) for layer in layers)
    if budget is not None and budget < min_bytes:
        raise CapacityError(
            f"even at 4 bits this model takes {min_bytes / 1e9:.2f} GB; the budget is {budget / 1e9:.2f} GB"
        )
    steps = _steps(subject, model, layers, examples)
    exact = log_probabilities(subject, model, examples)

    def nearness(count: int) -> Closeness:
        with rounded(_after(layers, steps, count)):
            return closeness(exact, log_probabilities(subject, model, examples))

    if budget is not None:
        count = _steps_within_budget(layers, steps, untouched, budget)
    else:
        assert max_drop is not None
        count = _smallest_sufficient(len(steps), lambda count: nearness(count).drop <= max_drop)
    chosen = _after(layers, steps, count)
    named = {f"lm:{name}": scheme for layer, scheme in chosen.items() for name in layer.names}
    return Mixture(named, untouched + _bytes(chosen), nearness(count))


def _steps(
    subject: QuantSubject, model: nn.Module, layers: Sequence[RatedLayer], examples: Sequence[CalibrationBatch]
) -> list[_Step]:
    """All rungs of all layers by gain per byte, each after the rung below it."""
    by_name = {layer.name: layer for layer in layers}
    costs = {
        scheme: {cost.layer: cost.divergence for cost in scan(subject, model, layers, examples, scheme)}
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


def _steps_within_budget(layers: Sequence[RatedLayer], steps: Sequence[_Step], untouched: int, budget: int) -> int:
    """Largest number of steps within the budget."""
    for count in range(len(steps), 0, -1):
        if untouched + _bytes(_after(layers, steps, count)) <= budget:
            return count
    return 0


def _smallest_sufficient(max_count: int, is_enough: Callable[[int], bool]) -> int:
    """Smallest sufficient count, by bisection."""
    low, high = 0, max_count
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return low
