"""The speech encoder against its official outputs, transformers' Whisper layers, and itself in pieces."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

from tests.golden import weights
from tests.models.named_checkpoint import GOLDEN, NamedCheckpoint
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import load_weights, published_tensors
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig, SpeechStream, encode_path_name
from vivavoce.models.whisper.model import WhisperLayer

KEYS = "moss_speech_encoder.tsv"
TINY = SpeechEncoderConfig(
    d_model=16,
    encoder_attention_heads=2,
    encoder_ffn_dim=24,
    num_mel_bins=6,
    max_source_positions=16,
    quantize_position=2,
    quantize_vocab_size=50,
)
SEGMENT = TINY.segment_frames
SPEECH_ENCODER = SpeechEncoderConfig(  # real mels and sound, but segments of 0.64 s
    d_model=16,
    encoder_attention_heads=2,
    encoder_ffn_dim=24,
    num_mel_bins=128,
    max_source_positions=32,
    quantize_position=2,
    quantize_vocab_size=200,
)


@pytest.fixture(scope="module", autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def small(config, dtype=torch.float64):
    """Weights large enough that codes vary."""
    torch.manual_seed(0)
    encoder = SpeechEncoder(config).to(dtype).eval()
    for parameter in encoder.parameters():
        parameter.mul_(2).add_(torch.randn_like(parameter) * 0.02)
    mel = torch.randn(4, config.num_mel_bins, config.segment_frames, dtype=dtype)
    features = encoder.features(mel).flatten(0, 1)
    chosen = torch.randint(len(features), (config.quantize_vocab_size,))
    encoder.codebook.weight.copy_(features[chosen] + 0.05 * torch.randn_like(encoder.codebook.weight))
    return encoder


@pytest.fixture(scope="module")
def tiny():
    return small(TINY)


@pytest.fixture(scope="module")
def stream():
    return SpeechStream(small(SPEECH_ENCODER, torch.float32))


@pytest.fixture(scope="module")
def full():
    config = SpeechEncoderConfig()
    with torch.device("meta"):
        encoder = SpeechEncoder(config)
    encoder = encoder.to_empty(device="cpu").eval()
    published = NamedCheckpoint(KEYS, seed=1, constant=lambda name, shape: torch.zeros(shape))
    load_weights(encoder, published.renamed(lambda name: encode_path_name(name, config)))
    return encoder


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "moss_speech_encoder.safetensors")


@pytest.mark.full
def test_full_size_equals_the_official_code(full, golden):
    features = full.features(golden["log_mel"])
    wanted = golden["before_codebook"]
    assert (features - wanted).norm() / wanted.norm() < 1e-4
    assert torch.equal(full.nearest(features), golden["codes"])
    state, codes, position = full.initial_state(), [], 0
    for frames in (8, 64, 8, 240):
        new, state = full.step(state, golden["log_mel"][..., position : position + frames])
        codes.append(new)
        position += frames
    assert torch.equal(torch.cat(codes, dim=1), golden["codes"])


def test_names_and_shapes_are_the_published_ones():
    with torch.device("meta"):
        ours = {name: tuple(t.shape) for name, t in published_tensors(SpeechEncoder(SpeechEncoderConfig())).items()}
    published = weights.shapes(GOLDEN / "keys" / KEYS)
    used = {encode_path_name(name, SpeechEncoderConfig()): shape for name, shape in published.items()}
    unused = [name for name in published if encode_path_name(name, SpeechEncoderConfig()) is None]
    assert ours == {name: shape for name, shape in used.items() if name is not None}
    assert unused == ["encoder.ema_count", "encoder.ema_weight", "encoder.embed_positions2.weight"]


def transformers_layer(layer, dtype):
    """transformers' encoder layer with the weights of ours."""
    attention = layer.self_attn
    config = WhisperConfig(
        d_model=attention.heads * attention.head_dim,
        encoder_attention_heads=attention.heads,
        encoder_ffn_dim=layer.fc1.out_features,
        activation_function="gelu",
        attn_implementation="eager",
    )
    theirs = WhisperEncoderLayer(config).to(dtype).eval()
    theirs.load_state_dict(layer.state_dict())
    return lambda x, mask: _first(theirs(x, attention_mask=mask))


def _first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("kind", ["everything", "mask", "causal", "steps"])
def test_a_layer_is_transformers_layer(kind):
    torch.manual_seed(0)
    layer = WhisperLayer(d_model=16, heads=4, ffn=40).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    may_look = torch.rand(2, 1, 9, 9) > 0.4
    may_look |= torch.eye(9, dtype=torch.bool)
    if kind == "everything":
        may_look[:], ours = True, layer(x)
    elif kind == "mask":
        ours = layer(x, mask=may_look)
    else:
        may_look = torch.ones_like(may_look).tril()
        ours = layer(x, causal=True)
    if kind == "steps":
        state, parts = layer.initial_state(batch=2), []
        for piece in x.split([1, 3, 4, 1], dim=1):
            y, state = layer.step(state, piece)
            parts.append(y)
        ours = torch.cat(parts, dim=1)
    hidden = torch.zeros(may_look.shape, dtype=torch.float64).masked_fill(~may_look, -torch.inf)
    torch.testing.assert_close(ours, transformers_layer(layer, x.dtype)(x, hidden), rtol=1e-12, atol=1e-12)


def reference_codes(encoder, mel):
    """One segment through transformers' layers under a causal mask, torch's pooling and a plain search."""
    x = functional.gelu(functional.conv1d(functional.pad(mel, (2, 0)), encoder.conv1.weight, encoder.conv1.bias))
    x = functional.conv1d(functional.pad(x, (2, 0)), encoder.conv2.weight, encoder.conv2.bias, stride=2)
    x = functional.gelu(x).transpose(1, 2)
    x = x + encoder.embed_positions.weight[: x.shape[1]]
    future = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    for layer in encoder.layers:
        x = transformers_layer(layer, x.dtype)(x, future)
    x = functional.pad(x, (0, 0, 0, -x.shape[1] % 4))
    x = functional.avg_pool1d(x.transpose(1, 2), 4).transpose(1, 2)
    return x, torch.cdist(x, encoder.codebook.weight[None]).argmin(-1)


@pytest.mark.parametrize("frames", [SEGMENT, 24, 21, 1])
def test_parity_with_transformers_layers_made_causal(tiny, frames):
    mel = torch.randn(3, TINY.num_mel_bins, frames, dtype=torch.float64)
    features, codes = reference_codes(tiny, mel)
    torch.testing.assert_close(tiny.features(mel), features, rtol=1e-10, atol=1e-10)
    assert torch.equal(tiny(mel), codes)
    assert codes.shape == (3, math.ceil(frames / 8))


def test_long_sound_is_cut_into_segments(tiny):
    mel = torch.randn(1, TINY.num_mel_bins, 2 * SEGMENT + 11, dtype=torch.float64)
    pieces = [mel[..., :SEGMENT], mel[..., SEGMENT : 2 * SEGMENT], mel[..., 2 * SEGMENT :]]
    assert torch.equal(tiny(mel), torch.cat([reference_codes(tiny, piece)[1] for piece in pieces], dim=1))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_a_stream_in_any_pieces_is_the_whole(tiny, codes_per_step):
    mel = torch.randn(2, TINY.num_mel_bins, 8 * sum(codes_per_step), dtype=torch.float64)
    state, codes = tiny.initial_state(batch=2), []
    for piece in mel.split([8 * count for count in codes_per_step], dim=-1):
        new, state = tiny.step(state, piece)
        codes.append(new)
    assert torch.equal(torch.cat(codes, dim=1), tiny(mel))


def test_streams_at_different_places_step_together(tiny):
    lengths = [0, 8, 24, SEGMENT - 8, SEGMENT, SEGMENT + 16]
    mel = torch.randn(len(lengths), TINY.num_mel_bins, SEGMENT + 16 + 2 * SEGMENT, dtype=torch.float64)
    states = [
        tiny.step(tiny.initial_state(), mel[row : row + 1, :, :length])[1] if length else tiny.initial_state()
        for row, length in enumerate(lengths)
    ]
    for frames in (8, 40):
        new = torch.stack([mel[row, :, length : length + frames] for row, length in enumerate(lengths)])
        together, after = tiny.step_batch(states, new)
        for row, state in enumerate(states):
            alone, _ = tiny.step(state, new[row : row + 1])
            assert torch.equal(together[row : row + 1], alone)
        states = after
        lengths = [length + frames for length in lengths]


def test_an_old_state_can_be_stepped_again_and_forks_do_not_meet(tiny):
    first, left, right = torch.randn(3, 1, TINY.num_mel_bins, 8, dtype=torch.float64)
    _, state = tiny.step(tiny.initial_state(), first)
    left_codes, left_state = tiny.step(state, left)
    right_codes, right_state = tiny.step(state, right)
    for path, state_after, codes in ((left, left_state, left_codes), (right, right_state, right_codes)):
        whole = tiny(torch.cat([first, path, first], dim=-1))
        assert torch.equal(codes[:, 0], whole[:, 1])
        assert torch.equal(tiny.step(state_after.copy(), first)[0][:, 0], whole[:, 2])
        assert torch.equal(tiny.step(state_after, first)[0][:, 0], whole[:, 2])


def test_the_nearest_code_is_found_in_float32_whatever_the_weights():
    half = small(TINY).to(torch.bfloat16)
    features = torch.randn(1, 200, TINY.d_model).to(torch.bfloat16)
    distances = torch.cdist(features.double(), half.codebook.weight.double()[None])
    assert torch.equal(half.nearest(features), distances.argmin(-1))
    assert half(torch.randn(1, TINY.num_mel_bins, 16)).shape == (1, 2)


def test_of_equal_rows_the_first_is_the_code():
    encoder = small(TINY)
    encoder.codebook.weight[[7, 31, 49]] = encoder.codebook.weight[7].clone()
    assert encoder.nearest(encoder.codebook.weight[None, [49, 7, 31]]).tolist() == [[7, 7, 7]]


BAD_MELS = {
    "NaN": (torch.full((1, 6, 8), torch.nan), "NaN"),
    "empty": (torch.zeros(1, 6, 0), "not 0"),
    "bins": (torch.zeros(1, 80, 8), r"\[1, 80, 8\]"),
    "dimensions": (torch.zeros(6, 8), r"\[6, 8\]"),
}


@pytest.mark.parametrize(("mel", "says"), BAD_MELS.values(), ids=BAD_MELS)
def test_bad_mels_are_refused(tiny, mel, says):
    with pytest.raises(InputError, match=says):
        tiny(mel)
    with pytest.raises(InputError, match=says):
        tiny.step(tiny.initial_state(), mel)


def test_a_step_takes_whole_codes_of_as_many_streams_as_it_has_states(tiny):
    with pytest.raises(InputError, match="multiple of 8 mel frames, not 12"):
        tiny.step(tiny.initial_state(), torch.zeros(1, 6, 12))
    with pytest.raises(InputError, match=r"2 streams .* states of 1"):
        tiny.step(tiny.initial_state(), torch.zeros(2, 6, 8))


def published_folder(encoder, folder, config=None, more=None):
    tensors = {f"encoder.{name}": t.float() for name, t in published_tensors(encoder).items()}
    save_file({**tensors, **(more or {})}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**vars(encoder.config), **(config or {})}), encoding="utf8")
    return folder


def test_a_published_folder_loads(tiny, tmp_path):
    more = {
        "encoder.ema_count": torch.zeros(50),
        "encoder.embed_positions2.weight": torch.zeros(4, 16),
        "encoder.layers.2.fc1.bias": torch.zeros(24),
    }
    published = {"encoder_causal_attention": True, "pooling_position": 2, "architectures": ["WhisperVQEncoder"]}
    loaded = SpeechEncoder.load(published_folder(tiny, tmp_path, published, more))
    assert loaded.config == TINY
    mel = torch.randn(1, 6, 64)
    torch.testing.assert_close(loaded.features(mel[..., :32]), tiny.float().features(mel[..., :32]))
    tiny.double()
    half = SpeechEncoder.load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_a_folder_with_other_tensors_is_refused(tiny, tmp_path):
    with pytest.raises(CheckpointError, match=r"1 not of this model: layers\.1\.odd"):
        SpeechEncoder.load(published_folder(tiny, tmp_path, more={"encoder.layers.1.odd": torch.zeros(1)}))


@pytest.mark.parametrize(
    "wrong",
    [{"encoder_causal_convolution": False}, {"encoder_causal_attention": False}, {"pooling_type": "max"}],
    ids=str,
)
def test_a_variant_that_is_not_causal_is_refused(wrong, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(wrong), encoding="utf8")
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        SpeechEncoderConfig.from_json(tmp_path / "config.json")


def noise(samples, seed=0):
    """Noise that swells and fades, so that its maximum comes late."""
    generator = torch.Generator().manual_seed(seed)
    swell = 0.05 + 0.4 * torch.linspace(0, 9, samples).sin().square()
    return torch.randn(samples, generator=generator) * swell


@pytest.mark.parametrize("samples", [160, 1280, 5000, 10240, 25000])
def test_exact_codes_are_those_of_transformers_features(stream, samples):
    sound = noise(samples)
    extractor = WhisperFeatureExtractor(feature_size=128)
    wanted = []
    for segment in sound.split(stream.segment_samples):
        mel = extractor(
            segment.numpy(), sampling_rate=16000, padding="longest", pad_to_multiple_of=1280, return_tensors="pt"
        )
        wanted.append(stream.encoder(mel.input_features)[0])
    wanted = torch.cat(wanted)
    state = stream.initial_state()
    for piece in sound.split(777):
        _, state = stream.step(state, piece)
    _, finished = stream.finish(state)
    assert torch.equal(stream.exact_codes(finished), wanted)
    assert torch.equal(stream.encode(sound), wanted)
    assert len(wanted) == math.ceil(samples / 1280)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=6), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_a_turn_in_any_pieces_gives_the_same_codes(stream, pieces, seed):
    sound = noise(sum(pieces), seed)
    state, codes, samples_in = stream.initial_state(), [], 0
    for piece in sound.split(pieces):
        new, state = stream.step(state, piece)
        codes.append(new)
        samples_in += len(piece)
        in_segment = samples_in % stream.segment_samples
        assert sum(map(len, codes)) == samples_in // stream.segment_samples * 8 + max(0, in_segment - 40) // 1280
    last, finished = stream.finish(state)
    all_at_once, after = stream.step(stream.initial_state(), sound)
    assert torch.equal(torch.cat([*codes, last]), torch.cat([all_at_once, stream.finish(after)[0]]))
    assert sum(map(len, codes)) + len(last) == math.ceil(len(sound) / 1280) == len(stream.exact_codes(finished))


def test_codes_at_once_are_exact_where_the_maximum_comes_first(stream):
    sound = 0.01 * noise(10000)
    sound[20:60] = 1.0
    codes, state = stream.step(stream.initial_state(), sound)
    last, finished = stream.finish(state)
    assert torch.equal(torch.cat([codes, last]), stream.exact_codes(finished))


def test_turns_of_different_ages_are_heard_together(stream):
    sounds = [noise(length, seed) for seed, length in enumerate((0, 1300, 9990, 10240, 15000))]
    states = [stream.step(stream.initial_state(), sound)[1] for sound in sounds]
    for length in (1280, 40, 4000):
        news = [noise(length + 13 * row, row) for row in range(len(sounds))]
        codes, after = stream.step_batch(states, news)
        for state, new, together in zip(states, news, codes, strict=True):
            assert torch.equal(together, stream.step(state, new)[0])
        states = after


def test_bad_sound_is_refused(stream):
    state = stream.initial_state()
    with pytest.raises(InputError, match="NaN"):
        stream.step(state, torch.tensor([0.0, torch.nan]))
    with pytest.raises(InputError, match="int16"):
        stream.step(state, torch.zeros(10, dtype=torch.int16))
    with pytest.raises(InputError, match="no samples"):
        stream.encode(torch.zeros(0))
    with pytest.raises(InputError, match="finished turn"):
        stream.exact_codes(stream.step(state, torch.zeros(100))[1])
    codes, finished = stream.finish(state)
    assert codes.tolist() == stream.exact_codes(finished).tolist() == []
