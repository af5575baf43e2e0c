"""`viva plan`: how many conversations a card holds, by memory and by time; what they wait, and what an hour costs."""

import math
from dataclasses import dataclass, replace
from typing import Any

from vivavoce.plan.figures import ASSUMED, FRAME_SECONDS, METHODS, Accelerator, Measured, QuestionLoad, on
from vivavoce.plan.simulation import Fleet, Simulation

MOST_SESSIONS = 4096


@dataclass(frozen=True)
class PlanLoad:
    """What so many sessions take of a card."""

    sessions: int
    weights: float
    codec: float
    cache: float
    replies: float
    reserve: float
    language_model: float
    """Shares of the card's time."""
    voice: float
    ear: float
    answer_ms: float
    """From the end of the turn to the first sound."""
    voice_to_voice_ms: float

    @property
    def memory(self) -> float:
        """Bytes, all together."""
        return self.weights + self.codec + self.cache + self.replies + self.reserve

    @property
    def busy(self) -> float:
        """Share of the card's time."""
        return self.language_model + self.voice + self.ear


def load_of(question: QuestionLoad, sessions: int) -> PlanLoad:
    """Memory, time and latency with so many sessions on one card."""
    sizes, talk, method = question.sizes, question.talk, question.method
    measured = on(question.card, question.measured, sizes, method)
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
        ear=measured.ear_share(listening),
        answer_ms=answer,
        voice_to_voice_ms=talk.silence_ms + answer + talk.network_ms,
    )


def most_by_memory(question: QuestionLoad) -> int:
    """Sessions whose history fits beside the weights."""
    return _most(question, lambda load: load.memory <= question.card.memory)


def most_by_time(question: QuestionLoad) -> int:
    """Sessions that are served in time."""
    return _most(question, lambda load: load.busy <= question.busy)


def plan(question: QuestionLoad) -> dict[str, Any]:
    """Everything about one card with one kind of weights."""
    measured = on(question.card, question.measured, question.sizes, question.method)
    by_memory, by_time = most_by_memory(question), most_by_time(question)
    most = min(by_memory, by_time)
    wanted = question.sessions or most
    per_card = max(min(most, wanted), 0)
    load = load_of(question, max(per_card, 1))
    cards = math.ceil(wanted / most) if most else None
    price = question.card.price
    return {
        "model": question.sizes.name,
        "card": question.card.name,
        "method": question.method.name,
        "context_rows": question.context,
        "context_minutes": question.context / question.talk.rows_a_second / 60,
        "figures": measured.device,
        "assumed": list(ASSUMED),
        "most_sessions": most,
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
        "time_share": {"language model": load.language_model, "voice": load.voice, "ear": load.ear, "all": load.busy},
        "answer_ms": load.answer_ms,
        "voice_to_voice_ms": load.voice_to_voice_ms,
        "restore_ms": measured.prefill_rows_ms * question.context,
        "dollars_an_hour": None if cards is None else cards * price,
        "dollars_an_hour_of_talk": price / per_card if per_card else None,
    }


def fits(card: Accelerator, question: QuestionLoad) -> list[dict[str, Any]]:
    """Which methods fit on a card, with how much history for one session, and how many sessions of the asked one."""
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
                "sessions": min(most_by_memory(asked), most_by_time(asked)),
                "note": method.note,
            }
        )
    return rows


def busiest(load: PlanLoad) -> str:
    """What takes most of the card's time."""
    shares = {"the ear": load.ear, "the voice": load.voice, "the language model": load.language_model}
    return max(shares, key=lambda name: shares[name])


def places_for(calls: float, refused: float) -> int:
    """Places so that, of calls that come at random, no larger share than this is refused (Erlang's first formula)."""
    places, blocked = 0, 1.0
    while blocked > refused:
        places += 1
        blocked = calls * blocked / (places + calls * blocked)
    return places


def erlang_b(calls: float, places: int) -> float:
    """Share of calls refused: so many Erlangs offered to so many places."""
    blocked = 1.0
    for place in range(1, places + 1):
        blocked = calls * blocked / (place + calls * blocked)
    return blocked


def _step_ms(question: QuestionLoad, measured: Measured, batch: float) -> float:
    """A step's time with the history asked for: reading the cache is added to what was measured at another length."""
    more = question.context / 2 - measured.context  # a history is half full on average
    row = question.sizes.kv_row_bytes * question.method.kv_share
    reading = batch * more * row / (question.card.bandwidth * 1e9) * 1e3
    return measured.step(batch) + max(reading, 0.0)


def _most(question: QuestionLoad, is_possible: Any) -> int:
    low, high = 0, MOST_SESSIONS
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
    """A day of a fleet as JSON. One larger than a cell is so many equal cells side by side, of which one is played."""
    cells = max(1, math.ceil(fleet.calls / cell))
    result = _played(replace(fleet, calls=fleet.calls / cells))
    grown = {name: _times(result[name], cells) for name in EXTENSIVE}
    return {"cells": cells, "calls_a_cell": fleet.calls / cells} | result | grown


def _times(value: Any, cells: int) -> Any:
    return {name: each * cells for name, each in value.items()} if isinstance(value, dict) else value * cells


def _played(fleet: Fleet) -> dict[str, Any]:
    simulation = Simulation(fleet)
    tally = simulation.run()
    hours = tally.call_integral / 3600.0
    edges = max(1, math.ceil(tally.most_calls * (1 + fleet.spare) / fleet.edge_calls)) + 1  # one may fail
    card_hours, edge_hours = tally.machine_seconds / 3600.0, edges * fleet.hours
    both_ways = 2 * fleet.kilobits * 1e3 / 8 * 3600.0 / 1e9 * hours
    gigabytes = both_ways * (1 + fleet.turn_share)  # relayed calls leave the building twice
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
        "most_calls": tally.most_calls,
        "card_hours": card_hours,
        "used": hours / max(card_hours * fleet.places, 1e-9),
        "edge_machines": edges,
        "gigabytes": gigabytes,
        "dollars": dollars | {"all": whole},
        "dollars_an_hour_of_talk": whole / max(hours, 1e-9),
        "samples": simulation.samples,
    }
