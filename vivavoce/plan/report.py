"""Print a plan and a simulated day, and write them as JSON and plot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GREY = "#888888"


def print_plan(planned: dict[str, Any], fitting: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    memory, shares = planned["memory_gb"], planned["time_share"]
    parts = ", ".join(f"{name} {size:.1f}" for name, size in memory.items() if name not in ("all", "card"))
    limits = f"memory {planned['most_by_memory']}, time {planned['most_by_time']}"
    limit = "nothing fits" if not planned["most_sessions"] else f"{planned['breaks_first']} is the limit"
    console.print(
        f"{planned['model']}, {planned['method']}, on {planned['card']}: {planned['most_sessions']} sessions of "
        f"{planned['context_rows']} rows ({planned['context_minutes']:.1f} min of talk); {limit} ({limits})"
    )
    console.print(f"memory with {planned['sessions_a_card']}: {memory['all']:.1f} of {memory['card']:.0f} GB ({parts})")
    console.print("time: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    console.print(
        f"first sound {planned['answer_ms']:.0f} ms after the turn, voice to voice {planned['voice_to_voice_ms']:.0f}"
        f" ms; a full history is prefilled in {planned['restore_ms']:.0f} ms"
    )
    if planned["cards"] is not None:
        console.print(
            f"{planned['sessions']} sessions: {planned['cards']} cards, {planned['dollars_an_hour']:.2f} $/h, "
            f"{planned['dollars_an_hour_of_talk']:.3f} $ an hour of talk"
        )
    console.print(f"[{GREY}]figures: {planned['figures']}; assumed: {'; '.join(planned['assumed'])}[/]")
    table = Table(title=f"What fits on {planned['card']} (one session; its history)", title_justify="left")
    for name in ("weights", "GB", "with codec", "rows left", "minutes", f"sessions at {planned['context_rows']}"):
        table.add_column(name, justify="left" if name == "weights" else "right")
    for row in fitting:
        left = [f"{row['context_rows']}", f"{row['context_minutes']:.0f}"] if row["fits"] else ["–", "–"]
        sizes = [f"{row['weights_gb']:.1f}", f"{row['all_without_cache_gb']:.1f}"]
        table.add_row(row["method"], *sizes, *left, str(row["sessions"]))
    console.print(table)


def print_day(day: dict[str, Any], places: int) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    many = (
        f"{day['cells']} cells of {day['calls_a_cell']:.0f} calls, one of them played"
        if day["cells"] > 1
        else "one cell"
    )
    console.print(f"{many}, {places} places a card")
    console.print(
        f"{day['offered']} calls, {day['hours_of_talk']:.0f} h of talk, at most {day['most_calls']} at once; refused "
        f"{day['refused_share']:.4%}, dropped {day['dropped_share']:.4%}, moved {day['moved']} at "
        f"{day['failures']} failures, away from home {day['away_from_home']}"
    )
    dollars = day["dollars"]
    console.print(
        f"{day['card_hours']:.0f} card-hours, {day['used']:.0%} of their places used; {day['edge_machines']} edge "
        f"machines, {day['gigabytes']:.0f} GB; {dollars['all']:.0f} $ (cards {dollars['cards']:.0f}, edge "
        f"{dollars['edge']:.0f}, traffic {dollars['traffic']:.0f}), "
        f"{day['dollars_an_hour_of_talk']:.3f} $ an hour of talk"
    )


def save(result: dict[str, Any], out: Path) -> None:
    """`plan.json`, and `plan.png` of a simulated day where matplotlib is installed."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(json.dumps(result, indent=1), encoding="utf8")
    samples = (result.get("day") or {}).get("samples")
    if not samples:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    regions = list(dict.fromkeys(sample["region"] for sample in samples))
    figure = Figure(figsize=(8, 2.2 * len(regions)), layout="constrained")
    for region, axes in zip(regions, figure.subplots(len(regions), 1, sharex=True, squeeze=False)[:, 0], strict=True):
        in_region = [sample for sample in samples if sample["region"] == region]
        hours = [sample["hour"] for sample in in_region]
        axes.plot(hours, [sample["places"] for sample in in_region], color=GREY, label="places", drawstyle="steps-post")
        axes.plot(hours, [sample["calls"] for sample in in_region], label="calls")
        axes.vlines(
            [sample["hour"] for sample in in_region if sample["refused"]],
            0,
            1,
            color="tab:red",
            alpha=0.4,
            linewidth=1,
            transform=axes.get_xaxis_transform(),
            label="refused",
        )
        axes.set_title(region, fontsize=9, loc="left")
    axes.set_xlim(0, samples[-1]["hour"])
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside upper right", ncols=3)
    axes.set_xlabel("hours, UTC")
    figure.savefig(out / "plan.png", dpi=130)
