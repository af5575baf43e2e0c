"""The range of what a layer is given, found from real activations: all of it, most of it, or what rounds best."""

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.nn.quantised_weight import InputRange

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
