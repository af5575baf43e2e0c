"""The report of `viva bench serve`: lines and a table on the terminal, `serve.json` and `serve.png`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivavoce.bench.serve_levels import DoorLevel
from vivavoce.bench.serve_plot import percentile_text, save_levels

LOG_WIDTH = 160


def print_level(level: DoorLevel) -> None:
    """Print a level on stderr as soon as it is measured."""
    _print(f"{level.sessions} sessions: {_line(level)}")
    for process in level.server.processes:
        _print(
            f"  {process.name} {process.pid}: {process.cpu:.2f} cores, of that {process.main_thread_cpu:.2f} in the "
            f"main thread; {process.rss_bytes / 1e6:.0f} MB"
        )
    lags = ", ".join(f"{name} {_lag(lag)}" for name, lag in level.server.loop_lag_p99_ms.items())
    callers = ", ".join(f"{report.cpu_share:.0%}" for report in level.callers)
    gpu = "" if level.server.gpu_bytes is None else f"; GPU {level.server.gpu_bytes / 1e9:.0f} GB"
    watts = "" if level.watts is None else f", {level.watts:.0f} W"
    _print(
        f"  event loop lag p99: {lags or '–'}; callers {callers} of a core, late by {level.lateness_ms:.1f} ms (p99)"
    )
    if level.server.stages_ms:
        stages = ", ".join(f"{name.replace('_', ' ')} {ms:.0f}" for name, ms in level.server.stages_ms.items())
        _print(f"  largest medians of the stages before a first sound: {stages} ms")
    _print(f"  {level.mean_sessions:.1f} in conversation on average, {level.wall_seconds:.0f} s{gpu}{watts}")


def _line(level: DoorLevel) -> str:
    if not level.is_valid:
        return (
            f"no figures: the callers were late by {level.lateness_ms:.0f} ms (p99; at most "
            f"{level.max_lateness_ms:.0f}); give them more cores or --callers"
        )
    parts = [
        f"first sound p50/p95/p99 {percentile_text(level.first_sound_ms)} ms of {level.answers}",
        f"{level.underruns} underruns in {level.replies_that_ran_dry} replies ({level.dry_seconds:.2f} s dry of "
        f"{level.sound_seconds:.0f} s)",
    ]
    if level.first_dry_ms:
        parts.append(f"first {percentile_text(level.first_dry_ms)} ms into the reply")
    if level.interruptions:
        parts.append(
            f"yield {percentile_text(level.yield_ms)} ms of {level.interruptions}, then first sound "
            f"{percentile_text(level.after_interruption_ms)} ms"
        )
    if level.refused:
        parts.append(
            f"refused {level.refused} within {percentile_text(level.refusal_ms)} ms ({_counts(level.refusals)})"
        )
    for name in ("never_answered", "unfinished", "not_yielded", "cut_in", "false_stops"):
        if getattr(level, name):
            parts.append(f"{name.replace('_', ' ')} {getattr(level, name)}")
    if level.failed:
        parts.append(f"failed: {_counts(level.failed)}")
    return "; ".join(parts)


def print_table(levels: Sequence[DoorLevel], result: dict[str, Any]) -> None:
    """Print the levels as a table, and the verdict."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['what']}; {result['load']}", title_justify="left", box=SIMPLE_HEAD)
    columns = ("sessions", "first sound p50/p95/p99", "underruns", "dry", "never answered", "refused", "yield p50/p95")
    for column in (*columns, "loop lag p99", "server cores", "holds"):
        table.add_column(column, justify="right")
    for level in levels:
        table.add_row(*_row(level))
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    console.print(table)
    console.print(f"{result['most_without_a_gap']} sessions without a gap")


def _row(level: DoorLevel) -> list[str]:
    lags = level.server.loop_lag_p99_ms.values()
    server = [
        _lag(None if None in lags else max(lag for lag in lags if lag is not None)) if lags else "–",
        f"{sum(process.cpu for process in level.server.processes):.1f}" if level.server.processes else "–",
    ]
    if not level.is_valid:
        return [str(level.sessions), "callers late", *["–"] * 5, *server, "–"]
    return [
        str(level.sessions),
        f"{percentile_text(level.first_sound_ms)} ms",
        str(level.underruns),
        f"{level.dry_seconds:.1f} s",
        str(level.never_answered),
        str(level.refused),
        f"{percentile_text({part: level.yield_ms[part] for part in (50, 95)})} ms" if level.yield_ms else "–",
        *server,
        "yes" if level.holds else "no",
    ]


def save(result: dict[str, Any], out: Path) -> None:
    """Write `serve.json`, and `serve.png` if matplotlib is installed."""
    title = f"{result['shape']} on {result['device'] or 'a running server'}\n{result['load']}"
    save_levels(result, out, {"first_sound_ms": "first sound", "yield_ms": "yield"}, "milliseconds", title)


def _lag(milliseconds: float | None) -> str:
    return "beyond the buckets" if milliseconds is None else f"≤ {milliseconds:.0f} ms"


def _counts(reasons: dict[str, int]) -> str:
    return ", ".join(f"{count} × {reason}" for reason, count in reasons.items())


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
