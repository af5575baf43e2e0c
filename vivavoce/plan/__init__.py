"""`viva plan`: sessions per accelerator by memory and by time, latency and cost, and a simulated day of a fleet."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vivavoce.plan.figures import ASSUMED, FRAME_SECONDS, METHODS, Accelerator, Measured, QuestionLoad, project_to
from vivavoce.plan.simulation import Fleet, Simulation

MAX_SESSIONS = 4096


@dataclass(frozen=True)
class PlanLoad:
    """Memory (bytes), time shares and latency of one card at a session count."""

    sessions: int
    weights: float
    codec: float
    cache: float
    replies: float
    reserve: float
    language_model: float
    """Share of the card's time; also `voice` and `encoder`."""
    voice: float
    encoder: float
    answer_ms: float
    """From the end of the turn to the first audio."""
    voice_to_voice_ms: float

    @property
    def memory(self) -> float:
        """Total bytes."""
        return self.weights + self.codec + self.cache + self.replies + self.reserve

    @property
    def busy(self) -> float:
        """Total share of the card's time."""
        return self.language_model + self.voice + self.encoder


def load_of(question: QuestionLoad, sessions: int) -> PlanLoad:
    sizes, talk, method = question.sizes, question.talk, question.method
    measured = project_to(question.card, question.measured, sizes, method)
    speaking, listening = talk.machine_share * sessions, talk.user_share * sessions
    step = _step_ms(question, measured, max(speaking + listening, 1.0))
    answer = measured.first_codes * step + measured.first_sound_ms
    return PlanLoad(
        sessions=sessions,
        weights=sizes.weights(method),
        codec=sizes.codec_bytes + sizes.voice_bytes,
        cache=sessions * question.context * sizes.kv_row_bytes * method.kv_share,
        replies=(math.ceil(speaking) + min(math.ceil(speaking), measured.written_together)) * sizes.speaking_bytes,
        reserve=question.reserve_bytes + method.prefill_bytes,
        language_model=step / (1e3 * FRAME_SECONDS),
        voice=measured.voice_share(speaking),
        encoder=measured.encoder_share(listening),
        answer_ms=answer,
        voice_to_voice_ms=talk.silence_ms + answer + talk.network_ms,
    )


def max_by_memory(question: QuestionLoad) -> int:
    """Largest session count whose KV cache fits beside the weights."""
    return _largest_count(question, lambda load: load.memory <= question.card.memory)


def max_by_time(question: QuestionLoad) -> int:
    """Largest session count within the time budget."""
    return _largest_count(question, lambda load: load.busy <= question.busy)


def plan(question: QuestionLoad) -> dict[str, Any]:
    """The plan for one card and weight format, as JSON."""
    measured = project_to(question.card, question.measured, question.sizes, question.method)
    by_memory, by_time = max_by_memory(question), max_by_time(question)
    max_count = min(by_memory, by_time)
    wanted = question.sessions or max_count
    per_card = max(min(max_count, wanted), 0)
    load = load_of(question, max(per_card, 1))
    cards = math.ceil(wanted / max_count) if max_count else None
    price = question.card.price
    return {
        "model": question.sizes.name,
        "card": question.card.name,
        "method": question.method.name,
        "context_rows": question.context,
        "context_minutes": question.context / question.talk.rows_a_second / 60,
        "figures": measured.device,
        "assumed": list(ASSUMED),
        "most_sessions": max_count,
        "most_by_memory": by_memory,
        "most_by_time": by_time,
        "breaks_first": "nothing fits" if not by_memory else "memory" if by_memory < by_time else busiest(load),
        "sessions": wanted,
        "cards": cards,
        "sessions_a_card": per_card,
        "memory_gb": {
            **{"weights": load.weights / 1e9, "codec and voice": load.codec / 1e9, "cache": load.cache / 1e9},
            **{"replies": load.replies / 1e9, "reserve": load.reserve / 1e9, "all": load.memory / 1e9},
            "card": question.card.memory / 1e9,
        },
        "time_share": {
            "language model": load.language_model,
            "voice": load.voice,
            "speech encoder": load.encoder,
            "all": load.busy,
        },
        "answer_ms": load.answer_ms,
        "voice_to_voice_ms": load.voice_to_voice_ms,
        "restore_ms": measured.prefill_rows_ms * question.context,
        "dollars_an_hour": None if cards is None else cards * price,
        "dollars_an_hour_of_talk": price / per_card if per_card else None,
    }


def fits(card: Accelerator, question: QuestionLoad) -> list[dict[str, Any]]:
    """For each weight format: whether it fits, the context left for one session, and sessions at the asked context."""
    rows = []
    for method in METHODS.values():
        asked = replace(question, card=card, method=method)
        alone = load_of(replace(asked, context=0), 1)
        left = card.memory - alone.memory
        context = max(int(left / (asked.sizes.kv_row_bytes * method.kv_share)), 0)
        rows.append(
            {
                "method": method.name,
                "weights_gb": alone.weights / 1e9,
                "all_without_cache_gb": alone.memory / 1e9,
                "fits": left > 0,
                "context_rows": context,
                "context_minutes": context / asked.talk.rows_a_second / 60,
                "sessions": min(max_by_memory(asked), max_by_time(asked)),
                "note": method.note,
            }
        )
    return rows


def busiest(load: PlanLoad) -> str:
    """The stage with the largest share of time."""
    shares = {"the speech encoder": load.encoder, "the voice": load.voice, "the language model": load.language_model}
    return max(shares, key=lambda name: shares[name])


def places_for(calls: float, refused: float) -> int:
    """Smallest number of places at which at most this share of random calls is refused (Erlang B)."""
    places, blocked = 0, 1.0
    while blocked > refused:
        places += 1
        blocked = calls * blocked / (places + calls * blocked)
    return places


def erlang_b(calls: float, places: int) -> float:
    """Blocking probability of `calls` Erlangs offered to `places`."""
    blocked = 1.0
    for count in range(1, places + 1):
        blocked = calls * blocked / (count + calls * blocked)
    return blocked


def _step_ms(question: QuestionLoad, measured: Measured, batch: float) -> float:
    """Step time at the asked context: the measured time plus reading the additional KV cache."""
    more = question.context / 2 - measured.context  # a history is half full on average
    row = question.sizes.kv_row_bytes * question.method.kv_share
    reading = batch * more * row / (question.card.bandwidth * 1e9) * 1e3
    return measured.step(batch) + max(reading, 0.0)


def _largest_count(question: QuestionLoad, is_possible: Any) -> int:
    low, high = 0, MAX_SESSIONS
    while low < high:
        middle = (low + high + 1) // 2
        if is_possible(load_of(question, middle)):
            low = middle
        else:
            high = middle - 1
    return low


EXTENSIVE = (
    *("offered", "completed", "refused", "dropped", "still_there", "moved", "away_from_home", "failures"),
    *("hours_of_talk", "mean_calls", "most_calls", "card_hours", "edge_machines", "gigabytes", "dollars"),
)


def play(fleet: Fleet, cell: float = math.inf) -> dict[str, Any]:
    """Simulate a day of a fleet. A fleet larger than a cell is scaled from one of its equal cells."""
    cells = max(1, math.ceil(fleet.calls / cell))
    result = _simulate_cell(replace(fleet, calls=fleet.calls / cells))
    scaled = {name: _times(result[name], cells) for name in EXTENSIVE}
    return {"cells": cells, "calls_a_cell": fleet.calls / cells} | result | scaled


def _times(value: Any, cells: int) -> Any:
    return {name: each * cells for name, each in value.items()} if isinstance(value, dict) else value * cells


def _simulate_cell(fleet: Fleet) -> dict[str, Any]:
    simulation = Simulation(fleet)
    tally = simulation.run()
    hours = tally.call_integral / 3600.0
    edges = max(1, math.ceil(tally.max_calls * (1 + fleet.spare) / fleet.edge_calls)) + 1  # one may fail
    card_hours, edge_hours = tally.machine_seconds / 3600.0, edges * fleet.hours
    both_ways = 2 * fleet.kilobits * 1e3 / 8 * 3600.0 / 1e9 * hours
    gigabytes = both_ways * (1 + fleet.turn_share)  # relayed calls are sent out twice
    dollars = {
        "cards": card_hours * fleet.card_price,
        "edge": edge_hours * fleet.edge_price,
        "traffic": gigabytes * fleet.gigabyte_price,
    }
    whole = sum(dollars.values())
    return {
        "offered": tally.offered,
        "completed": tally.completed,
        "refused": tally.refused,
        "dropped": tally.dropped,
        "still_there": len(simulation.calls),
        "moved": tally.moved,
        "away_from_home": tally.away,
        "failures": tally.failures,
        "refused_share": tally.refused / max(tally.offered, 1),
        "dropped_share": tally.dropped / max(tally.offered, 1),
        "hours_of_talk": hours,
        "mean_calls": hours / fleet.hours,
        "most_calls": tally.max_calls,
        "card_hours": card_hours,
        "used": hours / max(card_hours * fleet.places, 1e-9),
        "edge_machines": edges,
        "gigabytes": gigabytes,
        "dollars": dollars | {"all": whole},
        "dollars_an_hour_of_talk": whole / max(hours, 1e-9),
        "samples": simulation.samples,
    }


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
        f"{day['cells']} cells of {day['calls_a_cell']:.0f} calls, one of them simulated"
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
