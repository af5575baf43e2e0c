"""Windows released by one reply are reused by another, and the sound does not change."""

import asyncio

import pytest
import torch

from vivavoce.minis.untrained import untrained_codec
from vivavoce.models.flow.cuda import WindowPool
from vivavoce.models.flow.state import FlowCache, VoicePrompt
from vivavoce.models.moss_speech.codec import GraphedCodec
from vivavoce.s2s.local_codec import LocalCodec

LEFT = 2
SIZES = (8, 5, 10, 5, 4)


def prompt():
    generator = torch.Generator().manual_seed(0)
    mel, speaker = torch.randn(52, 80, generator=generator), torch.randn(192, generator=generator)
    return VoicePrompt(torch.arange(13), mel, speaker)


def codes(seed):
    return torch.randint(64, (sum(SIZES),), generator=torch.Generator().manual_seed(seed)).split(SIZES)


def alone(codec, seed):
    state, sounds = codec.start(codec.flow.voice(prompt()), LEFT), []
    for number, piece in enumerate(codes(seed), start=1):
        sound, state = codec.step(state, piece, final=number == len(SIZES))
        sounds.append(sound)
    return torch.cat(sounds)


async def served(local_codec, voice, seeds):
    """Replies at once, each in pieces, now one way, now the other."""

    async def reply(seed):
        state, sounds = voice, []
        for number, piece in enumerate(codes(seed), start=1):
            urgency = 0.1 if (seed + number) % 2 else 1.5
            sound, state = await local_codec.vocoder.do((state, piece, number == len(SIZES)), urgency)
            sounds.append(sound)
        return torch.cat(sounds)

    return await asyncio.gather(*map(reply, seeds))


@pytest.mark.gpu
def test_replies_in_windows_of_others_sound_as_if_they_were_alone():
    tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    plain = untrained_codec()
    expected = {seed: alone(plain, seed) for seed in range(4)}
    local_codec = LocalCodec(GraphedCodec(untrained_codec("cuda")), LEFT)
    voice = local_codec.codec.flow.voice(prompt())
    local_codec.warm_up([voice], (1, 2), (5, 10))

    async def serve():
        local_codec.speech_encoder.start()
        local_codec.vocoder.start()
        sounds = [sound for seeds in ((0, 1), (2, 3), (0, 3)) for sound in await served(local_codec, voice, seeds)]
        await local_codec.speech_encoder.close()
        await local_codec.vocoder.close()
        return sounds

    sounds = asyncio.run(serve())
    until = -plain.vocoder.reach.right * plain.vocoder.hift.config.hop  # the end is as if the last frame went on
    for seed, sound in zip((0, 1, 2, 3, 0, 3), sounds, strict=True):
        assert sound.shape == expected[seed].shape
        assert (sound - expected[seed])[:until].abs().max() <= 2e-4 * max(1.0, expected[seed].abs().max())
    torch.backends.cudnn.allow_tf32 = tf32


def cache(flow, slots):
    sizes, like = flow.config, flow.spk_embed_affine_layer.weight
    return FlowCache.blank(sizes.encoder, sizes.estimator, sizes.euler_steps, like).with_empty_windows(slots)


def test_only_windows_of_its_own_are_given_to_others():
    flow, pool = untrained_codec().flow, WindowPool()
    one, two = cache(flow, 10), cache(flow, 10)
    pool.release(one, one)
    both = FlowCache.stack([one, two])
    pool.release(both.stream(0, 10), two)
    assert pool.acquire(10) is None
    assert pool.nbytes == 0
    pool.release(one, two)
    assert pool.nbytes == one.nbytes and pool.acquire(15) is None
    taken = pool.acquire(10)
    assert taken is not None and taken.mel_windows.data_ptr() == one.mel_windows.data_ptr()
    assert pool.acquire(10) is None
