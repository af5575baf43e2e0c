"""Pitch is measured where there is one, and nowhere else."""

import math

import pytest
import torch

from vivavoce.train.flow_vocoder import pitch

RATE, HOP = 16_000, 320
TIME = torch.arange(2 * RATE) / RATE
CENTRES = torch.arange(len(TIME) // HOP) * HOP + HOP // 2


def _buzz(frequency: torch.Tensor, harmonics: int = 15, missing: tuple[int, ...] = ()) -> torch.Tensor:
    phase = 2 * math.pi * torch.cumsum(frequency / RATE, 0)
    return 0.1 * sum(torch.sin(k * phase) / k for k in range(1, harmonics + 1) if k not in missing)


@pytest.mark.parametrize("frequency", [70.0, 110.0, 233.0, 350.0])
@pytest.mark.parametrize("harmonics", [1, 15])
def test_a_steady_tone_has_its_pitch_everywhere(frequency, harmonics):
    found = pitch(_buzz(torch.full_like(TIME, frequency), harmonics)[None], RATE, HOP)[0]
    assert found.shape == (100,)
    torch.testing.assert_close(found[2:-2], torch.full((96,), frequency), rtol=0.01, atol=0)


def test_a_glide_is_followed_within_one_percent():
    frequency = 120 * 2 ** torch.sin(2 * math.pi * 0.6 * TIME)
    found = pitch(_buzz(frequency)[None], RATE, HOP)[0]
    assert (found[2:-2] > 0).all()
    assert ((found - frequency[CENTRES]) / frequency[CENTRES])[2:-2].abs().max() < 0.01


def test_pitch_without_the_fundamental():
    found = pitch(_buzz(torch.full_like(TIME, 105.0), missing=(1,))[None], RATE, HOP)[0]
    torch.testing.assert_close(found[2:-2], torch.full((96,), 105.0), rtol=0.01, atol=0)


def test_noise_and_silence_have_no_pitch():
    noise = 0.1 * torch.randn(2 * RATE, generator=torch.Generator().manual_seed(0))
    found = pitch(torch.stack([noise, torch.zeros(2 * RATE)]), RATE, HOP)
    assert (found[0] > 0).float().mean() < 0.03
    assert (found[1] == 0).all()


def test_voice_begins_and_ends_where_it_does():
    sound = _buzz(torch.full_like(TIME, 130.0))
    sound[: RATE // 2] = 0.01 * torch.randn(RATE // 2, generator=torch.Generator().manual_seed(1))
    sound[-RATE // 2 :] = 0
    voiced = pitch(sound[None], RATE, HOP)[0] > 0
    assert not voiced[:23].any() and not voiced[77:].any()
    assert voiced[27:73].all()


def test_a_batch_is_its_rows():
    sounds = torch.stack([_buzz(torch.full_like(TIME, f)) for f in (90.0, 180.0)])
    together = pitch(sounds, RATE, HOP)
    torch.testing.assert_close(together, torch.cat([pitch(row[None], RATE, HOP) for row in sounds]), rtol=1e-4, atol=0)
