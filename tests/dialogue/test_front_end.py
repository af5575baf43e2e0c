"""Windows of what is heard: who is asked about them, and how soon it is known that a voice has stopped."""

from functools import cache

import numpy as np
import pytest

from tests.dialogue.voices import RATE, silence, talk
from vivavoce.audio.vad import WINDOW, voice_activity
from vivavoce.dialogue.front_end import SETTLED_WINDOWS, AudioFrontEnd, AudioWindow

PACKET = RATE // 50


class Counted:
    """Silero's network, and how often it was asked."""

    def __init__(self) -> None:
        self._activity, self.asked = voice_activity(), 0

    def initial_state(self):
        return self._activity.initial_state()

    def step(self, state, samples):
        self.asked += 1
        return self._activity.step(state, samples)


def heard(samples: np.ndarray, activity=None) -> list[AudioWindow]:
    """The windows of a sound that comes in packets."""
    front_end = AudioFrontEnd(RATE, activity or voice_activity(), None, lambda moment, count: np.zeros(count, "f"))
    packets = range(0, len(samples), PACKET)
    return [window for start in packets for window in front_end.hear(samples[start : start + PACKET], start / RATE)]


@cache
def room(seconds: float, seed: int = 0) -> np.ndarray:
    return silence(seconds) + 3e-4 * np.random.default_rng(seed).standard_normal(round(seconds * RATE)).astype("f")


def test_the_detector_is_not_run_in_long_silence_and_detects_speech_after_it():
    counted, asked = Counted(), voice_activity()
    sound = np.concatenate([talk(0.6, seed=1), room(4.0), talk(1.0, seed=2)]).astype("f")
    windows = heard(sound, counted)
    assert counted.asked < len(windows) - 4.0 * RATE / WINDOW + SETTLED_WINDOWS + 8
    state, probabilities = asked.initial_state(), []
    for window in windows:
        probability, state = asked.step(state, window.samples)
        probabilities.append(probability)
    begins = round(4.6 * RATE / WINDOW) + 1
    events = [window.probability for window in windows]
    assert events[begins + 1 :] == pytest.approx(probabilities[begins + 1 :], abs=0.1)
    assert [probability > 0.5 for probability in events[begins:]] == [
        probability > 0.5 for probability in probabilities[begins:]
    ]
    assert max(events[begins : begins + 6]) > 0.9


def test_the_end_of_speech_is_located_within_a_window():
    sound = np.concatenate([room(0.5), talk(0.8, seed=3), room(0.5, seed=1)]).astype("f")
    windows = heard(sound)
    voiced = [index for index, window in enumerate(windows) if window.quiet_ms < WINDOW * 1000 // RATE]
    ended = (voiced[-1] + 1) * WINDOW / RATE - windows[voiced[-1]].quiet_ms / 1e3
    assert ended == pytest.approx(1.3, abs=0.03)
    assert all(window.probability == 0 for window in windows[voiced[-1] + 1 :])  # a network alone would linger
