"""BigVGAN-v2 against its official outputs, its formulas, and itself in pieces."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn.utils import parametrizations

from tests.golden import weights
from tests.models.named_checkpoint import GOLDEN, NamedCheckpoint
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.bigvgan import (
    BIGVGAN_V2_22KHZ_80BAND_256X,
    BIGVGAN_V2_24KHZ_100BAND_256X,
    BigVGAN,
    BigVGANConfig,
    receptive_field,
)
from vivavoce.models.checkpoint import fold_weight_norm, load_weights, published_tensors
from vivavoce.nn.vocoder import REACH, AntiAliased, Downsample2, SnakeBeta, Upsample2, kaiser_sinc

TINY = BigVGANConfig(
    num_mels=5,
    upsample_rates=(4, 2),
    upsample_kernel_sizes=(8, 4),
    upsample_initial_channel=8,
    resblock_kernel_sizes=(3, 5),
    resblock_dilation_sizes=((1, 3), (1, 2)),
)
KEYS = {
    "bigvgan_v2_24khz_100band_256x.tsv": (BIGVGAN_V2_24KHZ_100BAND_256X, 112_446_289),
    "bigvgan_v2_22khz_80band_256x.tsv": (BIGVGAN_V2_22KHZ_80BAND_256X, 112_231_249),
}


@pytest.fixture(scope="module")
def tiny():
    return tiny_vocoder(TINY)


def tiny_vocoder(config, dtype=torch.float32):
    torch.manual_seed(0)
    vocoder = BigVGAN(config).to(dtype).eval().requires_grad_(False)
    for name, parameter in vocoder.named_parameters():
        parameter.normal_(std=0.3 if name.endswith(("alpha", "beta", "bias")) else parameter[0].numel() ** -0.5)
    return vocoder


def in_pieces(vocoder, mel, sizes, look_ahead=None):
    """Steps of these sizes, the last one final."""
    state, heard = vocoder.initial_state(mel.shape[0], look_ahead), []
    pieces = list(mel.split(sizes, dim=-1))
    for number, piece in enumerate(pieces, start=1):
        pcm, state = vocoder.step(state, piece, final=number == len(pieces))
        heard.append(pcm)
    return heard


def test_official_output():
    golden = load_file(GOLDEN / "bigvgan_v2_24khz_100band_256x.safetensors")
    with torch.device("meta"):
        vocoder = BigVGAN(BIGVGAN_V2_24KHZ_100BAND_256X)
    vocoder = vocoder.to_empty(device="cpu").eval().requires_grad_(False)
    checkpoint = NamedCheckpoint("bigvgan_v2_24khz_100band_256x.tsv", 1, lambda name, shape: kaiser_sinc())
    load_weights(vocoder, fold_weight_norm(checkpoint))
    wave, expected = vocoder.render(golden["mel"]), golden["before_clamp"][:, 0]
    assert (wave - expected).norm() < 1e-4 * expected.norm()
    torch.testing.assert_close(vocoder.bounded(wave), golden["pcm"][:, 0], atol=5e-3, rtol=0)


@pytest.mark.parametrize("keys", KEYS)
def test_published_names_shapes_and_parameter_count(keys):
    config, parameters = KEYS[keys]
    with torch.device("meta"):
        vocoder = BigVGAN(config)
    published = weights.shapes(GOLDEN / "keys" / keys)
    folded = {}
    for name, shape in published.items():
        if not name.endswith("weight_g"):
            folded[name.replace("weight_v", "weight")] = shape
    assert {name: tuple(tensor.shape) for name, tensor in published_tensors(vocoder).items()} == folded
    assert sum(math.prod(s) for n, s in published.items() if not weights.is_constant(n)) == parameters


@pytest.mark.parametrize("form", ["old", "new", "folded"])
def test_loading_each_published_form(tiny, tmp_path, form):
    tensors = {name: tensor.clone() for name, tensor in published_tensors(tiny).items()}
    for name in [name for name in tensors if name.endswith(".weight") and form != "folded"]:
        conv = torch.nn.Conv1d(1, 1, 1)
        conv.weight = torch.nn.Parameter(tensors.pop(name))
        parametrizations.weight_norm(conv)  # a convolution's magnitudes run along the first dimension, transposed too
        magnitude, direction = (("weight_g", "weight_v") if form == "old" else PARAMETRIZED_NAMES)[:2]
        prefix = name.removesuffix("weight")
        tensors[prefix + magnitude] = conv.parametrizations.weight.original0.detach()
        tensors[prefix + direction] = conv.parametrizations.weight.original1.detach()
    torch.save({"generator": tensors}, tmp_path / "bigvgan_generator.pt")
    values = asdict(TINY) | {"resblock": "1", "activation": "snakebeta", "model_in_dim": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    loaded = BigVGAN.load(tmp_path)
    mel = torch.randn(1, 5, 9)
    assert loaded.config == TINY
    torch.testing.assert_close(loaded(mel), tiny(mel), atol=1e-5, rtol=0)


PARAMETRIZED_NAMES = ("parametrizations.weight.original0", "parametrizations.weight.original1")


def test_version_1_configs_end_with_a_bias_and_tanh(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"resblock": "1", "num_mels": 5, "upsample_rates": [4, 2]}))
    config = BigVGANConfig.from_json(tmp_path / "config.json")
    assert config.use_bias_at_final and config.use_tanh_at_final and config.upsample_rates == (4, 2)


@pytest.mark.parametrize("text", ['{"resblock": "2"}', '{"activation": "snake"}', "not json"])
def test_a_config_of_another_model_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError):
        BigVGANConfig.from_json(tmp_path / "config.json")


def test_snake_beta_is_its_formula():
    snake = SnakeBeta(3)
    snake.requires_grad_(False).alpha.normal_()
    snake.beta.normal_()
    x = torch.randn(2, 3, 7)
    for channel in range(3):
        alpha, beta = math.exp(snake.alpha[channel]), math.exp(snake.beta[channel])
        expected = x[:, channel] + (alpha * x[:, channel]).sin() ** 2 / beta
        torch.testing.assert_close(snake(x)[:, channel], expected)


def test_filter_is_the_published_one():
    half = torch.tensor([0.00202896, 0.00938947, -0.02554346, -0.05765738, 0.12857258, 0.44320980])
    torch.testing.assert_close(kaiser_sinc().flatten(), torch.cat([half, half.flip(0)]), atol=1e-7, rtol=0)


def test_filters_keep_a_constant():
    constant = torch.full((1, 2, 40), 0.7)
    torch.testing.assert_close(Upsample2()(constant), torch.full((1, 2, 80), 0.7), atol=2e-3, rtol=0)
    torch.testing.assert_close(Downsample2()(constant), torch.full((1, 2, 20), 0.7))
    assert abs(float(kaiser_sinc().sum()) - 1) < 1e-6


def test_up_and_down_keep_a_slow_sine():
    time = torch.arange(400.0)
    sine = torch.sin(2 * math.pi * 0.02 * time)[None, None]
    up, there_and_back = Upsample2()(sine), AntiAliased(torch.nn.Identity())(sine)
    between = torch.sin(
        2 * math.pi * 0.02 * (torch.arange(800.0) / 2 - 0.25)
    )  # each sample becomes two, around its place
    assert (up[0, 0, 20:-20] - between[20:-20]).abs().max() < 5e-3
    assert (there_and_back - sine)[..., 10:-10].abs().max() < 5e-3


def test_anti_aliasing_weakens_what_folds_back():
    """Squaring a tone at 0.4 cycles a sample makes 0.8, which folds to 0.2; so short a filter takes off two thirds."""
    tone = torch.cos(2 * math.pi * 0.4 * torch.arange(512.0))[None, None]

    class Square(torch.nn.Module):
        def forward(self, x):
            return x * x

    def level(signal, frequency):
        return abs(torch.fft.rfft(signal.flatten() * torch.hann_window(512))[round(frequency * 512)])

    assert level(AntiAliased(Square())(tone), 0.2) < 0.4 * level(tone**2, 0.2)


def test_receptive_field_of_the_published_models():
    assert receptive_field(BIGVGAN_V2_24KHZ_100BAND_256X) == receptive_field(BIGVGAN_V2_22KHZ_80BAND_256X) == (38, 38)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        BigVGANConfig(5, 5, (2, 3), (6, 7), 8, (3,), ((1,),)),
        BigVGANConfig(5, 5, (5,), (5,), 8, (3, 7), ((2,), (1,))),
    ],
)
def test_receptive_field_is_exactly_what_the_gradient_sees(config):
    vocoder, (left, right) = tiny_vocoder(config, torch.float64), receptive_field(config)
    frame, hop = left + 3, config.hop
    mel = torch.randn(1, 5, frame + right + 4, dtype=torch.float64, requires_grad=True)
    wave = vocoder.render(mel)[0, frame * hop : (frame + 1) * hop]
    (seen,) = torch.autograd.grad(wave.square().sum(), mel)
    touched = seen.abs().amax(dim=(0, 1)).nonzero().flatten()
    assert (int(touched[0]), int(touched[-1])) == (frame - left, frame + right)


def test_activation_reach_is_exactly_what_the_gradient_sees():
    x = torch.randn(1, 1, 41, dtype=torch.float64, requires_grad=True)
    (seen,) = torch.autograd.grad(AntiAliased(SnakeBeta(1)).double()(x)[0, 0, 20], x)
    touched = seen[0, 0].nonzero().flatten()
    assert (int(touched[0]), int(touched[-1])) == (20 - REACH, 20 + REACH)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), batch=st.integers(1, 2))
def test_stream_equals_whole_for_any_pieces(tiny, sizes, batch):
    frames = sum(sizes)
    mel = torch.randn(batch, 5, frames, generator=torch.Generator().manual_seed(frames))
    heard = torch.cat(in_pieces(tiny, mel, sizes), dim=-1)
    expected = tiny.bounded(tiny.render(mel)) if frames else mel.new_empty(batch, 0)
    torch.testing.assert_close(heard, expected, atol=1e-5, rtol=0)


def test_full_depth_stream_equals_whole():
    config = BigVGANConfig(num_mels=8, upsample_initial_channel=64)
    vocoder = tiny_vocoder(config, torch.float64)  # random weights magnify float32 rounding to 1e-4
    mel = torch.randn(1, 8, 130, dtype=torch.float64)
    whole = vocoder.bounded(vocoder.render(mel))
    heard = in_pieces(vocoder, mel, [1, 50, 7, 8, 40, 24])
    assert [piece.shape[-1] // config.hop for piece in heard] == [0, 13, 7, 8, 40, 62]
    torch.testing.assert_close(torch.cat(heard, dim=-1), whole, atol=1e-9, rtol=0)


def test_whole_mel_in_bounded_memory_is_the_same(tiny, monkeypatch):
    mel = torch.randn(2, 5, 200)
    monkeypatch.setattr("vivavoce.models.bigvgan.PIECE_FRAMES", 37)
    torch.testing.assert_close(tiny(mel), tiny.bounded(tiny.render(mel)), atol=1e-5, rtol=0)


def test_less_look_ahead_answers_sooner_and_errs_less_the_more_it_sees():
    vocoder = tiny_vocoder(TINY)
    mel = torch.randn(1, 5, 160)
    whole = vocoder(mel)
    errors = []
    for look_ahead in (0, vocoder.look_ahead // 3, vocoder.look_ahead):
        heard = in_pieces(vocoder, mel, [8] * 20, look_ahead)
        ready = max(0, 8 - look_ahead)
        assert heard[0].shape[-1] == ready * TINY.hop
        errors.append(float((torch.cat(heard, dim=-1) - whole).norm() / whole.norm()))
    assert errors[0] > errors[1] > 1e-3
    assert errors[2] < 1e-5


def test_batched_streams_equal_single_ones(tiny):
    torch.manual_seed(1)
    mels = [torch.randn(1, 5, frames) for frames in (60, 60, 90, 12)]
    alone = [in_pieces(tiny, mel, [mel.shape[-1] // 2, mel.shape[-1] - mel.shape[-1] // 2]) for mel in mels]
    states = [tiny.initial_state() for _ in mels]
    halves = [mel.split([mel.shape[-1] // 2, mel.shape[-1] - mel.shape[-1] // 2], dim=-1) for mel in mels]
    first, states = tiny.step_batch(states, [half[0] for half in halves], [False] * 4)
    second, _ = tiny.step_batch(states, [half[1] for half in halves], [True] * 4)
    for together, single in zip(zip(first, second, strict=True), alone, strict=True):
        torch.testing.assert_close(torch.cat(together, dim=-1), torch.cat(single, dim=-1), atol=1e-5, rtol=0)


def test_a_state_can_be_stepped_twice(tiny):
    mel, other = torch.randn(1, 5, 50), torch.randn(1, 5, 20)
    _, state = tiny.step(tiny.initial_state(), mel)
    once, _ = tiny.step(state, other)
    tiny.step(state, torch.randn(1, 5, 33))
    again, _ = tiny.step(state, other)
    assert torch.equal(once, again)


@pytest.mark.parametrize(
    ("mel", "words"),
    [
        (torch.zeros(1, 5, 0), "no frames"),
        (torch.zeros(1, 6, 4), "[1, 6, 4]"),
        (torch.zeros(5, 4), "[5, 4]"),
        (torch.full((1, 5, 4), math.nan), "NaN"),
        (torch.full((1, 5, 4), math.inf), "infinite"),
    ],
)
def test_bad_mels_are_refused(tiny, mel, words):
    with pytest.raises(InputError) as caught:
        tiny(mel)
    assert words in str(caught.value)


def test_negative_look_ahead_is_refused(tiny):
    with pytest.raises(InputError):
        tiny.initial_state(look_ahead=-1)


def test_one_frame_and_silence(tiny):
    assert tiny(torch.zeros(1, 5, 1)).shape == (1, TINY.hop)
    assert torch.isfinite(tiny(torch.full((1, 5, 30), math.log(1e-5)))).all()
