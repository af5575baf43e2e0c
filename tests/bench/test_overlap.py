"""`viva bench overlap`: sounds over a reply are judged offline, by every way to decide, on the same windows."""

import numpy as np
import pytest

from tests.bench.duplex.voices import speak
from vivavoce.bench import overlap
from vivavoce.bench.duplex.scenes import gather, script
from vivavoce.dialogue.barge_in import OverlapClassifier, OverlapVerdict, UserLevel
from vivavoce.dialogue.front_end import AudioWindow
from vivavoce.evaluation.overlaps import Stop, judge


def test_every_kind_is_judged_in_both_languages():
    made = overlap.make_scenes(gather(speak), share=0.01)
    found = list(overlap.overlaps(made))
    assert len(found) == len(made) == 2 * len(overlap.COUNTS)
    assert all(-30 < each.levels.user < -15 for each in found)
    rows = overlap.table_of(found, {"rules": OverlapClassifier()})
    assert {row["language"] for row in rows} == {"en", "zh"}
    kinds = {row["kind"] for row in rows}
    assert {"interruption", "user backchannel", "side talk", "background", "echo", "made-up cough"} <= kinds
    assert all(row["rules"]["sounds"] == 1 for row in rows)


def test_recorded_sounds_are_not_played_twice():
    found = gather(speak)
    names = [scene.over_name for scene in overlap.make_scenes(found, share=0.05) if scene.name == "noise"]
    assert len(set(names)) == len(names) == 10
    (second,) = script(found, 1, ["noise"], ["en"], first=1)
    assert second.over_name == names[1]


class Decided:
    """Stops after a number of windows."""

    def __init__(self, windows: int) -> None:
        self.words, self.left, self.lasted_ms, self.may_be_turn, self.is_over = None, windows, 0, True, False

    def watch(self, before=(), levels=None):
        return self

    def step(self, *arguments):
        self.left -= 1

    @property
    def verdict(self):
        return OverlapVerdict.INTERRUPTION if self.left <= 0 else None


@pytest.mark.parametrize(("begin", "seconds"), [(0.0, 0.128), (0.1, 0.124)])
def test_a_stop_is_timed_by_the_sound(begin, seconds):
    silent = [0.0] * 2
    windows = [
        AudioWindow(np.zeros(512, np.float32), probability, -24.0, ended_at=0.032 * (index + 1))
        for index, probability in enumerate([*silent, *[0.9] * 10])
    ]
    stop = judge(windows, Decided(2 if begin == 0.0 else 4), UserLevel(), begin)
    assert stop == Stop(pytest.approx(seconds), (OverlapVerdict.INTERRUPTION,))


def test_rows_have_shares_and_times():
    row = overlap.row_of([Stop(0.2), Stop(0.4), Stop(None), Stop(None)])
    assert row == {"sounds": 4, "stopped": 0.5, "ms_p50": pytest.approx(300.0), "ms_p90": pytest.approx(380.0)}
    assert overlap.row_of([Stop(None)])["ms_p50"] is None
