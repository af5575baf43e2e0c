"""Sessions on a simulated device, a table of batch times: which loads have no gap, deterministically."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from vivavoce.bench.serve import Script
from vivavoce.bench.serve_simulation import H200, PassTimes, fills, simulate
from vivavoce.cli import app
from vivavoce.plan.figures import Curve
from vivavoce.s2s import moss_speech

SCRIPT = Script(question=0.4, reply=2.4, spread=0.05, newcomers=0)


def scaled(curve: Curve, factor: float) -> Curve:
    return Curve(tuple((count, milliseconds * factor) for count, milliseconds in curve.points))


def slow_hops(factor: float) -> PassTimes:
    return replace(H200, hops={size: scaled(curve, factor) for size, curve in H200.hops.items()})


def slower(factor: float) -> PassTimes:
    return replace(slow_hops(factor), step=scaled(H200.step, factor), encoder=scaled(H200.encoder, factor))


def test_replies_have_no_gap_and_a_simulation_is_deterministic():
    (level, busy), (again, _) = simulate(8, SCRIPT), simulate(8, SCRIPT)
    assert level.holds and level.sound_seconds == pytest.approx(8 * SCRIPT.reply)
    assert level.ttfa_ms[50] < 350 and level.ttfa_ms == again.ttfa_ms
    assert level.replies_a_pass > 1 and 0 < busy < 1
    assert sum(level.first_sound_parts_ms.values()) == pytest.approx(level.ttfa_ms[50], rel=0.3)


def test_a_single_session_gets_its_first_sound_without_delay():
    level, _ = simulate(1, SCRIPT)
    assert level.ttfa_ms[50] < 80 and level.first_sound_parts_ms["out"] == 0


def test_128_sessions_with_long_replies_have_no_gap_with_slower_hops():
    level, _ = simulate(128, Script(1.0, 12.0, 8.0, 0), slow_hops(1.5))
    assert level.holds


def test_a_burst_of_sessions_holds_by_longer_first_chunks_and_is_answered_sooner(monkeypatch):
    sessions = 24, Script(0.4, 2.4, 1.0, 0), slow_hops(2.2)
    level, _ = simulate(*sessions)
    monkeypatch.setattr(moss_speech, "MANY_STARTING", 1000)
    at_once, _ = simulate(*sessions)
    assert level.holds and at_once.underruns
    assert level.ttfa_ms[50] < at_once.ttfa_ms[50]


def test_a_device_that_is_too_slow_has_underruns():
    level, busy = simulate(4, Script(0.4, 2.4, 0.2, 0), slower(20.0))
    assert level.underruns and not level.holds
    assert busy > 0.9


def test_the_command_simulates_and_writes_its_figures(tmp_path):
    words = "bench serve --rehearse --sessions 1 --seconds 0.8 --question 0.4 --spread 0 --newcomers 0 --json --out"
    done = CliRunner().invoke(app, [*words.split(), str(tmp_path)])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "rehearsal.json").read_text(encoding="utf8"))
    assert written["most_without_a_gap"] == 1 and written["levels"][0]["ttfa_ms"]["50"] < 100


def test_large_batches_occupy_the_device_and_small_ones_do_not():
    curve = H200.hops[20]
    shares = [fills(curve, count) for count, _ in curve.points]
    assert shares == sorted(shares)
    assert shares[0] < 0.2 and 0.7 < shares[-1] <= 1
