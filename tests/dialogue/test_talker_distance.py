"""How far away a voice is: its sharpness, and what the barge-in model is given of it."""

from functools import cache
from typing import cast

import numpy as np
import pytest

from tests.dialogue.overlap_networks import network_that_hears_distance
from vivavoce.audio.io import Sound
from vivavoce.audio.vad import RATE, WINDOW
from vivavoce.bench.turn_sounds import gather, voiced_bounds
from vivavoce.dialogue.barge_in import UserLevel
from vivavoce.dialogue.front_end import AudioWindow, window_features
from vivavoce.dialogue.joined_turns import AnsweredTurn
from vivavoce.dialogue.model_barge_in import ModelClassifier
from vivavoce.dialogue.overlap_model import DISTANCES, INPUTS, OverlapInputs
from vivavoce.dialogue.reply import ActiveReply
from vivavoce.dialogue.talker_distance import (
    KEPT_WINDOWS,
    MAX_EVIDENCE,
    MIDDLE,
    MIN_WINDOWS,
    USUAL_STEP,
    TalkerDistance,
    sharpness,
)
from vivavoce.evaluation.room_acoustics import Room, impulse_response

ROOM = Room("a room of these tests", (5.2, 3.9, 2.5), 0.72)


@cache
def voices() -> list[np.ndarray]:
    """Loud windows of several voices.  # each [window, WINDOW]"""
    return [loud_windows(question) for question in questions()]


@cache
def questions() -> list[np.ndarray]:
    found = [each.sound[slice(*voiced_bounds(each.sound))] for each in gather().questions[:12]]
    return [Sound(each[None], 24_000).resampled(RATE).samples[0] for each in found]


def far(sound: np.ndarray) -> np.ndarray:
    """As loud, but 2 m away."""
    echoed = np.convolve(sound, impulse_response(ROOM, 2.0, 1, RATE))[: len(sound)]
    return (echoed * np.linalg.norm(sound) / np.linalg.norm(echoed)).astype(np.float32)


def loud_windows(sound: np.ndarray) -> np.ndarray:
    windows = sound[: len(sound) // WINDOW * WINDOW].reshape(-1, WINDOW)
    power = np.square(windows).mean(axis=1)
    return windows[power > power.max() / 16]


def evidence(usual: np.ndarray, heard: np.ndarray) -> float:
    distance = TalkerDistance.from_usual(list(usual))
    for window, sharp in zip(heard, sharpness(heard), strict=True):
        distance.add(10 * np.log10(np.square(window).mean() + 1e-10), float(sharp))
    return distance.evidence


def test_a_room_makes_voices_less_sharp():
    pairs = [(sharpness(near), sharpness(loud_windows(far(q)))) for near, q in zip(voices(), questions(), strict=True)]
    assert np.mean([np.median(near) > np.median(away) + 0.1 for near, away in pairs]) >= 0.8


def test_sharpness_does_not_depend_on_the_level():
    windows = voices()[0]
    np.testing.assert_allclose(sharpness(windows), sharpness(0.1 * windows), atol=0.02)


def test_a_batch_of_windows_gives_what_each_gives_alone():
    windows = voices()[1][:8]
    np.testing.assert_allclose(sharpness(windows), [sharpness([each])[0] for each in windows], atol=1e-9)


def test_silence_has_a_finite_sharpness():
    assert np.isfinite(sharpness(np.zeros((3, WINDOW), np.float32))).all()


def test_a_distant_voice_is_more_likely_a_bystander_than_the_same_voice_near():
    pairs = zip(voices(), questions(), strict=True)
    both = [(evidence(near, near), evidence(near, loud_windows(far(sound)))) for near, sound in pairs]
    assert np.mean([near < away for near, away in both]) >= 0.8
    assert np.mean([near for near, _ in both]) < 0 < np.mean([away for _, away in both])


def test_there_is_no_evidence_where_too_little_is_known():
    windows = voices()[2]
    assert evidence(windows[: (MIN_WINDOWS - 1) * USUAL_STEP], windows) == 0.0
    assert evidence(windows, windows[: MIN_WINDOWS - 1]) == 0.0
    assert TalkerDistance().evidence == 0.0


def test_evidence_is_bounded_and_so_is_what_is_kept():
    distance = TalkerDistance(usual=9.0)
    for sharp in [*sharpness(voices()[3])] * 20:
        distance.add(-20.0, float(sharp))
    assert distance.evidence == MAX_EVIDENCE and len(distance._windows) == KEPT_WINDOWS


def distances(heard: np.ndarray, usual: np.ndarray, echo: float = 0.0, since: int = 0) -> np.ndarray:
    """The network's inputs for the distance of what is heard.  # → [window, DISTANCES]"""
    levels = UserLevel(user=-24.0)
    levels.loud.extend(usual)
    inputs = OverlapInputs.of(levels, since)
    windows = [AudioWindow(each, 0.9, -24.0, echo) for each in heard]
    made = [inputs.add(each, window_features(each.samples), True, levels.user) for each in windows]
    assert all(each.shape == (INPUTS,) for each in made)
    return np.stack(made)[:, -DISTANCES:]


def test_the_network_is_given_the_sharpness_of_each_window_that_of_the_user_and_the_evidence():
    near, away = voices()[4], loud_windows(far(questions()[4]))[:20]
    given, usual = distances(away, near), TalkerDistance.from_usual(list(near)).usual
    assert usual is not None
    np.testing.assert_allclose(given[:, 0], sharpness(away) - MIDDLE, atol=1e-5)
    np.testing.assert_allclose(given[:, 1], usual - MIDDLE, atol=1e-5)
    assert not given[: MIN_WINDOWS - 1, 2].any() and given[MIN_WINDOWS - 1 :, 2].all()
    assert given[-1, 2] == pytest.approx(evidence(near, away) / MAX_EVIDENCE, abs=1e-5)
    assert given[-1, 2] > 0 > distances(near[:20], near)[-1, 2]


def test_echo_and_what_was_before_the_sound_say_nothing_of_the_distance():
    near, away = voices()[4], loud_windows(far(questions()[4]))[:20]
    assert distances(away, near)[:, 2].any()
    assert not distances(away, near, echo=0.6)[:, 2].any()
    assert not distances(away, near, since=-len(away))[:, 2].any()


def test_of_an_unknown_user_the_network_is_given_the_sharpness_of_the_window_alone():
    given = distances(voices()[4][:20], voices()[4][:0])
    assert given[:, 0].all() and not given[:, 1:].any()


def test_digital_silence_is_not_far_from_other_sounds():
    assert distances(np.zeros((1, WINDOW), np.float32), voices()[4])[0, 0] == pytest.approx(-MIDDLE)


def test_distance_does_not_count_where_the_user_goes_on_with_a_turn():
    """A word between two pauses is too short to tell it."""
    levels = UserLevel(user=-24.0)
    levels.loud.extend(voices()[4])
    before = AnsweredTurn("item", (), 0, cast(ActiveReply, None), finished=0.02)
    heard = {}
    for name, windows in (("near", voices()[4][:8]), ("far", loud_windows(far(questions()[4]))[:8])):
        watch = ModelClassifier(network_that_hears_distance()).watch(levels=levels)
        for window in windows:
            watch.step(window, 0.9, 0.0, True, levels)
        heard[name] = (watch.may_be_turn, watch.goes_on(before, lambda turn: None), watch.goes_on(before, None))
    assert heard == {"near": (True, True, True), "far": (False, True, True)}
