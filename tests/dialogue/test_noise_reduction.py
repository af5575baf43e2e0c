"""Noise suppression within conversations: what is heard when, and that it can be chosen at any time."""

from dataclasses import replace

import numpy as np
import pytest

from tests.dialogue.stage import RATE, WINDOW, Stage, answered, spoken, with_turn
from tests.dialogue.voices import silence, talk
from vivavoce.audio.vad import voice_activity
from vivavoce.dialogue.events import SpeechStarted, SpeechStopped
from vivavoce.dialogue.front_end import AudioFrontEnd, AudioWindow
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.settings import NoiseSettings

PACKET = RATE // 50


def fan(seconds: float, level: float, seed: int = 0) -> np.ndarray:
    return (level * np.random.default_rng(seed).standard_normal(round(seconds * RATE))).astype("f")


def heard(sound: np.ndarray, strength: float | None) -> tuple[list[AudioWindow], AudioFrontEnd]:
    """The windows of a sound that comes in packets without delay."""
    front_end = AudioFrontEnd(RATE, voice_activity(), None, lambda moment, count: np.zeros(count, "f"))
    front_end.reduce_noise(strength)
    windows = []
    for end in range(PACKET, len(sound) + 1, PACKET):
        windows += front_end.hear(sound[end - PACKET : end], end / RATE)
    return windows, front_end


def test_capture_times_are_those_of_the_samples():
    sound = (talk(1.0, seed=1) + fan(1.0, 0.01)).astype("f")
    for strength, late in ((None, 0), (0.0, 256)):
        windows, _ = heard(sound, strength)
        for window in windows[1:]:
            end = round(window.ended_at * RATE)
            np.testing.assert_allclose(window.samples, sound[end - WINDOW : end], atol=1e-6)
        assert [window.late_ms for window in windows] == [late * 1000 // RATE] * len(windows)


@pytest.mark.parametrize("strength", [None, 1.0])
def test_silence_in_a_quiet_room_is_known_when_it_arrives(strength):
    """What the suppression has not given back counts, so that the end of a turn is detected no later."""
    sound = np.concatenate([talk(1.0, seed=3), silence(0.5)]).astype("f")
    windows, front_end = heard(sound, strength)
    last = windows[-1]
    assert last.quiet_ms == 32
    assert round(1e3 * (len(sound) / RATE - last.ended_at)) - front_end.quiet_ms < 4


def test_loud_steady_noise_is_neither_speech_nor_sound():
    windows, _ = heard(fan(3.0, 0.05), 1.0)
    settled = windows[20:]
    assert max(window.probability for window in settled) < 0.3
    assert (
        np.mean([window.level_db for window in settled])
        < np.mean([w.level_db for w in heard(fan(3.0, 0.05), None)[0]]) - 20
    )


async def turn_of(
    reduction: NoiseSettings | None, options: DialogueOptions | None = None
) -> tuple[list[str], list[int]]:
    stage = Stage.set(spoken(2.0), settings=replace(with_turn(), noise_reduction=reduction), options=options)
    await answered(stage)
    await stage.close()
    stage.check()
    return stage.names(), [stage.all(SpeechStarted)[0].audio_start_ms, stage.all(SpeechStopped)[0].audio_end_ms]


async def test_a_turn_in_a_quiet_room_is_the_same_at_the_same_time():
    names, times = await turn_of(None)
    denoised_names, denoised_times = await turn_of(NoiseSettings())
    assert denoised_names == names
    assert denoised_times == pytest.approx(times, abs=32)


async def test_it_is_switched_on_and_off_within_a_conversation():
    stage = Stage.set()
    windows: list[AudioWindow] = []
    stage.conversation._front_end.deliver = lambda found, quiet_ms: windows.extend(found)
    for reduction in (None, NoiseSettings("far_field", 0.5), NoiseSettings(strength=1.0), None):
        stage.conversation.update(lambda settings, reduction=reduction: replace(settings, noise_reduction=reduction))
        await stage.hear(fan(0.32, 0.01))
    await stage.close()
    assert [window.late_ms for window in windows] == [0] * 10 + [16] * 20 + [0] * 10
