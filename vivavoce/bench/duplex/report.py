"""The report of the duplex lab: figures by name, a table beside published ones, and JSON."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vivavoce.bench.duplex import published
from vivavoce.bench.duplex.interaction import UserSound
from vivavoce.bench.duplex.measure import CallOutcome, events, scene_figures
from vivavoce.bench.duplex.requirements import Requirement
from vivavoce.bench.duplex.runner import PlayedScenes
from vivavoce.bench.duplex.scenes import SCENES
from vivavoce.cores import usable_cores
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES

LATE_MS = 20.0
PANEL = ("R_R", "L_R", "L_R_p50", "R_Y", "L_Y", "L_Y_p50", "I_A", "S_BC", "S_VT", "S_ND")
COLUMNS = {
    "calls": "n",
    "answered": "ans",
    "latency_p50": "lat s",
    "early": "early",
    "turn_over": "TOR",
    "stopped": "stop",
    "stop_p50": "in s",
    "stray_answered": "stray",
    "cut_short": "cut",
}
RATES = {"answered", "early", "turn_over", "stopped", "stray_answered", "cut_short"}
LEGEND = (
    "ans: calls with an answer; lat: last voice of the question to the first of the reply, median; early: a reply was "
    "heard before the question had ended; TOR: enough of it for a turn-over of Full-Duplex-Bench; stop: the sound "
    "over the reply silenced it, and how soon; stray: sounds in silence that were answered; cut: replies that stopped "
    "while the caller was silent"
)


def figure_names() -> dict[str, None]:
    """All names that a requirement may use."""
    scene = scene_figures([])
    parts = ["", *(f"{language}." for language in HELD_OUT_VOICES)]
    names = [f"{part}{name}" for part in parts for name in PANEL]
    names += [f"{part}{scene_name}.{name}" for part in parts for scene_name in SCENES for name in scene]
    return dict.fromkeys(names)


def figures(played: PlayedScenes) -> dict[str, float | None]:
    """Every figure by its name: `R_Y`, `zh.R_Y`, `pause.early`, `zh.pause.early`."""
    found: dict[str, float | None] = {}
    for part, chosen in _parts(played):
        found |= {f"{part}{name}": value for name, value in events(_with_sounds(chosen)).measures().items()}
        for scene in dict.fromkeys(each.scene for each in chosen):
            calls = [each for each in chosen if each.scene == scene]
            found |= {f"{part}{scene}.{name}": value for name, value in scene_figures(calls).items()}
    return found


def _with_sounds(chosen: Sequence[CallOutcome]) -> list[tuple[CallOutcome, UserSound | None]]:
    """The calls, with what the sound over their reply is to the measures."""
    return [(each, SCENES[each.scene][1]) for each in chosen]


def _parts(played: PlayedScenes) -> list[tuple[str, list[CallOutcome]]]:
    """All calls, and those of each language."""
    languages = dict.fromkeys(each.language for each in played.outcomes)
    by_language = [
        (f"{language}.", [each for each in played.outcomes if each.language == language]) for language in languages
    ]
    return [("", played.outcomes), *by_language]


def result_of(played: PlayedScenes, about: dict[str, Any], requirements: Sequence[Requirement] = ()) -> dict[str, Any]:
    """Everything that was measured, as JSON."""
    found = figures(played)
    by_condition = {
        condition: scene_figures([each for each in played.outcomes if each.condition == condition])
        for condition in dict.fromkeys(each.condition for each in played.outcomes)
    }
    late = 1e3 * np.percentile(played.lateness, [50, 95]) if played.lateness else None
    return {
        "what": "duplex lab: turn-taking over the Realtime protocol",
        **about,
        "machine": {"cores": usable_cores(), "load": os.getloadavg()[0], "python": platform.python_version()},
        "microphone_late_ms": None if late is None else {"p50": float(late[0]), "p95": float(late[1])},
        "figures": found,
        "events": events(_with_sounds(played.outcomes)).counts(),
        "conditions": by_condition,
        "requirements": [{"requirement": str(each), "met": each.is_met(found)} for each in requirements],
        "published": [asdict(each) for each in published.SYSTEMS],
        "errors": played.errors,
        "outcomes": [asdict(each) for each in played.outcomes],
    }


def save(result: dict[str, Any], out: Path) -> None:
    """Write `duplex.json`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "duplex.json").write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf8")


def print_result(result: dict[str, Any]) -> None:
    """Print the tables on stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"{result['url']}: {result['how']}; {result['sounds']}")
    console.print(_scene_table(result))
    console.print(_panel_table(result))
    late = result["microphone_late_ms"]
    if late is not None and late["p95"] > LATE_MS:
        console.print(f"[yellow]this machine was busy:[/yellow] packets left {late['p95']:.0f} ms late at p95")
    for message in result["errors"]:
        console.print(f"server error: {message}")
    for failed in dict.fromkeys(each["failure"] for each in result["outcomes"] if each["failure"]):
        console.print(f"[red]a call ended early:[/red] {failed}")
    for each in result["requirements"]:
        console.print(f"{'[green]met[/green]' if each['met'] else '[red]not met[/red]'} {each['requirement']}")


def _scene_table(result: dict[str, Any]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, caption=LEGEND, caption_justify="left", padding=(0, 1, 0, 0))
    table.add_column("scene", no_wrap=True)
    for title in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    found = result["figures"]
    languages = [part for part in HELD_OUT_VOICES if f"{part}.R_R" in found]
    for scene in SCENES:
        for language in languages:
            prefix = f"{language}.{scene}."
            if f"{prefix}calls" in found:
                table.add_row(f"{scene}, {language}", *(_shown(name, found[f"{prefix}{name}"]) for name in COLUMNS))
    return table


def _panel_table(result: dict[str, Any]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    names = published.NAMES
    table = Table(box=SIMPLE_HEAD, caption=published.TAU_VOICE, caption_justify="left", padding=(0, 1, 0, 0))
    table.add_column("measures of τ-voice", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    found = result["figures"]
    for part in ("", *(f"{language}." for language in HELD_OUT_VOICES)):
        if f"{part}R_R" in found:
            label = "this server" + (f", {part[:-1]}" if part else "")
            table.add_row(label, *(_number(found[f"{part}{name}"]) for name in names))
    table.add_section()
    for system in published.SYSTEMS:
        if system.source == published.TAU_VOICE:
            table.add_row(system.name, *(_number(system.figures[name]) for name in names))
    return table


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.0f}%" if name in RATES else f"{value:.2f}" if name.endswith("p50") else f"{value:.0f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
