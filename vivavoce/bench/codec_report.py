"""What `viva bench codec` prints and writes."""

import json
from pathlib import Path
from typing import Any


def print_result(result: dict[str, Any]) -> None:
    """As text and tables, on stderr."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True, highlight=False)
    console.print(f"{result['what']}, shape {result['shape']}, flow in {result['dtype']}, on {result['device']}")
    console.print(
        f"first sound from {result['first_sound_codes']} codes: {result['first_sound_ms']:.1f} ms; "
        f"hop of 5 codes (0.4 s of sound): {result['hop_ms'][5]:.1f} ms, "
        f"RTF {result['rtf']:.3f}; hop {len(result['hops_ms'])} / hop 5: "
        f"{result['hop_last_over_hop_5']:.2f}; ear: {result['ear']['step_ms']:.1f} ms per 80 ms"
    )
    recomputed = ", ".join(f"{hop}: {ms:.0f} ms" for hop, ms in result["recomputed_ms"].items())
    console.print(
        f"flow alone, run eagerly: decoding everything anew at hop {recomputed}; keeping only codes and decoding the "
        f"window again {result['window_recomputed_ms']:.0f} ms"
    )
    errors = ", ".join(f"{window}: {error:.3f}" for window, error in result["windows"].items())
    console.print(f"mel under a left window of chunks, relative difference from full context: {errors}")
    held = ", ".join(f"{frames}: {error:.1e}" for frames, error in result["look_right"].items())
    console.print(f"vocoder on {result['speech']}, difference from the whole by mel frames held back: {held}")
    ear = result["ear"]
    console.print(f"ear on it: {ear['codes_that_differ']:.1%} of {ear['codes']} codes differ from the exact ones")
    table = Table("sessions", "hop ms", "worst", "GB/s of the flow", "RTF", "underruns")
    for row in result["sessions"]:
        cells = (f"{row['hop_ms']:.1f}", f"{row['worst_hop_ms']:.1f}", f"{row['gb_s']:.0f}", f"{row['rtf']:.3f}")
        table.add_row(str(row["sessions"]), *cells, str(row["underruns"]))
    console.print(table)
    policies = Table("policy", "first sound ms", "added delay ms", "underruns", "chunks", "work s", "edges / inside")
    for row in result["policies"]:
        policies.add_row(
            row["policy"],
            f"{row['first_sound'] * 1e3:.0f}",
            f"{row['added_delay'] * 1e3:.0f}",
            str(row["underruns"]),
            str(row["chunks"]),
            f"{row['decode_seconds']:.2f}",
            f"{row['largest_jump_at_edges']:.3f} / {row['p999_jump_inside']:.3f}",
        )
    console.print(policies)
    console.print("edges: the largest jump between samples where chunks meet; inside: the 99.9th percentile of all")


def save(result: dict[str, Any], out: Path) -> None:
    """As JSON and a plot."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "codec.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(result["hops_ms"]) + 1), result["hops_ms"], label="state kept (flow and vocoder)")
    hops, times = zip(*result["recomputed_ms"].items(), strict=True)
    axes.plot(hops, times, "o-", label="everything anew (flow alone)")
    axes.axhline(result["hop_sound_ms"], color="grey", linestyle=":", label="sound made by a hop")
    axes.set(xlabel="hop of 5 codes", ylabel="milliseconds", yscale="log", ylim=(1, None))
    axes.set_title(f"MOSS-Speech codec, {result['shape']} shape, {result['dtype']}, {result['device']}", fontsize=10)
    axes.legend()
    figure.savefig(out / "codec.png", dpi=130)
