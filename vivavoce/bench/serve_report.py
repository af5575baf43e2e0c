"""What `viva bench serve` found, as lines, a table, JSON and a plot."""

import json
import sys
from pathlib import Path
from typing import Any

from vivavoce.bench.serve_parts import Level


def print_level(level: Level) -> None:
    """One line, as soon as it is known: whoever stops the rest keeps it."""
    first, newcomer = _three(level.ttfa_ms), _three(level.newcomer_ttfa_ms)
    slack = "" if level.least_slack_ms is None else f", least slack {level.least_slack_ms:.0f} ms"
    memory = "" if level.memory_bytes is None else f", {level.memory_bytes / 1e9:.0f} GB"
    watts = "" if level.watts is None else f", {level.watts:.0f} W"
    failed = f"; failed: {'; '.join(level.failed)}" if level.failed else ""
    print(
        f"{level.sessions} sessions: first sound p50/p95/p99 {first} ms, of newcomers {newcomer} ms; "
        f"{level.underruns} underruns in {level.sessions_that_ran_dry} sessions ({level.dry_seconds:.2f} s dry) of "
        f"{level.sound_seconds:.0f} s of sound; step {level.step_ms:.1f} ms (longest {level.longest_step_ms:.0f}), "
        f"engine busy {level.engine_busy:.0%}{slack}; {level.replies_a_pass:.1f} replies a pass; "
        f"loop lag {level.loop_lag_ms:.1f} ms{memory}{watts}{failed}",
        file=sys.stderr,
        flush=True,
    )
    parts = ", ".join(f"{part} {each:.0f}" for part, each in level.first_sound_parts_ms.items())
    ways = "; ".join(
        f"{name} {way['passes']:.0f} × {way['ms']:.0f} ms of {way['jobs']:.1f} ({way['share']:.0%})"
        for name, way in level.ways.items()
    )
    threads = ", ".join(f"{name} {share:.0%}" for name, share in level.threads.items() if share >= 0.005)
    reserved = "" if level.reserved_bytes is None else f"; {level.reserved_bytes / 1e9:.0f} GB reserved"
    print(f"  first sound: {parts} ms; {ways}; of a core: {threads}{reserved}", file=sys.stderr, flush=True)


def print_stages(costs: dict[str, Any]) -> None:
    """A line of what passes cost."""
    hops = "; ".join(f"hops of {size} codes {_by_count(each)}" for size, each in costs["hop_ms"].items())
    print(
        f"milliseconds by replies in the pass: {hops}; first sound {costs['first_sound_ms']:.1f}; "
        f"ear {_by_count(costs['ear_ms'])}; a reply keeps {costs['speaking_bytes'] / 1e6:.0f} MB",
        file=sys.stderr,
        flush=True,
    )


def _by_count(milliseconds: dict[int, float]) -> str:
    return ", ".join(f"{count}: {each:.1f}" for count, each in milliseconds.items())


def print_result(result: dict[str, Any]) -> None:
    """What it comes to."""
    print(
        f"{result['what']}: shape {result['shape']} in {result['dtype']} on {result['device']}, replies of "
        f"{result['reply_seconds']:.0f} s: {result['most_without_a_gap']} sessions without a gap",
        file=sys.stderr,
        flush=True,
    )


def save(result: dict[str, Any], out: Path) -> None:
    """`serve.json`, and `serve.png` where matplotlib is."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "serve.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    levels = result["levels"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label in (("ttfa_ms", "as all begin"), ("newcomer_ttfa_ms", "a newcomer beside them")):
        for part, style in ((50, "-"), (95, ":")):
            points = [(level["sessions"], level[name][part]) for level in levels if level[name]]
            if points:
                axes.plot(*zip(*points, strict=True), style, marker="o", label=f"{label}, p{part}")
    for level in levels:
        if not level["holds"]:
            axes.axvline(level["sessions"], color="tab:red", linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="sessions that speak at once", ylabel="milliseconds to the first sound")
    axes.set_title(f"{result['shape']} shape, {result['dtype']}, {result['device']}", fontsize=10)
    axes.set_xticks([level["sessions"] for level in levels], [str(level["sessions"]) for level in levels])
    axes.legend()
    figure.savefig(out / "serve.png", dpi=130)


def _three(percentiles: dict[int, float]) -> str:
    return "/".join(f"{value:.0f}" for value in percentiles.values()) or "–"
