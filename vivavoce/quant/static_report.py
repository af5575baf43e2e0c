"""What a report says of static int8 besides: dynamic int8 in the same run, and what outliers do to observers."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.quant.calibration import watching
from vivavoce.quant.comparison import closeness, opinions
from vivavoce.quant.convert import quantise_folder
from vivavoce.quant.measure import step_seconds
from vivavoce.quant.methods import METHODS
from vivavoce.quant.observers import LEVELS, OBSERVERS, Observer, input_range, observer
from vivavoce.quant.policy import ModelPart, policy_for
from vivavoce.quant.sensitivity import RatedLayer, roundable
from vivavoce.quant.subjects import CalibrationBatch, QuantSubject

STATIC, DYNAMIC = "int8-static", "int8-dynamic"
MOST_ROWS = 4096
Figures = dict[str, Any]


@dataclass(frozen=True)
class Outliers:
    """The layer whose inputs hold the largest values beside usual ones, and its results by each observer's range."""

    layer: str
    largest: float
    usual: float
    """Where all but a few values lie."""
    errors: dict[str, float]
    """Relative, of a row's results, by observer: the median over rows."""
    worst: dict[str, float]
    """Of the row that suffers most."""


def static_figures(
    subject: QuantSubject, source: Path, exact: nn.Module, static: nn.Module, lessons: Sequence[CalibrationBatch]
) -> Figures:
    """Static and dynamic int8 of one model in turns, and the layer with outliers."""
    policy = policy_for(source)
    with tempfile.TemporaryDirectory() as folder:
        quantise_folder(source, Path(folder) / DYNAMIC, METHODS[DYNAMIC], policy)
        versions = {STATIC: static, DYNAMIC: subject.load(Path(folder) / DYNAMIC)}
        steps = step_seconds(subject, versions, lessons)
        truth = opinions(subject, exact, lessons)
        near = {name: closeness(truth, opinions(subject, model, lessons)) for name, model in versions.items()}
    beside = {
        name: {
            **{"step_ms": {str(batch): 1e3 * taken for batch, taken in steps[name].items()}},
            **{"divergence": near[name].divergence, "agreement": near[name].agreement},
        }
        for name in versions
    }
    return {"static": beside, "outliers": asdict(outliers(subject, exact, policy.parts[0], lessons))}


@torch.no_grad()
def outliers(subject: QuantSubject, model: nn.Module, part: ModelPart, lessons: Sequence[CalibrationBatch]) -> Outliers:
    """The layer that outliers hurt most under the range of all that was seen, and how each observer does there."""
    layers = {layer.names: layer for layer in roundable(model, part, "int8")}
    watched: dict[tuple[str, ...], dict[str, Observer]] = {}

    def see(names: tuple[str, ...], x: Tensor) -> None:
        if names in layers:
            for each in watched.setdefault(names, {name: observer(name) for name in OBSERVERS}).values():
                each.see(x)

    with watching(model, see):
        for lesson in lessons:
            subject.logits(model, lesson)
    spans = {names: {name: each.span() for name, each in observers.items()} for names, observers in watched.items()}
    chosen = max(
        spans, key=lambda names: _width(spans[names]["minmax"]) / max(_width(spans[names]["percentile"]), 1e-9)
    )
    given = _inputs(subject, model, chosen, lessons)
    rows = {name: _row_errors(layers[chosen], given, span) for name, span in spans[chosen].items()}
    return Outliers(
        layers[chosen].name,
        max(map(abs, spans[chosen]["minmax"])),
        max(map(abs, spans[chosen]["percentile"])),
        {name: float(errors.median()) for name, errors in rows.items()},
        {name: float(errors.max()) for name, errors in rows.items()},
    )


def _width(span: tuple[float, float]) -> float:
    return span[1] - span[0]


def _inputs(
    subject: QuantSubject, model: nn.Module, chosen: tuple[str, ...], lessons: Sequence[CalibrationBatch]
) -> Tensor:
    found: list[Tensor] = []

    def see(names: tuple[str, ...], x: Tensor) -> None:
        if names == chosen and sum(map(len, found)) < MOST_ROWS:
            found.append(x.flatten(0, -2).float().clone())

    with watching(model, see):
        for lesson in lessons:
            subject.logits(model, lesson)
    return torch.cat(found)[:MOST_ROWS]


def _row_errors(layer: RatedLayer, given: Tensor, span: tuple[float, float]) -> Tensor:
    """How far each row's results are off where inputs are rounded within a span.  # [row]"""
    steps, weight = input_range(*span), layer.linear.weight.float()
    rounded = ((given / steps.scale).round() + steps.zero).clamp(0, LEVELS)
    off = ((rounded - steps.zero) * steps.scale - given) @ weight.T
    return off.norm(dim=-1) / (given @ weight.T).norm(dim=-1).clamp_min(1e-9)
