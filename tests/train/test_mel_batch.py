"""A batch of sounds of different lengths has the mels that each sound has alone, whole or heard as a stream."""

import pytest
import torch

from vivavoce.audio.mel import WHISPER_SPEECH_MAXIMUM, WhisperMel, whisper_normalise_running
from vivavoce.train.speech_encoder import BatchMel

LENGTHS = [16000, 15990, 15840, 15961, 7999, 1280, 480, 200, 161]


@pytest.fixture
def sounds():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, generator=generator) * 0.1 for length in LENGTHS]


def _batch(sounds):
    rows = torch.full((len(sounds), max(LENGTHS)), 7.0)  # what stands past a row's end is not heard
    for row, sound in zip(rows, sounds, strict=True):
        row[: len(sound)] = sound
    return rows, torch.tensor([len(sound) for sound in sounds])


@pytest.mark.parametrize("bins", [80, 128])
def test_each_row_has_the_mel_of_its_sound_alone(sounds, bins):
    mels = BatchMel(bins)(*_batch(sounds))
    assert mels.shape == (len(sounds), bins, 100)
    for mel, sound in zip(mels, sounds, strict=True):
        alone = WhisperMel(bins)(sound[None])[0]
        torch.testing.assert_close(mel[:, : alone.shape[1]], alone, atol=1e-5, rtol=0)
        silence = (alone.max() - 2.0).expand(bins, 100 - alone.shape[1])
        torch.testing.assert_close(mel[:, alone.shape[1] :], silence, atol=1e-5, rtol=0)


def test_each_row_is_heard_as_its_stream_hears_it(sounds):
    mels = BatchMel(80)(*_batch(sounds), running=True)
    mel = WhisperMel(80)
    for row, sound in zip(mels, sounds, strict=True):
        power = mel.log_mel_power(sound[None])
        alone, _ = whisper_normalise_running(power, torch.tensor([WHISPER_SPEECH_MAXIMUM]))
        torch.testing.assert_close(row[:, : alone.shape[2]], alone[0], atol=1e-5, rtol=0)
