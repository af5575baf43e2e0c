"""`serve.json` and `serve.png` of `viva bench serve`, through the server and in process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def save_levels(result: dict[str, Any], out: Path, curves: Mapping[str, str], ylabel: str, title: str) -> None:
    """Write `serve.json`, and `serve.png` if matplotlib is installed. `curves` are figures of a level and their labels.

    Levels whose figures were withheld (`is_valid`) are not plotted; those that do not hold are marked.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "serve.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    levels = [level for level in result["levels"] if level.get("is_valid", True)]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label in curves.items():
        for part, style in ((50, "-"), (95, ":")):
            points = [(level["sessions"], level[name][part]) for level in levels if level[name]]
            if points:
                axes.plot(*zip(*points, strict=True), style, marker="o", label=f"{label}, p{part}")
    for level in levels:
        if not level["holds"]:
            axes.axvline(level["sessions"], color="tab:red", linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="concurrent sessions", ylabel=ylabel)
    axes.set_title(title, fontsize=9)
    axes.set_xticks([level["sessions"] for level in levels], [str(level["sessions"]) for level in levels])
    if axes.lines:
        axes.legend()
    figure.savefig(out / "serve.png", dpi=130)


def percentile_text(percentiles: Mapping[int, float]) -> str:
    """Percentiles as `50/95/99`."""
    return "/".join(f"{value:.0f}" for value in percentiles.values()) or "–"
