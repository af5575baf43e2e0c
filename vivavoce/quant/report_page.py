"""The Markdown report: verdict by thresholds, tables, a plot, and the comparison of static with dynamic int8."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.errors import MissingDependencyError
from vivavoce.quant.calibration import (
    LEVELS,
    OBSERVERS,
    Observer,
    RatedLayer,
    input_range,
    observer,
    observing_inputs,
    roundable,
)
from vivavoce.quant.convert import quantise_folder
from vivavoce.quant.measure import closeness, log_probabilities, step_seconds
from vivavoce.quant.policy import METHODS, ModelPart, policy_for
from vivavoce.quant.subjects import CalibrationBatch, QuantSubject

MIN_AGREEMENT = 0.98  # argmax agreement
MIN_VISQOL = 0.95  # relative to identical audio
MAX_LOSS = 0.02  # rise of word errors, drop of right answers
Figures = dict[str, Any]


@dataclass(frozen=True)
class Threshold:
    """One threshold, the measured value, and whether it holds."""

    what: str
    found: float
    bound: str
    holds: bool


def thresholds(figures: Figures) -> list[Threshold]:
    """All thresholds that have a measured value."""
    agreement = figures["logits"]["agreement"]
    done = [Threshold("likeliest id the same", agreement, f"≥ {MIN_AGREEMENT}", agreement >= MIN_AGREEMENT)]
    aligned = figures.get("aligned") or {}
    if aligned.get("visqol") and aligned["ceiling"]["visqol"]:
        share = aligned["visqol"] / aligned["ceiling"]["visqol"]
        done.append(Threshold("ViSQOL, share of identical sounds'", share, f"≥ {MIN_VISQOL}", share >= MIN_VISQOL))
    alone = figures.get("alone") or {}
    if "wer" in alone.get("float", {}):
        rise = alone["quantised"]["wer"] - alone["float"]["wer"]
        done.append(Threshold("word errors, rise", rise, f"≤ {MAX_LOSS}", rise <= MAX_LOSS))
    if "right" in alone.get("float", {}):
        drop = alone["float"]["right"] - alone["quantised"]["right"]
        done.append(Threshold("right answers, drop", drop, f"≤ {MAX_LOSS}", drop <= MAX_LOSS))
    rates = (figures.get("transcripts") or {}).get("wer")
    if rates:
        rise = rates["quantised"] - rates["float"]
        done.append(Threshold("word errors, rise", rise, f"≤ {MAX_LOSS}", rise <= MAX_LOSS))
    return done


def verdict(figures: Figures) -> str:
    """One line on quality, speed and memory."""
    failed = [threshold for threshold in thresholds(figures) if not threshold.holds]
    quality = (
        "as good as float"
        if not failed
        else "not as good: "
        + "; ".join(f"{threshold.what} {threshold.found:.3f} ({threshold.bound})" for threshold in failed)
    )
    steps = figures["step_ms"]
    faster = steps["float"]["1"] / steps["quantised"]["1"]
    speed = f"{faster:.2f}× float's speed at batch 1 on this CPU"
    size = figures["loading"]["quantised"]["memory"] / max(1, figures["loading"]["float"]["memory"])
    return f"{quality}; {speed}; {size:.2f} of float's memory"


def page(figures: Figures) -> str:
    lines = [f"# {figures['kind']}, {figures['method']}", "", f"**{figures['verdict']}**", ""]
    lines += _table(
        ["threshold", "found", "bound", "holds"],
        [
            [each.what, f"{each.found:.4f}", each.bound, "yes" if each.holds else "**no**"]
            for each in thresholds(figures)
        ],
    )
    lines += ["", "## Cost", "", *_table(["", "float", "quantised"], _cost_rows(figures))]
    lines += ["", "Steps are CPU time, the two versions taking turns. On disk, a source may be packed for shipping",
              f"already; its language model as float32 has {_megabytes(figures['float32_bytes'])}.", ""]  # fmt: skip
    lines += ["## Closeness", "", *_table(["", ""], _closeness_rows(figures)), ""]
    if figures.get("static"):
        lines += _static_lines(figures)
    if figures.get("training"):
        lines += training_lines(figures["training"])
    if figures.get("aligned"):
        lines += _sound_lines(figures)
    if figures.get("transcripts"):
        lines += ["## Words", "", f"`{figures['transcripts']}`", ""]
    where = (
        f"{figures['machine']}, {figures['threads']} thread(s), torch {figures['torch']}, Python {figures['python']}"
    )
    lines += [f"Measured on {where}; {figures['set']['items']} items of {figures['set']['name']}.", ""]
    return "\n".join(lines)


def _cost_rows(figures: Figures) -> list[list[str]]:
    def both(values: dict[str, Any], show: Any) -> list[str]:
        return [show(values[name]) for name in ("float", "quantised")]

    rows = [["weights on disk, all parts", *both(figures["disk_bytes"], _megabytes)]]
    load = figures["loading"]
    rows.append(["memory after loading", *both({n: v["memory"] for n, v in load.items()}, _megabytes)])
    rows.append(["peak while loading", *both({n: v["peak"] for n, v in load.items()}, _megabytes)])
    rows.append(["seconds to load", *both({n: v["seconds"] for n, v in load.items()}, "{:.2f}".format)])
    steps = figures["step_ms"]
    for batch in steps["float"]:
        rows.append([f"step, batch {batch}, ms", *both({n: v[batch] for n, v in steps.items()}, "{:.2f}".format)])
    alone = figures.get("alone")
    if alone:
        rows.append(["first sound, ms", *both({n: v["first_sound_ms"] for n, v in alone.items()}, "{:.0f}".format)])
        rows.append(["RTF", *both({n: v["rtf"] for n, v in alone.items()}, "{:.3f}".format)])
    return rows


def _closeness_rows(figures: Figures) -> list[list[str]]:
    near = figures["logits"]
    return [
        ["divergence of logits (KL), nats", f"{near['divergence']:.5f}"],
        ["likeliest id the same", f"{near['agreement']:.4f} of {near['places']} positions"],
        ["rows of greedy replies the same", f"{figures['code_agreement']:.4f}"],
    ]


def _static_lines(figures: Figures) -> list[str]:
    """Static int8 beside dynamic, and the observers on the layer with the worst outliers."""
    versions, found = figures["static"], figures["outliers"]
    batches = list(next(iter(versions.values()))["step_ms"])
    rows = [
        [name, *(f"{each['step_ms'][b]:.2f}" for b in batches), f"{each['divergence']:.5f}", f"{each['agreement']:.4f}"]
        for name, each in versions.items()
    ]
    observers = [[name, f"{found['errors'][name]:.4f}", f"{found['worst'][name]:.4f}"] for name in found["errors"]]
    head = ["", *(f"step, batch {batch}, ms" for batch in batches), "divergence", "likeliest id the same"]
    return [
        "## Static beside dynamic", "", *_table(head, rows), "",
        f"Outliers are worst before `{found['layer']}`: up to {found['largest']:.1f} where all but a few values lie "
        f"within {found['usual']:.1f}. Error of its results when its inputs are rounded within each observer's range:",
        "", *_table(["observer", "median row", "worst row"], observers), "",
    ]  # fmt: skip


def training_lines(training: Figures) -> list[str]:
    """Share of the quantisation loss recovered by fine-tuning."""
    before, after = training["divergence_before"], training["divergence_after"]
    won = 1 - after / before if before else 0.0
    amount = "at least half" if won >= 0.5 else "less than half"
    return [
        "## Fine-tuning", "",
        f"{training['steps']} steps on {training['lessons']} replies. On {training['held_out']} held-out ones: "
        f"divergence {before:.5f} → {after:.5f}, likeliest id the same {training['agreement_before']:.4f} → "
        f"{training['agreement_after']:.4f}. It recovered {100 * won:.0f} % of that: **{amount} of what 4 bits "
        "lost**.", "",
    ]  # fmt: skip


def _sound_lines(figures: Figures) -> list[str]:
    aligned, alone = figures["aligned"], figures["alone"]
    rows = [
        [name, _number(aligned[name]), _number(aligned["ceiling"][name])]
        for name in ("visqol", "pesq", "stoi", "speaker")
    ]
    own = [
        [name, _number(alone["float"].get(name)), _number(alone["quantised"].get(name))]
        for name in ("dnsmos", "wer", "right")
    ]
    return [
        "## Sound", "",
        f"At the same positions of {aligned['pairs']} replies (`aligned-*.wav`, pictures beside them):", "",
        *_table(["", "quantised against float", "float against itself"], rows), "",
        "Left alone (`alone-*.wav`), same items and seeds:", "",
        *_table(["", "float", "quantised"], own), "",
        f"Speaker similarity of both left alone: {_number(figures['speaker_similarity'])}. "
        f"Metrics that are not installed: {', '.join(aligned['absent_judges']) or 'none'}.", "",
    ]  # fmt: skip


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def plot_summary(figures: Figures, file: Path) -> None:
    """Plot disk size, memory and step time beside float."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'vivavoce[plot]'") from error
    load, steps = figures["loading"], figures["step_ms"]
    shown = {
        "disk, MB": [figures["disk_bytes"][name] / 1e6 for name in ("float", "quantised")],
        "memory, MB": [load[name]["memory"] / 1e6 for name in ("float", "quantised")],
        **{f"step at {batch}, ms": [steps[name][batch] for name in ("float", "quantised")] for batch in steps["float"]},
    }
    figure = Figure(figsize=(2.2 * len(shown), 2.6), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        axes.bar(["float", figures["method"]], values, color=["#b8b8b8", "#3b7dd8"])
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7)
    figure.savefig(file, dpi=120)


STATIC, DYNAMIC = "int8-static", "int8-dynamic"
MAX_ROWS = 4096


@dataclass(frozen=True)
class Outliers:
    """The layer with the largest input outliers, and its output error by observer."""

    layer: str
    largest: float
    usual: float
    """Range of all but a few values."""
    errors: dict[str, float]
    """Median relative output error over rows, by observer."""
    worst: dict[str, float]
    """Largest relative output error of a row, by observer."""


def static_figures(
    subject: QuantSubject, source: Path, exact: nn.Module, static: nn.Module, examples: Sequence[CalibrationBatch]
) -> Figures:
    """Static and dynamic int8 of one model compared, and the layer with outliers."""
    policy = policy_for(source)
    with tempfile.TemporaryDirectory() as folder:
        quantise_folder(source, Path(folder) / DYNAMIC, METHODS[DYNAMIC], policy)
        versions = {STATIC: static, DYNAMIC: subject.load(Path(folder) / DYNAMIC)}
        steps = step_seconds(subject, versions, examples)
        truth = log_probabilities(subject, exact, examples)
        near = {name: closeness(truth, log_probabilities(subject, model, examples)) for name, model in versions.items()}
    beside = {
        name: {
            **{"step_ms": {str(batch): 1e3 * taken for batch, taken in steps[name].items()}},
            **{"divergence": near[name].divergence, "agreement": near[name].agreement},
        }
        for name in versions
    }
    return {"static": beside, "outliers": asdict(outliers(subject, exact, policy.parts[0], examples))}


@torch.no_grad()
def outliers(
    subject: QuantSubject, model: nn.Module, part: ModelPart, examples: Sequence[CalibrationBatch]
) -> Outliers:
    """The layer whose min-max range is widest relative to its percentile range, and each observer's error there."""
    layers = {layer.names: layer for layer in roundable(model, part, "int8")}
    watched: dict[tuple[str, ...], dict[str, Observer]] = {}

    def observe(names: tuple[str, ...], x: Tensor) -> None:
        if names in layers:
            for each in watched.setdefault(names, {name: observer(name) for name in OBSERVERS}).values():
                each.observe(x)

    with observing_inputs(model, observe):
        for example in examples:
            subject.logits(model, example)
    spans = {names: {name: each.span() for name, each in observers.items()} for names, observers in watched.items()}
    chosen = max(
        spans, key=lambda names: _width(spans[names]["minmax"]) / max(_width(spans[names]["percentile"]), 1e-9)
    )
    given = _inputs(subject, model, chosen, examples)
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
    subject: QuantSubject, model: nn.Module, chosen: tuple[str, ...], examples: Sequence[CalibrationBatch]
) -> Tensor:
    found: list[Tensor] = []

    def observe(names: tuple[str, ...], x: Tensor) -> None:
        if names == chosen and sum(map(len, found)) < MAX_ROWS:
            found.append(x.flatten(0, -2).float().clone())

    with observing_inputs(model, observe):
        for example in examples:
            subject.logits(model, example)
    return torch.cat(found)[:MAX_ROWS]


def _row_errors(layer: RatedLayer, given: Tensor, span: tuple[float, float]) -> Tensor:
    """Relative output error of each row with inputs rounded within a span.  # [row]"""
    steps, weight = input_range(*span), layer.linear.weight.float()
    rounded = ((given / steps.scale).round() + steps.zero).clamp(0, LEVELS)
    off = ((rounded - steps.zero) * steps.scale - given) @ weight.T
    return off.norm(dim=-1) / (given @ weight.T).norm(dim=-1).clamp_min(1e-9)
