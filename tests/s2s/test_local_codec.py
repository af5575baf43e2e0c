"""The codec for many conversations: two ways of making sound give what one gives, whoever goes which way."""

import asyncio
from dataclasses import replace

import pytest
import torch

from vivavoce.errors import InputError
from vivavoce.minis.untrained import untrained_codec
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.moss_speech.codec import GraphedCodec
from vivavoce.nn.process_settings import cudnn_benchmark
from vivavoce.s2s.local_codec import SOON_SECONDS, LocalCodec

LEFT, SOON, LATER = 3, 0.1, 2 * SOON_SECONDS
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def codes(count, seed):
    return torch.randint(1000, (count,), generator=torch.Generator().manual_seed(seed))


def prompt():
    generator = torch.Generator().manual_seed(0)
    mel, speaker = torch.randn(40, 80, generator=generator), torch.randn(192, generator=generator)
    return VoicePrompt(codes(10, 99), mel, speaker)


@pytest.fixture(scope="module", params=DEVICES)
def graphed(request):
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield GraphedCodec(untrained_codec(request.param))
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def plain():
    return untrained_codec()


async def said(local_codec, voice, seed, urgencies):
    """A reply in pieces, each with its urgency."""
    state, sounds = voice, []
    pieces = [codes(8 if number == 0 else 5, 100 * seed + number) for number in range(len(urgencies))]
    for number, (piece, urgency) in enumerate(zip(pieces, urgencies, strict=True), start=1):
        sound, state = await local_codec.vocoder.do((state, piece, number == len(urgencies)), urgency)
        sounds.append(sound)
    return torch.cat(sounds), pieces


def spoken(codec, pieces):
    """The same by one codec, one piece after another."""
    state, sounds = codec.start(codec.flow.voice(prompt()), LEFT), []
    for number, piece in enumerate(pieces, start=1):
        sound, state = codec.step(state, piece, final=number == len(pieces))
        sounds.append(sound)
    return torch.cat(sounds)


@pytest.mark.full
async def test_replies_that_change_batchers_sound_the_same(graphed, plain):
    local_codec = LocalCodec(graphed, LEFT)
    voice = graphed.flow.voice(prompt())
    local_codec.warm_up([voice], (1, 4), (5, 10))
    local_codec.speech_encoder.start()
    local_codec.vocoder.start()
    ways = [[SOON, SOON, LATER, SOON], [SOON, LATER, LATER, LATER], [LATER, SOON, SOON, SOON]]
    replies = await asyncio.gather(*(said(local_codec, voice, seed, way) for seed, way in enumerate(ways)))
    await local_codec.speech_encoder.close()
    await local_codec.vocoder.close()
    for sound, pieces in replies:
        expected = spoken(plain, pieces)
        assert sound.shape == expected.shape
        # The end is another: as if the last frame went on.
        known = len(expected) - plain.vocoder.reach.right * plain.vocoder.hift.config.hop
        assert (sound - expected)[:known].abs().max() < 2e-4 * max(1.0, float(expected.abs().max()))
    assert local_codec.vocoder.jobs == 12
    assert local_codec.vocoder.waiting == 0


@pytest.mark.parametrize(("count", "urgency", "is_quick"), [(5, SOON, 1), (10, SOON, 1), (15, SOON, 0), (5, LATER, 0)])
async def test_long_urgent_hops_use_the_usual_batcher(graphed, count, urgency, is_quick):
    local_codec = LocalCodec(graphed, LEFT)
    local_codec.vocoder.start()
    _, state = await local_codec.vocoder.do((graphed.flow.voice(prompt()), codes(8, 1), False), SOON)
    usual, quick = local_codec.vocoder.ways
    before = usual.jobs, quick.jobs
    await local_codec.vocoder.do((state, codes(count, 2), False), urgency)
    await local_codec.vocoder.close()
    assert (usual.jobs, quick.jobs) == (before[0] + 1 - is_quick, before[1] + is_quick)


@pytest.mark.gpu
async def test_hops_are_captured_where_the_process_lets_cudnn_time_its_engines(plain):
    with cudnn_benchmark.held(True):
        codec = GraphedCodec(untrained_codec("cuda"))
        local_codec = LocalCodec(codec, LEFT)
        voice = codec.flow.voice(prompt())
        local_codec.vocoder.start()
        sound, pieces = await said(local_codec, voice, 7, [SOON, SOON, LATER])
        await local_codec.vocoder.close()
    expected = spoken(plain, pieces)
    assert sound.shape == expected.shape
    assert torch.isfinite(sound).all()


async def test_non_finite_sound_fails_alone(graphed):
    local_codec = LocalCodec(graphed, LEFT)
    voice = graphed.flow.voice(prompt())
    broken = replace(voice, speaker=torch.full_like(voice.speaker, torch.nan))
    local_codec.vocoder.start()
    results = await asyncio.gather(
        *(local_codec.vocoder.do((each, codes(8, 1), False), SOON) for each in (voice, broken)), return_exceptions=True
    )
    await local_codec.vocoder.close()
    assert torch.isfinite(results[0][0]).all()
    assert isinstance(results[1], InputError)


async def test_batched_turns_have_the_codes_of_the_plain_encoder(graphed, plain):
    local_codec = LocalCodec(graphed, LEFT)
    local_codec.speech_encoder.start()
    local_codec.vocoder.start()
    sound = 0.2 * torch.randn(8000, generator=torch.Generator().manual_seed(3))
    first, state = await local_codec.speech_encoder.do((graphed.speech_encoder.initial_state(), sound[:4000], False))
    rest, _ = await local_codec.speech_encoder.do((state, sound[4000:], True))
    await local_codec.speech_encoder.close()
    await local_codec.vocoder.close()
    heard, _ = plain.speech_encoder.step_batch([plain.speech_encoder.initial_state()], [sound], [True])
    assert first + rest == heard[0].tolist()


def test_the_memory_of_a_reply_is_estimated_from_its_voice(graphed):
    voice = graphed.flow.voice(prompt())
    kept = graphed.start(voice, LEFT).nbytes
    assert LocalCodec(graphed, LEFT).reply_bytes(voice) == pytest.approx(kept, rel=0.3)
    assert LocalCodec(graphed, None).reply_bytes(voice) == 0
