"""The Nano codec gives what the official code gives, and streams what it decodes at once."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.models.named_checkpoint import GOLDEN, NamedCheckpoint
from tests.models.nano_reference import CodecReference
from tests.models.tiny_nano import CODEC_CONFIG, tiny_nano_codec
from vivavoce.audio.io import Sound
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import Checkpoint, fold_weight_norm, load_weights, published_tensors
from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig
from vivavoce.models.moss_audio_tokenizer.model import CodecState, MossAudioTokenizerNano

KEYS = "moss_audio_tokenizer_nano.tsv"
FRAME = 3840


def published() -> Checkpoint:
    return NamedCheckpoint(KEYS, 1, lambda *_: torch.zeros(0))


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "moss_audio_tokenizer_nano.safetensors")


@pytest.fixture(scope="module")
def codec():
    """The true sizes, weights made by name."""
    model = MossAudioTokenizerNano()
    load_weights(model, fold_weight_norm(published()))
    return model.eval()


def assert_sounds_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@torch.inference_mode()
def test_codes_equal_the_official_ones(codec, golden):
    hidden: list[torch.Tensor] = []
    hook = codec.encoder[-1].register_forward_hook(lambda _module, _given, out: hidden.append(out))
    codes = codec.encode(golden["waveform"])
    hook.remove()
    torch.testing.assert_close(hidden[0].transpose(1, 2), golden["encoder_hidden"], rtol=0, atol=1e-4)
    assert torch.equal(codes[0], golden["codes"][:, 0])


def test_a_rest_of_a_frame_has_no_codes(codec, golden):
    codes = codec.encode(golden["waveform"][..., :16360])
    whole = int(golden["partial_lengths"][0])
    assert codes.shape == (1, 16, whole)
    assert torch.equal(codes[0], golden["partial_codes"][:, 0, :whole])


@torch.inference_mode()
def test_sound_equals_the_official_one(codec, golden):
    codes = golden["decode_codes"].transpose(0, 1)
    dequantized = codec.quantizer.decode(codes).transpose(1, 2)
    torch.testing.assert_close(dequantized, golden["dequantized"], rtol=0, atol=1e-4)
    assert_sounds_equal(codec.decode(codes), golden["audio"])
    assert_sounds_equal(codec.decode(codes[:, :8]), golden["audio_nq8"])
    assert_sounds_equal(codec.decode(golden["codes"].transpose(0, 1)), golden["roundtrip_audio"])


def streamed(codec: MossAudioTokenizerNano, codes: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Codes decoded in steps of these many frames.  # [codebook, frame] → [2, sample]"""
    state, sounds = codec.decoder_state(), []
    for piece in codes.split(sizes, dim=1):
        sound, state = codec.decode_step(state, piece)
        sounds.append(sound)
    assert state.frames == codes.shape[1]
    return torch.cat(sounds, dim=1)


@pytest.mark.parametrize("size", [1, 3])
def test_a_stream_equals_the_official_stream(codec, golden, size):
    sound = streamed(codec, golden["decode_codes"][:, 0], [size] * (12 // size))
    assert_sounds_equal(sound[None], golden[f"audio_stream_{size}"])
    assert_sounds_equal(sound[None], golden["audio"])


@pytest.mark.parametrize("sizes", [None, [1, 2, 60, 40, 30, 7]], ids=["at once", "streamed"])
def test_frames_past_the_windows_equal_the_official_ones(codec, golden, sizes):
    codes = golden["long_codes"][:, 0]
    sound = codec.decode(codes[None])[0] if sizes is None else streamed(codec, codes, sizes)
    frames = sound.unflatten(1, (-1, FRAME)).transpose(0, 1)
    assert_sounds_equal(frames[golden["long_frames"]], golden["long_audio"])


def test_the_true_config_makes_the_published_tensors():
    with torch.device("meta"):
        ours = {name: tuple(tensor.shape) for name, tensor in published_tensors(MossAudioTokenizerNano()).items()}
    assert ours == fold_weight_norm(published()).shapes
    assert len(published().shapes) == 374
    assert sum(math.prod(shape) for shape in published().shapes.values()) == 21_969_664
    config = MossAudioTokenizerConfig()
    assert (config.frame_samples, config.frame_rate) == (FRAME, 12.5)


# From here on a tiny codec with windows of 3 to 5 frames, beside a reference that masks a whole sound.

TINY = tiny_nano_codec(1)
REFERENCE = CodecReference(CODEC_CONFIG, published_tensors(TINY))


def some_codes(frames: int, seed: int = 0, codebooks: int = 6) -> torch.Tensor:
    return torch.randint(0, 32, (codebooks, frames), generator=torch.Generator().manual_seed(seed))


def some_sound(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, frames * 80, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("frames", [1, 3, 40])
def test_the_codec_equals_the_plain_reference(frames):
    codes, sound = some_codes(frames), some_sound(frames)
    torch.testing.assert_close(TINY.decode(codes[None])[0], REFERENCE.decode(codes), rtol=0, atol=1e-5)
    torch.testing.assert_close(TINY.decode(codes[None, :2])[0], REFERENCE.decode(codes[:2]), rtol=0, atol=1e-5)
    assert torch.equal(TINY.encode(sound[None])[0], REFERENCE.encode(sound))


def test_the_windows_matter():
    """Or the tests of streams would show nothing about them: an old frame is heard, and then no more."""
    codes = some_codes(40)
    changed = codes.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 32
    difference = (TINY.decode(codes[None]) - TINY.decode(changed[None]))[0].abs().unflatten(1, (40, 80)).amax((0, 2))
    assert difference[1] > 1e-3
    assert difference[-1] == 0


sizes_of_steps = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes_of_steps, st.integers(1, 6))
def test_any_cut_of_a_stream_decodes_to_the_same_sound(sizes, codebooks):
    codes = some_codes(sum(sizes), seed=len(sizes), codebooks=codebooks)
    whole = TINY.decode(codes[None])[0]
    # Products of other numbers of rows add up in another order: a few steps of float32 at the loudest sample.
    torch.testing.assert_close(streamed(TINY, codes, sizes), whole, rtol=0, atol=2e-6 * float(whole.abs().max()))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes_of_steps)
def test_any_cut_of_a_sound_has_the_same_codes(sizes):
    sound = some_sound(sum(sizes), seed=len(sizes))
    state, codes = TINY.encoder_state(), []
    for piece in sound.split([80 * size for size in sizes], dim=1):
        new, state = TINY.encode_step(state, piece)
        codes.append(new)
    assert torch.equal(torch.cat(codes, dim=1), TINY.encode(sound[None])[0])


def test_streams_at_different_positions_step_as_one_batch():
    """Joining and leaving, with different sizes and numbers of codebooks."""
    generator = torch.Generator().manual_seed(3)
    codes = [some_codes(30, seed, codebooks=6 if seed else 3) for seed in range(4)]
    states = [TINY.decoder_state() for _ in codes]
    at = [0] * 4
    sounds: list[list[torch.Tensor]] = [[] for _ in codes]
    for _ in range(40):
        chosen = [index for index in range(4) if torch.rand((), generator=generator) < 0.6 and at[index] < 30]
        if not chosen:
            continue
        sizes = [min(int(torch.randint(1, 4, (), generator=generator)), 30 - at[index]) for index in chosen]
        pieces = [codes[index][:, at[index] : at[index] + size] for index, size in zip(chosen, sizes, strict=True)]
        made, after = TINY.decode_step_batch([states[index] for index in chosen], pieces)
        for index, size, sound, state in zip(chosen, sizes, made, after, strict=True):
            states[index], at[index] = state, at[index] + size
            sounds[index].append(sound)
    assert max(at) == 30
    for index in range(4):
        whole = TINY.decode(codes[index][None, :, : at[index]])[0]
        torch.testing.assert_close(torch.cat(sounds[index], dim=1), whole, rtol=0, atol=1e-5)


def test_sounds_are_encoded_together_as_alone():
    sounds = [some_sound(frames, frames) for frames in (3, 5, 3)]
    states = [TINY.encoder_state() for _ in sounds]
    codes, states = TINY.encode_step_batch(states, sounds)
    more, _ = TINY.encode_step_batch(states, sounds[::-1])
    for index in range(3):
        joined = torch.cat([sounds[index], sounds[2 - index]], dim=1)
        assert torch.equal(torch.cat([codes[index], more[index]], dim=1), TINY.encode(joined[None])[0])


def test_a_state_is_a_value():
    """Stepping on does not change what a state gives: a reply can be rewound to any state kept."""
    codes = some_codes(20)
    states, sounds = [TINY.decoder_state()], []
    for frame in range(20):
        sound, state = TINY.decode_step(states[-1], codes[:, frame : frame + 1])
        states.append(state)
        sounds.append(sound)
    for frame in (13, 0, 19, 7):
        for state in (states[frame], states[frame].copy()):
            assert_sounds_equal(TINY.decode_step(state, codes[:, frame : frame + 1])[0], sounds[frame])
    other = TINY.decode_step(states[13], (codes[:, :1] + 1) % 32)[0]
    assert (other - sounds[13]).abs().max() > 1e-3


def held_bytes(state: CodecState) -> int:
    tensors = [tensor for cache in state.caches for tensor in (*cache.buffer.keys, *cache.buffer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_a_long_stream_needs_no_more_memory_than_a_few_windows():
    state, sizes = TINY.decoder_state(), []
    for _ in range(100):
        _, state = TINY.decode_step(state, some_codes(1))
        sizes.append(held_bytes(state))
    assert max(sizes[50:]) <= max(sizes[:50])
    assert held_bytes(state.copy()) <= sizes[-1]


def test_a_reference_of_any_rate_and_channels_is_encoded():
    tone = np.sin(np.arange(960) * 0.2).astype(np.float32) * 0.3
    mono, stereo = TINY.reference(Sound(tone, 2000)), TINY.reference(Sound(np.stack([tone, tone]), 2000))
    assert mono.shape == (6, 480 // 80)
    assert torch.equal(mono, stereo)
    assert torch.equal(mono, TINY.reference(Sound(np.stack([tone] * 6), 2000)))


BAD_CALLS = {
    "codes beyond the codebook": (lambda: TINY.decode(torch.full((1, 6, 2), 32)), "code 32 is not in 0…31"),
    "negative codes": (lambda: TINY.decode(torch.full((1, 6, 2), -1)), "code -1 is not in 0…31"),
    "too many codebooks": (lambda: TINY.decode(some_codes(2, codebooks=7)[None]), "1 to 6 codebooks"),
    "no frames": (lambda: TINY.decode(some_codes(0)[None]), "one or more frames"),
    "float codes": (lambda: TINY.decode(torch.zeros(1, 6, 2)), "integer codes"),
    "codes without streams": (lambda: TINY.decode(some_codes(2)), "shape"),
    "a step with streams": (lambda: TINY.decode_step(TINY.decoder_state(), some_codes(2)[None]), "shape"),
    "bad codes in a step": (lambda: TINY.decode_step(TINY.decoder_state(), some_codes(2) + 32), "is not in"),
    "NaN": (lambda: TINY.encode(torch.full((1, 2, 80), float("nan"))), "NaN or infinite"),
    "infinite in a step": (
        lambda: TINY.encode_step(TINY.encoder_state(), torch.full((2, 80), float("inf"))),
        "NaN or infinite",
    ),
    "mono": (lambda: TINY.encode(torch.zeros(1, 1, 80)), "2 channels"),
    "integers": (lambda: TINY.encode(torch.zeros(1, 2, 80, dtype=torch.int16)), "float samples"),
    "less than a frame": (lambda: TINY.encode(torch.zeros(1, 2, 79)), "a frame has 80 samples, but the sound has 79"),
    "a step of part of a frame": (
        lambda: TINY.encode_step(TINY.encoder_state(), torch.zeros(2, 81)),
        "whole frames of 80 samples",
    ),
    "a reference too short": (lambda: TINY.reference(Sound(np.zeros(100, np.float32), 1000)), "0.10 s; give"),
    "a reference too long": (lambda: TINY.reference(Sound(np.zeros(600_000, np.float32), 1000)), "600.00 s; give"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_what_cannot_be_coded_gets_one_line(name):
    call, says = BAD_CALLS[name]
    with pytest.raises(InputError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.fixture(params=["original", "weight_g"])
def folder(request, tmp_path):
    """The published layout: one shard with an index, weight norm in either spelling."""
    endings = {
        "original": (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
        "weight_g": (".weight_g", ".weight_v"),
    }[request.param]
    state: dict[str, torch.Tensor] = {}
    for name, tensor in published_tensors(TINY).items():
        if name.startswith("quantizer") and name.endswith("proj.weight"):
            norm = tensor.norm(dim=(1, 2), keepdim=True)
            state[name.removesuffix(".weight") + endings[0]] = norm
            state[name.removesuffix(".weight") + endings[1]] = tensor * 3.0
        else:
            state[name] = tensor.detach().clone()
    shard = "model-00001-of-00001.safetensors"
    save_file(state, tmp_path / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, shard)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    CODEC_CONFIG.write(tmp_path)
    return tmp_path


def test_a_published_folder_loads(folder):
    loaded = MossAudioTokenizerNano.load(folder)
    codes = some_codes(7)[None]
    torch.testing.assert_close(loaded.decode(codes), TINY.decode(codes), rtol=0, atol=1e-5)
    assert MossAudioTokenizerConfig.read(folder) == CODEC_CONFIG


def test_codebooks_stay_exact_in_half_precision(folder):
    half = MossAudioTokenizerNano.load(folder, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in half.quantizer.parameters()} == {torch.float32}
    assert half.decoder[1].input_proj.weight.dtype == torch.bfloat16
    codes = some_codes(7)[None]
    sound = half.decode(codes)
    assert sound.dtype == torch.float32
    error = (sound - TINY.decode(codes)).square().mean() / TINY.decode(codes).square().mean()
    assert error < 1e-3
    assert half.encode(some_sound(4)[None]).shape == (1, 6, 4)


def rewrite(folder: Path, part: int | None = None, **changes: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    target = content if part is None else content["encoder_kwargs"][part]
    target |= changes
    (folder / "config.json").write_text(json.dumps(content))


BREAKAGES = {
    "another model": (lambda f: rewrite(f, model_type="dac"), "'dac' model, not 'moss-audio-tokenizer'"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "is this a MOSS-Audio-Tokenizer-Nano folder"),
    "another quantizer": (lambda f: rewrite(f, quantizer_type="lfq"), "only 'rlfq'"),
    "channels apart": (lambda f: rewrite(f, enable_channel_interleave=False), "not interleaved"),
    "not causal": (lambda f: rewrite(f, 1, causal=False), "only True is supported"),
    "gated": (lambda f: rewrite(f, 1, gating="silu"), "only 'none'"),
    "another stage": (lambda f: rewrite(f, 1, module_type="LSTM"), "'LSTM' stage"),
    "frames do not add up": (lambda f: rewrite(f, 0, patch_size=20), "do not make frames"),
    "no sizes": (lambda f: rewrite(f, quantizer_kwargs={}), "does not have the sizes"),
    "wrong size": (lambda f: rewrite(f, 1, d_model=32), "misshapen: encoder.1"),
    "no weights": (lambda f: (f / "model-00001-of-00001.safetensors").unlink(), "fetch the model again"),
}


@pytest.mark.parametrize("name", BREAKAGES)
@pytest.mark.parametrize("folder", ["original"], indirect=True)
def test_a_bad_folder_gets_one_line_that_says_what_is_wrong(folder, name):
    breakage, says = BREAKAGES[name]
    breakage(folder)
    with pytest.raises(CheckpointError, match=says) as caught:
        MossAudioTokenizerNano.load(folder)
    assert "\n" not in str(caught.value)
