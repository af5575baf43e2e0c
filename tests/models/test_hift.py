"""HiFT against its official outputs, closed forms, and itself hop by hop."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

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
from tests.models.plain_vocoders import PlainHiFT
from vivavoce.errors import InputError
from vivavoce.models.checkpoint import fold_weight_norm, load_weights
from vivavoce.models.hift.model import HiFT, HiFTConfig, SampleSpan, reach
from vivavoce.models.hift.stream import HiFTStream, PublishedHiFTStream
from vivavoce.nn.vocoder import ShortFourier, SineSource, Snake
from vivavoce.nn.vq import normal_at, uniform_at

SMALL = HiFTConfig(**hift_cases.SMALL)
HOP = SMALL.hop


@pytest.fixture(scope="module", autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def small_vocoder(dtype):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return quietened(HiFT(SMALL).to(dtype).eval())


@pytest.fixture(scope="module")
def exact():
    return small_vocoder(torch.float64)


@pytest.fixture(scope="module")
def single():
    return small_vocoder(torch.float32)


def test_full_size_equals_the_official_code():
    hift = HiFT().eval()
    load_weights(hift, fold_weight_norm(NamedCheckpoint("moss_speech_hift.tsv", 1, lambda *_: torch.zeros(0))))
    golden = load_file(GOLDEN / "moss_speech_hift.safetensors")
    assert distance(hift.f0_predictor(golden["mel"]), golden["f0"]) < 1e-4
    source = hift.m_source(golden["f0_curve"], hift.m_source.start(1, seed=None))
    assert distance(source, golden["source_without_noise"][:, 0]) < 5e-4
    assert distance(hift.decode(golden["mel"], golden["source"][:, 0]), golden["pcm_unclamped"]) < 1e-4


def test_snake_is_its_formula():
    snake = Snake(2)
    snake.alpha.copy_(torch.tensor([0.5, 2.0]))
    x = torch.linspace(-3, 3, 14).reshape(1, 2, 7)
    wanted = [[v + math.sin(a * v) ** 2 / a for v in row] for a, row in zip([0.5, 2.0], x[0].tolist(), strict=True)]
    torch.testing.assert_close(snake(x)[0], torch.tensor(wanted))


def test_the_short_fourier_transform_is_torchs_and_its_own_inverse():
    fourier, signal = ShortFourier(16, 4), torch.randn(2, 96)
    wanted = torch.stft(signal, 16, 4, window=torch.hann_window(16), return_complex=True)
    spectrum = fourier(signal)
    torch.testing.assert_close(spectrum, torch.cat([wanted.real, wanted.imag], dim=1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fourier.inverse(spectrum)[:, 8:-8], signal, atol=1e-5, rtol=1e-5)
    any_spectrum = torch.randn(2, 18, 25)
    sound = torch.istft(torch.complex(*any_spectrum.chunk(2, dim=1)), 16, 4, window=torch.hann_window(16))
    torch.testing.assert_close(fourier.inverse(any_spectrum)[:, 8:-8], sound, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frames", [1, 2, 7, 40])
def test_the_vocoder_is_the_plain_computation(exact, frames):
    plain, mel = PlainHiFT(exact), mels(frames, batch=2)
    f0 = plain.f0(mel)
    torch.testing.assert_close(exact.f0_predictor(mel), f0, rtol=0, atol=1e-9)
    source = exact.m_source(f0, exact.m_source.start(2, None))
    torch.testing.assert_close(exact.decode(mel, source), plain.decode(mel, source), rtol=0, atol=1e-6)


def plain_source(harmonic):
    """Lets one harmonic through, small enough that tanh is nearly straight."""
    source = SineSource(24_000, 480).double()
    source.l_linear.weight.zero_()
    source.l_linear.weight[0, harmonic - 1] = 1e-3
    source.l_linear.bias.zero_()
    return source


@pytest.mark.parametrize(("f0", "harmonic"), [(100.0, 1), (237.3, 1), (237.3, 3), (60.0, 9)])
def test_a_constant_f0_gives_sines_of_its_multiples(f0, harmonic):
    source = plain_source(harmonic)
    sound = source(torch.full((1, 20), f0, dtype=torch.float64), source.start(1, seed=None))[0, 240:-240]
    time = torch.arange(len(sound), dtype=torch.float64) + 0.5
    start = 2 * math.pi * f0 * harmonic * 480 / 24_000
    wanted = 1e-4 * torch.sin(start + 2 * math.pi * f0 * harmonic * time / 24_000)
    torch.testing.assert_close(sound, wanted, rtol=0, atol=1e-9)


def test_unvoiced_frames_are_noise_and_voiced_ones_nearly_none():
    source = plain_source(1)
    f0 = torch.tensor([[0.0] * 50 + [200.0] * 50], dtype=torch.float64)
    noisy, clean = (source(f0, source.start(1, seed))[0] / 1e-3 for seed in (3, None))
    unvoiced, voiced = (noisy - clean).split(24_000)
    assert unvoiced.std().item() == pytest.approx(0.1 / 3, rel=0.03)
    assert voiced.std().item() == pytest.approx(0.003, rel=0.03)
    assert clean[:24_000].abs().max() == 0


def test_an_hour_of_phase_loses_nothing():
    source = plain_source(9)
    f0 = torch.full((1, 180_000), 217.7, dtype=torch.float64)
    late = source.advance(f0, source.start(1, seed=None))
    cycles = 217.7 * 9 / 24_000 * 480 * 180_000
    assert abs((late.cycles[0, 8].item() - cycles + 0.5) % 1 - 0.5) < 1e-6


def test_noise_is_normal_and_a_function_of_its_place():
    seeds, places = torch.tensor([[0], [1]]), torch.arange(200_000)
    noise = normal_at(seeds, places)
    for moment, wanted in ((1, 0.0), (2, 1.0), (4, 3.0)):
        assert noise.pow(moment).mean(-1).tolist() == pytest.approx([wanted] * 2, abs=0.05)
    assert abs(torch.corrcoef(noise)[0, 1]) < 0.01
    assert abs((noise[:, 1:] * noise[:, :-1]).mean()) < 0.01
    assert torch.equal(normal_at(seeds, places[777:999]), noise[:, 777:999])
    distant = uniform_at(seeds[0], places[:1000] + 2**32)
    assert not torch.equal(distant, uniform_at(seeds[0], places[:1000]))
    assert distant.min() > 0 and distant.max() < 1


def test_the_reach_is_what_the_network_really_sees(exact):
    left, right = reach(SMALL)
    assert (left, right) == (15, 20) == tuple(reach(HiFTConfig()))
    mel, frame = mels(60), 30
    source = exact.m_source(exact.f0_predictor(mel), exact.m_source.start(1))

    def moved(at, hear):
        return (hear(at) - hear(None))[0, frame * HOP : (frame + 1) * HOP].abs().max().item()

    def by_mel(at):
        changed = mel.clone()
        if at is not None:
            changed[..., at] += 1
        return exact(changed)

    def by_source(at):
        changed = source.clone()
        if at is not None:
            changed[:, at * HOP : (at + 1) * HOP] += 0.1
        return exact.decode(mel, changed)

    assert moved(frame + right, by_mel) > 0 == moved(frame + right + 1, by_mel)
    assert moved(frame - left, by_source) > 0 == moved(frame - left - 1, by_source)


@pytest.mark.parametrize(
    "emit", [SampleSpan(0, 3), SampleSpan(25, 26), SampleSpan(20, 40), SampleSpan(50, 60)], ids=str
)
def test_a_part_is_the_same_part_of_the_whole(exact, emit):
    mel = mels(60)
    source = exact.m_source(exact.f0_predictor(mel), exact.m_source.start(1))
    whole = exact.decode(mel, source)[:, emit.start * HOP : emit.stop * HOP]
    torch.testing.assert_close(exact.decode(mel, source, emit), whole, rtol=0, atol=1e-11)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 2))
@settings(max_examples=12, deadline=None)
def test_an_exact_stream_in_any_hops_is_the_whole(exact, hops, seed):
    mel = mels(sum(hops), batch=2, seed=seed)
    sounds, _ = streamed(HiFTStream(exact, look_right=None), mel, hops, seed)
    torch.testing.assert_close(torch.cat(sounds, dim=1), exact(mel, seed), rtol=0, atol=1e-10)


def test_an_exact_stream_in_float32(single):
    mel = mels(70, dtype=torch.float32)
    sounds, _ = streamed(HiFTStream(single, look_right=None), mel, [25, 1, 24, 20])
    torch.testing.assert_close(torch.cat(sounds, dim=1), single(mel), rtol=0, atol=1e-4)
    assert [sound.shape[1] // HOP for sound in sounds] == [5, 1, 24, 40]


def test_the_less_is_held_back_the_further_from_the_whole(exact):
    mel = mels(120)
    whole = exact(mel)
    errors = {}
    for look_right in (20, 12, 8, 5):
        stream = HiFTStream(exact, look_right)
        sounds, _ = streamed(stream, mel, [20] * 6)
        assert sounds[0].shape[1] == (20 - look_right) * HOP
        errors[look_right] = distance(torch.cat(sounds, dim=1), whole)
    published = distance(torch.cat(streamed(PublishedHiFTStream(exact), mel, [20] * 6)[0], dim=1), whole)
    assert errors[20] < 1e-10 < errors[12] < errors[8] < errors[5] < published
    assert errors[8] < published / 5


def test_hop_edges_are_as_smooth_as_the_inside(exact):
    mel = mels(200)
    sound = torch.cat(streamed(HiFTStream(exact), mel, [20] * 10)[0], dim=1)[0]
    bend = (sound[2:] - 2 * sound[1:-1] + sound[:-2]).abs()
    edges = torch.tensor([(20 * hop - 8) * HOP for hop in range(1, 10)])
    at_edges = torch.stack([bend[edge - 3 : edge + 2].max() for edge in edges])
    inside = bend.unfold(0, 5, 5).amax(-1)
    assert at_edges.mean() < 1.3 * inside.mean()
    assert at_edges.max() < inside.max()


def test_the_state_of_a_long_stream_does_not_grow(exact):
    stream = HiFTStream(exact)
    state = stream.initial_state()
    for _ in range(12):
        _, state = stream.step(state, mels(10))
    assert state.mel.shape[-1] == reach(SMALL).left + stream.delay_frames
    assert state.f0.shape[-1] == reach(SMALL).left


@pytest.mark.parametrize("look_right", [None, 8, 0])
def test_streams_at_different_places_hop_together(exact, look_right):
    final = [False, False, True, False, False, True]
    stream = HiFTStream(exact, look_right)
    assert_streams_hop_together(stream, [0, 0, 3, 30, 50, 70], [20, 20, 20, 20, 20, 7], final)


def test_after_the_end_a_stream_begins_anew(exact):
    for stream in (HiFTStream(exact), PublishedHiFTStream(exact)):
        assert_begins_anew_after_the_end(stream, held=8 * HOP)


def test_noise_follows_the_seed(exact):
    mel = mels(4)
    assert torch.equal(exact(mel, seed=1), exact(mel, seed=1))
    assert not torch.equal(exact(mel, seed=1), exact(mel, seed=2))
    assert not torch.equal(exact(mel, seed=1), exact(mel, seed=None))


def test_the_published_protocol_overlaps_by_eight_frames(exact):
    mel = mels(50)
    overlap = 8 * HOP

    def made(mel, cached):
        source = exact.m_source(exact.f0_predictor(mel), exact.m_source.start(1, None))
        source[:, : cached.shape[1]] = cached
        return exact.decode(mel, source), source

    first, source = made(mel[..., :20], torch.zeros(1, 0))
    second, source = made(mel[..., 12:40], source[:, -overlap:])
    third, _ = made(mel[..., 32:], source[:, -overlap:])
    window = torch.hamming_window(2 * overlap, periodic=False)
    for new, old in ((second, first), (third, second)):
        new[:, :overlap] = new[:, :overlap] * window[:overlap] + old[:, -overlap:] * window[overlap:]
    wanted = [first[:, :-overlap], second[:, :-overlap], third]
    sounds, _ = streamed(PublishedHiFTStream(exact), mel, [20, 20, 10], seed=None)
    for ours, theirs in zip(sounds, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    small = torch.cat(streamed(PublishedHiFTStream(exact), mel, [3, 2, 1, 4, 30, 10], seed=None)[0], dim=1)
    assert small.shape[1] == 50 * HOP


def test_one_frame_is_enough(exact):
    mel = mels(1)
    assert exact(mel).shape == (1, HOP)
    sound, _ = HiFTStream(exact).step(HiFTStream(exact).initial_state(), mel, final=True)
    torch.testing.assert_close(sound, exact(mel), rtol=0, atol=1e-12)


def test_sound_stays_within_its_limit(exact):
    assert exact(mels(5) * 1000).abs().max() <= 0.99


def test_bad_settings_are_refused(exact):
    with pytest.raises(InputError, match="look_right is -1"):
        HiFTStream(exact, look_right=-1)
    stream = HiFTStream(exact)
    with pytest.raises(InputError, match=r"2 streams .* state of 1"):
        stream.step(stream.initial_state(), mels(3, batch=2))


@pytest.mark.gpu
def test_replayed_hops_are_the_hops():
    hift = small_vocoder(torch.float32).cuda()
    plain, replayed = HiFTStream(hift), HiFTStream(hift, graphs=True)
    mel = mels(160, batch=2, dtype=torch.float32).cuda()
    wanted, _ = streamed(plain, mel, [20] * 8)
    sounds, _ = streamed(replayed, mel, [20] * 8)
    torch.testing.assert_close(torch.cat(sounds, dim=1), torch.cat(wanted, dim=1), rtol=0, atol=1e-4)
