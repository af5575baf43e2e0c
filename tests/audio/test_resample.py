import copy

import numpy as np
import pytest

from vivavoce.audio.io import Sound
from vivavoce.audio.resample import TELEPHONE, LiveResampler, StreamingResampler, resample
from vivavoce.errors import InputError

RATES = (8_000, 16_000, 24_000, 44_100, 48_000)
PAIRS = [(a, b) for a in RATES for b in RATES]


def stereo(make_voice, rate, seconds=0.7):
    return np.stack([make_voice(rate, seconds, seed=1), make_voice(rate, seconds, seed=2)])


@pytest.mark.parametrize("quality", ["HQ", "VHQ"])
@pytest.mark.parametrize(("from_rate", "to_rate"), PAIRS)
def test_streamed_in_any_pieces_equals_offline(make_voice, cut, from_rate, to_rate, quality):
    samples = stereo(make_voice, from_rate)
    stream = StreamingResampler(from_rate, to_rate, channels=2, quality=quality)
    streamed = np.concatenate([*(stream.step(piece) for piece in cut(samples)), stream.flush()], axis=1)
    offline = resample(samples, from_rate, to_rate, quality)
    assert streamed.shape == offline.shape
    assert abs(offline.shape[1] - samples.shape[1] * to_rate / from_rate) <= 1
    assert np.abs(streamed - offline).max() <= 1e-6


@pytest.mark.parametrize(("from_rate", "to_rate"), PAIRS)
def test_live_stream_equals_its_offline_and_agrees_with_soxr(make_voice, cut, from_rate, to_rate):
    samples = stereo(make_voice, from_rate)
    resampler = LiveResampler(from_rate, to_rate)
    state, streamed = resampler.initial_state(channels=2), []
    for piece in cut(samples):
        output, state = resampler.step(state, piece)
        streamed.append(output)
    joined = np.concatenate([*streamed, resampler.flush(state)], axis=1)
    offline, soxr = resampler.forward(samples), resample(samples, from_rate, to_rate)
    assert joined.shape == offline.shape == soxr.shape
    assert np.abs(joined - offline).max() <= 1e-6
    low_passed = np.abs(np.fft.rfft(offline - soxr))[
        :, : int(0.85 * offline.shape[1] / 2 * min(1, from_rate / to_rate))
    ]
    assert low_passed.max() <= 1e-3 * np.abs(np.fft.rfft(soxr)).max()


def test_live_stream_lags_by_what_it_says(make_voice):
    for from_rate, to_rate in PAIRS:
        resampler = LiveResampler(from_rate, to_rate)
        state, hop, emitted = resampler.initial_state(), from_rate // 100, 0
        for begin in range(0, from_rate // 2, hop):
            output, state = resampler.step(state, np.zeros((1, hop), np.float32))
            emitted += output.shape[1]
            lag = (begin + hop) / from_rate - emitted / to_rate
            assert lag <= resampler.lag_seconds + 1 / to_rate
        assert resampler.lag_seconds <= 48 / min(from_rate, to_rate) + 1 / from_rate


def test_live_state_is_a_value(make_voice):
    resampler = LiveResampler(48_000, 16_000)
    first, second = np.split(make_voice(48_000, 0.2)[None], 2, axis=1)
    _, state = resampler.step(resampler.initial_state(), first)
    kept = copy.deepcopy(state)
    once, _ = resampler.step(state, second)
    resampler.step(state, second * 0)
    again, _ = resampler.step(kept, second)
    assert np.array_equal(once, again)


@pytest.mark.parametrize("convert", [resample, lambda x, a, b: LiveResampler(a, b).forward(x[None])[0]])
def test_what_would_alias_is_gone_and_what_fits_stays(convert):
    time = np.arange(48_000) / 48_000
    kept = convert(np.sin(2 * np.pi * 6_000 * time).astype(np.float32), 48_000, 16_000)[1_000:-1_000]
    gone = convert(np.sin(2 * np.pi * 9_000 * time).astype(np.float32), 48_000, 16_000)[1_000:-1_000]
    expected = np.sin(2 * np.pi * 6_000 * np.arange(16_000) / 16_000)[1_000:-1_000]
    assert np.abs(kept - expected).max() < 2e-3
    assert np.abs(gone).max() < 1e-3


def test_telephone_filters_pass_the_telephone_band_with_half_the_lag():
    time = np.arange(24_000) / 24_000
    down, up = LiveResampler(24_000, 8_000, TELEPHONE), LiveResampler(8_000, 24_000, TELEPHONE)
    assert down.lag_seconds == up.lag_seconds == 0.003
    for frequency in (300, 3_400):
        sound = np.sin(2 * np.pi * frequency * time).astype(np.float32)[None]
        assert np.abs(up.forward(down.forward(sound)) - sound)[0, 1_000:-1_000].max() < 5e-3
    above = np.sin(2 * np.pi * 4_200 * time).astype(np.float32)[None]
    assert np.abs(down.forward(above))[0, 1_000:-1_000].max() < 2e-3


def test_overshoot_past_full_scale_is_kept():
    square = np.sign(np.sin(2 * np.pi * 300 * np.arange(16_000) / 16_000 + 0.1)).astype(np.float32)
    assert np.abs(resample(square, 16_000, 48_000)).max() > 1.05


def test_same_rate_passes_through(make_voice):
    samples = make_voice(16_000, 0.1)
    assert np.array_equal(resample(samples, 16_000, 16_000), samples)


def test_ten_milliseconds_keep_their_length(make_voice):
    for from_rate, to_rate in PAIRS:
        samples = make_voice(from_rate, 0.01)
        assert abs(resample(samples, from_rate, to_rate).size - to_rate / 100) <= 1
        assert (
            LiveResampler(from_rate, to_rate).forward(samples[None]).shape[1]
            == resample(samples, from_rate, to_rate).size
        )


def test_wrong_use_is_named():
    with pytest.raises(InputError, match="0 Hz is out of range"):
        resample(np.zeros(10, np.float32), 0, 16_000)
    with pytest.raises(InputError, match="'best' does not exist"):
        resample(np.zeros(10, np.float32), 8_000, 16_000, "best")
    with pytest.raises(InputError, match="2 channel"):
        StreamingResampler(8_000, 16_000, channels=2).step(np.zeros((1, 10), np.float32))
    with pytest.raises(InputError, match="1 channel"):
        LiveResampler(8_000, 16_000).step(LiveResampler(8_000, 16_000).initial_state(), np.zeros((2, 10), np.float32))
    ended = StreamingResampler(8_000, 16_000)
    ended.flush()
    with pytest.raises(InputError, match="flushed"):
        ended.step(np.zeros(10, np.float32))


def test_a_sound_resamples_and_mixes_down(make_voice):
    sound = Sound(stereo(make_voice, 48_000), 48_000)
    small = sound.mono().resampled(16_000)
    assert (small.rate, small.channels) == (16_000, 1)
    assert small.seconds == pytest.approx(sound.seconds, abs=1e-4)
    assert np.allclose(small.samples, resample(sound.samples, 48_000, 16_000).mean(axis=0), atol=1e-6)
