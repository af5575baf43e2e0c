"""What is heard on an outgoing call: tones before and after the answer, a person, a machine, and its beep."""

import numpy as np
import pytest

from tests.server.scripted import tone
from vivavoce.audio.tones import CALL_PROGRESS, SPECIAL_INFORMATION, cadence
from vivavoce.server.telephony.call_progress import CallProgress

RATE = 16_000
FRAME = RATE // 50


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)


def speech(seconds: float) -> np.ndarray:
    """Noise at the level of speech."""
    return 0.1 * np.random.default_rng(1).standard_normal(round(seconds * RATE)).astype(np.float32)


class Line:
    """A call whose audio is given by a test."""

    def __init__(self, policy: str) -> None:
        self.heard, self.tones, self.answers = np.zeros(0, np.float32), [], []
        self.progress = CallProgress(RATE, policy, self._hear, self.tones.append, self.answers.append)

    def _hear(self, samples: np.ndarray) -> None:
        self.heard = np.concatenate([self.heard, samples])

    def play(self, *sounds: np.ndarray) -> "Line":
        sound = np.concatenate(sounds)
        for begin in range(0, len(sound), FRAME):
            self.progress.hear(sound[begin : begin + FRAME])
        return self

    def answer(self) -> "Line":
        self.progress.note_answer()
        return self


def ringback(region: str, seconds: float) -> np.ndarray:
    return cadence(CALL_PROGRESS[region]["ringback"], seconds, RATE)


@pytest.mark.parametrize("region", sorted(CALL_PROGRESS))
def test_tones_before_the_answer_are_reported_and_not_heard_by_the_session(region):
    line = Line("report").play(ringback(region, 8), cadence(CALL_PROGRESS[region]["busy"], 4, RATE))
    assert set(line.tones) == {"ringback", "busy"} and not line.answers and not len(line.heard)


def test_special_information_is_reported():
    assert "special information" in Line("report").play(cadence(SPECIAL_INFORMATION, 3, RATE)).tones


@pytest.mark.parametrize("policy", ["report", "ignore"])
def test_the_session_hears_everything_after_the_answer(policy):
    line = Line(policy).play(silence(1)).answer().play(speech(0.5), silence(1))
    assert len(line.heard) == round(1.5 * RATE)
    assert line.answers == (["person"] if policy == "report" else [])


@pytest.mark.parametrize("policy", ["hang_up", "leave_message"])
def test_the_greeting_of_a_person_is_heard_once_it_is_known_to_be_one(policy):
    line = Line(policy).answer().play(speech(0.5), silence(0.5))
    assert not line.progress.is_open and not len(line.heard)
    line.play(silence(1))
    assert line.answers == ["person"] and line.progress.is_open and len(line.heard) == 2 * RATE


def test_a_message_is_left_after_the_beep():
    line = Line("leave_message").answer().play(speech(4))
    assert line.answers == ["machine"] and not line.progress.is_open
    line.play(silence(0.2), tone(1000, 0.5, RATE), silence(0.5))
    assert line.answers == ["machine", "beep"] and line.progress.is_open and line.progress.answer == "beep"
    assert np.abs(line.heard).max(initial=0) < 0.01, "neither the recording nor the beep is heard"


def test_a_message_is_left_without_a_beep_after_a_minute():
    line = Line("leave_message").answer().play(speech(4), silence(57))
    assert line.answers == ["machine", "beep"] and line.progress.is_open


@pytest.mark.parametrize("region", ["us", "europe"])
def test_a_telephone_that_rings_on_after_the_answer_is_no_greeting(region):
    line = Line("report").answer().play(ringback(region, 4))
    assert line.tones and not line.answers
    assert line.play(speech(0.5), silence(1)).answers == ["person"]


def test_silence_opens_the_call():
    assert Line("hang_up").answer().play(silence(6)).answers == ["silence"]
