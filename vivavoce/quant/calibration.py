"""What the layers of a float model are given while it answers real speech."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.models.quantised import linears, weight_names
from vivavoce.nn.quantised_weight import InputRange
from vivavoce.quant.observers import LEVELS, Observer, input_range, observer
from vivavoce.quant.subjects import CalibrationBatch, QuantSubject

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
