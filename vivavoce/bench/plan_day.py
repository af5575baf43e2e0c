"""What a day of calls comes to: who was served, by how many machines, for how much."""

import math
from dataclasses import replace
from typing import Any

from vivavoce.bench.plan_fleet import Fleet
from vivavoce.bench.plan_simulation import Simulation

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
