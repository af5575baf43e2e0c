"""The codec's way on a CPU gives the sound of the plain one, however a reply is cut, alone or beside others."""

import pytest
import torch

from vivavoce import hub
from vivavoce.audio.level import buzz
from vivavoce.cpu_speed import has_products_in
from vivavoce.minis.untrained import untrained_codec
from vivavoce.models.hift.cpu import NOISE_BLOCK, CpuHiFT
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.models.moss_speech.cpu import CpuCodec
from vivavoce.nn.vocoder import Snake

PIECES = [(8,), (5,), (3, 2), (10,), (5,), (4,)]
TOLERANCE = 1.5e-3  # the plain source rounds the phase of every harmonic, the flat one that of the lowest
needs_bfloat16 = pytest.mark.skipif(
    not has_products_in(torch.bfloat16), reason="this processor has no products in bfloat16"
)


@pytest.fixture(scope="module")
def codecs():
    torch.manual_seed(0)
    plain = untrained_codec()
    for snake in (module for module in plain.vocoder.hift.modules() if isinstance(module, Snake)):
        snake.alpha.data.uniform_(0.3, 2.0)
    return plain, CpuCodec(plain)


@pytest.fixture(scope="module")
def voices(codecs):
    with torch.no_grad():
        return [codec.voice(buzz(2.0, 24_000, seed=1), torch.linspace(-1, 1, 192)) for codec in codecs]


def codes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 1024, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def stream(codec, voice, given: torch.Tensor, left_chunks: int | None = 2) -> torch.Tensor:
    state, sounds, begin = codec.start(voice, left_chunks), [], 0
    for size in (size for piece in PIECES for size in piece):
        sound, state = codec.step(state, given[begin : begin + size])
        sounds.append(sound)
        begin += size
    sound, _ = codec.step(state, given[begin:], final=True)
    return torch.cat([*sounds, sound])


@pytest.mark.parametrize("left_chunks", [2, None])
def test_a_reply_sounds_as_from_the_plain_codec(codecs, voices, left_chunks):
    plain, flat = (stream(codec, voice, codes(50, 1), left_chunks) for codec, voice in zip(codecs, voices, strict=True))
    assert plain.shape == flat.shape and len(plain) > 80_000
    assert plain.abs().max() > 0.01
    assert (plain - flat).abs().max() < TOLERANCE * plain.abs().max()


def test_replies_made_together_sound_as_alone(codecs, voices):
    flat, voice = codecs[1], voices[1]
    with torch.inference_mode():
        states = [flat.start(voice, 2) for _ in range(3)]
        _, states = flat.step_batch(states, [codes(8, seed) for seed in range(3)], [False] * 3)
        together, _ = flat.step_batch(states, [codes(10, 10 + seed) for seed in range(3)], [False, False, True])
        for seed in range(3):
            _, state = flat.step(flat.start(voice, 2), codes(8, seed))
            alone, _ = flat.step(state, codes(10, 10 + seed), final=seed == 2)
            assert (alone - together[seed]).abs().max() < TOLERANCE * alone.abs().max()


def decibels_below(other: torch.Tensor, one: torch.Tensor) -> float:
    """How far the difference of two signals is below the second."""
    return float(10 * (one.double().square().mean() / (other - one).double().square().mean()).log10())


@needs_bfloat16
def test_in_bfloat16_mel_and_sound_are_the_same_but_for_coarse_rounding_however_they_are_cut(codecs, voices):
    exact, coarse = codecs[1], CpuCodec(codecs[0], torch.bfloat16)
    with torch.inference_mode():
        voice = coarse.voice(buzz(2.0, 24_000, seed=1), torch.linspace(-1, 1, 192))
        assert voice.cache.nbytes < 0.6 * voices[1].cache.nbytes
        mel, _ = exact.flow.step(exact.flow.start(voices[1], 2), codes(30, 1), final=True)
        whole, _ = coarse.flow.step(coarse.flow.start(voice, 2), codes(30, 1), final=True)
        first, state = coarse.flow.step(coarse.flow.start(voice, 2), codes(30, 1)[:13])
        cut = torch.cat([first, coarse.flow.step(state, codes(30, 1)[13:], final=True)[0]], dim=1)
        sounds = [each.vocoder.step(each.vocoder.initial_state(), mel[None], final=True)[0] for each in (exact, coarse)]
    for other in (whole, cut):
        assert decibels_below(other, mel) > 40
    assert decibels_below(sounds[1], sounds[0]) > 27  # 30 measured: random weights amplify every rounding


@needs_bfloat16
def test_in_bfloat16_the_error_with_trained_weights_is_inaudible():
    plain = MossSpeechCodec.load(hub.resolve("mini-speech") / "codec")
    coarse = CpuCodec(plain, torch.bfloat16)
    prompt = plain.named.prompt("af_heart")
    with torch.inference_mode():
        mels = [
            each.flow.step(each.flow.start(each.flow.voice(prompt), 2), prompt.codes[:20], final=True)[0]
            for each in (coarse, plain)
        ]
        assert decibels_below(*mels) > 45
        mel = mels[1][None]
        sounds = [each.vocoder.step(each.vocoder.initial_state(), mel, final=True)[0] for each in (coarse, plain)]
        assert decibels_below(*sounds) > 44


def test_excitation_above_the_rate_is_not_looked_up(codecs):
    plain, flat = (codec.vocoder.hift.m_source for codec in codecs)
    f0 = torch.full((1, 4), 1.5 * plain.rate / plain.harmonics)
    assert (plain(f0, plain.start(1, None)) - flat(f0, flat.start(1, None))).abs().max() < 1e-5


def test_noise_that_is_looked_up_is_the_noise_of_its_place(codecs):
    plain, flat = (codec.vocoder.hift.m_source for codec in codecs)
    frames = NOISE_BLOCK // plain.hop + 7  # over a block's end
    f0 = torch.where(torch.arange(frames) % 5 == 0, 0.0, 120.0)[None]
    for seed in (0, 5, None):
        start = plain.start(1, seed)
        moved = plain.advance(f0[:, :3], start)
        for begin in (start, moved):
            assert (plain(f0, begin) - flat(f0, begin)).abs().max() < 4e-5


def test_a_snake_that_is_too_flat_is_left_to_the_plain_vocoder(codecs):
    hift = untrained_codec().vocoder.hift
    assert CpuHiFT.suits(hift)
    hift.resblocks[0].activations1[0].alpha.data[0] = 0.0
    assert not CpuHiFT.suits(hift)
