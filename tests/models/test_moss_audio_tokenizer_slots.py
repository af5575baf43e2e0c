"""Streams in slots, stepped together however far each has come, sound as each does alone and at once."""

import gc

import numpy as np
import pytest
import torch

from tests.models.tiny_nano import tiny_nano_codec
from vivavoce.errors import InputError
from vivavoce.models.moss_audio_tokenizer.cuda import BATCHES, HOPS, SlotDecoder


@pytest.fixture(scope="module")
def codec():
    return tiny_nano_codec()


def some_codes(frames: int, seed: int = 0, codebooks: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 32, (codebooks, frames))


def whole(codec, codes: np.ndarray) -> np.ndarray:
    return codec.decode(torch.from_numpy(codes)[None])[0].cpu().numpy()


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [1, 2, 3, 5, 8, 13, 8], [7, 20, 1, 12]], ids=str)
@pytest.mark.parametrize("codebooks", [6, 3])
def test_any_cut_of_a_stream_sounds_as_the_whole(codec, sizes, codebooks):
    decoder, codes = SlotDecoder(codec, 2), some_codes(40, codebooks=codebooks)
    state, heard = decoder.start(), []
    for piece in np.split(codes, np.cumsum(sizes)[:-1], axis=1):
        (sound,), (state,) = decoder.step_batch([state], [piece])
        heard.append(sound)
    assert state.frames == 40
    np.testing.assert_allclose(np.concatenate(heard, axis=1), whole(codec, codes), atol=2e-5)


def test_streams_of_any_age_and_hunger_step_together(codec):
    decoder, generator = SlotDecoder(codec, 5), np.random.default_rng(1)
    codes = [some_codes(30, seed) for seed in range(5)]
    states, done, heard = [decoder.start() for _ in codes], [0] * 5, [[] for _ in codes]
    while min(done) < 30:
        members = [index for index in range(5) if done[index] < 30 and generator.random() < 0.6]
        sizes = [int(generator.integers(1, 10)) for _ in members]
        pieces = [codes[index][:, done[index] : done[index] + size] for index, size in zip(members, sizes, strict=True)]
        sounds, after = decoder.step_batch([states[index] for index in members], pieces)
        for index, piece, sound, state in zip(members, pieces, sounds, after, strict=True):
            states[index], done[index] = state, done[index] + piece.shape[1]
            heard[index].append(sound)
    for each, sounds in zip(codes, heard, strict=True):
        np.testing.assert_allclose(np.concatenate(sounds, axis=1), whole(codec, each), atol=2e-5)


def test_more_streams_than_a_batch_holds(codec):
    count = BATCHES[-1] + 3
    decoder, codes = SlotDecoder(codec, count), [some_codes(3, seed) for seed in range(count)]
    sounds, _ = decoder.step_batch([decoder.start() for _ in codes], codes)
    np.testing.assert_allclose(sounds[-1], whole(codec, codes[-1]), atol=2e-5)


def test_the_slot_of_a_dropped_stream_is_reused_without_its_past(codec):
    decoder = SlotDecoder(codec, 1)
    (_, (state,)) = decoder.step_batch([decoder.start()], [some_codes(20, seed=9)])
    assert decoder.start() is None
    del state
    gc.collect()
    (sound,), _ = decoder.step_batch([decoder.start()], [some_codes(9)])
    np.testing.assert_allclose(sound, whole(codec, some_codes(9)), atol=2e-5)


def test_codes_that_stand_for_nothing_are_refused(codec):
    decoder = SlotDecoder(codec, 1)
    with pytest.raises(InputError, match="code 32 is not in"):
        decoder.step_batch([decoder.start()], [np.full((6, 1), 32)])


@pytest.mark.gpu
@torch.inference_mode()
def test_graphs_sound_as_the_codec_does():
    codec = tiny_nano_codec()
    expected = [whole(codec, some_codes(40, seed)) for seed in range(7)]
    decoder = SlotDecoder(codec.cuda(), 7)
    decoder.warm_up(6)
    assert decoder._graphs.captured == len(BATCHES) * len(HOPS)
    states, heard = [decoder.start() for _ in range(7)], [[] for _ in range(7)]
    for piece in np.split(np.arange(40), [1, 2, 4, 9, 17, 20], axis=0):
        sounds, states = decoder.step_batch(states, [some_codes(40, seed)[:, piece] for seed in range(7)])
        for each, sound in zip(heard, sounds, strict=True):
            each.append(sound)
    for each, sound in zip(heard, expected, strict=True):
        np.testing.assert_allclose(np.concatenate(each, axis=1), sound, atol=2e-4)
