"""What the layers of a float model are given while it answers real speech."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.models.quantised import linears, weight_names
from vivavoce.nn.quantised_weight import InputRange
from vivavoce.quant.subjects import CalibrationBatch, QuantSubject

ObserverName = Literal["minmax", "percentile", "mse"]
OBSERVERS: tuple[ObserverName, ...] = get_args(ObserverName)
LEVELS = 255
BINS = 2048
KEPT_SHARE = 0.9995  # of the values, between the percentiles
SHRUNK = tuple(1 - 0.025 * step for step in range(32))
LEAST_SPAN = 1e-6


class Observer(Protocol):
    """Sees every batch of a layer's inputs, then says their range."""

    def see(self, x: Tensor) -> None:
        """Take note of some inputs."""
        ...

    def span(self) -> tuple[float, float]:
        """The lowest and the highest value that need not be clipped."""
        ...


class MinMax:
    """The smallest and the largest value ever seen. One outlier makes every step coarse."""

    def __init__(self) -> None:
        self.low, self.high = float("inf"), float("-inf")

    def see(self, x: Tensor) -> None:
        """Take note of some inputs."""
        self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))

    def span(self) -> tuple[float, float]:
        """All that was seen."""
        return self.low, self.high


class Histogram:
    """Counts of values between the smallest and the largest seen, rebinned as that grows."""

    def __init__(self) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.float64)
        self.low = self.high = 0.0

    def see(self, x: Tensor) -> None:
        """Take note of some inputs."""
        values = x.detach().flatten().float()
        low, high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        if (low, high) != (self.low, self.high):
            self._widen(low, max(high, low + LEAST_SPAN))
        self.counts += torch.histc(values, BINS, self.low, self.high).double()

    def _widen(self, low: float, high: float) -> None:
        old = self.centres()
        counts, self.counts = self.counts, torch.zeros_like(self.counts)
        self.low, self.high = low, high
        places = ((old - low) / (high - low) * BINS).long().clamp(0, BINS - 1)
        self.counts.index_add_(0, places, counts)

    def centres(self) -> Tensor:
        """The middle value of each bin."""
        return self.low + (torch.arange(BINS, dtype=torch.float64) + 0.5) * (self.high - self.low) / BINS


class Percentile(Histogram):
    """Where all but a few values lie; those few are clipped."""

    def span(self) -> tuple[float, float]:
        """Between the two percentiles."""
        share = self.counts.cumsum(0) / self.counts.sum()
        tail = (1 - KEPT_SHARE) / 2
        centres = self.centres()
        low = int((share < tail).sum())
        high = int((share < 1 - tail).sum().clamp(max=BINS - 1))
        return min(0.0, float(centres[low])), max(0.0, float(centres[high]))


class LeastError(Histogram):
    """Where rounding and clipping together cost the least square error."""

    def span(self) -> tuple[float, float]:
        """The best of some shares of all that was seen."""
        centres, best, found = self.centres(), float("inf"), (self.low, self.high)
        for share in SHRUNK:
            low, high = self.low * share, self.high * share
            step = max(high - low, LEAST_SPAN) / LEVELS
            inside = centres.clamp(low, high)
            error = (((inside / step).round() * step - centres).square() * self.counts).sum()
            if error < best:
                best, found = float(error), (low, high)
        return found


def observer(name: str) -> Observer:
    """A new observer of this name."""
    if name == "minmax":
        return MinMax()
    if name == "percentile":
        return Percentile()
    if name == "mse":
        return LeastError()
    raise InputError(f"there is no observer {name!r}; use one of {', '.join(OBSERVERS)}")


def input_range(low: float, high: float) -> InputRange:
    """The steps that cover a span; zero is one of them, so that padding stays zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    if not (torch.isfinite(torch.tensor([low, high])).all()):
        raise InputError(f"calibration met inputs from {low} to {high}; the model makes NaN or infinite values")
    scale = max(high - low, LEAST_SPAN) / LEVELS
    return InputRange(scale, max(0, min(LEVELS, round(-low / scale))))


PART = "lm"
CHECKED = 4  # lessons
SMALLEST = 1e-12
MOST_COARSER = 1.75  # times the error that each row's own range has may one range for all rows have


@contextmanager
def watching(model: nn.Module, see: Callable[[tuple[str, ...], Tensor], None]) -> Iterator[None]:
    """Every linear layer's inputs are shown to `see` under the names of its matrices."""
    handles = []
    for _, _, prefix, linear in linears(model):
        names = tuple(weight_names(linear, prefix))

        def hook(module: nn.Module, given: tuple[Tensor, ...], names: tuple[str, ...] = names) -> None:
            see(names, given[0])

        handles.append(linear.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def calibrate(
    subject: QuantSubject, folder: Path, lessons: Sequence[CalibrationBatch], name: str = "mse"
) -> dict[str, InputRange]:
    """The range of layers' inputs over some lessons, by the names findings use.

    A layer is left out where rows differ so in size that one range for all is much coarser than each row's own. Behind
    a norm they hardly do; what attention mixes and what a feed-forward's middle holds often does.
    """
    if not lessons:
        raise InputError("there is nothing to calibrate with: the model replied to none of the items")
    model = subject.load(folder)
    seen: dict[tuple[str, ...], Observer] = {}

    def see(names: tuple[str, ...], x: Tensor) -> None:
        seen.setdefault(names, observer(name)).see(x)

    with watching(model, see):
        for lesson in lessons:
            subject.logits(model, lesson)
    ranges = {names: input_range(*each.span()) for names, each in seen.items()}
    coarser = _coarser(subject, model, lessons[:CHECKED], ranges)
    return {f"{PART}:{one}": span for names, span in ranges.items() for one in names if coarser[names] < MOST_COARSER}


def _coarser(
    subject: QuantSubject,
    model: nn.Module,
    lessons: Sequence[CalibrationBatch],
    ranges: Mapping[tuple[str, ...], InputRange],
) -> dict[tuple[str, ...], float]:
    """How many times the error of rounding rows by their own sizes that of the range for all is, layer by layer."""
    errors: dict[tuple[str, ...], Tensor] = {}

    def see(names: tuple[str, ...], x: Tensor) -> None:
        rows = x.flatten(0, -2).float()
        size = rows.norm(dim=-1).clamp_min(SMALLEST)
        both = (_rounded(rows, ranges[names].scale, ranges[names].zero), _rounded_by_row(rows))
        found = torch.stack([((rounded - rows).norm(dim=-1) / size).sum() for rounded in both])
        errors[names] = errors.get(names, torch.zeros(2)) + found

    with watching(model, see):
        for lesson in lessons:
            subject.logits(model, lesson)
    return {names: float(static / dynamic.clamp_min(SMALLEST)) for names, (static, dynamic) in errors.items()}


def _rounded_by_row(rows: Tensor) -> Tensor:
    low, high = rows.amin(-1, keepdim=True).clamp(max=0), rows.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / LEVELS).clamp_min(SMALLEST)
    return _rounded(rows, scale, (-low / scale).round())


def _rounded(rows: Tensor, scale: Tensor | float, zero: Tensor | int) -> Tensor:
    return (((rows / scale).round() + zero).clamp(0, LEVELS) - zero) * scale
