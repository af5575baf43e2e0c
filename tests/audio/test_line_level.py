"""Level control of a line."""

from pathlib import Path

import numpy as np
import pytest

from vivavoce.audio.io import Sound
from vivavoce.audio.level import from_db, peak, rms_dbfs, speech_dbfs
from vivavoce.audio.line_level import LineLevel
from vivavoce.server.rtp.codecs import G722Decoder

RATE = 16_000
RECORDINGS = sorted((Path(__file__).parents[1] / "data" / "english").glob("*.g722"))


@pytest.fixture(scope="module")
def speech():
    return np.concatenate([G722Decoder().decode(path.read_bytes()) for path in RECORDINGS])


def at_level(samples, dbfs):
    return (samples * from_db(dbfs - speech_dbfs(Sound(samples[None], RATE)))).astype(np.float32)


def through(level, samples, is_held=False):
    return np.concatenate([level.step(samples[at : at + 320], is_held) for at in range(0, len(samples), 320)])


@pytest.mark.parametrize(("given", "heard"), [(-42, -27), (-32, -23), (-24, -23), (-15, -15)])
def test_quiet_speech_is_raised_by_15_db_at_most(speech, given, heard):
    output = through(LineLevel(RATE), at_level(speech, given))
    assert speech_dbfs(Sound(output[None, -6 * RATE :], RATE)) == pytest.approx(heard, abs=2.5)


def test_pauses_do_not_change_the_gain(speech):
    level = LineLevel(RATE)
    through(level, at_level(speech, -33))
    before = level.gain_db
    assert before > 5
    through(level, 0.0005 * np.random.default_rng(0).standard_normal(20 * RATE).astype(np.float32))
    assert level.gain_db == pytest.approx(before, abs=0.1)


def test_noise_alone_is_raised_within_the_bound():
    level = LineLevel(RATE)
    noise = from_db(-45) * np.random.default_rng(0).standard_normal(20 * RATE).astype(np.float32)
    assert rms_dbfs(through(level, noise)[-RATE:]) <= -45 + LineLevel.MAX_GAIN_DB + 0.1


def test_a_held_gain_does_not_follow_an_echo(speech):
    level = LineLevel(RATE)
    through(level, at_level(speech[: 4 * RATE], -30))
    before = level.gain_db
    through(level, at_level(speech, -45), is_held=True)
    assert level.gain_db == before


def test_a_shout_after_quiet_speech_is_limited(speech):
    level = LineLevel(RATE)
    output = through(level, np.concatenate([at_level(speech, -40), at_level(speech, -12)]))
    assert peak(output) <= from_db(-1) + 1e-6
