"""Sessions beside a device that is a table of times: what holds, what does not, and the same every time."""

import json

import pytest
from typer.testing import CliRunner

from vivavoce.bench.plan_figures import Curve
from vivavoce.bench.serve import Script
from vivavoce.bench.serve_rehearsal import rehearse
from vivavoce.bench.stand_in import H200, PassTimes, fills
from vivavoce.cli import app

SCRIPT = Script(question=0.4, reply=2.4, spread=0.05, newcomers=0)


def slower(factor: float) -> PassTimes:
    def scaled(curve: Curve) -> Curve:
        return Curve(tuple((count, milliseconds * factor) for count, milliseconds in curve.points))

    return PassTimes(scaled(H200.step), {size: scaled(curve) for size, curve in H200.hops.items()}, scaled(H200.ear))


def test_sessions_hear_all_without_a_gap_and_a_rehearsal_can_be_repeated():
    (level, busy), (again, _) = rehearse(8, SCRIPT), rehearse(8, SCRIPT)
    assert level.holds and level.sound_seconds == pytest.approx(8 * SCRIPT.reply)
    assert level.ttfa_ms[50] < 200 and level.ttfa_ms == again.ttfa_ms
    assert level.replies_a_pass > 1 and 0 < busy < 1
    assert sum(level.first_sound_parts_ms.values()) == pytest.approx(level.ttfa_ms[50], rel=0.3)


def test_a_device_that_is_too_slow_is_found_out():
    level, busy = rehearse(4, Script(0.4, 1.6, 0.2, 0), slower(12.0))
    assert level.underruns and not level.holds
    assert busy > 0.9


def test_the_command_rehearses_and_writes_what_came_of_it(tmp_path):
    words = "bench serve --rehearse --sessions 1 --seconds 0.8 --question 0.4 --spread 0 --newcomers 0 --json --out"
    told = CliRunner().invoke(app, [*words.split(), str(tmp_path)])
    assert told.exit_code == 0, told.output
    written = json.loads((tmp_path / "rehearsal.json").read_text(encoding="utf8"))
    assert written["most_without_a_gap"] == 1 and written["levels"][0]["ttfa_ms"]["50"] < 100


def test_a_pass_of_many_fills_a_device_and_one_of_few_mostly_waits():
    curve = H200.hops[20]
    shares = [fills(curve, count) for count, _ in curve.points]
    assert shares == sorted(shares)
    assert shares[0] < 0.2 and 0.7 < shares[-1] <= 1
