"""Telephone tones, made and detected: through G.711, in noise, in pieces of any size, and not in speech."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from vivavoce.audio.answering_machine import AnsweringMachineDetector
from vivavoce.audio.resample import resample
from vivavoce.audio.tone_detection import BeepDetector, CallProgressDetector, DigitToneDetector
from vivavoce.audio.tones import CALL_PROGRESS, SPECIAL_INFORMATION, cadence, digit_tones, tone
from vivavoce.server.realtime.audio_formats import MU_LAW, WireFormat, decode, encode
from vivavoce.server.rtp.codecs import G722Decoder

RECORDINGS = sorted((Path(__file__).parents[1] / "data" / "english").glob("*.g722"))
KEYS = "0123456789*#ABCD"
RATES = [8_000, 16_000, 24_000]


@cache
def speech():
    whole = np.concatenate([G722Decoder().decode(path.read_bytes()) for path in RECORDINGS])
    return resample(whole, 16_000, 8_000)


def feed(detector, samples, piece=160):
    """What a detector reports, with the time of each report in pieces."""
    found = [detector.step(samples[at : at + piece]) for at in range(0, len(samples), piece)]
    return "".join(found) if isinstance(found[0], str) else [each for some in found for each in some]


def over_g711(samples):
    return decode(encode(samples, WireFormat(MU_LAW, 8_000)), WireFormat(MU_LAW, 8_000))


def noise(count, level_db, seed=0):
    return (10 ** (level_db / 20) * np.random.default_rng(seed).standard_normal(count)).astype(np.float32)


# Keys


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("piece", [37, 160, 100_000])
def test_keys_are_detected(rate, piece):
    assert feed(DigitToneDetector(rate), digit_tones(KEYS, rate), piece) == KEYS


@pytest.mark.parametrize("level_db", [-3, -10, -25])
def test_a_hundred_keys_over_g711_and_noise(level_db):
    keys = "".join(np.random.default_rng(1).choice(list(KEYS), 100))
    samples = digit_tones(keys, 8_000, level_db)
    assert feed(DigitToneDetector(8_000), over_g711(samples + noise(len(samples), level_db - 18))) == keys


def test_short_keys_and_a_repeated_one():
    pieces = [tone((770, 1336), 0.05, 8_000), np.zeros(400, np.float32)] * 3
    assert feed(DigitToneDetector(8_000), np.concatenate(pieces)) == "555"


def test_a_long_key_is_one():
    assert feed(DigitToneDetector(8_000), tone((697, 1209), 3.0, 8_000)) == "1"


@pytest.mark.parametrize("frequencies", [(770,), (1336,), (770, 852), (770, 1290), (440, 480), (2_000,)])
def test_other_tones_are_no_keys(frequencies):
    assert feed(DigitToneDetector(8_000), tone(frequencies, 1.0, 8_000)) == ""


def test_speech_and_noise_are_no_keys():
    assert feed(DigitToneDetector(8_000), speech()) == ""
    assert feed(DigitToneDetector(8_000), noise(80_000, -20)) == ""


# Call progress


@pytest.mark.parametrize("name", ["ringback", "busy", "congestion"])
@pytest.mark.parametrize("region", CALL_PROGRESS)
def test_call_progress_tones_are_distinguished(region, name):
    samples = cadence(CALL_PROGRESS[region][name], 9.0, 8_000, level_db=-20)
    found = feed(CallProgressDetector(8_000), over_g711(samples + noise(len(samples), -50)))
    assert found and set(found) == {name}


@pytest.mark.parametrize("rate", RATES)
def test_special_information_tones(rate):
    samples = cadence(SPECIAL_INFORMATION, 4.0, rate)
    assert "special information" in feed(CallProgressDetector(rate), samples)
    variant = [((913.8,), 0.38), ((1428.5,), 0.274), ((1776.7,), 0.38), ((), 1.0)]
    assert feed(CallProgressDetector(rate), cadence(variant, 2.3, rate)) == ["special information"]


def test_busy_is_certain_after_two_periods():
    busy = CALL_PROGRESS["us"]["busy"]
    assert feed(CallProgressDetector(8_000), cadence(busy, 1.4, 8_000)) == []
    assert feed(CallProgressDetector(8_000), cadence(busy, 2.3, 8_000)) == ["busy"]


def test_speech_keys_and_noise_are_no_call_progress():
    samples = np.concatenate([speech(), digit_tones(KEYS, 8_000), noise(40_000, -20)])
    assert feed(CallProgressDetector(8_000), samples) == []


# Voice mail


@pytest.mark.parametrize("frequency", [440, 1_000, 1_400, 2_000])
def test_a_beep_is_found(frequency):
    samples = np.concatenate([noise(4_000, -60), tone((frequency,), 0.3, 8_000), noise(4_000, -60)])
    (found,) = feed(BeepDetector(8_000), over_g711(samples))
    assert found.frequency == pytest.approx(frequency, abs=10)
    assert found.seconds == pytest.approx(0.3, abs=0.03)


def test_speech_keys_and_long_tones_are_no_beeps():
    samples = np.concatenate(
        [speech(), digit_tones("159#", 8_000), tone((440,), 4.0, 8_000), np.zeros(800, np.float32)]
    )
    assert feed(BeepDetector(8_000), samples) == []


def answered(*parts):
    """What is found in sounds and seconds of line noise, one after the other."""
    sounds = [part if isinstance(part, np.ndarray) else noise(round(part * 8_000), -65) for part in parts]
    return feed(AnsweringMachineDetector(8_000), over_g711(np.concatenate(sounds)))


def test_a_short_greeting_and_silence_is_a_person():
    hello = speech()[4_000:10_000]
    assert answered(0.5, hello, 2.0) == ["person"]


def test_a_long_greeting_is_a_machine_and_its_beep_is_found():
    greeting = speech()[: 8_000 * 6]
    assert answered(0.5, greeting, 0.3, tone((1_000,), 0.4, 8_000), 1.0) == ["machine", "beep"]


def test_nothing_said_is_silence_and_a_click_is_nothing():
    click = np.zeros(400, np.float32)
    click[:40] = 0.5
    assert answered(6.0) == ["silence"]
    assert answered(1.0, click, 7.0) == ["silence"]


def test_a_beep_before_any_speech_is_none_of_voice_mail():
    assert "beep" not in answered(0.3, tone((1_000,), 0.3, 8_000), 0.5)
