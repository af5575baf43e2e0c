"""How far away a voice is: its sharpness, and what the barge-in model makes of it."""

from functools import cache

import numpy as np
import pytest

from tests.dialogue.overlap_networks import network_with
from vivavoce.audio.io import Sound
from vivavoce.audio.vad import RATE, WINDOW
from vivavoce.bench.turn_sounds import gather, voiced_bounds
from vivavoce.dialogue.barge_in import UserLevel
from vivavoce.dialogue.model_barge_in import ModelClassifier, with_evidence
from vivavoce.dialogue.overlap_model import SoundKind
from vivavoce.dialogue.talker_distance import (
    KEPT_WINDOWS,
    MAX_EVIDENCE,
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
    for window in heard:
        distance.add(window, 10 * np.log10(np.square(window).mean() + 1e-10))
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
    for window in [*voices()[3]] * 20:
        distance.add(window, -20.0)
    assert distance.evidence == MAX_EVIDENCE and len(distance._windows) == KEPT_WINDOWS


@pytest.mark.parametrize("is_far", [False, True])
def test_distance_changes_the_odds_of_the_network(is_far):
    network = network_with({SoundKind.TURN: 0.0, SoundKind.BYSTANDER: 0.0}, -20.0)
    levels = UserLevel(user=-24.0)
    levels.loud.extend(voices()[4])
    watch = ModelClassifier(network).watch(levels=levels)
    heard = loud_windows(far(questions()[4])) if is_far else voices()[4]
    for window in heard[:20]:
        watch.step(window, 0.9, 0.0, True, levels)
    assert (watch.bystander_odds > 0) is (watch.odds < 0) is is_far


def test_echo_says_nothing_of_the_distance():
    network = network_with({SoundKind.TURN: 0.0, SoundKind.BYSTANDER: 0.0}, -20.0)
    levels = UserLevel(user=-24.0)
    levels.loud.extend(voices()[4])
    watch = ModelClassifier(network).watch(levels=levels)
    for window in voices()[4][:20]:
        watch.step(window, 0.9, 0.6, True, levels)
    assert watch.bystander_odds == pytest.approx(0.0, abs=1e-5)


def test_evidence_moves_only_the_odds_of_a_bystander():
    before = np.log(np.array([0.4, 0.2, 0.1, 0.2, 0.1], np.float32))
    after = with_evidence(before, 1.5)
    assert np.exp(after).sum() == pytest.approx(1.0, abs=1e-5)
    moved = after - before
    assert moved[SoundKind.BYSTANDER] - moved[SoundKind.TURN] == pytest.approx(1.5, abs=1e-5)
    others = [kind for kind in SoundKind if kind is not SoundKind.BYSTANDER]
    np.testing.assert_allclose(moved[others], moved[SoundKind.TURN], atol=1e-5)
