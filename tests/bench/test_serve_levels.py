"""The arithmetic of `viva bench serve`: arrivals, percentiles, verdicts, and what is read of the server."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from vivavoce.audio.vad import RATE as VAD_RATE
from vivavoce.bench.serve_levels import Behaviour, LevelPlan, figures, max_at_once, rush, steady
from vivavoce.bench.serve_plans import CallerReport, CallResult, TurnResult
from vivavoce.bench.serve_report import print_level, print_table, save
from vivavoce.bench.serve_sounds import encoded_sounds, one_turn_questions
from vivavoce.bench.serve_watch import lag_gauges, lag_percentiles, process_tree, samples
from vivavoce.bench.turn_sounds import RATE

ON_TIME = CallerReport(0.1, {"p50": 0.1, "p99": 2.0, "max": 9.0}, 100)
LATE = CallerReport(0.9, {"p50": 5.0, "p99": 21.0, "max": 90.0}, 100)
BEHAVIOUR = Behaviour(question=2.0, reply=20.0, questions=8)


def answered(seconds, at=0.0, **more):
    return TurnResult(at, first_sound=seconds, is_over=True, sound_seconds=20.0, **more)


def call(number, *turns, **more):
    return CallResult(number, list(turns), opened=0.01, **more)


def level(*results, plan=None, callers=(ON_TIME,)):
    return figures(plan or LevelPlan(len(results), []), results, callers, 10.0, max_lateness_ms=20.0)


def test_a_rush_begins_within_the_spread_and_every_tenth_interrupts():
    plan = rush(40, 8.0, replace(BEHAVIOUR, interrupt=0.1))
    starts = [each.start for each in plan.calls]
    assert (len(starts), starts[0]) == (40, 0.0)
    assert max(starts) < 8.0
    assert np.diff(starts) == pytest.approx([0.2] * 39)
    interrupting = [each for each in plan.calls if each.interrupt_after is not None]
    assert len(interrupting) == 4
    assert all(1.5 <= each.interrupt_after <= 8.0 for each in interrupting)
    assert len({tuple(each.questions) for each in plan.calls}) > 4
    assert plan.ends is None


def test_a_short_reply_is_interrupted_before_its_end():
    plan = rush(8, 1.0, replace(BEHAVIOUR, reply=2.0, interrupt=1.0))
    assert all(each.interrupt_after <= 1.5 for each in plan.calls)


@pytest.mark.parametrize("interrupt", [0.0, 0.5])
def test_a_steady_stream_has_its_mean_in_conversation(interrupt):
    plan = steady(64, 2000.0, replace(BEHAVIOUR, interrupt=interrupt))
    lengths = {1: 0.6 + 22.3, 2: 0.6 + 44.6 + 1.0}
    results = []
    for each in plan.calls:
        # An interrupter hears a part of the first reply, asks, and hears another one.
        interruption = 0.0 if each.interrupt_after is None else each.interrupt_after + 2.0 + 0.3
        ended = each.start + lengths[len(each.questions)] + interruption
        results.append(CallResult(each.number, opened=0.0, started=each.start, ended=ended))
    found = figures(plan, results, [ON_TIME], plan.ends, 20.0)
    assert found.mean_sessions == pytest.approx(64, rel=0.06)
    assert plan.counted_from >= max(result.ended - result.started for result in results)
    assert plan.counted_until - plan.counted_from == pytest.approx(2000.0)
    assert plan.ends >= plan.counted_until + 22.3  # the last counted reply is heard under load


def test_the_arrivals_of_a_steady_stream_are_those_of_a_poisson_process():
    gaps = np.diff([each.start for each in steady(200, 300.0, BEHAVIOUR).calls])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)


def test_a_server_has_room_for_the_variation_of_a_steady_stream():
    assert max_at_once(128, is_steady=False) == 128
    assert max_at_once(100, is_steady=True) == 140


def test_percentiles_are_over_questions_and_interruptions_apart():
    found = level(
        call(0, answered(0.1)),
        call(1, answered(0.2), answered(0.9, interrupts=True, yielded=0.15)),
        call(2, answered(0.3), TurnResult(0.0, interrupts=True)),
    )
    assert found.first_sound_ms[50] == pytest.approx(200)
    assert found.first_sound_ms[95] == pytest.approx(290)
    assert (found.yield_ms[50], found.after_interruption_ms[50]) == (pytest.approx(150), pytest.approx(900))
    assert (found.interruptions, found.not_yielded, found.never_answered) == (2, 1, 0)
    assert not found.holds


def test_only_turns_of_the_steady_part_count():
    plan = LevelPlan(2, [], counted_from=10.0, counted_until=20.0)
    early, inside, late = answered(9.0, 9.9), answered(0.1, 10.0), answered(9.0, 20.0, underruns=3)
    found = level(call(0, early, inside), call(1, late), plan=plan)
    assert found.first_sound_ms[99] == pytest.approx(100)
    assert (found.underruns, found.answers) == (0, 1)


def test_a_reply_that_begins_before_the_end_of_the_question_is_no_quick_answer():
    found = level(call(0, answered(-0.4)), call(1, answered(0.2)))
    assert (found.first_sound_ms[50], found.cut_in) == (pytest.approx(200), 1)


@pytest.mark.parametrize(
    ("result", "column", "value"),
    [
        (call(0, answered(0.1, underruns=2, dry_seconds=0.5)), "underruns", 2),
        (call(0, TurnResult(0.0)), "never_answered", 1),
        (call(0, TurnResult(0.0, first_sound=0.1)), "unfinished", 1),
        (call(0, answered(0.1), false_stops=1), "false_stops", 1),
        (call(0, answered(0.1), failure="closed"), "failed", {"closed": 1}),
    ],
)
def test_what_breaks_a_conversation_breaks_the_level(result, column, value):
    good = call(1, answered(0.1))
    assert level(good).holds
    found = level(result, good)
    assert getattr(found, column) == value
    assert not found.admitted_hold


def test_refusals_are_counted_and_timed_and_leave_the_others():
    refused = [CallResult(number, refused=0.02, refusal="session_limit_reached") for number in (1, 2)]
    found = level(call(0, answered(0.1)), *refused)
    assert (found.refused, found.refusals) == (2, {"session_limit_reached": 2})
    assert found.refusal_ms[99] == pytest.approx(20)
    assert found.admitted_hold
    assert not found.holds


def test_figures_of_late_callers_are_withheld(capsys):
    found = level(call(0, answered(0.1)), callers=[ON_TIME, LATE])
    assert not found.is_valid
    assert not found.holds
    assert "first_sound_ms" not in found.as_json()
    assert found.as_json()["lateness_ms"] == 21.0
    print_level(found)
    assert "no figures: the callers were late by 21 ms" in capsys.readouterr().err


def test_the_report_is_printed_and_written(tmp_path, capsys):
    levels = [
        level(call(0, answered(0.1), answered(0.3, interrupts=True, yielded=0.2))),
        level(call(0, answered(0.1, underruns=1)), call(1, answered(0.3))),
        level(call(0, answered(0.1)), callers=[LATE]),
    ]
    result = {"what": "sessions", "load": "rush", "most_without_a_gap": 1, "shape": "tiny"}
    result |= {"device": "CPU", "levels": [each.as_json() for each in levels]}
    for each in levels:
        print_level(each)
    print_table(levels, result)
    printed = capsys.readouterr().err
    assert "yield 200/200/200 ms of 1" in printed
    assert "callers late" in printed
    assert "1 sessions without a gap" in printed
    save(result, tmp_path)
    read = json.loads((tmp_path / "serve.json").read_text(encoding="utf8"))
    assert [each["holds"] for each in read["levels"]] == [True, False, False]
    assert (tmp_path / "serve.png").is_file()


PAGE = """
# TYPE viva_event_loop_lag_seconds histogram
viva_event_loop_lag_seconds_bucket{{le="0.001"{door}}} {a}
viva_event_loop_lag_seconds_bucket{{le="0.01"{door}}} {b}
viva_event_loop_lag_seconds_bucket{{le="+Inf"{door}}} {c}
"""


def page(a, b, c, door=""):
    return samples(PAGE.format(a=a, b=b, c=c, door=door))


def test_the_lag_is_that_of_the_level_only():
    assert lag_percentiles(page(0, 0, 500), page(100, 100, 600)) == {"server": pytest.approx(1.0)}
    assert lag_percentiles(page(0, 0, 0), page(98, 100, 100)) == {"server": pytest.approx(10.0)}
    assert lag_percentiles(page(0, 0, 0), page(50, 50, 100)) == {"server": None}
    assert lag_percentiles(page(1, 1, 1), page(1, 1, 1)) == {}


def test_every_process_has_its_own_lag():
    door = ',process="door 1"'
    before, after = page(0, 0, 0) | page(0, 0, 0, door), page(99, 100, 100) | page(0, 100, 100, door)
    assert lag_percentiles(before, after) == {"server": pytest.approx(1.0), "door 1": pytest.approx(10.0)}


def test_the_lag_of_doors_is_a_gauge():
    text = '# TYPE viva_door_event_loop_lag_seconds gauge\nviva_door_event_loop_lag_seconds{door="1"} 0.004\n'
    assert lag_gauges(samples(text) | page(1, 1, 1)) == {"door 1": 0.004}


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_the_processes_of_a_server_include_its_descendants():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        while len(found := process_tree(parent.pid)) < 2:
            assert parent.poll() is None
        assert found[0] == parent.pid
    finally:
        parent.communicate(b"\n")
    assert process_tree(parent.pid) == []


def test_questions_are_bundled_and_taken_for_one_turn():
    questions = one_turn_questions(2.0)
    assert len(questions) == 8
    assert all(1.5 < len(each) / RATE < 2.5 for each in questions)
    assert VAD_RATE == 16_000


@pytest.mark.parametrize(("transport", "seconds"), [("websocket", 0.04), ("binary", 0.02), ("webrtc", 0.02)])
def test_every_message_has_the_same_length_and_the_voice_ends_with_one(transport, seconds):
    if transport == "binary":
        pytest.importorskip("av")
    sounds = encoded_sounds(transport, 1.0)
    assert sounds.packet_seconds == seconds
    assert len(sounds.noise) == pytest.approx(10.0 / seconds, abs=2)
    for question in sounds.questions:
        assert 0 <= question.onset < 0.1 + seconds
        assert 0.05 / seconds - 2 <= len(question.messages) - 1 - question.last <= 0.05 / seconds + 2
    if transport == "websocket":
        event = json.loads(sounds.noise[0])
        assert event["type"] == "input_audio_buffer.append"
        assert len(event["audio"]) == math.ceil(seconds * RATE * 2 / 3) * 4
