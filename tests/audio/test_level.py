"""Levels, speech gain, the limiter and the onset gate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivavoce.audio.io import Sound
from vivavoce.audio.level import (
    SILENCE_DBFS,
    Limiter,
    OnsetGate,
    SpeechGain,
    from_db,
    normalise_speech,
    peak,
    rms_dbfs,
    speech_dbfs,
    to_db,
    true_peak,
)
from vivavoce.errors import InputError

RATE = 24_000
CEILING = from_db(-1.0)


def streamed(process, state, pieces):
    outputs = []
    for piece in pieces:
        output, state = process.step(state, piece)
        outputs.append(output)
    return outputs, state


def gains_db(output, samples):
    """The gain on each sample that is loud enough to tell."""
    audible = np.abs(samples) > 1e-3
    return 20 * np.log10(np.abs(output[audible]) / np.abs(samples[audible]))


def test_levels_of_known_signals():
    sine = 0.5 * np.sin(2 * np.pi * 1_000 * np.arange(RATE) / RATE).astype(np.float32)
    assert rms_dbfs(sine) == pytest.approx(-6.02 - 3.01, abs=0.01)
    assert peak(-sine) == pytest.approx(0.5, abs=1e-3)
    assert rms_dbfs(np.zeros(100, np.float32)) == rms_dbfs(np.zeros(0, np.float32)) == SILENCE_DBFS
    assert to_db(from_db(-17.0)) == pytest.approx(-17.0)


def test_true_peak_sees_between_the_samples():
    quarter_rate = np.sin(np.pi / 2 * np.arange(4_000) + np.pi / 4).astype(np.float32)  # every sample at ±0.707
    assert peak(quarter_rate) == pytest.approx(0.7071, abs=1e-3)
    assert true_peak(quarter_rate[500:-500], RATE) == pytest.approx(1.0, abs=0.08)


def test_speech_level_leaves_pauses_out(make_voice):
    speech = make_voice(RATE, 2.0)
    with_pause = np.concatenate([speech, np.zeros(4 * RATE, np.float32)])
    assert speech_dbfs(Sound(with_pause, RATE)) == pytest.approx(speech_dbfs(Sound(speech, RATE)), abs=0.1)
    assert rms_dbfs(with_pause) < rms_dbfs(speech) - 4


@pytest.mark.parametrize("scale", [1e-4, 0.02, 0.2, 1.0, 2.0])
def test_a_clip_is_raised_by_one_gain_towards_the_target_and_never_past_its_peak(make_voice, scale):
    sound = Sound(make_voice(RATE, 2.0) * np.float32(scale), RATE)
    louder = normalise_speech(sound, target_dbfs=-16.0, max_gain_db=18.0)
    gain = gains_db(louder.samples, sound.samples) if scale > 0.01 else np.zeros(1)
    assert np.ptp(gain) < 1e-3
    assert -1e-3 <= gain.mean() <= 18.0 + 1e-3
    assert speech_dbfs(louder) <= max(-16.0, speech_dbfs(sound)) + 1e-3
    assert true_peak(louder.samples, RATE) <= max(CEILING, true_peak(sound.samples, RATE)) * 1.0001


def test_silence_stays_silence():
    assert not normalise_speech(Sound(np.zeros(RATE, np.float32), RATE)).samples.any()
    assert not SpeechGain(RATE).forward(np.zeros((1, RATE), np.float32)).any()


def loud_voice(make_voice, scale=5.0):
    samples = np.stack([make_voice(RATE, 1.5, seed=1), 0.3 * make_voice(RATE, 1.5, seed=2)]) * np.float32(scale)
    samples[:, 20_000] = 9.0  # a click
    return samples


def test_nothing_passes_the_limiter(make_voice):
    limited = Limiter(RATE).forward(loud_voice(make_voice))
    assert peak(limited) <= np.float32(CEILING)
    assert peak(limited) > 0.9 * CEILING


def test_the_limiter_leaves_what_is_not_too_loud_alone(make_voice):
    samples = make_voice(RATE, 1.0)[None]
    assert np.array_equal(Limiter(RATE).forward(samples), samples)


@pytest.mark.parametrize("largest", [2, 30, 700, 9_000])
def test_the_limiter_streams_as_it_works_offline(make_voice, cut, largest):
    limiter, samples = Limiter(RATE), loud_voice(make_voice)[:, 18_000 : 18_000 + 1_000 * largest]
    outputs, state = streamed(limiter, limiter.initial_state(2), cut(samples, largest=largest))
    joined = np.concatenate([*outputs, limiter.flush(state)], axis=1)
    assert joined.shape == samples.shape
    assert np.abs(joined - limiter.forward(samples)).max() <= 1e-6
    assert sum(output.shape[1] for output in outputs) == samples.shape[1] - limiter.lookahead


@pytest.mark.parametrize("length", [0, 1, 5, 47, 48, 49])
def test_the_limiter_on_less_than_its_lookahead(length):
    samples = np.full((1, length), 3.0, np.float32)
    limited = Limiter(RATE).forward(samples)
    assert limited.shape == samples.shape
    assert np.allclose(limited, CEILING, atol=1e-6)


def test_the_limiter_turns_both_channels_down_alike_and_lets_go_slowly(make_voice):
    samples = np.full((2, RATE), 0.5, np.float32)
    samples[1] *= 0.5
    samples[0, 5_000] = 2.0
    limited = Limiter(RATE, release_db_per_second=60.0).forward(samples)
    steady = np.arange(RATE) != 5_000
    gains = 20 * np.log10(limited / samples)
    assert np.abs(gains[0] - gains[1])[steady].max() < 1e-3
    recovery = np.diff(gains[1][5_000:])
    assert recovery.max() <= 60.0 / RATE + 1e-4  # float32 noise
    assert np.abs(gains[1, 5_000 + RATE // 5 :]).max() < 1e-5
    assert gains[1, :4_950].max() == 0.0


def test_speech_gain_streams_as_it_works_offline(make_voice, cut):
    fader, samples = (
        SpeechGain(RATE),
        np.stack([0.05 * make_voice(RATE, 3.0, seed=s) for s in (1, 2)]).astype(np.float32),
    )
    for largest in (40, 700, 9_000):
        outputs, _ = streamed(fader, fader.initial_state(), cut(samples, largest=largest))
        assert [len(output[0]) for output in outputs] == [len(piece[0]) for piece in cut(samples, largest=largest)]
        assert np.abs(np.concatenate(outputs, axis=1) - fader.forward(samples)).max() <= 1e-6


@pytest.mark.parametrize(("scale", "expected_gain"), [(0.05, 12.0), (0.5, None), (2.0, None)])
def test_speech_gain_comes_to_the_target_or_to_its_limit(make_voice, scale, expected_gain):
    samples = (scale * make_voice(RATE, 8.0))[None].astype(np.float32)
    output = SpeechGain(RATE, target_dbfs=-20.0, max_gain_db=12.0, slope_db_per_second=10.0).forward(samples)
    last = np.s_[:, -2 * RATE :]
    if expected_gain is not None:
        assert gains_db(output[last], samples[last]) == pytest.approx(expected_gain, abs=0.01)
    else:
        assert speech_dbfs(Sound(output[last], RATE)) == pytest.approx(-20.0, abs=2.5)  # of another two seconds


def test_speech_gain_never_moves_faster_than_its_slope(make_voice):
    loud, quiet = make_voice(RATE, 2.0, seed=1), 0.03 * make_voice(RATE, 2.0, seed=2)
    samples = np.concatenate([quiet, loud, quiet, loud])[None].astype(np.float32)
    carrier = np.where(np.abs(samples) < 1e-2, 1e-2, samples).astype(np.float32)  # so that each sample tells its gain
    gains = 20 * np.log10(SpeechGain(RATE, slope_db_per_second=3.0).forward(carrier) / carrier)[0]
    over_100_ms = gains[RATE // 10 :] - gains[: -RATE // 10]
    assert np.abs(over_100_ms).max() <= 0.3 + 1e-3
    assert np.ptp(gains) > 1.0


def test_a_quiet_passage_between_loud_ones_is_not_pumped_up(make_voice):
    loud = make_voice(RATE, 3.0, seed=1)
    quiet = 0.1 * make_voice(RATE, 1.0, seed=2)
    pause = 1e-3 * np.random.default_rng(0).standard_normal(2 * RATE)
    samples = np.concatenate([loud, quiet, pause, loud])[None].astype(np.float32)
    fader = SpeechGain(RATE, target_dbfs=rms_dbfs(loud) + 1.0)
    _, after_loud = fader.step(fader.initial_state(), samples[:, : 3 * RATE])
    _, after_quiet = fader.step(after_loud, samples[:, 3 * RATE : 4 * RATE])
    _, after_pause = fader.step(after_quiet, samples[:, 4 * RATE : 6 * RATE])
    assert abs(after_quiet.gain_db - after_loud.gain_db) <= 3.0
    assert abs(after_pause.gain_db - after_quiet.gain_db) <= 0.1


def test_a_shout_does_not_make_all_later_speech_count_as_a_pause(make_voice):
    shout = np.random.default_rng(0).normal(0.0, 0.4, 800)
    murmur = np.tile(0.1 * make_voice(8_000, 5.0), 16)
    fader = SpeechGain(8_000, target_dbfs=-20.0)
    _, after_shout = fader.step(fader.initial_state(), shout[None].astype(np.float32))
    _, after_murmur = fader.step(after_shout, murmur[None].astype(np.float32))
    assert after_shout.gain_db < 0.0
    assert after_murmur.gain_db > 6.0


@pytest.mark.parametrize("process", [SpeechGain(RATE), Limiter(RATE)])
def test_a_piece_with_nan_is_refused_and_leaves_the_stream_usable(process, make_voice):
    samples = make_voice(RATE, 0.5)[None]
    _, state = process.step(process.initial_state(), samples)
    with pytest.raises(InputError, match="NaN"):
        process.step(state, samples * np.float32(np.nan))
    assert np.isfinite(process.step(state, samples)[0]).all()


GATE = OnsetGate(RATE)


def sound(silent: float, voiced: float = 0.3) -> np.ndarray:
    noise = np.random.default_rng(3).standard_normal(round((silent + voiced) * RATE)).astype(np.float32)
    level = np.where(np.arange(len(noise)) < round(silent * RATE), 1e-3, 0.1)
    return (noise * level).astype(np.float32)


def gated(samples: np.ndarray, sizes: list[int]) -> tuple[np.ndarray, int]:
    state, pieces, begin = GATE.initial_state(), [], 0
    for size in sizes:
        piece, state = GATE.step(state, samples[begin : begin + size])
        pieces.append(piece)
        begin += size
    piece, state = GATE.step(state, samples[begin:], final=True)
    return np.concatenate([*pieces, piece]), state.dropped


@pytest.mark.parametrize("silent", [0.0, 0.004, 0.07, 0.2, 0.39])
def test_silence_before_the_onset_is_trimmed_except_for_a_margin(silent):
    samples = sound(silent)
    heard, dropped = gated(samples, [])
    assert np.array_equal(heard, samples[dropped:])
    assert silent - 0.016 <= dropped / RATE <= max(0.0, silent - 0.009)


@given(st.floats(0, 0.6), st.lists(st.integers(0, 5000), max_size=12))
def test_pieces_of_any_size_give_what_the_whole_gives(silent, sizes):
    samples = sound(silent)
    whole, dropped = gated(samples, [])
    pieces, also = gated(samples, sizes)
    assert also == dropped
    assert np.array_equal(whole, pieces)


def test_a_sound_that_stays_silent_is_emitted_after_the_maximum():
    heard, dropped = gated(np.zeros(RATE, np.float32), [2000] * 6)
    assert dropped == round(0.4 * RATE)
    assert len(heard) == RATE - dropped
