"""The figures of `viva bench turn`: a table, a picture of the scenes, and their timelines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivavoce.bench.turn_measure import Outcome
from vivavoce.bench.turn_scenes import ScriptedCall

SELECTIVE = ("backchannel", "cough", "knock", "side_talk")
LATE_MS = 20.0
COLOURS = {"question": "tab:blue", "interruption": "tab:red", "backchannel": "tab:green"}
TIMELINE_SECONDS = 25.0
LEGEND = (
    "said: questions answered; V2V: last voice in to first voice heard, median/95th percentile; yields: replies that "
    "an interruption stopped, and how soon; kept: replies that another sound did not stop; early: hesitations taken "
    "for the end; self: replies the server stopped though nobody spoke; dry: times the player ran out of sound"
)


def show(result: dict[str, Any]) -> None:
    """Print what was measured."""
    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"{result['url']}: {result['how']}; questions: {result['material']}")
    console.print(_table(result))
    _print_totals(console, result)


def _table(result: dict[str, Any]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, caption=LEGEND, caption_justify="left", padding=(0, 1, 0, 0))
    table.add_column("scene", no_wrap=True)
    for name in ("asked", "said", "V2V ms", "yields", "in ms", "kept", "early", "self", "dry"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in [*result["scenes"], {"name": "all", **result["totals"]}]:
        kept = [row[f"{kind}_selectivity"] for kind in SELECTIVE if row[f"{kind}_selectivity"] is not None]
        table.add_row(
            row["name"] + (" ✗" if row.get("failure") else ""),
            str(row["questions"]),
            _percent(row["response_rate"]),
            _spread(row["response_ms"]),
            _percent(row["yield_rate"]),
            _spread(row["yield_ms"]),
            _percent(sum(kept) / len(kept) if kept else None),
            _percent(row["false_end_rate"]),
            str(row["self_interruptions"]),
            str(row["underruns"]),
            end_section=row is result["scenes"][-1] if result["scenes"] else False,
        )
    return table


def _print_totals(console: Any, result: dict[str, Any]) -> None:
    totals = result["totals"]
    shares = ", ".join(f"{kind.replace('_', ' ')} {_percent(totals[f'{kind}_selectivity'])}" for kind in SELECTIVE)
    console.print(f"reply not stopped by: {shares}; sounds in silence not answered: ", end="")
    console.print(_percent(totals["stray_selectivity"]))
    for row in result["scenes"]:
        if row.get("failure"):
            console.print(f"[red]{row['name']}[/red] ended early: {row['failure']}")
    for message in result["errors"]:
        console.print(f"the server complained: {message}")
    late = result["microphone_late_ms"]
    if late is not None and late["p95"] > LATE_MS:
        console.print(f"[yellow]this machine was busy:[/yellow] packets left {late['p95']:.0f} ms late at p95")
    together = result.get("together")
    if together is not None:
        console.print(
            f"{together['sessions']} sessions at once: V2V {_spread(together['response_ms'])} ms, "
            f"{together['underruns']} underruns; of "
            f"{together['answers']} answers {together['own']} their own, {together['other']} another's, "
            f"{together['unclear']} like none (by {together['compared_by']})"
        )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"


def _spread(value: dict[str, float] | None) -> str:
    return "–" if value is None else f"{value['p50']:.0f}/{value['p95']:.0f}"


def draw(result: dict[str, Any], found: Sequence[Outcome], calls: Sequence[ScriptedCall], out: Path) -> None:
    """`turn.png`, latencies and shares by scene, and `turn_timeline.png`, who spoke when; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(11, 5), layout="constrained")
    latency, shares = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_latency(latency, [row["name"] for row in result["scenes"]], found)
    _draw_shares(shares, result["totals"])
    figure.suptitle(f"{result['url']}: {result['how']}", fontsize=9)
    figure.savefig(out / "turn.png", dpi=130)
    timeline = Figure(figsize=(11, 1 + 0.55 * max(1, len(calls))), layout="constrained")
    _draw_timelines(timeline.subplots(), calls)
    timeline.savefig(out / "turn_timeline.png", dpi=130)


def _draw_latency(axes: Any, names: list[str], found: Sequence[Outcome]) -> None:
    for row, name in enumerate(names):
        for kind, value, marker in (("response_ms", "V2V", "o"), ("stop_ms", "yield", "x")):
            wanted = [each for each in found if each.scene == name]
            if kind == "stop_ms":
                wanted = [each for each in wanted if each.over == "interruption"]
            times = [getattr(each, kind) for each in wanted if getattr(each, kind) is not None]
            colour = "tab:blue" if marker == "o" else "tab:red"
            axes.plot(times, [row] * len(times), marker, color=colour, alpha=0.6, label=value if row == 0 else None)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", title="V2V (o) and time to yield (x), every turn")
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)


def _draw_shares(axes: Any, totals: dict[str, Any]) -> None:
    names = ["response_rate", "yield_rate", *(f"{kind}_selectivity" for kind in SELECTIVE), "stray_selectivity"]
    known = [(name, totals[name]) for name in names if totals[name] is not None]
    labels = [name.replace("_", " ") for name, _ in known]
    bars = axes.barh(labels, [share for _, share in known], color="tab:blue")
    axes.bar_label(bars, [f"{100 * share:.0f}%" for _, share in known], padding=3)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.2), title="higher is better")


def _draw_timelines(axes: Any, calls: Sequence[ScriptedCall]) -> None:
    """One row a call: what the caller said above, what was heard below."""
    for row, call in enumerate(calls):
        began = call.caller.microphone.began
        for played in call.played:
            for sound in (played.asked, played.over, played.stray):
                if sound is not None and sound.first - began < TIMELINE_SECONDS:
                    colour = COLOURS.get(sound.kind, "tab:orange")
                    axes.broken_barh([(sound.first - began, sound.last - sound.first)], (row - 0.35, 0.3), color=colour)
        for reply in call.caller.loudspeaker.replies.values():
            spans = [(begin - began, end - begin) for begin, end in reply.voiced_spans()]
            axes.broken_barh(spans, (row + 0.02, 0.3), color="tab:gray")
    axes.set_yticks(range(len(calls)), [call.scene.name for call in calls])
    axes.invert_yaxis()
    axes.set(xlim=(0, TIMELINE_SECONDS), xlabel="seconds of the call")
    axes.set_title("caller (blue asks, red interrupts, green mm-hm, orange other sounds) above, replies (grey) below")
