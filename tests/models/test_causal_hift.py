"""CosyVoice 3's vocoder against its official outputs, a plain computation, and itself hop by hop."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional

from tests.models import hift_cases
from tests.models.hift_cases import (
    assert_begins_anew_after_the_end,
    assert_streams_hop_together,
    distance,
    mels,
    quietened,
    streamed,
)
from tests.models.named_checkpoint import GOLDEN, NamedCheckpoint
from tests.models.plain_vocoders import PlainCausalHiFT
from vivavoce.errors import InputError
from vivavoce.models.checkpoint import fold_weight_norm, load_weights
from vivavoce.models.hift.causal import CausalHiFT, CausalHiFTConfig, SteppedSource

SMALL = CausalHiFTConfig(**hift_cases.SMALL)
HOP, AHEAD, SAMPLES_HELD = SMALL.hop, 4, 4


@pytest.fixture(scope="module", autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def small_vocoder(dtype):
    hift = CausalHiFT(SMALL).to(dtype).eval()
    hift.f0_predictor.double()
    return quietened(hift)


@pytest.fixture(scope="module")
def exact():
    return small_vocoder(torch.float64)


@pytest.fixture(scope="module")
def single():
    return small_vocoder(torch.float32)


def test_full_size_equals_the_official_code():
    hift = CausalHiFT().eval()
    load_weights(hift, fold_weight_norm(NamedCheckpoint("cosyvoice3_hift.tsv", 1, lambda *_: torch.zeros(0))))
    golden = load_file(GOLDEN / "cosyvoice3_hift.safetensors")
    mel, source = golden["mel"], golden["source"][:, 0]
    assert distance(hift.f0(mel), golden["f0"]) < 1e-6
    assert distance(hift.f0(mel, final=False), golden["f0_not_final"]) < 1e-6
    assert distance(hift.decode(mel, source), golden["pcm_unclamped"]) < 1e-4
    certain = hift.decode(mel, source, final=False)
    official = golden["pcm_unclamped_not_final"]
    assert certain.shape[1] == 36 * HOP - SAMPLES_HELD > official.shape[1] == 35 * HOP
    assert distance(certain[:, : 35 * HOP], official) < 1e-4
    assert distance(certain, golden["pcm_unclamped"][:, : certain.shape[1]]) < 1e-4


def published_source(source, f0):
    """The official recipe: phase summed at 1/480 of the rate and brought back by repeating it."""
    multiples = torch.arange(1, 10, dtype=f0.dtype)
    repeated = f0.repeat_interleave(HOP, dim=1)[..., None]  # [batch, sample, 1]
    cycles = (repeated * multiples / 24_000) % 1
    slow = functional.interpolate(cycles.transpose(1, 2), scale_factor=1 / HOP, mode="linear")
    phase = functional.interpolate(slow.cumsum(-1) * 2 * math.pi * HOP, scale_factor=HOP, mode="nearest")
    sines = 0.1 * torch.sin(phase).transpose(1, 2) * (repeated > 10)
    return torch.tanh(source.l_linear(sines).squeeze(-1))


def test_the_excitation_is_the_published_one_and_can_be_cut():
    source = SteppedSource(24_000, HOP).double()
    f0 = torch.tensor([[0.0, 0.0, 110.3, 180.0, 231.7, 9.0, 240.2, 199.9]], dtype=torch.float64)
    start = source.start(1, seed=None)
    whole = source(f0, start)
    torch.testing.assert_close(whole, published_source(source, f0), rtol=0, atol=1e-9)
    rest = source(f0[:, 3:], source.advance(f0[:, :3], start))
    torch.testing.assert_close(rest, whole[:, 3 * HOP :], rtol=0, atol=1e-12)


def test_noise_is_uniform_between_0_and_1_and_follows_its_seed():
    source = SteppedSource(24_000, HOP).double()
    source.l_linear.weight.fill_(0).view(-1)[0] = 1e-3
    source.l_linear.bias.zero_()
    f0 = torch.zeros(1, 100, dtype=torch.float64)
    noise = source(f0, source.start(1, 3))[0] / 1e-3 / (0.1 / 3)
    assert noise.min() > 0 and noise.max() < 1
    assert noise.mean().item() == pytest.approx(0.5, abs=0.01)
    assert noise.var().item() == pytest.approx(1 / 12, rel=0.03)
    assert not torch.equal(noise, source(f0, source.start(1, 4))[0] / 1e-3 / (0.1 / 3))


@pytest.mark.parametrize("frames", [1, 2, 7, 40])
def test_the_vocoder_is_the_plain_computation(exact, frames):
    plain, mel = PlainCausalHiFT(exact), mels(frames, batch=2)
    f0 = plain.f0(mel)
    torch.testing.assert_close(exact.f0(mel), f0, rtol=0, atol=1e-9)
    wanted = plain.decode(mel, published_source(exact.m_source, f0)).clamp(-0.99, 0.99)
    torch.testing.assert_close(exact(mel, seed=None), wanted, rtol=0, atol=1e-6)  # our transform's bases are float32


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_a_stream_in_any_hops_is_the_whole(exact, hops, seed):
    mel = mels(sum(hops), batch=2, seed=seed)
    sounds, _ = streamed(exact, mel, hops, seed)
    torch.testing.assert_close(torch.cat(sounds, dim=1), exact(mel, seed), rtol=0, atol=1e-10)


def test_a_stream_in_float32_holds_back_four_frames_and_four_samples(single):
    mel = mels(50, dtype=torch.float32)
    sounds, _ = streamed(single, mel, [3, 1, 1, 15, 1, 24, 5])
    torch.testing.assert_close(torch.cat(sounds, dim=1), single(mel), rtol=0, atol=1e-4)
    known = [3, 4, 5, 20, 21, 45]
    expected = [max(0, (frames - AHEAD) * HOP - SAMPLES_HELD) for frames in known] + [50 * HOP]
    assert [sum(sound.shape[1] for sound in sounds[: n + 1]) for n in range(7)] == expected
    assert single.delay_frames == AHEAD


def test_no_sample_could_come_a_frame_sooner(exact):
    mel = mels(20)
    changed = mel.clone()
    changed[..., 14] += 1
    moved = (exact(changed, seed=None) - exact(mel, seed=None))[0].abs()
    first = moved.gt(1e-12).nonzero()[0].item()
    assert first in range((14 - AHEAD) * HOP - SAMPLES_HELD, (14 - AHEAD) * HOP)


def test_the_state_of_a_long_stream_does_not_grow(exact):
    state, sizes = exact.initial_state(), set()
    for number in range(12):
        _, state = exact.step(state, mels(6))
        tensors = [state.mel, state.f0_contexts, state.source, *state.excitations, state.contexts, state.spectrum]
        if number:
            sizes.add(tuple(tensor.shape for tensor in tensors))
    assert len(sizes) == 1


def test_a_state_can_be_gone_back_to(exact):
    _, state = exact.step(exact.initial_state(), mels(9))
    kept = dataclasses.replace(state)
    first, _ = exact.step(state, mels(5, seed=1))
    exact.step(state, mels(7, seed=2))
    again, _ = exact.step(kept, mels(5, seed=1))
    assert torch.equal(first, again)


def test_streams_at_different_places_hop_together(exact):
    final = [False, False, True, False, False, False, False, True]
    assert_streams_hop_together(exact, [0, 0, 3, 3, 4, 30, 50, 70], [20, 20, 20, 20, 20, 20, 20, 7], final)


def test_after_the_end_a_stream_begins_anew(exact):
    state = assert_begins_anew_after_the_end(exact, held=AHEAD * HOP + SAMPLES_HELD)
    silence, _ = exact.step(state, mels(1)[..., :0], final=True)
    assert silence.shape == (1, 0)


def test_sound_stays_within_its_limit(exact):
    assert exact(mels(5) * 1000).abs().max() <= 0.99


def test_what_does_not_fit_the_mel_is_refused(exact):
    with pytest.raises(InputError, match=r"\[1, 480\]; a mel \[1, 6, 3\] needs \[1, 1440\]"):
        exact.decode(mels(3), torch.zeros(1, HOP))
    with pytest.raises(InputError, match=r"2 streams .* state of 1"):
        exact.step(exact.initial_state(), mels(3, batch=2))
