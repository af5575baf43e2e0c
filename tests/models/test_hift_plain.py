"""HiFT whose network says real and imaginary parts: not published, but what the miniature's vocoder learned with."""

import dataclasses

import pytest
import torch

from tests.models.hift_cases import SMALL, distance, mels, quietened, streamed
from vivavoce.models.hift.cpu import CpuHiFT
from vivavoce.models.hift.model import HiFT, HiFTConfig, polar_to_rectangular
from vivavoce.models.hift.stream import HiFTStream

PLAIN = HiFTConfig(**SMALL, overtones=24, plain_spectrum=True)


@pytest.fixture(scope="module")
def hift():
    return quietened(HiFT(PLAIN).double().eval().requires_grad_(False))


def test_published_angles_stay_within_a_radian_and_plain_parts_as_they_are():
    spectrum = 4 * torch.randn(1, 18, 50, dtype=torch.float64)
    real, imaginary = polar_to_rectangular(spectrum).chunk(2, dim=1)
    assert torch.atan2(imaginary, real).abs().max() <= 1.0
    magnitude = spectrum.chunk(2, dim=1)[0].exp().clamp(max=100.0)
    torch.testing.assert_close(torch.hypot(real, imaginary), magnitude)
    assert polar_to_rectangular(spectrum, plain=True) is spectrum


def test_a_stream_is_the_whole_sound(hift):
    mel = mels(60)
    sounds, _ = streamed(HiFTStream(hift, look_right=None), mel, [20, 20, 20])
    assert distance(torch.cat(sounds, dim=1), hift(mel)) < 1e-9
    published = HiFT(dataclasses.replace(PLAIN, plain_spectrum=False)).double().eval()
    published.load_state_dict(hift.state_dict())
    assert distance(published(mel), hift(mel)) > 0.01


def test_on_a_cpu_it_is_the_same_in_fewer_passes(hift):
    single, mel = HiFT(hift.config).eval().requires_grad_(False), mels(40, dtype=torch.float32)
    single.load_state_dict(hift.state_dict())
    assert distance(CpuHiFT(single)(mel), single(mel)) < 1e-3  # random weights: 3.1e-4 was seen
