"""The codec on CUDA graphs against the plain codec on the CPU, on small random weights in float32."""

import pytest
import torch

from tests.models.tiny_codec import tiny_codec
from vivavoce.errors import InputError
from vivavoce.models.flow.cuda import STEPS_PER_PART
from vivavoce.models.flow.state import FlowCache, VoicePrompt
from vivavoce.models.moss_speech.codec import GraphedCodec

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
LEFT = 2


@pytest.fixture(scope="module")
def plain():
    return tiny_codec()


@pytest.fixture(scope="module")
def graphed():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    codec = tiny_codec()
    codec.flow.to(DEVICE)
    codec.vocoder.hift.to(DEVICE)
    yield GraphedCodec(codec)
    torch.backends.cudnn.allow_tf32 = before


def a_prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mel, speaker = torch.randn(length * 4, 80, generator=generator), torch.randn(192, generator=generator)
    return VoicePrompt(some_codes(length, seed), mel, speaker)


def some_codes(count, seed=1):
    return torch.randint(64, (count,), generator=torch.Generator().manual_seed(seed))


def spoken(codec, state, codes, sizes, final=True):
    """The sound of steps of these sizes, and the state after them."""
    sounds = []
    for number, piece in enumerate(codes.split(sizes), start=1):
        sound, state = codec.step(state, piece, final=final and number == len(sizes))
        sounds.append(sound.cpu())
    return torch.cat(sounds), state


def assert_same_sound(ours, expected):
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= 1e-4 * max(1.0, expected.abs().max())


@pytest.mark.parametrize("prompt_length", [0, 6, 13])
@pytest.mark.parametrize("sizes", [[8, 5, 5, 5, 5, 4], [3, 14, 20, 5, 1, 1]])
def test_a_reply_sounds_as_the_plain_codec_says_it(plain, graphed, prompt_length, sizes):
    codes, prompt = some_codes(sum(sizes)), a_prompt(prompt_length)
    expected, _ = spoken(plain, plain.start(plain.flow.voice(prompt), LEFT, seed=3), codes, sizes)
    ours, _ = spoken(graphed, graphed.start(graphed.flow.voice(prompt), LEFT, seed=3), codes, sizes)
    assert_same_sound(ours, expected)


def test_replies_of_several_voices_that_join_late_equal_plain_ones_alone(plain, graphed):
    prompts, late, lengths = [a_prompt(length, length) for length in (6, 13, 6)], [0, 1, 3], [31, 22, 18]
    states = [graphed.start(graphed.flow.voice(prompt), LEFT, seed) for seed, prompt in enumerate(prompts)]
    sounds, fed = [[] for _ in states], [0] * len(states)
    for step in range(12):
        active = [row for row in range(3) if step >= late[row] and fed[row] < lengths[row]]
        if not active:
            break
        pieces = [some_codes(lengths[row], row)[fed[row] : fed[row] + 5] for row in active]
        for row in active:
            fed[row] += 5
        final = [fed[row] >= lengths[row] for row in active]
        made, after = graphed.step_batch([states[row] for row in active], pieces, final)
        for row, sound, state in zip(active, made, after, strict=True):
            sounds[row].append(sound.cpu())
            states[row] = state
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        state = plain.start(plain.flow.voice(prompt), LEFT, row)
        sizes = [5] * (length // 5) + [length % 5]
        assert_same_sound(torch.cat(sounds[row]), spoken(plain, state, some_codes(length, row), sizes)[0])


def test_a_state_is_a_value_and_the_voice_is_left_alone(graphed):
    voice = graphed.flow.voice(a_prompt(13))
    before = voice.cache.copy()
    codes, other = some_codes(25), some_codes(15, seed=9)
    _, state = spoken(graphed, graphed.start(voice, LEFT), codes[:10], [10], final=False)
    kept = state.copy()
    spoken(graphed, graphed.start(voice, LEFT), other, [10, 5])  # another reply in between
    once, _ = spoken(graphed, state, codes[10:], [5, 5, 5])
    again, _ = spoken(graphed, kept, codes[10:], [5, 5, 5])
    assert_same_sound(once, again)
    for name in FlowCache.WINDOW_AXES | FlowCache.CONTEXT_AXES:
        assert torch.equal(getattr(voice.cache, name), getattr(before, name))


def test_warming_up_disturbs_no_reply_and_captures_what_it_names(graphed):
    graphed = graphed.with_own_graphs()
    voice = graphed.flow.voice(a_prompt(6))
    codes = some_codes(18)
    _, state = spoken(graphed, graphed.start(voice), codes[:8], [8], final=False)
    kept = state.copy()
    graphed.warm_up(voice, batches=(2, 1))
    once, _ = spoken(graphed, state, codes[8:], [5, 5])
    again, _ = spoken(graphed, kept, codes[8:], [5, 5])
    assert_same_sound(once, again)
    with pytest.raises(InputError, match="at most 32"):
        graphed.warm_up(voice, batches=(64,))


def test_a_reply_without_a_left_window_is_spoken_without_graphs(plain, graphed):
    codes, prompt = some_codes(18), a_prompt(6)
    expected, _ = spoken(plain, plain.start(plain.flow.voice(prompt)), codes, [8, 10])
    ours, _ = spoken(graphed, graphed.start(graphed.flow.voice(prompt), None), codes, [8, 10])
    assert_same_sound(ours, expected)


def test_passes_in_parts_sound_the_same_and_pause_before_each_part(plain, graphed):
    pauses = []
    in_parts = graphed.with_own_graphs()
    in_parts.pause_before_parts(lambda: pauses.append(None))
    codes, prompt = some_codes(28), a_prompt(6)
    expected, _ = spoken(plain, plain.start(plain.flow.voice(prompt), LEFT, seed=3), codes, [8, 5, 10, 5])
    for _ in range(2):  # captured, then replayed
        pauses.clear()
        state = in_parts.start(in_parts.flow.voice(prompt), LEFT, seed=3)
        ours, _ = spoken(in_parts, state, codes, [8, 5, 10, 5])
        assert_same_sound(ours, expected)
    hops, parts = 4, -(-in_parts.flow.config.euler_steps // STEPS_PER_PART)
    assert len(pauses) >= hops * parts
