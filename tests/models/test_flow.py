"""The flow decoder against its official outputs, and its stream against its offline pass under the same mask."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.golden import weights
from tests.models.flow_cases import (
    BANDS,
    CHUNK,
    DIT,
    LOOKAHEAD,
    RATIO,
    UNET,
    a_prompt,
    assert_close,
    some_codes,
    streamed,
    tiny_decoder,
)
from tests.models.named_checkpoint import GOLDEN, NamedCheckpoint
from tests.models.plain_flows import plain_flow
from vivavoce.errors import CapacityError, CheckpointError, InputError
from vivavoce.models.checkpoint import load_weights, published_tensors
from vivavoce.models.flow.estimator import MAX_FRAMES, fixed_noise
from vivavoce.models.flow.model import FlowConfig, FlowDecoder
from vivavoce.models.flow.state import FlowPass, Pasts, VoicePrompt
from vivavoce.nn.attention import KeySpan
from vivavoce.nn.streaming import Silence

PUBLISHED = {"moss_speech_flow": FlowConfig.moss_speech(), "cosyvoice2_flow": FlowConfig.cosyvoice2()}
NOT_FINAL_CODES = {"moss_speech_flow": 15, "cosyvoice2_flow": 38}


@pytest.fixture(scope="module", params=[UNET, DIT], ids=["unet", "dit"])
def tiny(request):
    return tiny_decoder(request.param)


@pytest.fixture(scope="module")
def unet():
    return tiny_decoder(UNET)


@pytest.fixture(scope="module", params=PUBLISHED)
def case(request):
    golden = load_file(GOLDEN / f"{request.param}.safetensors")
    prompt = VoicePrompt(golden["prompt_codes"][0], golden["prompt_mel"][0], golden["xvector"][0])
    return request.param, full_size(request.param), golden, prompt


def full_size(name):
    with torch.device("meta"):
        decoder = FlowDecoder(PUBLISHED[name])
    decoder.to_empty(device="cpu")
    load_weights(decoder, NamedCheckpoint(f"{name}.tsv", seed=1, constant=lambda name, shape: torch.zeros(shape)))
    return decoder.requires_grad_(False).eval()


@pytest.mark.full
class TestGolden:
    """Full size, weights made by name, against the official code."""

    def test_offline_pass(self, case):
        _, decoder, golden, prompt = case
        assert_close(decoder(golden["codes"][0], prompt), golden["mel_offline"][0])

    def test_streaming_passes_not_final_and_final_as_a_stream(self, case):
        name, decoder, golden, prompt = case
        codes = golden["codes"][0]
        first = NOT_FINAL_CODES[name] + decoder.config.lookahead
        state = decoder.start(decoder.voice(prompt))
        mel, frames = streamed(decoder, state, codes, [first, len(codes) - first])
        assert frames[0] == NOT_FINAL_CODES[name] * decoder.config.ratio
        assert_close(mel[:, : frames[0]], golden["mel_streaming_not_final"][0])
        assert_close(mel, golden["mel_streaming_final"][0])

    def test_noise_is_the_one_of_seed_0(self):
        first = load_file(GOLDEN / "moss_speech_flow.safetensors")["first_noise"]
        # All CPUs draw the same; the logarithm and cosine that make it normal differ in their last bits.
        torch.testing.assert_close(fixed_noise(80, torch.device("cpu"))[:8, :4].T, first, rtol=0, atol=1e-6)


class TestPublished:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_tensor_names_and_shapes_are_the_published_ones(self, name):
        with torch.device("meta"):
            tensors = published_tensors(FlowDecoder(PUBLISHED[name]))
        assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == weights.shapes(
            GOLDEN / "keys" / f"{name}.tsv"
        )

    def test_a_training_checkpoint_loads_without_its_leftovers(self, unet, tmp_path):
        tensors = {name: tensor.clone() for name, tensor in published_tensors(unet).items()}
        torch.save({**tensors, "epoch": 7, "step": torch.tensor(1200)}, tmp_path / "flow.pt")
        loaded = FlowDecoder.load(tmp_path / "flow.pt", UNET)
        assert torch.equal(loaded(some_codes(5), a_prompt(4)), unet(some_codes(5), a_prompt(4)))

    def test_a_checkpoint_of_another_ratio_is_refused(self, unet, tmp_path):
        torch.save(dict(published_tensors(unet)), tmp_path / "flow.pt")
        with pytest.raises(CheckpointError, match=r"encoder\.up_layer\.conv\.weight"):
            FlowDecoder.load(tmp_path / "flow.pt", replace(UNET, encoder=replace(UNET.encoder, ratio=4)))


@pytest.mark.parametrize(("masked", "left_chunks"), [(False, None), (True, None), (True, 1)])
def test_the_flow_is_the_plain_computation(tiny, masked, left_chunks):
    prompt, codes = a_prompt(7), some_codes(17)
    sink = 3  # of 7 codes, 3 are a whole chunk with its look-ahead
    plain = plain_flow(tiny).mel(codes, prompt, left_chunks, masked, sink)
    assert_close(tiny(codes, prompt, streaming=masked, left_chunks=left_chunks), plain, tolerance=1e-4)


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

    def test_gives_a_chunk_as_soon_as_its_lookahead_is_there(self, tiny):
        prompt = a_prompt(7)
        _, frames = streamed(tiny, tiny.start(tiny.voice(prompt)), some_codes(12), [1] * 12)
        # the chunk that holds the prompt's last code ends after 2 codes, and 3 more are look-ahead
        assert frames == [0, 0, 0, 0, 4, 0, 0, 6, 0, 0, 6, 8]

    def test_mel_given_out_is_that_of_the_pass_that_is_not_final(self, tiny):
        prompt, codes = a_prompt(6), some_codes(9)
        mel, _ = tiny.step(tiny.start(tiny.voice(prompt), left_chunks=1), codes)
        assert_close(mel, tiny(codes, prompt, streaming=True, final=False, left_chunks=1))

    def test_a_left_window_changes_the_sound_and_leaves_the_prompt_in_sight(self, tiny):
        codes, prompt, other = some_codes(30), a_prompt(9), a_prompt(9, seed=5)
        windowed = tiny(codes, prompt, streaming=True, left_chunks=1)
        assert not torch.allclose(windowed, tiny(codes, prompt, streaming=True), atol=1e-3)
        same_speaker = replace(other, speaker=prompt.speaker)
        unlike = tiny(codes, same_speaker, streaming=True, left_chunks=0)[:, -6:]
        assert not torch.allclose(unlike, tiny(codes, prompt, streaming=True, left_chunks=0)[:, -6:], atol=1e-3)

    def test_windowed_state_does_not_grow(self, tiny):
        state = tiny.start(tiny.voice(a_prompt(6)), left_chunks=2)
        sizes = set()
        for seed in range(40):
            _, state = tiny.step(state, some_codes(CHUNK, seed))
            sizes.add((state.cache.nbytes, state.cache.mel_windows.shape, state.cache.code_windows.data_ptr()))
            assert len(state.codes) <= CHUNK + LOOKAHEAD
        assert len(sizes) == 1
        assert state.cache.code_slots == 2 * CHUNK  # the prompt is not in it

    def test_a_final_step_without_codes_gives_what_is_left(self, tiny):
        prompt, codes = a_prompt(5), some_codes(10)
        first, state = tiny.step(tiny.start(tiny.voice(prompt)), codes)
        rest, _ = tiny.step(state, codes[:0], final=True)
        assert_close(torch.cat([first, rest], dim=1), tiny(codes, prompt, streaming=True))

    def test_a_reply_without_codes_is_silent(self, tiny):
        mel, state = tiny.step(tiny.start(tiny.voice(a_prompt(5))), some_codes(0), final=True)
        assert mel.shape == (BANDS, 0)
        assert state.finished

    def test_prompt_codes_and_mel_are_cut_to_the_same_length(self, tiny):
        prompt = a_prompt(9)
        longer = replace(prompt, codes=torch.cat([prompt.codes, some_codes(4)]))
        assert torch.equal(tiny(some_codes(6), longer), tiny(some_codes(6), prompt))
        longer = replace(prompt, mel=torch.cat([prompt.mel, torch.randn(3, BANDS)]))
        assert torch.equal(tiny(some_codes(6), longer), tiny(some_codes(6), prompt))


@pytest.mark.parametrize("filled_with", [0, 7])
def test_codes_that_only_fill_a_chunk_up_change_nothing(tiny, filled_with):
    """As a graph of whole chunks is given the last codes of a reply."""
    codes, (zero,) = some_codes(13), torch.zeros(1, 1, dtype=torch.int64)
    filled = torch.cat([codes, torch.full((5 + LOOKAHEAD,), filled_with)])
    speaker, pasts = torch.randn(1, BANDS), Pasts(Silence(), Silence(), lambda step: Silence())
    mels = []
    for these, time in ((codes, 13), (filled, 18)):
        prompt_mel = torch.zeros(1, time * RATIO, BANDS)
        span = KeySpan(zero, time, zero, ends=zero + 13)
        mel = tiny.decode(FlowPass(these[None], speaker, prompt_mel, span, pasts, CHUNK))
        mels.append(mel[:, : 13 * RATIO])
    assert_close(mels[1], mels[0])


class TestRecompute:
    def test_equals_the_kept_state_while_the_reply_fits_into_the_window(self, unet):
        prompt, codes = a_prompt(8), some_codes(20)
        voice = unet.voice(prompt)
        recomputed, _ = streamed(unet, unet.start(voice, left_chunks=9, recompute=True), codes, [4] * 5)
        assert_close(recomputed, unet(codes, prompt, streaming=True))

    def test_is_near_the_kept_state_beyond_it_and_keeps_only_the_window_of_codes(self, unet):
        voice, codes = unet.voice(a_prompt(8)), some_codes(60)
        kept, _ = streamed(unet, unet.start(voice, left_chunks=4), codes, [CHUNK] * 20)
        recomputed, _ = streamed(unet, unet.start(voice, left_chunks=4, recompute=True), codes, [CHUNK] * 20)
        assert not torch.allclose(recomputed, kept, atol=1e-4)
        assert (recomputed - kept).norm() < 0.5 * kept.norm()
        _, state = unet.step(unet.start(voice, left_chunks=4, recompute=True), codes)
        assert state.cache is None
        assert len(state.codes) <= 5 * CHUNK + LOOKAHEAD

    def test_needs_a_window(self, unet):
        with pytest.raises(InputError, match="left_chunks"):
            unet.start(unet.voice(a_prompt(8)), recompute=True)


class TestBatch:
    @pytest.mark.parametrize(("left_chunks", "recompute"), [(None, False), (0, False), (2, False), (2, True)])
    def test_replies_with_different_voices_and_pasts_equal_single_ones(self, tiny, left_chunks, recompute):
        prompts = [a_prompt(length, seed=length) for length in (0, 8, 8, 14)]
        replies = [some_codes(length, seed=length) for length in (31, 22, 16, 25)]
        late = [0, 3, 4, 1]  # steps before each joins
        states = [tiny.start(tiny.voice(prompt), left_chunks, recompute) for prompt in prompts]
        mels = [[] for _ in prompts]
        for number in range(40):
            active = [row for row, state in enumerate(states) if number >= late[row] and not state.finished]
            if not active:
                break
            codes = [replies[row][:CHUNK] for row in active]
            for row in active:
                replies[row] = replies[row][CHUNK:]
            final = [len(replies[row]) == 0 for row in active]
            given, after = tiny.step_batch([states[row] for row in active], codes, final)
            for row, mel, state in zip(active, given, after, strict=True):
                mels[row].append(mel)
                states[row] = state
        for prompt, length, parts in zip(prompts, (31, 22, 16, 25), mels, strict=True):
            codes = some_codes(length, seed=length)
            state = tiny.start(tiny.voice(prompt), left_chunks, recompute)
            sizes = [CHUNK] * (length // CHUNK) + ([length % CHUNK] if length % CHUNK else [])
            assert_close(torch.cat(parts, dim=1), streamed(tiny, state, codes, sizes)[0])

    def test_sessions_of_one_voice_share_it_and_do_not_disturb_each_other(self, tiny):
        prompt = a_prompt(10)
        voice = tiny.voice(prompt)
        before = voice.cache.copy()
        states = [tiny.start(voice, left_chunks=2) for _ in range(2)]
        assert all(state.voice is voice for state in states)
        replies, mels = [some_codes(18, seed=1), some_codes(18, seed=2)], [[], []]
        for start in range(0, 18, CHUNK):
            for row in (0, 1):
                piece = replies[row][start : start + CHUNK]
                mel, states[row] = tiny.step(states[row], piece, final=start + CHUNK == 18)
                mels[row].append(mel)
        for codes, parts in zip(replies, mels, strict=True):
            assert_close(torch.cat(parts, dim=1), tiny(codes, prompt, streaming=True, left_chunks=2))
        for name in voice.cache.WINDOW_AXES | voice.cache.CONTEXT_AXES:
            assert torch.equal(getattr(voice.cache, name), getattr(before, name))


@pytest.mark.parametrize("left_chunks", [None, 2])
def test_a_copied_state_can_be_gone_back_to(tiny, left_chunks):
    codes = some_codes(24)
    _, state = tiny.step(tiny.start(tiny.voice(a_prompt(7)), left_chunks), codes[:10])
    kept = state.copy()
    abandoned, _ = streamed(tiny, state, some_codes(14, seed=9), [5, 9])
    again, _ = streamed(tiny, kept.copy(), codes[10:], [5, 9])
    once_more, _ = streamed(tiny, kept, codes[10:], [5, 9])
    assert torch.equal(again, once_more)
    assert not torch.allclose(abandoned, again)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.02), (torch.bfloat16, 0.12)])
def test_half_precision_gives_float32_mel_near_the_exact_one(tiny, dtype, tolerance):
    prompt, codes = a_prompt(7), some_codes(20)
    exact = tiny(codes, prompt, streaming=True, left_chunks=2)
    half = tiny_decoder(tiny.config, dtype)
    mel, _ = streamed(half, half.start(half.voice(prompt), left_chunks=2), codes, [5] * 4)
    assert mel.dtype == torch.float32
    assert (mel - exact).norm() <= tolerance * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [UNET, DIT], ids=["unet", "dit"])
def test_a_hop_captured_in_a_cuda_graph_equals_the_plain_one(config):
    decoder = tiny_decoder(config).cuda()
    voice = decoder.voice(a_prompt(7))
    _, state = decoder.step(decoder.start(voice, left_chunks=2), some_codes(11))
    kept, static = state.cache.copy(), state.cache.copy()
    span = decoder.span([voice], [state.position], CHUNK, static)
    codes = some_codes(CHUNK + LOOKAHEAD).cuda()[None]
    plain, after = decoder.hop(codes, [voice], span, kept.copy(), left_chunks=2)
    decoder.hop(codes, [voice], span, static, left_chunks=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed, following = decoder.hop(codes, [voice], span, static, left_chunks=2)
    for name in kept.WINDOW_AXES | kept.CONTEXT_AXES:
        getattr(static, name).copy_(getattr(kept, name))
    graph.replay()
    assert_close(replayed, plain)
    assert_close(following.mel_windows, after.mel_windows)
    assert_close(following.mel_contexts, after.mel_contexts)


class TestBadInput:
    @pytest.mark.parametrize(
        "codes", [torch.tensor([3, 50]), torch.tensor([-1]), torch.tensor([0.5]), torch.ones(2, 2).long()]
    )
    def test_codes_that_are_none_are_refused(self, tiny, codes):
        with pytest.raises(InputError, match="codes"):
            tiny(codes, a_prompt(4))
        with pytest.raises(InputError, match="codes"):
            tiny.step(tiny.start(tiny.voice(a_prompt(4))), codes)

    def test_no_codes_are_refused(self, tiny):
        with pytest.raises(InputError, match="no codes"):
            tiny(some_codes(0), a_prompt(4))
        with pytest.raises(InputError, match="no codes"):
            tiny.step(tiny.start(tiny.voice(a_prompt(4))), some_codes(0))
        with pytest.raises(InputError, match="look-ahead"):
            tiny(some_codes(3), a_prompt(4), streaming=True, final=False)

    def test_a_reply_too_long_is_refused_and_can_go_on_with_less(self, tiny):
        max_codes = MAX_FRAMES // RATIO
        with pytest.raises(CapacityError, match=str(MAX_FRAMES)):
            tiny(some_codes(max_codes - 3), a_prompt(4))
        state = tiny.start(tiny.voice(a_prompt(4)), left_chunks=1)
        with pytest.raises(CapacityError, match=str(MAX_FRAMES)):
            tiny.step(state, some_codes(max_codes - 3))
        mel, _ = tiny.step(state, some_codes(8), final=True)
        assert_close(mel, tiny(some_codes(8), a_prompt(4), streaming=True, left_chunks=1))

    def test_a_finished_reply_takes_no_more(self, tiny):
        _, state = tiny.step(tiny.start(tiny.voice(a_prompt(4))), some_codes(5), final=True)
        with pytest.raises(InputError, match="start a new one"):
            tiny.step(state, some_codes(5))

    def test_a_prompt_of_wrong_shape_is_refused(self, tiny):
        prompt = a_prompt(4)
        with pytest.raises(InputError, match="prompt mel"):
            tiny.voice(replace(prompt, mel=prompt.mel.T))
        with pytest.raises(InputError, match="speaker embedding"):
            tiny.voice(replace(prompt, speaker=torch.zeros(3)))
        with pytest.raises(InputError, match="left_chunks is -1"):
            tiny.start(tiny.voice(prompt), left_chunks=-1)
