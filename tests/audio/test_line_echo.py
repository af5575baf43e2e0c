"""Echo cancellation of a line: echoes are removed, callers who speak over a reply are heard, and delays may change."""

from pathlib import Path

import numpy as np
import pytest

from vivavoce.audio.level import from_db
from vivavoce.audio.line_echo import LineEchoCanceller
from vivavoce.server.realtime.audio_formats import MU_LAW, WireFormat, decode, encode
from vivavoce.server.rtp.codecs import G722Decoder

RECORDINGS = sorted((Path(__file__).parents[1] / "data" / "english").glob("*.g722"))
NOISE_DB = -60.0


@pytest.fixture(scope="module")
def speech():
    """Recorded speech at 16 kHz."""
    return np.concatenate([G722Decoder().decode(path.read_bytes()) for path in RECORDINGS])


def decibels(samples):
    return 10 * np.log10(np.mean(np.square(samples)) + 1e-12)


def echoed(sent, rate, delay_seconds, echo_db=-15.0):
    """What comes back of it, with a little dispersion."""
    response = np.zeros(round(0.004 * rate), np.float32)
    response[[1, 2, 4, len(response) - 1]] = 0.3, 0.9, -0.3, 0.1
    delayed = np.concatenate([np.zeros(round(delay_seconds * rate), np.float32), sent])[: len(sent)]
    return (from_db(echo_db) * np.convolve(delayed, response)[: len(sent)]).astype(np.float32)


def noise(count):
    return from_db(NOISE_DB) * np.random.default_rng(3).standard_normal(count).astype(np.float32)


def through(canceller, heard, sent, rate):
    frame, output = rate // 50, []
    for at in range(0, len(sent) - frame + 1, frame):
        canceller.note_sent(sent[at : at + frame])
        output.append(canceller.step(heard[at : at + frame]))
    return np.concatenate(output)


@pytest.mark.parametrize("rate", [8_000, 16_000])
@pytest.mark.parametrize("delay_seconds", [0.04, 0.165, 0.4])
def test_an_echo_of_a_g711_line_is_removed_within_a_second(speech, rate, delay_seconds):
    sent = speech[:: 16_000 // rate]
    line = WireFormat(MU_LAW, rate)
    heard = decode(encode(echoed(sent, rate, delay_seconds) + noise(len(sent)), line), line)
    left = through(LineEchoCanceller(rate), heard, sent, rate)[rate:]
    assert decibels(heard[rate:]) > -45
    assert decibels(left) < decibels(heard[rate:]) - 15


def test_a_caller_who_speaks_over_a_reply_is_heard_and_does_not_spoil_the_filter(speech):
    rate = 16_000
    half = len(speech) // 2
    sent, caller = speech[:half], np.roll(speech[half : 2 * half], 1)
    canceller = LineEchoCanceller(rate)
    echo = echoed(sent, rate, 0.165)
    through(canceller, echo + noise(half), sent, rate)
    heard = through(canceller, echo + caller, sent, rate)
    assert decibels(heard - caller[: len(heard)]) < decibels(echo) - 10
    left = through(canceller, echo, sent, rate)
    assert decibels(left) < decibels(echo) - 15


def test_an_echo_whose_delay_changes_is_found_again(speech):
    rate, canceller = 16_000, LineEchoCanceller(16_000)
    for delay_seconds in (0.12, 0.16):
        heard = echoed(speech, rate, delay_seconds)
        left = through(canceller, heard, speech, rate)
        assert decibels(left[-2 * rate :]) < decibels(heard[-2 * rate :]) - 15
        assert abs(canceller.delay_samples / rate - delay_seconds) < 0.01


@pytest.mark.parametrize("is_told", [True, False])
def test_a_delay_that_the_jitter_buffer_changes_needs_no_search(speech, is_told):
    rate, frame = 16_000, 320
    canceller, echo = LineEchoCanceller(rate), echoed(speech, rate, 0.165)
    played, left = 0, []
    for tick in range(len(speech) // frame):
        canceller.note_sent(speech[tick * frame : (tick + 1) * frame])
        if tick < 100 or tick % 4:
            played += frame
        elif tick % 8:  # a frame is skipped; before, one was repeated while the buffer was empty
            played += 2 * frame
        heard = echo[played - frame : played]
        left.append(canceller.step(heard, played if is_told else None))
    is_removed = decibels(np.concatenate(left[100:])) < decibels(echo[100 * frame :]) - 15
    assert is_removed == is_told


def test_a_line_without_echo_is_left_as_it_is(speech):
    half = len(speech) // 2
    sent, caller = speech[:half], speech[half : 2 * half]
    canceller = LineEchoCanceller(16_000)
    heard = through(canceller, caller, sent, 16_000)
    assert canceller.delay_samples is None
    np.testing.assert_array_equal(heard, caller[: len(heard)])
