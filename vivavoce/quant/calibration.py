"""What the layers of a float model are given while it answers real speech."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.models.quantised import linears, weight_names
from vivavoce.nn.quantised_weight import InputRange
from vivavoce.quant.observers import Observer, input_range, observer
from vivavoce.quant.subjects import Lesson, Subject

PART = "lm"


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
def calibrate(subject: Subject, folder: Path, lessons: Sequence[Lesson], name: str = "mse") -> dict[str, InputRange]:
    """The range of every layer's inputs over some lessons, by the names findings use."""
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
    return {f"{PART}:{one}": span for names, span in ranges.items() for one in names}
