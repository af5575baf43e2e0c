"""CosyVoice 3's flow against its official outputs, a plain transformer, and its stream against its offline pass."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.golden import weights
from tests.models.flow_cases import (
    CHUNK,
    DIT,
    LOOKAHEAD,
    RATIO,
    a_prompt,
    assert_close,
    some_codes,
    streamed,
    tiny_decoder,
)
from tests.models.named_checkpoint import GOLDEN, NamedCheckpoint
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import load_weights, published_tensors
from vivavoce.models.cosyvoice.dit import CosyVoice3Flow
from vivavoce.models.flow.estimator import cosine_times
from vivavoce.models.flow.state import VoicePrompt

NOT_FINAL_CODES = 38


def inv_freq(name, shape):
    return 10_000.0 ** -(torch.arange(0, 2 * shape[0], 2) / (2 * shape[0]))


@pytest.fixture(scope="module")
def tiny():
    return tiny_decoder(DIT)


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


class TestGolden:
    def test_offline_pass(self, full, golden, golden_prompt):
        assert_close(full(golden["codes"][0], golden_prompt), golden["mel_offline"][0])

    def test_streaming_passes_not_final_and_final_as_a_stream(self, full, golden, golden_prompt):
        codes, first = golden["codes"][0], NOT_FINAL_CODES + full.config.lookahead
        state = full.start(full.voice(golden_prompt))
        mel, frames = streamed(full, state, codes, [first, len(codes) - first])
        assert frames[0] == NOT_FINAL_CODES * full.config.ratio
        assert_close(mel[:, : frames[0]], golden["mel_streaming_not_final"][0])
        assert_close(mel, golden["mel_streaming_final"][0])

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
        loaded = CosyVoice3Flow.load(tmp_path / "flow.pt", DIT, tabulate=tabulate)
        assert torch.equal(loaded(some_codes(5), a_prompt(4)), tiny(some_codes(5), a_prompt(4)))

    def test_a_checkpoint_that_lacks_a_tensor_is_refused(self, tiny, tmp_path):
        missing = "decoder.estimator.transformer_blocks.1.attn.to_k.bias"
        tensors = {name: tensor for name, tensor in published_tensors(tiny).items() if name != missing}
        torch.save(tensors, tmp_path / "flow.pt")
        with pytest.raises(CheckpointError, match=missing):
            CosyVoice3Flow.load(tmp_path / "flow.pt", DIT)


def test_tabulated_times_are_the_computed_ones(tiny):
    decoder = tiny_decoder(DIT)
    times = cosine_times(DIT.euler_steps, torch.device("cpu"))[:-1]
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
        assert len(prompt.mel) == RATIO * len(prompt.codes) >= RATIO * (length - CHUNK + 1)
        assert torch.equal(prompt.codes, a_prompt(length).codes[-len(prompt.codes) :])
        _, frames = streamed(tiny, tiny.start(tiny.voice(prompt)), some_codes(12), [1] * 12)
        silent_steps = first_hop + LOOKAHEAD - 1
        assert frames[: silent_steps + 1] == [0] * silent_steps + [first_hop * RATIO]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_extreme_prompts_give_no_nan_in_half_precision(dtype):
    half = tiny_decoder(DIT, dtype)
    for seed in range(16):
        prompt = a_prompt(6, seed)
        loud = replace(prompt, mel=prompt.mel.sign() * 30, speaker=prompt.speaker * (1e4 if seed % 2 else 0))
        mel, _ = half.step(half.start(half.voice(loud), left_chunks=1), some_codes(6, seed), final=True)
        assert mel.isfinite().all()


def test_a_first_hop_that_cannot_be_is_refused(tiny):
    with pytest.raises(InputError, match=r"first_hop is 4; give 1…3"):
        tiny.aligned(a_prompt(8), 4)
    with pytest.raises(InputError, match="too short"):
        tiny.aligned(a_prompt(1), 1)
