"""Speech at another speed keeps its pitch, its level and every part of it, however the stream is cut."""

import numpy as np
import pytest

from vivavoce.audio.level import buzz
from vivavoce.audio.stretch import TimeStretch
from vivavoce.errors import InputError

RATE = 16_000


def stretched(samples: np.ndarray, speed: float, pieces: list[int] | None = None) -> np.ndarray:
    stretch = TimeStretch(RATE, speed)
    state = stretch.initial_state(samples.shape[0])
    out = []
    for piece in np.split(samples, np.cumsum(pieces or []), axis=1):
        new, state = stretch.step(state, piece)
        out.append(new)
    return np.concatenate([*out, stretch.flush(state)], axis=1)


def pitch(samples: np.ndarray) -> float:
    """The strongest period of a tone, by its spectrum."""
    power = np.abs(np.fft.rfft(samples * np.hanning(len(samples)), 1 << 18))
    return float(np.argmax(power)) * RATE / (1 << 18)


@pytest.mark.parametrize("speed", [0.5, 0.8, 1.25, 2.0])
def test_a_tone_changes_its_length_and_not_its_pitch_or_level(speed):
    tone = (0.3 * np.sin(2 * np.pi * 150 * np.arange(RATE) / RATE)).astype(np.float32)[None]
    out = stretched(tone, speed)[0]
    assert len(out) == round(RATE / speed)
    middle = out[2000:-2000]
    assert pitch(middle) == pytest.approx(150, abs=1.5)
    assert middle.std() == pytest.approx(tone.std(), rel=0.03)


@pytest.mark.parametrize("speed", [0.6, 1.0, 1.7])
def test_a_stream_is_stretched_as_if_given_at_once(speed):
    sound = buzz(1.5, RATE).samples
    whole = stretched(sound, speed)
    for pieces in ([1] * 50 + [777, 3, 5000], [1280] * 18, [20_000]):
        np.testing.assert_array_equal(stretched(sound, speed, pieces), whole)


def test_speed_one_changes_nothing():
    sound = buzz(0.5, RATE).samples
    np.testing.assert_array_equal(stretched(sound, 1.0), sound)


@pytest.mark.parametrize("speed", [0.5, 1.5, 2.0])
def test_nothing_is_lost(speed):
    """Bursts stand where they should, first and last sample included."""
    sound = np.zeros((1, RATE), np.float32)
    places = [0.0, 0.3, 0.6, 0.9]
    for place in places:
        start = int(place * RATE)
        sound[0, start : start + 1600] = 0.3 * np.sin(2 * np.pi * 200 * np.arange(1600) / RATE)
    out = np.abs(stretched(sound, speed)[0])
    for place in places:
        middle = int((place + 0.05) / speed * RATE)
        assert out[middle - 400 : middle + 400].max() > 0.2


def test_channels_stay_in_step():
    mono = buzz(0.7, RATE).samples
    out = stretched(np.concatenate([mono, mono]), 1.4)
    np.testing.assert_array_equal(out[0], out[1])


def test_sounds_of_any_length_come_out():
    for length in (0, 1, 100, 600):
        assert stretched(np.ones((1, length), np.float32), 2.0).shape == (1, round(length / 2))


def test_a_state_may_be_stepped_from_twice():
    sound = buzz(0.6, RATE).samples
    stretch = TimeStretch(RATE, 1.3)
    _, state = stretch.step(stretch.initial_state(), sound[:, :4000])
    first, _ = stretch.step(state, sound[:, 4000:])
    second, _ = stretch.step(state, sound[:, 4000:])
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("speed", [0.49, 2.01, 0.0, -1.0, float("nan")])
def test_impossible_speeds_are_refused(speed):
    with pytest.raises(InputError, match="speed must be"):
        TimeStretch(RATE, speed)


def test_samples_of_the_wrong_shape_are_refused():
    stretch = TimeStretch(RATE, 1.5)
    with pytest.raises(InputError, match="1 channel"):
        stretch.step(stretch.initial_state(), np.zeros((2, 10), np.float32))
