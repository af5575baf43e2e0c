"""A job that fails in a pass over several fails alone, and the sound and codes of the others are the same as ever."""

import asyncio

import pytest
import torch

from tests.s2s.test_local_codec import LEFT, codes, prompt
from vivavoce.minis.untrained import untrained_codec
from vivavoce.models.moss_speech.codec import GraphedCodec
from vivavoce.models.moss_speech.cpu import CpuCodec
from vivavoce.runtime.executor import DeadlineExecutor
from vivavoce.s2s.local_codec import LocalCodec

KINDS = {"plain": lambda codec: codec, "cpu": CpuCodec, "graphed": GraphedCodec}
POISON = 999
FIRST = [8, 12, 8]  # codes of each reply's first hop: the second then decodes more of the middle one


class PlantedError(Exception):
    """The fault of these tests."""


@pytest.fixture(params=KINDS)
def codec(request):
    """A codec whose passes are made in full and then fail where a code is POISON, or a sample is beyond 4."""
    made = KINDS[request.param](untrained_codec())

    class Faulty(type(made)):
        def step_batch(self, states, given, final):
            result = super().step_batch(states, given, final)
            if any(POISON in each.tolist() for each in given):
                raise PlantedError
            return result

    class FaultyEncoder(type(made.speech_encoder)):
        def step_batch(self, states, samples, final=None):
            result = super().step_batch(states, samples, final)
            if any(len(each) and each.max() > 4 for each in samples):
                raise PlantedError
            return result

    made.__class__, made.speech_encoder.__class__ = Faulty, FaultyEncoder
    return made


async def together(batcher, executor, jobs):
    """What comes of jobs that wait when the work begins."""
    tasks = [asyncio.ensure_future(batcher.do(job)) for job in jobs]
    await asyncio.sleep(0)
    if not executor.is_open:
        executor.start()
    return await asyncio.gather(*tasks, return_exceptions=True)


def replies(codec, voice):
    """Three replies, each after its first hop."""
    with torch.inference_mode():
        started = [codec.start(voice, LEFT) for _ in FIRST]
        return [
            codec.step(state, codes(count, seed))[1]
            for seed, (state, count) in enumerate(zip(started, FIRST, strict=True))
        ]


async def test_a_reply_that_fails_leaves_the_sound_of_the_others(codec):
    voice, executor = codec.flow.voice(prompt()), DeadlineExecutor("viva-test")
    local_codec = LocalCodec(codec, LEFT, executor=executor)
    pieces = [codes(6, 40 + seed) % 900 for seed in range(3)]
    with torch.inference_mode():
        wanted = [codec.step(state, piece) for state, piece in zip(replies(codec, voice), pieces, strict=True)]
        after = [codec.step(state, piece)[0] for (_, state), piece in zip(wanted, pieces, strict=True)]
        wanted = [sound for sound, _ in wanted]
    bad = pieces[2].clone()
    bad[1] = POISON
    local_codec.vocoder.start()
    given = [*pieces[:2], bad]
    states = replies(codec, voice)
    one, two, failed = await together(
        local_codec.vocoder, executor, [(s, c, False) for s, c in zip(states, given, strict=True)]
    )
    assert isinstance(failed, PlantedError)
    for (sound, state), expected, next_piece, later in zip((one, two), wanted, pieces, after, strict=False):
        torch.testing.assert_close(sound, expected.float().cpu(), rtol=0, atol=1e-5)
        again, _ = await local_codec.vocoder.do((state, next_piece, False))
        torch.testing.assert_close(again, later.float().cpu(), rtol=0, atol=1e-5)
    assert local_codec.vocoder.batches >= 1 and len(one[0]) and len(two[0]) > len(one[0])
    await local_codec.vocoder.close()
    executor.close()


async def test_a_turn_that_fails_leaves_the_codes_of_the_others(codec):
    executor = DeadlineExecutor("viva-test")
    local_codec = LocalCodec(codec, LEFT, executor=executor)
    generator = torch.Generator().manual_seed(3)
    sounds = torch.randn(3, 4, 2560, generator=generator) * 0.2

    def turn(number):
        state, heard = codec.speech_encoder.initial_state(), []
        for piece in sounds[number]:
            new, state = codec.speech_encoder.step(state, piece)
            heard += new.tolist()
        return heard

    with torch.inference_mode():
        wanted = [turn(number) for number in range(3)]
    local_codec.speech_encoder.start()
    states, heard = [codec.speech_encoder.initial_state() for _ in range(3)], [[] for _ in range(3)]
    for number in range(4):
        given = [sounds[turn, number].clone() for turn in range(3)]
        given[2][7] = 9.0 if number == 2 else given[2][7]
        alive = range(3 if number < 3 else 2)
        results = await together(
            local_codec.speech_encoder, executor, [(states[turn], given[turn], False) for turn in alive]
        )
        for index, result in enumerate(results):
            if number == 2 and index == 2:
                assert isinstance(result, PlantedError)
            else:
                heard[index] += result[0]
                states[index] = result[1]
    assert heard[:2] == wanted[:2]
    assert heard[2] == wanted[2][: len(heard[2])]
    await local_codec.speech_encoder.close()
    executor.close()
