"""The mels against other people's implementations, and against float64 ones written out here from their definitions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from vivavoce.audio.mel import (
    BIGVGAN_V2_22KHZ_80BAND,
    BIGVGAN_V2_24KHZ_100BAND,
    BIGVGAN_V2_44KHZ_128BAND_512X,
    COSYVOICE3_24KHZ,
    HIFIGAN_22KHZ,
    MATCHA_24KHZ,
    WHISPER_SPEECH_MAXIMUM,
    KaldiFbank,
    VocoderMel,
    WhisperMel,
    kaldi_filters,
    slaney_filters,
    whisper_normalise,
    whisper_normalise_running,
)
from vivavoce.errors import InputError

GOLDEN = Path(__file__).parent.parent / "golden"
VOCODER_SPECS = [
    MATCHA_24KHZ,
    COSYVOICE3_24KHZ,
    HIFIGAN_22KHZ,
    BIGVGAN_V2_22KHZ_80BAND,
    BIGVGAN_V2_24KHZ_100BAND,
    BIGVGAN_V2_44KHZ_128BAND_512X,
]


def batch(samples):
    return torch.from_numpy(samples)[None]


def in_a_room(samples):
    """With noise, so that no band is so quiet that its logarithm shows float32's rounding instead of the sound."""
    return samples + np.random.default_rng(0).normal(0.0, 0.01, samples.size).astype(np.float32)


def streamed(mel, samples, pieces):
    state, frames = mel.initial_state(samples.shape[0]), []
    for piece in pieces:
        output, state = mel.step(state, torch.from_numpy(piece))
        frames.append(output)
    return torch.cat([*frames, mel.flush(state)], dim=-1)


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("samples", [1_280, 16_000, 30_001, 51_359])
def test_whisper_equals_transformers(make_voice, mels, samples):
    sound = make_voice(16_000, 4.0)[:samples]
    theirs = WhisperFeatureExtractor(feature_size=mels)(
        sound, sampling_rate=16_000, padding="longest", return_tensors="pt"
    ).input_features
    ours = WhisperMel(mels)(batch(sound))
    assert ours.shape == theirs.shape == (1, mels, samples // 160)
    assert (ours - theirs).abs().max() < 1e-5


def test_whisper_equals_the_golden_log_mel():
    golden = load_file(GOLDEN / "xy_tokenizer_16k.safetensors")
    window = torch.nn.functional.pad(golden["wav"][0], (0, 30 * 16_000 - golden["wav"].shape[-1]))
    assert (WhisperMel(80)(window)[..., :400] - golden["log_mel"]).abs().max() < 1e-5


def test_whisper_rows_of_a_batch_have_their_own_maximum(make_voice):
    mel = WhisperMel(80)
    loud = make_voice(16_000, 1.0)
    both = mel(torch.from_numpy(np.stack([loud, loud * np.float32(0.01)])))
    assert torch.allclose(both[0], mel(batch(loud))[0], atol=1e-6)
    assert torch.allclose(both[1], mel(batch(loud * np.float32(0.01)))[0], atol=1e-6)


@pytest.mark.parametrize("length", [0, 1, 159, 160, 200, 201, 320, 399, 400, 401, 559, 560, 600, 601, 16_000, 20_123])
def test_whisper_stream_gives_the_offline_frames(make_voice, cut, length):
    mel = WhisperMel(128)
    sound = np.stack([in_a_room(make_voice(16_000, 2.0, seed=seed)) for seed in (1, 2)])[:, :length]
    offline = mel.log_mel_power(torch.from_numpy(sound))
    assert offline.shape == (2, 128, length // 160)
    for largest in (3, 50, 200, 1_281, 5_000):
        if length <= 40 * largest:
            frames = streamed(mel, sound, cut(sound, seed=largest, largest=largest))
            assert frames.shape == offline.shape
            assert torch.allclose(frames, offline, atol=1e-5)


def test_whisper_frames_come_as_soon_as_they_can(make_voice):
    mel, sound = WhisperMel(80), make_voice(16_000, 1.0)
    state, count = mel.initial_state(), 0
    for begin in range(0, 16_000, 1_280):
        frames, state = mel.step(state, batch(sound[begin : begin + 1_280]))
        count += frames.shape[-1]
        heard = min(begin + 1_280, 16_000)
        assert count == (heard - 200) // 160 + 1


def test_whisper_state_can_be_kept_and_gone_back_to(make_voice):
    mel, sound = WhisperMel(80), make_voice(16_000, 0.5)
    _, state = mel.step(mel.initial_state(), batch(sound[:3_000]))
    once, _ = mel.step(state, batch(sound[3_000:]))
    mel.step(state, batch(sound[3_000:] * 0))
    again, _ = mel.step(state, batch(sound[3_000:]))
    assert torch.equal(once, again)


def test_running_normalisation_is_the_same_for_any_pieces_and_ends_as_the_exact_one(make_voice):
    mel = WhisperMel(128)
    log_mel = mel.log_mel_power(batch(make_voice(16_000, 3.0)))
    start = torch.full((1,), -3.0)
    whole, highest = whisper_normalise_running(log_mel, start)
    maximum, parts = start, []
    for piece in log_mel.split([0, 1, 7, 100, 8, 184], dim=-1):
        part, maximum = whisper_normalise_running(piece, maximum)
        parts.append(part)
    assert torch.equal(torch.cat(parts, dim=-1), whole)
    assert maximum == highest == log_mel.max()
    exact = whisper_normalise(log_mel, log_mel.amax(dim=(-2, -1)))
    after_the_loudest = int(log_mel.amax(dim=-2).argmax())
    assert torch.equal(whole[..., after_the_loudest:], exact[..., after_the_loudest:])
    assert (whole >= exact - 2.0).all() and not torch.equal(whole, exact)


def test_a_running_maximum_that_starts_at_speech_differs_from_the_exact_only_in_the_floor(make_voice):
    mel = WhisperMel(128)
    log_mel = mel.log_mel_power(batch(make_voice(16_000, 3.0)))
    maximum = log_mel.max().item()
    running, _ = whisper_normalise_running(log_mel, torch.full((1,), WHISPER_SPEECH_MAXIMUM))
    exact = whisper_normalise(log_mel, maximum)
    above_both_floors = log_mel > max(maximum, WHISPER_SPEECH_MAXIMUM) - 8
    assert torch.equal(running[above_both_floors], exact[above_both_floors])
    assert (running - exact).abs().max() <= abs(WHISPER_SPEECH_MAXIMUM - maximum) / 4 + 1e-6


def test_silence_and_full_scale_are_finite():
    square = torch.ones(1, 16_000).cumsum(-1).remainder(100).sub(50).sign()
    for sound in (torch.zeros(1, 16_000), square):
        for mel in (WhisperMel(80), VocoderMel(MATCHA_24KHZ), KaldiFbank(subtract_mean=True)):
            assert mel(sound).isfinite().all()


@pytest.mark.parametrize(
    ("rate", "n_fft", "mels", "high"),
    [(16_000, 400, 80, 8_000), (24_000, 1_920, 80, 8_000), (24_000, 1_024, 100, 12_000), (44_100, 2_048, 128, 22_050)],
)
def test_slaney_filters_equal_transformers(rate, n_fft, mels, high):
    theirs = mel_filter_bank(n_fft // 2 + 1, mels, 0.0, high, rate, norm="slaney", mel_scale="slaney").T
    assert np.abs(slaney_filters(rate, n_fft, mels, high=high).numpy() - theirs).max() < 1e-7


def test_kaldi_filters_equal_transformers():
    theirs = mel_filter_bank(
        257, 80, 20.0, 8_000.0, 16_000, norm=None, mel_scale="kaldi", triangularize_in_mel_space=True
    ).T
    ours = kaldi_filters(16_000, 512, 80).numpy()
    assert np.abs(ours[:, :256] - theirs[:, :256]).max() < 1e-6
    assert not ours[:, 256].any()


def vocoder_mel_float64(spec, samples):
    """Reflected, windowed, transformed frame by frame, as its definition says."""
    margin = (spec.n_fft - spec.hop) // 2
    padded = np.pad(samples.astype(np.float64), margin, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(spec.n_fft) / spec.n_fft)
    filters = mel_filter_bank(
        spec.n_fft // 2 + 1, spec.mels, 0.0, spec.high or spec.rate / 2, spec.rate, norm="slaney", mel_scale="slaney"
    )
    frames = []
    for begin in range(0, padded.size - spec.n_fft + 1, spec.hop):
        spectrum = np.fft.rfft(padded[begin : begin + spec.n_fft] * window)
        frames.append(np.sqrt(np.abs(spectrum) ** 2 + 1e-9) @ filters)
    return np.log(np.maximum(frames, 1e-5)).T


@pytest.mark.parametrize("spec", VOCODER_SPECS)
def test_vocoder_mel_equals_its_definition(make_voice, spec):
    sound = in_a_room(make_voice(spec.rate, 0.83))
    ours = VocoderMel(spec)(batch(sound))[0].numpy()
    theirs = vocoder_mel_float64(spec, sound)
    assert ours.shape == theirs.shape == (spec.mels, sound.size // spec.hop)
    assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize(("samples", "frames"), [(0, 0), (240, 0), (480, 1), (720, 1), (721, 1), (959, 1), (960, 2)])
def test_vocoder_mel_of_a_very_short_sound(make_voice, samples, frames):
    mel = VocoderMel(MATCHA_24KHZ)(batch(make_voice(24_000, 0.1)[:samples]))
    assert mel.shape == (1, 80, frames)
    assert mel.isfinite().all()


def kaldi_fbank_float64(samples):
    """Kaldi's recipe, frame by frame: no mean, pre-emphasis, Povey window, 512-point power, mel triangles, log."""
    to_mel = lambda hz: 1127.0 * np.log(1.0 + hz / 700.0)  # noqa: E731
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)) ** 0.85
    step = (to_mel(8_000.0) - to_mel(20.0)) / 81
    filters = np.zeros((80, 257))
    for band in range(80):
        left, centre, right = (to_mel(20.0) + (band + side) * step for side in range(3))
        for bin_ in range(256):
            mel = to_mel(bin_ * 16_000 / 512)
            if left < mel < right:
                filters[band, bin_] = (mel - left) / step if mel <= centre else (right - mel) / step
    features = []
    for begin in range(0, samples.size - 399, 160):
        frame = samples[begin : begin + 400].astype(np.float64)
        frame = frame - frame.mean()
        frame = np.concatenate([[frame[0] * (1 - 0.97)], frame[1:] - 0.97 * frame[:-1]])
        power = np.abs(np.fft.rfft(frame * window, 512)) ** 2
        features.append(np.log(np.maximum(filters @ power, np.finfo(np.float32).eps)))
    return np.stack(features)


@pytest.mark.parametrize("samples", [400, 559, 560, 16_000])
def test_kaldi_fbank_equals_its_definition(make_voice, samples):
    sound = in_a_room(make_voice(16_000, 1.0))[:samples] + np.float32(0.1)
    ours = KaldiFbank()(batch(sound))[0].numpy()
    theirs = kaldi_fbank_float64(sound)
    assert ours.shape == theirs.shape == (1 + (samples - 400) // 160, 80)
    assert np.abs(ours - theirs).max() < 5e-4


def test_kaldi_fbank_equals_kaldi_native_fbank(make_voice):
    knf = pytest.importorskip("kaldi_native_fbank")
    options = knf.FbankOptions()
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = 80
    sound = in_a_room(make_voice(16_000, 1.0))
    theirs = knf.OnlineFbank(options)
    theirs.accept_waveform(16_000, sound.tolist())
    theirs.input_finished()
    expected = np.stack([theirs.get_frame(index) for index in range(theirs.num_frames_ready)])
    ours = KaldiFbank()(batch(sound))[0].numpy()
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() < 5e-4


def test_kaldi_fbank_without_its_mean(make_voice):
    sound = batch(make_voice(16_000, 1.0))
    plain, centred = KaldiFbank()(sound), KaldiFbank(subtract_mean=True)(sound)
    assert centred.mean(dim=1).abs().max() < 1e-4
    assert torch.allclose(plain - plain.mean(dim=1, keepdim=True), centred)


def test_too_short_is_named():
    with pytest.raises(InputError, match="needs 160 samples, the sound has 100"):
        WhisperMel()(torch.zeros(1, 100))
    with pytest.raises(InputError, match="needs 400 samples, the sound has 399"):
        KaldiFbank()(torch.zeros(1, 399))


def test_mels_add_nothing_to_a_checkpoint():
    for mel in (WhisperMel(), VocoderMel(MATCHA_24KHZ), KaldiFbank()):
        assert not mel.state_dict()
