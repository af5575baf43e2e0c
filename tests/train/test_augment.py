"""Augmentation: shapes stay, the seed decides, and every change does what its name says."""

import math

import pytest
import torch

from vivavoce.train.augment import (
    NOISES,
    RATE,
    Augmenter,
    at_snr,
    clipped,
    equalise,
    inside,
    levelled,
    mask_mel,
    mu_law,
    noise,
    resample,
    reverberate,
    telephone,
)

TIME = RATE


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tone(*hertz: float) -> torch.Tensor:
    return torch.stack([0.3 * torch.sin(2 * math.pi * pitch * torch.arange(TIME) / RATE) for pitch in hertz])


def loudest(samples: torch.Tensor) -> torch.Tensor:
    """The strongest frequency of each row, in Hz."""
    return torch.fft.rfft(samples * torch.hann_window(samples.shape[1])).abs().argmax(1) * (RATE / samples.shape[1])


def level(samples: torch.Tensor) -> torch.Tensor:
    return samples.square().mean(1).sqrt()


@pytest.fixture
def speech():
    lengths = torch.tensor([16_000, 12_000, 9_000, 4_000])
    syllables = (torch.sin(2 * math.pi * 3 * torch.arange(TIME) / RATE) > 0).float()
    return tone(140, 220, 310, 180) * syllables * inside(lengths, TIME), lengths


def test_shapes_and_the_silence_behind_the_end_stay(speech):
    samples, lengths = speech
    changed, shorter = Augmenter("cpu", 0)(samples, lengths)
    assert changed.shape == samples.shape
    assert shorter.shape == lengths.shape and shorter.dtype == lengths.dtype
    assert changed.isfinite().all() and changed.abs().max() <= 1
    assert (shorter <= TIME).all() and (shorter > 0.7 * lengths.clamp(max=TIME) / 1.0).all()
    assert (changed * (1 - inside(shorter, TIME))).abs().max() == 0


def test_the_seed_decides_everything(speech):
    first, second, other = (Augmenter("cpu", seed)(*speech)[0] for seed in (4, 4, 5))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_each_call_changes_an_utterance_anew(speech):
    augmenter = Augmenter("cpu", 0)
    assert not torch.equal(augmenter(*speech)[0], augmenter(*speech)[0])


def test_without_strength_only_the_level_changes(speech):
    samples, lengths = speech
    changed, same = Augmenter("cpu", 0, strength=0.0)(samples, lengths)
    assert torch.equal(same, lengths)
    likeness = torch.nn.functional.cosine_similarity(changed, samples)
    assert (likeness > 0.999).all()


def test_silence_stays_finite():
    changed, _ = Augmenter("cpu", 0)(torch.zeros(4, TIME), torch.full((4,), TIME))
    assert changed.isfinite().all()


def test_resampling_moves_pitch_and_length_together():
    lengths = torch.tensor([8_000, 8_000, 8_000])
    factor = torch.tensor([0.8, 1.0, 1.25])
    played, shorter = resample(tone(1000, 1000, 1000), lengths, factor)
    heard = torch.stack([loudest(played[row : row + 1, :6_000])[0] for row in range(3)])
    assert torch.allclose(heard, 1000 * factor, atol=4)
    assert shorter.tolist() == [10_000, 8_000, 6_400]


def test_resampling_folds_nothing_back_below_half_the_rate():
    played, _ = resample(tone(7_500), torch.tensor([TIME]), torch.tensor([1.25]))
    assert level(played[:, : TIME // 2]) < 0.01


def test_resampling_by_one_changes_nothing():
    samples = tone(440, 2_500)
    played, lengths = resample(samples, torch.tensor([TIME, TIME]), torch.ones(2))
    assert torch.allclose(played, samples, atol=1e-3)
    assert lengths.tolist() == [TIME, TIME]


@pytest.mark.parametrize("kind", NOISES)
def test_noise_lies_at_the_level_asked_for(kind, speech):
    samples, lengths = speech
    bed = noise(kind, samples, generator())
    assert torch.allclose(level(bed), torch.ones(4), atol=0.05)
    mixed = at_snr(samples, bed, 15.0, lengths)
    where = inside(lengths, TIME)
    ratio = (samples * where).square().sum(1) / ((mixed - samples) * where).square().sum(1)
    assert torch.allclose(10 * ratio.log10(), torch.full((4,), 15.0), atol=0.05)


def test_pink_and_brown_noise_fall_with_frequency():
    shape = torch.zeros(8, TIME)
    shares = []
    for kind in ("white", "pink", "brown"):
        power = torch.fft.rfft(noise(kind, shape, generator())).abs().square().mean(0)
        shares.append(float(power[4_000:].sum() / power.sum()))
    assert shares[0] > 0.4 > shares[1] > 0.05 > shares[2]


def test_a_telephone_drops_what_lies_outside_its_band():
    before = tone(100, 1_000, 5_000)
    share = level(telephone(before)) / level(before)
    assert share[0] < 0.01 and 0.98 < share[1] < 1.02 and share[2] < 0.01


def test_a_room_keeps_the_direct_sound_and_adds_a_tail():
    click = torch.zeros(2, TIME)
    click[:, 100] = 1.0
    seconds = torch.tensor([0.1, 0.6])
    rung = reverberate(click, seconds, generator())
    assert torch.allclose(rung[:, 100], torch.ones(2), atol=1e-4)
    assert rung[:, :100].abs().max() < 1e-5
    late = rung[:, 3_000:].square().sum(1) / rung[:, 101:].square().sum(1)
    assert late[1] > 10 * late[0]


def test_an_equaliser_stays_within_its_decibels():
    samples = torch.randn(4, TIME, generator=generator())
    gain = torch.fft.rfft(equalise(samples, generator(), 6.0)).abs() / torch.fft.rfft(samples).abs()
    assert gain.max() <= 10 ** (6 / 20) * 1.01 and gain.min() >= 10 ** (-6 / 20) * 0.99
    assert gain.std(1).min() > 0.02


def test_mu_law_has_eight_bits():
    ramp = torch.linspace(-1, 1, 20_000)[None]
    coded = mu_law(ramp)
    assert len(coded.unique()) <= 256
    assert (coded - ramp).abs().max() < 0.03


def test_levels_are_set_and_peaks_are_cut():
    samples = tone(200, 300)
    assert torch.allclose(level(levelled(samples, torch.tensor([0.1, 0.01]))), torch.tensor([0.1, 0.01]), rtol=0.01)
    assert (clipped(samples, generator()).abs().amax(1) < 0.91 * samples.abs().amax(1)).all()


def test_masks_hide_bands_and_spans():
    mel = torch.randn(8, 80, 200, generator=generator())
    masked = mask_mel(mel, generator())
    hidden = (masked != mel).float().mean(dim=(1, 2))
    assert 0.05 < hidden.mean() < 0.5
    assert torch.equal(masked, mask_mel(mel, generator()))
