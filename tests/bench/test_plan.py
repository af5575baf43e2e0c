"""Capacity arithmetic, and a simulated day: the laws of queues hold."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vivavoce.cli import app
from vivavoce.errors import InputError
from vivavoce.plan import erlang_b, fits, load_of, max_by_memory, max_by_time, places_for, plan, play, save
from vivavoce.plan.figures import (
    ACCELERATORS,
    H200_MEASURED,
    METHODS,
    MOSS_SPEECH,
    Curve,
    QuestionLoad,
    TalkPattern,
    read_measured,
)
from vivavoce.plan.simulation import Fleet, Region, Simulation

BENCH = Path(__file__).parents[2] / "docs" / "bench"
ONE = (Region("one", 1.0),)
STEADY = Fleet(calls=40, regions=ONE, is_flat=True, machines=4, places=12, call_seconds=60, failures_a_year=0)


def measured_files():
    return [json.loads((BENCH / f"{name}_h200.json").read_text(encoding="utf8")) for name in ("lm", "serve")]


def test_the_figures_are_those_of_the_bench():
    measured = read_measured(*measured_files())
    for name in ("step", "hop", "encoder"):
        for (count, ours), (there, theirs) in zip(
            getattr(H200_MEASURED, name).points, getattr(measured, name).points, strict=True
        ):
            assert count == there and ours == pytest.approx(theirs, rel=0.2), name
    assert H200_MEASURED.prefill_rows_ms == pytest.approx(measured.prefill_rows_ms, rel=0.2)


def test_the_sizes_are_those_of_the_bench():
    lm, serve = measured_files()
    all_parameters = sum((MOSS_SPEECH.layer_parameters, MOSS_SPEECH.heads_parameters, MOSS_SPEECH.embedding_parameters))
    assert all_parameters == lm["parameters"]
    assert MOSS_SPEECH.read_each_step(METHODS["bf16"]) == lm["weight_bytes_per_step"]
    assert MOSS_SPEECH.kv_row_bytes == lm["kv_bytes_per_row"] == 160 * 1024
    assert (MOSS_SPEECH.voice_bytes, MOSS_SPEECH.speaking_bytes) == (
        serve["stages"]["voice_bytes"],
        serve["stages"]["speaking_bytes"],
    )
    assert MOSS_SPEECH.weights(METHODS["bf16"]) == pytest.approx(18.2e9, rel=0.01)


def test_planned_memory_is_near_the_measured():
    _, serve = measured_files()
    first = serve["runs"][0]
    level = next(level for level in first["levels"] if level["sessions"] == 64)
    rows = round(136 / 64 * (12.5 * (first["question_seconds"] + first["reply_seconds"]) + 96))  # the bench's own cache
    question = QuestionLoad(context=rows, talk=TalkPattern(user_share=0.0, machine_share=1.0))
    assert load_of(question, 64).memory == pytest.approx(level["memory_bytes"], rel=0.1)


def test_a_curve_goes_through_its_points_and_on():
    curve = Curve(((1, 10.0), (3, 20.0), (4, 30.0)))
    assert [curve(count) for count in (0, 0.5, 1, 2, 3, 4, 6)] == [0, 5, 10, 15, 20, 30, 50]


def test_more_history_leaves_room_for_fewer_and_smaller_weights_for_more():
    by_context = [max_by_memory(QuestionLoad(context=rows)) for rows in (1024, 4096, 16384)]
    assert by_context == sorted(by_context, reverse=True) and by_context[0] > by_context[-1] > 0
    fourth = [row["context_rows"] for row in fits(ACCELERATORS["RTX4090"], QuestionLoad())]
    methods = dict(zip(METHODS, fourth, strict=True))
    assert methods["bf16"] < methods["int8"] < methods["int4"] < methods["int4+kv8"]
    assert methods["int8"] == methods["fp8"]


def test_one_session_more_than_the_maximum_does_not_fit():
    question = QuestionLoad(context=4096)
    max_count = plan(question)["most_sessions"]
    assert load_of(question, max_count).busy <= question.busy < load_of(question, max_count + 1).busy or (
        load_of(question, max_count).memory <= question.card.memory < load_of(question, max_count + 1).memory
    )
    assert max_count == min(max_by_memory(question), max_by_time(question))


def test_a_model_that_does_not_fit_is_reported():
    small = replace(ACCELERATORS["RTX4090"], memory=16e9)
    planned = plan(QuestionLoad(card=small, sessions=10))
    assert planned["most_sessions"] == 0 and planned["cards"] is None and planned["breaks_first"] == "nothing fits"
    assert [row["fits"] for row in fits(small, QuestionLoad())][:2] == [False, True]


@pytest.mark.parametrize(("calls", "places", "blocked"), [(1.0, 1, 0.5), (10.0, 10, 0.2146), (100.0, 117, 0.0098)])
def test_erlangs_formula(calls, places, blocked):
    assert erlang_b(calls, places) == pytest.approx(blocked, abs=5e-4)


def test_places_for_a_share_refused():
    for calls in (3.0, 50.0, 1000.0):
        places = places_for(calls, 0.001)
        assert erlang_b(calls, places) <= 0.001 < erlang_b(calls, places - 1)


@pytest.mark.parametrize("lengths", ["exponential", "lognormal"])
def test_refusals_are_erlangs_whatever_the_lengths(lengths):
    results = [play(replace(STEADY, lengths=lengths, seed=seed, hours=12)) for seed in range(3)]
    refused = sum(each["refused"] for each in results) / sum(each["offered"] for each in results)
    assert refused == pytest.approx(erlang_b(40, 48), abs=0.006)


def test_littles_law():
    result = play(replace(STEADY, hours=24, seed=5))
    admitted = result["offered"] - result["refused"]
    assert result["mean_calls"] == pytest.approx(admitted / (24 * 3600) * 60.0, rel=0.02)


@pytest.mark.parametrize(
    "fleet",
    [
        Fleet(calls=120, hours=24, seed=1),
        Fleet(calls=120, hours=12, outage_hour=4, seed=2),
        Fleet(calls=60, hours=6, failures_a_year=20_000, seed=3),
        Fleet(calls=60, hours=6, failures_a_year=20_000, machines=1, overflows=False, seed=4),
    ],
)
def test_every_call_is_accounted_for_and_no_machine_is_overloaded(fleet):
    simulation = Simulation(fleet)
    look = simulation._autoscale

    def checked() -> None:
        look()
        assert all(len(machine.calls) <= fleet.places for machine in simulation.machines.values())
        calls_by_machine = Counter(call.machine for call in simulation.calls.values())
        assert calls_by_machine == Counter(
            {each.id: len(each.calls) for each in simulation.machines.values() if each.calls}
        )
        for region in range(len(fleet.regions)):
            in_region = [each for each in simulation.machines.values() if each.region == region and each.is_ready]
            assert simulation._busy[region] == sum(len(each.calls) for each in in_region)
            assert simulation._places[region] == sum(
                len(each.calls) if each.is_draining else fleet.places for each in in_region
            )

    simulation._autoscale = checked
    tally = simulation.run()
    assert tally.offered == tally.completed + tally.refused + tally.dropped + len(simulation.calls)
    assert tally.offered > 0
    under_way = sum(simulation.end - call.began for call in simulation.calls.values())
    assert tally.talk_seconds + under_way == pytest.approx(tally.call_integral)


def test_failures_drop_calls_only_without_spare_places():
    often = {"failures_a_year": 20_000, "hours": 6, "is_flat": True, "regions": ONE, "call_seconds": 120}
    roomy = play(Fleet(calls=60, machines=10, **often))
    tight = play(Fleet(calls=60, machines=3, **often))
    assert roomy["failures"] > 5 and roomy["moved"] > 0 and roomy["dropped"] == 0
    assert tight["dropped"] > 0


def test_other_regions_take_the_calls_of_a_failed_one():
    day = {"calls": 150, "hours": 10, "failures_a_year": 0}
    alone = play(Fleet(outage_hour=4, overflows=False, **day))
    together = play(Fleet(outage_hour=4, overflows=True, **day))
    assert together["away_from_home"] > 0 == alone["away_from_home"]
    assert together["refused_share"] < alone["refused_share"]


def test_a_fixed_fleet_costs_its_hours():
    result = play(STEADY)
    assert result["card_hours"] == pytest.approx(4 * 24)
    assert result["dollars"]["cards"] == pytest.approx(4 * 24 * STEADY.card_price)
    assert result["dollars"]["all"] / result["hours_of_talk"] == pytest.approx(result["dollars_an_hour_of_talk"])


def test_several_cells_are_one_cell_scaled():
    one = play(Fleet(calls=50, hours=4))
    many = play(Fleet(calls=500, hours=4), cell=50)
    assert many["cells"] == 10 and many["offered"] == 10 * one["offered"]
    assert many["refused_share"] == one["refused_share"]
    assert many["dollars_an_hour_of_talk"] == pytest.approx(one["dollars_an_hour_of_talk"])


def test_the_command_plans_a_card_and_a_day(tmp_path):
    arguments = [
        "plan",
        "--gpu",
        "rtx4090",
        "--method",
        "int8",
        "--simulate",
        "--calls",
        "30",
        "--hours",
        "2",
        "--json",
    ]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    measured = json.loads(done.stdout)
    assert measured["plan"]["card"] == "RTX4090" and measured["day"]["offered"] > 0
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf8"))["plan"] == measured["plan"]
    assert (tmp_path / "plan.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--gpu", "abacus"], "abacus"),
        (["--method", "int2"], "int2"),
        (["--model", "parrot"], "parrot"),
        (["--gpu", "L4", "--context", "1000000", "--simulate"], "no session fits"),
        (["--figures", str(BENCH / "lm_h200.json")], "twice"),
        (["--figures", str(BENCH / "lm_h200.json"), "--figures", str(BENCH / "lm_h200.json")], "lack"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(arguments, word):
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(done.exception, InputError)
    assert word in str(done.exception) and "\n" not in str(done.exception)


def test_a_plan_without_a_day_has_no_plot(tmp_path):
    save({"plan": plan(QuestionLoad())}, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    assert math.isfinite(json.loads((tmp_path / "plan.json").read_text())["plan"]["voice_to_voice_ms"])
