"""The scorers give the numbers that the published ones gave on the same timelines.

The expected numbers were printed by the scorers of sierra-research/tau2-bench (a2c0247) and
DanielLin94144/Full-Duplex-Bench (d7336bd), and those of hotato 1.20 are computed here.
"""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from vivavoce.audio.io import read
from vivavoce.bench.duplex import overlap
from vivavoce.bench.duplex.interaction import Events, Timeline, UserSound, events_of, runs
from vivavoce.bench.duplex.recording import barge_in, flags, voiced_segments
from vivavoce.bench.turn_sounds import RATE, talk
from vivavoce.errors import InputError

TICKS = 400


def random_runs(random: Random, on: int, off: int) -> np.ndarray:
    found, begin = np.zeros(TICKS, bool), int(off * random.random())
    while begin < TICKS:
        length = 1 + int(on * random.random())
        found[begin : begin + length] = True
        begin += length + 1 + int(off * random.random())
    return found


def timeline(seed: int) -> Timeline:
    random = Random(seed)
    user, agent, sound = random_runs(random, 20, 25), random_runs(random, 30, 12), np.zeros(TICKS, np.int8)
    for each in runs(user):
        sound[each.begin : each.end] = max(0, int(8 * random.random()) - 4)
    for each in runs(random_runs(random, 4, 40) & ~user):
        sound[each.begin : each.end] = 2 + int(2 * random.random())
    return Timeline(user, agent, sound)


TAU = {
    (0,): ((1.0, 1.05, 1 / 3, 1.0, 1.5, 1.0, 0.0, 0.5), (4, 6, 6, 1, 4, 2)),
    (1,): ((1.0, 1.0, 3 / 7, 1.13333333, 4.0, None, 0.4, 0.5), (2, 7, 8, 0, 10, 6)),
    (2,): ((0.8, 0.4, 0.0, None, 1.6, 1.0, 0.0, 2 / 9), (5, 6, 8, 1, 4, 9)),
    (3,): ((1.0, 0.8, 0.5, 0.8, 9.0, 1.0, 3 / 7, 0.0), (1, 6, 9, 1, 7, 3)),
    tuple(range(40)): (
        (0.94011976, 0.89426752, 0.42990654, 0.94637681, 1.88023952, 0.81132075, 0.20212766, 0.26943005),
        (167, 321, 314, 53, 188, 193),
    ),
}


@pytest.mark.parametrize("seeds", TAU, ids=lambda seeds: f"{len(seeds)} from {seeds[0]}")
def test_interaction_measures_equal_those_of_tau_voice(seeds):
    measures, counts = TAU[seeds]
    found = events_of(timeline(seed) for seed in seeds)
    names = ("R_R", "L_R", "R_Y", "L_Y", "I_A", "S_BC", "S_VT", "S_ND")
    assert {name: found.measures()[name] for name in names} == pytest.approx(dict(zip(names, measures, strict=True)))
    assert tuple(found.counts().values()) == counts


def test_no_events_have_no_rates():
    assert set(Events().measures().values()) == {None}
    with pytest.raises(InputError, match="equally long"):
        Timeline(np.zeros(3, bool), np.zeros(4, bool), np.zeros(3, np.int8))


def test_an_agent_that_speaks_when_the_turn_ends_has_not_answered_it():
    user, agent = flags([(0.4, 2.0)], 20, 0.2), flags([(1.0, 3.0)], 20, 0.2)
    found = events_of([Timeline(user, agent, np.zeros(20, np.int8))])
    assert found.counts()["R_R"] == 0 and found.agent_interruptions == 1


def test_an_interruption_is_measured_on_any_grid():
    for tick in (0.2, 0.1, 0.02):
        ticks = round(6 / tick)
        user, agent = flags([(2.0, 4.0)], ticks, tick), flags([(0.4, 2.4)], ticks, tick)
        measures = events_of([Timeline(user, agent, np.zeros(ticks, np.int8), tick)]).measures()
        assert (measures["R_Y"], measures["L_Y"]) == (1.0, pytest.approx(0.4))
        tic = np.where(user, UserSound.vocal_tic, 0).astype(np.int8)
        assert events_of([Timeline(user, agent, tic, tick)]).measures()["S_VT"] == 0.0


def segments(random: Random, count: int, on: float, off: float) -> list[overlap.Segment]:
    found, begin = [], off * random.random()
    for _ in range(count):
        length = 0.1 + on * random.random()
        found.append((round(begin, 3), round(begin + length, 3)))
        begin += length + 0.05 + off * random.random()
    return found


STOPS = (
    [
        *((1.689, 3.305), (4.466, 4.814), (6.276, 6.796), (8.414, 9.072), (10.124, 11.39), (13.537, 14.366)),
        *((14.98, 16.376), (17.878, 18.479)),
    ],
    [(0.945, 2.064), (3.641, 4.006), (5.292, 6.291), (7.644, 9.716), (11.587, 12.403)],
    [(1.912, 4.341), (6.627, 7.634), (9.023, 9.739), (11.001, 12.315)],
)
ANSWERS = (
    [(3.305, 4.466), (4.814, 6.276), (9.12, 9.806), (11.39, 13.537), (16.591, 17.393), (18.479, 19.839)],
    [(4.251, 4.598), (9.716, 11.587)],
    [(4.341, 6.627), (7.634, 8.915)],
)


@pytest.mark.parametrize("seed", range(3))
def test_overlaps_and_responses_equal_those_of_full_duplex_bench(seed):
    random = Random(seed)
    user = overlap.joined(segments(random, 8, 2, 2), overlap.USER_GAP)
    agent = overlap.joined(segments(random, 8, 3, 1), overlap.AGENT_GAP)
    assert overlap.stop_intervals(user, agent) == STOPS[seed]
    assert overlap.response_intervals(user, agent) == ANSWERS[seed]


def test_turn_overs_equal_those_of_full_duplex_bench():
    taken, latencies = [], []
    for seed in range(40):
        random = Random(seed)
        words = segments(random, int(7 * random.random()), 0.25, 0.15)
        taken.append(overlap.takes_turn(words))
        latencies.append(overlap.turn_latency(words, 0.1 * random.random()))
    known = [each for each in latencies if each is not None]
    assert sum(taken) / 40 == 0.475
    assert [each is not None for each in latencies] == taken
    assert sum(known) / len(known) == pytest.approx(LATENCY)


LATENCY = 0.03917361
TAKEN = "1101010000001001110000101111001001101100"
BACKCHANNELS = "4141134212322214231341443233133113332331"


def test_backchannels_of_the_agent_equal_those_of_full_duplex_bench():
    taken, counts = "", ""
    for seed in range(40):
        random = Random(seed)
        spoken = segments(random, 1 + int(4 * random.random()), 1.2, 4)
        words = []
        for begin, end in spoken:
            count = int(5 * random.random())
            step = (end - begin) / max(1, count)
            words += [(begin + step * index, begin + (end - begin) * (index + 1) / count) for index in range(count)]
        takes, count = overlap.backchannel_turn(spoken, words)
        taken, counts = taken + str(int(takes)), counts + str(count)
    assert (taken, counts) == (TAKEN, BACKCHANNELS)
    assert overlap.backchannel_turn([(0.0, 0.5), (1.0, 4.5), (6.0, 6.2)], []) == (True, 1)


def test_voice_is_found_where_it_is_at_any_rate():
    sound = np.zeros(4 * RATE, np.float32)
    sound[RATE : 2 * RATE] = talk(1.0, seed=3)
    for rate in (24_000, 8_000):
        samples = sound if rate == RATE else sound[:: RATE // rate]
        assert voiced_segments(samples, rate, gap=0.3) == [pytest.approx((1.0, 2.0), abs=0.06)]
    assert voiced_segments(np.zeros(RATE, np.float32)) == []


def test_an_agent_that_finishes_long_after_a_word_has_not_yielded():
    caller, agent = np.zeros(6 * RATE, np.float32), np.zeros(6 * RATE, np.float32)
    caller[2 * RATE : round(2.3 * RATE)] = talk(0.3, seed=1)
    agent[: 4 * RATE] = talk(4.0, seed=2)
    kept = barge_in(caller, agent, RATE, 2.0)
    assert kept.agent_was_speaking and not kept.yielded and kept.talk_over_seconds == pytest.approx(0.3, abs=0.05)
    agent[round(2.25 * RATE) :] = 0.0
    stopped = barge_in(caller, agent, RATE, 2.0)
    assert stopped.yielded and stopped.yield_seconds == pytest.approx(0.25, abs=0.03)


@pytest.mark.full
def test_the_example_calls_of_hotato_are_scored_as_by_hotato():
    hotato = pytest.importorskip("hotato", reason="needs hotato: pip install hotato")
    from hotato._engine.audio import read_wav
    from hotato._engine.score import score_stereo

    folder, compared = Path(hotato.__file__).parent / "data", 0
    for part in (folder, folder / "demo" / "failing"):
        for path in sorted(part.glob("scenarios/*-*.json")):
            scenario = json.loads(path.read_text(encoding="utf8"))
            wav, onset = part / "audio" / f"{scenario['id']}.example.wav", scenario["caller_onset_sec"]
            theirs, call = score_stereo(read_wav(str(wav)), 0, 1, onset), read(wav, mono=False)
            ours = barge_in(*call.samples, call.rate, onset)
            assert ours.agent_was_speaking == theirs.agent_talking_at_onset, path.name
            assert ours.yielded == theirs.did_yield, path.name
            assert ours.yield_seconds == pytest.approx(theirs.time_to_yield_sec, abs=0.021), path.name
            assert ours.talk_over_seconds == pytest.approx(theirs.talk_over_sec, abs=0.04), path.name
            gap = theirs.signals["latency"]["response_gap_sec"]
            assert ours.response_seconds == (None if gap is None else pytest.approx(gap, abs=0.021)), path.name
            compared += 1
    assert compared == 10
