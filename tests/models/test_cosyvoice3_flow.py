"""CosyVoice 3's flow against its official outputs, a plain transformer, and its stream against its offline pass."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional

from tests.golden import weights
from tests.models.named_checkpoint import GOLDEN, NamedCheckpoint
from vivavoce.errors import CapacityError, CheckpointError, InputError
from vivavoce.models.checkpoint import load_weights, published_tensors
from vivavoce.models.cosyvoice3_dit import DiTConfig
from vivavoce.models.cosyvoice3_flow import CosyVoice3Flow, CosyVoice3FlowConfig, LookaheadConfig
from vivavoce.models.flow_matching import MAX_FRAMES, cosine_times, fixed_noise
from vivavoce.models.flow_state import VoicePrompt
from vivavoce.nn.allocation import allocating

NOT_FINAL_CODES = 38
CHUNK = 3
TINY = CosyVoice3FlowConfig(
    vocabulary=50,
    chunk=CHUNK,
    encoder=LookaheadConfig(dim=16),
    estimator=DiTConfig(
        mel_bands=6, dim=32, blocks=2, heads=4, head_dim=8, time_waves=8, position_kernel=5, position_groups=4
    ),
    mel_bands=6,
    speaker_dim=5,
    euler_steps=3,
)
TOLERANCE = 1e-5


def inv_freq(name, shape):
    return 10_000.0 ** -(torch.arange(0, 2 * shape[0], 2) / (2 * shape[0]))


def tiny_decoder(dtype=torch.float32, config=TINY):
    with allocating("cpu", dtype):
        decoder = CosyVoice3Flow(config).requires_grad_(False).eval()
    for name, tensor in published_tensors(decoder).items():
        if not weights.is_constant(name):
            tensor.copy_(torch.from_numpy(weights.tensor(name, tuple(tensor.shape), seed=3)))
    return decoder


@pytest.fixture(scope="module")
def tiny():
    return tiny_decoder()


@pytest.fixture(scope="module")
def full():
    """Full size, weights made by name, as `load` leaves it."""
    with torch.device("meta"):
        decoder = CosyVoice3Flow()
    decoder.to_empty(device="cpu")
    load_weights(decoder, NamedCheckpoint("cosyvoice3_flow.tsv", seed=1, constant=inv_freq))
    decoder.requires_grad_(False).eval().tabulate()
    return decoder


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "cosyvoice3_flow.safetensors")


@pytest.fixture(scope="module")
def golden_prompt(golden):
    return VoicePrompt(golden["prompt_codes"][0], golden["prompt_mel"][0], golden["xvector"][0])


def a_prompt(length, seed=0, config=TINY):
    generator = torch.Generator().manual_seed(seed)
    return VoicePrompt(
        codes=some_codes(length, seed, config),
        mel=torch.randn(length * config.ratio, config.mel_bands, generator=generator),
        speaker=torch.randn(config.speaker_dim, generator=generator),
    )


def some_codes(length, seed=1, config=TINY):
    return torch.randint(config.vocabulary, (length,), generator=torch.Generator().manual_seed(seed))


def streamed(decoder, state, codes, sizes):
    """The mel of steps of these sizes, the last one final, and how many frames each gave."""
    mels, pieces = [], list(codes.split(sizes))
    for number, piece in enumerate(pieces, start=1):
        mel, state = decoder.step(state, piece, final=number == len(pieces))
        mels.append(mel)
    return torch.cat(mels, dim=1), [mel.shape[1] for mel in mels]


def assert_close(actual, expected, tolerance=TOLERANCE):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


class TestGolden:
    def test_offline_pass(self, full, golden, golden_prompt):
        assert_close(full(golden["codes"][0], golden_prompt), golden["mel_offline"][0])

    def test_streaming_pass_not_final(self, full, golden, golden_prompt):
        known = golden["codes"][0, : NOT_FINAL_CODES + full.config.lookahead]
        mel = full(known, golden_prompt, streaming=True, final=False)
        assert_close(mel, golden["mel_streaming_not_final"][0])

    def test_the_stream_is_the_final_streaming_pass(self, full, golden, golden_prompt):
        codes, first = golden["codes"][0], NOT_FINAL_CODES + full.config.lookahead
        state = full.start(full.voice(golden_prompt))
        mel, frames = streamed(full, state, codes, [first, len(codes) - first])
        assert_close(mel, golden["mel_streaming_final"][0])
        assert frames[0] == NOT_FINAL_CODES * full.config.ratio

    def test_what_depends_on_the_time_alone_is_a_small_table(self, full):
        estimator = full.decoder.estimator
        assert estimator.table.shape == (10, 22 * 6 + 2, 1024)
        assert sum(parameter.numel() for parameter in estimator.parameters()) == 331_142_224 - 141_959_168


class TestPublished:
    def test_tensor_names_and_shapes_are_the_published_ones(self):
        with torch.device("meta"):
            tensors = published_tensors(CosyVoice3Flow())
        assert len(tensors) == 330
        assert sum(tensor.numel() for tensor in tensors.values()) == 332_257_120
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        assert shapes == weights.shapes(GOLDEN / "keys" / "cosyvoice3_flow.tsv")

    @pytest.mark.parametrize("tabulate", [True, False])
    def test_a_checkpoint_loads(self, tiny, tabulate, tmp_path):
        tensors = {name: tensor.clone() for name, tensor in published_tensors(tiny).items()}
        torch.save({**tensors, "epoch": 7, "step": torch.tensor(1200)}, tmp_path / "flow.pt")
        loaded = CosyVoice3Flow.load(tmp_path / "flow.pt", TINY, tabulate=tabulate)
        assert torch.equal(loaded(some_codes(5), a_prompt(4)), tiny(some_codes(5), a_prompt(4)))

    def test_a_checkpoint_that_lacks_a_tensor_is_refused(self, tiny, tmp_path):
        missing = "decoder.estimator.transformer_blocks.1.attn.to_k.bias"
        tensors = {name: tensor for name, tensor in published_tensors(tiny).items() if name != missing}
        torch.save(tensors, tmp_path / "flow.pt")
        with pytest.raises(CheckpointError, match=missing):
            CosyVoice3Flow.load(tmp_path / "flow.pt", TINY)


class PlainFlow:
    """The published computation without states: whole tensors, one loop, the quirks spelled out."""

    def __init__(self, decoder):
        self.config, self.w = decoder.config, published_tensors(decoder)

    def linear(self, name, x):
        name = f"decoder.estimator.{name}"
        return functional.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def conv(self, name, x, left=0, right=0, groups=1):
        x = functional.pad(x.T[None], (left, right))
        return functional.conv1d(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"], groups=groups)[0].T

    def mel(self, codes, prompt, left_chunks=None, masked=True, sink=0):
        config = self.config
        x = self.w["input_embedding.weight"][torch.cat([prompt.codes, codes])]
        ahead = functional.leaky_relu(self.conv("pre_lookahead_layer.conv1", x, right=config.lookahead), 0.01)
        features = (self.conv("pre_lookahead_layer.conv2", ahead, left=2) + x).repeat_interleave(config.ratio, 0)
        speaker = prompt.speaker / prompt.speaker.norm()
        speaker = self.w["spk_embed_affine_layer.weight"] @ speaker + self.w["spk_embed_affine_layer.bias"]
        time, chunk = len(features), config.chunk * config.ratio
        prompt_mel = torch.zeros(time, config.mel_bands)
        prompt_mel[: len(prompt.mel)] = prompt.mel
        seen = torch.ones(time, time, dtype=torch.bool)
        if masked:
            query, key = torch.arange(time)[:, None], torch.arange(time)[None]
            seen = key < (query // chunk + 1) * chunk
            if left_chunks is not None:
                seen &= (key // chunk >= query // chunk - left_chunks) | (key < sink)
        times = [1 - math.cos(0.5 * math.pi * step / config.euler_steps) for step in range(config.euler_steps + 1)]
        mel = fixed_noise(config.mel_bands, torch.device("cpu"))[:time]
        for begin, end in itertools.pairwise(times):
            with_conditions = self.velocity(mel, prompt_mel, features, speaker.expand_as(features), begin, seen)
            nothing = torch.zeros_like(features)
            without = self.velocity(mel, nothing, nothing, nothing, begin, seen)
            mel = mel + (end - begin) * (1.7 * with_conditions - 0.7 * without)
        return mel[len(prompt.mel) :].T

    def velocity(self, noisy, prompt_mel, features, speaker, time, seen):
        size = self.config.estimator
        half = size.time_waves // 2
        angles = torch.tensor([1000 * time * 10_000 ** (-wave / (half - 1)) for wave in range(half)])
        embedding = self.linear("time_embed.time_mlp.0", torch.cat([angles.sin(), angles.cos()]))
        embedding = functional.silu(self.linear("time_embed.time_mlp.2", functional.silu(embedding)))
        x = self.linear("input_embed.proj", torch.cat([noisy, prompt_mel, features, speaker], dim=-1))
        places = x
        for number in (1, 2):
            name = f"decoder.estimator.input_embed.conv_pos_embed.conv{number}.0"
            left, groups = size.position_kernel - 1, size.position_groups
            places = functional.mish(self.conv(name, places, left=left, groups=groups))
        x = x + places
        for number in range(size.blocks):
            block = f"transformer_blocks.{number}"
            shift, scale, gate, shift2, scale2, gate2 = self.linear(f"{block}.attn_norm.linear", embedding).chunk(6)
            normed = functional.layer_norm(x, (size.dim,), eps=1e-6)
            x = x + gate * self.attention(f"{block}.attn", normed * (1 + scale) + shift, seen)
            normed = functional.layer_norm(x, (size.dim,), eps=1e-6)
            hidden = functional.gelu(
                self.linear(f"{block}.ff.ff.0.0", normed * (1 + scale2) + shift2), approximate="tanh"
            )
            x = x + gate2 * self.linear(f"{block}.ff.ff.2", hidden)
        scale, shift = self.linear("norm_out.linear", embedding).chunk(2)
        return self.linear("proj_out", functional.layer_norm(x, (size.dim,), eps=1e-6) * (1 + scale) + shift)

    def attention(self, name, x, seen):
        heads, dim = self.config.estimator.heads, self.config.estimator.head_dim
        query, key = (self.turned(self.linear(f"{name}.{part}", x), dim) for part in ("to_q", "to_k"))
        query, key, value = (
            part.unflatten(-1, (heads, dim)).transpose(0, 1) for part in (query, key, self.linear(f"{name}.to_v", x))
        )
        scores = (query @ key.transpose(1, 2) / math.sqrt(dim)).masked_fill(~seen, float("-inf"))
        return self.linear(f"{name}.to_out.0", (scores.softmax(-1) @ value).transpose(0, 1).flatten(1))

    def turned(self, x, dim):
        """Complex rotation of the first `dim` channels of all heads together: the first head."""
        rates = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
        turn = torch.polar(torch.ones(len(x), dim // 2), torch.arange(len(x))[:, None] * rates)
        pairs = torch.view_as_complex(x[:, :dim].unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([torch.view_as_real(pairs * turn).flatten(1), x[:, dim:]], dim=-1)


@pytest.mark.parametrize(("masked", "left_chunks"), [(False, None), (True, None), (True, 1)])
def test_the_flow_is_the_plain_computation(tiny, masked, left_chunks):
    prompt, codes = a_prompt(7), some_codes(17)
    sink = 3 * TINY.ratio  # of 7 codes, 3 are a whole chunk with its look-ahead
    plain = PlainFlow(tiny).mel(codes, prompt, left_chunks, masked, sink)
    assert_close(tiny(codes, prompt, streaming=masked, left_chunks=left_chunks), plain, tolerance=1e-4)


def test_tabulated_times_are_the_computed_ones(tiny):
    decoder = tiny_decoder()
    times = cosine_times(TINY.euler_steps, torch.device("cpu"))[:-1]
    computed = decoder.decoder.estimator.time_conditions(times)
    before = decoder(some_codes(12), a_prompt(5))
    decoder.tabulate()
    assert torch.equal(decoder.decoder.estimator.time_conditions(times), computed)
    assert torch.equal(decoder(some_codes(12), a_prompt(5)), before)
    assert not [name for name, _ in decoder.named_parameters() if "norm" in name or "time" in name]
    decoder.decoder.steps = 5
    with pytest.raises(InputError, match="tabulated for 3 steps"):
        decoder(some_codes(12), a_prompt(5))


class TestStream:
    @pytest.mark.parametrize("left_chunks", [None, 0, 1, 3])
    @pytest.mark.parametrize("prompt_length", [0, 2, 6, 10])
    def test_equals_the_offline_pass_under_the_same_mask(self, tiny, left_chunks, prompt_length):
        prompt, codes = a_prompt(prompt_length), some_codes(29)
        state = tiny.start(tiny.voice(prompt), left_chunks)
        offline = tiny(codes, prompt, streaming=True, left_chunks=left_chunks)
        assert_close(streamed(tiny, state, codes, [1] * 29)[0], offline)

    @settings(max_examples=15, deadline=None)
    @given(
        sizes=st.lists(st.integers(1, 11), min_size=1, max_size=8),
        prompt_length=st.integers(0, 13),
        left_chunks=st.sampled_from([None, 0, 1, 2, 5]),
    )
    def test_does_not_depend_on_how_the_codes_are_cut(self, tiny, sizes, prompt_length, left_chunks):
        prompt, codes = a_prompt(prompt_length), some_codes(sum(sizes))
        state = tiny.start(tiny.voice(prompt), left_chunks)
        offline = tiny(codes, prompt, streaming=True, left_chunks=left_chunks)
        assert_close(streamed(tiny, state, codes, sizes)[0], offline)

    def test_windowed_state_does_not_grow(self, tiny):
        state = tiny.start(tiny.voice(a_prompt(6)), left_chunks=2)
        sizes = set()
        for seed in range(30):
            _, state = tiny.step(state, some_codes(CHUNK, seed))
            sizes.add((state.cache.nbytes, state.cache.mel_windows.shape))
            assert len(state.codes) <= CHUNK + TINY.lookahead
        assert len(sizes) == 1
        assert state.cache.mel_windows.shape == (3, 2, 2, 1, 2, 4, 2 * CHUNK * TINY.ratio, 8)

    def test_the_second_request_begins_like_the_first(self, tiny):
        voice, codes = tiny.voice(a_prompt(5)), some_codes(30)
        first_hops = []
        for _ in range(3):
            mel, frames = streamed(tiny, tiny.start(voice, left_chunks=1), codes, [4] * 7 + [2])
            first_hops.append((frames, mel))
        assert all(frames == first_hops[0][0] and torch.equal(mel, first_hops[0][1]) for frames, mel in first_hops)

    @pytest.mark.parametrize("first_hop", [1, 2, 3])
    @pytest.mark.parametrize("length", [7, 8, 9])
    def test_an_aligned_prompt_makes_the_first_hop_as_short_as_asked(self, tiny, length, first_hop):
        prompt = tiny.aligned(a_prompt(length), first_hop)
        assert len(prompt.mel) == TINY.ratio * len(prompt.codes) >= TINY.ratio * (length - CHUNK + 1)
        assert torch.equal(prompt.codes, a_prompt(length).codes[-len(prompt.codes) :])
        _, frames = streamed(tiny, tiny.start(tiny.voice(prompt)), some_codes(12), [1] * 12)
        silent_steps = first_hop + TINY.lookahead - 1
        assert frames[: silent_steps + 1] == [0] * silent_steps + [first_hop * TINY.ratio]


def test_replies_with_different_voices_and_pasts_equal_single_ones(tiny):
    prompts = [a_prompt(length, seed=length) for length in (0, 8, 8, 14)]
    lengths, late = (31, 22, 16, 25), [0, 3, 4, 1]  # steps before each joins
    for left_chunks in (None, 2):
        replies = [some_codes(length, seed=length) for length in lengths]
        states = [tiny.start(tiny.voice(prompt), left_chunks) for prompt in prompts]
        mels = [[] for _ in prompts]
        for number in range(16):
            active = [row for row, state in enumerate(states) if number >= late[row] and not state.finished]
            codes = [replies[row][:CHUNK] for row in active]
            for row in active:
                replies[row] = replies[row][CHUNK:]
            final = [len(replies[row]) == 0 for row in active]
            given, after = tiny.step_batch([states[row] for row in active], codes, final)
            for row, mel, state in zip(active, given, after, strict=True):
                mels[row].append(mel)
                states[row] = state
        assert all(state.finished for state in states)
        for prompt, length, parts in zip(prompts, lengths, mels, strict=True):
            offline = tiny(some_codes(length, seed=length), prompt, streaming=True, left_chunks=left_chunks)
            assert_close(torch.cat(parts, dim=1), offline)


@pytest.mark.parametrize("left_chunks", [None, 2])
def test_a_copied_state_can_be_gone_back_to(tiny, left_chunks):
    codes = some_codes(24)
    voice = tiny.voice(a_prompt(7))
    before = voice.cache.copy()
    _, state = tiny.step(tiny.start(voice, left_chunks), codes[:10])
    kept = state.copy()
    abandoned, _ = streamed(tiny, state, some_codes(14, seed=9), [5, 9])
    again, _ = streamed(tiny, kept.copy(), codes[10:], [5, 9])
    once_more, _ = streamed(tiny, kept, codes[10:], [5, 9])
    assert torch.equal(again, once_more)
    assert not torch.allclose(abandoned, again)
    assert torch.equal(voice.cache.mel_windows, before.mel_windows)
    assert torch.equal(voice.cache.mel_contexts, before.mel_contexts)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.02), (torch.bfloat16, 0.12)])
def test_half_precision_gives_float32_mel_near_the_exact_one(tiny, dtype, tolerance):
    prompt, codes = a_prompt(7), some_codes(200)
    exact = tiny(codes, prompt, streaming=True, left_chunks=2)
    half = tiny_decoder(dtype)
    mel, _ = streamed(half, half.start(half.voice(prompt), left_chunks=2), codes, [50] * 4)
    assert mel.dtype == torch.float32
    assert (mel - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_extreme_prompts_give_no_nan_in_half_precision(dtype):
    half = tiny_decoder(dtype)
    for seed in range(64):
        prompt = a_prompt(6, seed)
        loud = replace(prompt, mel=prompt.mel.sign() * 30, speaker=prompt.speaker * (1e4 if seed % 2 else 0))
        mel, _ = half.step(half.start(half.voice(loud), left_chunks=1), some_codes(6, seed), final=True)
        assert mel.isfinite().all()


class TestBadInput:
    @pytest.mark.parametrize("codes", [torch.tensor([3, 50]), torch.tensor([-1]), torch.tensor([0.5])])
    def test_codes_that_are_none_are_refused(self, tiny, codes):
        with pytest.raises(InputError, match="codes"):
            tiny(codes, a_prompt(4))
        with pytest.raises(InputError, match="codes"):
            tiny.step(tiny.start(tiny.voice(a_prompt(4))), codes)

    def test_a_reply_too_long_is_refused(self, tiny):
        with pytest.raises(CapacityError, match=str(MAX_FRAMES)):
            tiny(some_codes(MAX_FRAMES // TINY.ratio - 3), a_prompt(4))

    def test_a_prompt_of_wrong_shape_is_refused(self, tiny):
        prompt = a_prompt(4)
        with pytest.raises(InputError, match="prompt mel"):
            tiny.voice(replace(prompt, mel=prompt.mel.T))
        with pytest.raises(InputError, match="speaker embedding"):
            tiny.voice(replace(prompt, speaker=torch.zeros(3)))

    def test_a_first_hop_that_cannot_be_is_refused(self, tiny):
        with pytest.raises(InputError, match=r"first_hop is 4; give 1…3"):
            tiny.aligned(a_prompt(8), 4)
        with pytest.raises(InputError, match="too short"):
            tiny.aligned(a_prompt(1), 1)
