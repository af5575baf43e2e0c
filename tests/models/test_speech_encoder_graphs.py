"""The replayed speech encoder against the plain one: the same codes, whoever is in the batch. On a CPU nothing is
captured, so that what surrounds the graphs is tested everywhere."""

import random

import pytest
import torch

from vivavoce.models.speech_encoder.cuda import GraphedSpeechStream
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig, SpeechStream
from vivavoce.nn.modules import fill_randomly

CONFIG = SpeechEncoderConfig(
    d_model=32,
    encoder_attention_heads=2,
    encoder_ffn_dim=64,
    num_mel_bins=20,
    max_source_positions=600,
    quantize_position=2,
    quantize_vocab_size=128,
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def encoder_on(device):
    encoder = SpeechEncoder(CONFIG).requires_grad_(False).eval()
    fill_randomly(encoder)
    return encoder.to(device)


def streams(device, keep=True):
    encoder = encoder_on(device)
    return SpeechStream(encoder, keep), GraphedSpeechStream(encoder)


def turn(seconds, seed):
    return 0.3 * torch.randn(round(16_000 * seconds), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_long_turn_in_pieces_gives_the_codes_of_the_plain_stream(device):
    plain, replayed = streams(device)
    sound = turn(14.0, 0)  # over the end of a segment, which is 12 s here
    expected, state = plain.step(plain.initial_state(), sound)
    last, _ = plain.finish(state)
    codes, state = [], replayed.initial_state()
    for piece in sound.split([1280] * 3 + [1536] * 40 + [7] + [len(sound) - 1280 * 3 - 1536 * 40 - 7]):
        new, state = replayed.step(state, piece)
        codes.append(new)
    end, _ = replayed.finish(state)
    assert torch.cat([*codes, end]).tolist() == torch.cat([expected, last]).tolist()


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_state_is_a_value_two_ends_of_one_turn_do_not_disturb_each_other(device):
    plain, replayed = streams(device)
    sound, other = turn(2.0, 1), turn(1.0, 2)
    _, state = replayed.step(replayed.initial_state(), sound[:16_000])
    ended, _ = replayed.step_batch([state], [sound[16_000:16_100]], [True])
    once, after = replayed.step(state, sound[16_000:])
    again, _ = replayed.step(state, other)
    _, plain_state = plain.step(plain.initial_state(), sound[:16_000])
    assert once.tolist() == plain.step(plain_state, sound[16_000:])[0].tolist()
    assert again.tolist() == plain.step(plain_state, other)[0].tolist()
    assert ended[0].tolist() == plain.step_batch([plain_state], [sound[16_000:16_100]], [True])[0][0].tolist()
    rest = plain.step(plain.step(plain_state, sound[16_000:])[1], other)[0]
    assert replayed.step(after, other)[0].tolist() == rest.tolist()


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_turns_that_step_together_hear_what_each_hears_alone(seed):
    """Pieces of equal and of different lengths, turns that join late: mels made together are those made alone."""
    plain, replayed = streams("cpu")
    for stream in (plain, replayed):
        chance = random.Random(seed)
        count = chance.randint(2, 5)
        sounds = [turn(1.5, seed) for seed in range(count)]
        states, codes, fed = [stream.initial_state() for _ in sounds], [[] for _ in sounds], [0] * count
        while any(fed[row] < len(sounds[row]) for row in range(count)):
            active = [row for row in range(count) if fed[row] < len(sounds[row]) and chance.random() < 0.7]
            if not active:
                continue
            sizes = [chance.choice([1280, 1536, 8000]) for _ in active]
            pieces = [sounds[row][fed[row] : fed[row] + size] for row, size in zip(active, sizes, strict=True)]
            made, after = stream.step_batch([states[row] for row in active], pieces)
            for row, piece, new, state in zip(active, pieces, made, after, strict=True):
                fed[row] += len(piece)
                codes[row] += new.tolist()
                states[row] = state
        for sound, heard in zip(sounds, codes, strict=True):
            assert heard == plain.step(plain.initial_state(), sound)[0].tolist()


@torch.no_grad()
def test_exact_codes_of_turns_heard_together_are_those_of_each_alone():
    plain, _ = streams("cpu")
    sounds = [turn(1.0, 3), turn(1.0, 4)]
    _, states = plain.step_batch([plain.initial_state()] * 2, sounds, [True, True])
    for state, sound in zip(states, sounds, strict=True):
        assert plain.exact_codes(state).tolist() == plain.encode(sound).tolist()


@pytest.mark.gpu
@torch.no_grad()
def test_warm_up_leaves_running_streams_unchanged():
    plain, replayed = streams("cuda")
    sound = turn(1.0, 5)
    _, state = replayed.step(replayed.initial_state(), sound[:8000])
    replayed.warm_up(4)
    _, plain_state = plain.step(plain.initial_state(), sound[:8000])
    assert replayed.step(state, sound[8000:])[0].tolist() == plain.step(plain_state, sound[8000:])[0].tolist()
