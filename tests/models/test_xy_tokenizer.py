"""XY-Tokenizer and its Vocos against official outputs, independent implementations, and themselves in pieces."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn.utils import parametrizations

from tests.golden import weights
from tests.models.named_checkpoint import GOLDEN, NamedCheckpoint
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import fold_weight_norm, load_weights, published_tensors
from vivavoce.models.xy_tokenizer.model import (
    TRAINING_ONLY,
    XY_TOKENIZER_16KHZ,
    XY_TOKENIZER_24KHZ,
    XY_TOKENIZER_32KHZ,
    AudioEncoder,
    InverseSTFT,
    XYTokenizer,
    XYTokenizerConfig,
    config_of,
    open_checkpoint,
    published_name,
)
from vivavoce.models.xy_tokenizer.windows import LONG, LOW_LATENCY, PUBLISHED, Windows, XYCodec, cross_faded
from vivavoce.nn.attention import sinusoids
from vivavoce.nn.vq import ResidualVQ

KEYS = "xy_tokenizer_16k.tsv"
TINY = XYTokenizerConfig(
    d_model=128,
    heads=2,
    ffn=64,
    layers=1,
    adapter_layers=1,
    window_seconds=4,
    codebooks=3,
    codebook_entries=16,
    codebook_size=8,
    vocos_dim=16,
    vocos_inner=32,
    vocos_layers=2,
)
SAMPLES = TINY.samples_in


@pytest.fixture(scope="module")
def official():
    """The paper's model at full size, its weights made by name."""
    tokenizer = XYTokenizer.allocate(XY_TOKENIZER_16KHZ)
    checkpoint = NamedCheckpoint(KEYS, 1, constant).renamed(published_name)
    load_weights(tokenizer, fold_weight_norm(checkpoint))
    yield tokenizer
    for tensor in published_tensors(tokenizer).values():
        tensor.set_()  # two gigabytes, given back before other modules build theirs


def constant(name, shape):
    return torch.hann_window(*shape) if name.endswith("window") else sinusoids(*shape)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    tokenizer = XYTokenizer(TINY).eval().requires_grad_(False)
    for name, tensor in published_tensors(tokenizer).items():
        if name.endswith(".codebook"):
            tensor.normal_()
    tokenizer.vocos.head.out.weight.mul_(3)
    return tokenizer


def speechlike(samples, seed=0):
    """Noise whose loudness and colour change, [1, samples]."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(samples, generator=generator)
    slow = torch.sin(torch.arange(samples) / 1500.0 + seed) + 1.2
    return (0.1 * slow * (noise + torch.sin(torch.arange(samples) * 0.05 * slow)))[None]


def some_codes(count, batch=1, codebooks=TINY.codebooks, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY.codebook_entries, (batch, codebooks, count), generator=generator)


class TestOfficialOutputs:
    def test_log_mel(self, official):
        golden = load_file(GOLDEN / "xy_tokenizer_16k.safetensors")
        window = torch.nn.functional.pad(golden["wav"][0], (0, 30 * 16000 - golden["wav"].shape[-1]))
        torch.testing.assert_close(official.mel(window)[..., :400], golden["log_mel"], atol=1e-5, rtol=0)

    def test_decoder_with_codebooks_of_zero(self, official):
        """In this file the quantiser gives its bias alone, whatever the codes: it pins the rest of the decoder."""
        golden = load_file(GOLDEN / "xy_tokenizer_16k.safetensors")
        books = [quantizer.codebook.clone() for quantizer in official.quantizer.quantizers]
        for quantizer in official.quantizer.quantizers:
            quantizer.codebook.zero_()
        codes = golden["codes"].transpose(0, 1)
        assert torch.equal(official.encode_window(golden["wav"][0]), codes)
        torch.testing.assert_close(official.quantizer.decode(codes), golden["quantised"], atol=1e-5, rtol=0)
        assert relative_error(official.decode_window(codes), golden["decoded_from_codes"][0]) < 1e-4
        for quantizer, book in zip(official.quantizer.quantizers, books, strict=True):
            quantizer.codebook.copy_(book)

    def test_encoder(self, official):
        wav = load_file(GOLDEN / "xy_tokenizer_16k.safetensors")["wav"][0]
        golden = load_file(GOLDEN / "xy_tokenizer_16k_codebooks.safetensors")
        latents = official.quantizer.input_proj(official.latents(wav).transpose(1, 2))
        assert relative_error(latents, golden["latent"]) < 1e-4
        assert torch.equal(XYCodec(official).encode(wav[0]), golden["codes"][:, 0].long())
        assert torch.equal(XYCodec(official).encode(wav[0, :30000]), golden["codes_of_30000_samples"][:, 0].long())

    def test_decoder(self, official):
        golden = load_file(GOLDEN / "xy_tokenizer_16k_codebooks.safetensors")
        codec, codes = XYCodec(official), golden["codes"][:, 0]
        assert relative_error(codec.decode(codes), golden["decoded_from_codes"][0, 0]) < 1e-4
        coarse = codec.decode(codes[:4])
        assert coarse.shape == (51200,)
        assert relative_error(coarse[:12800], golden["decoded_from_4_codebooks"][0, 0]) < 1e-4


def relative_error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


class TestPublishedCheckpoints:
    @pytest.mark.parametrize(
        ("config", "rate"), [(XY_TOKENIZER_16KHZ, 16000), (XY_TOKENIZER_24KHZ, 24000), (XY_TOKENIZER_32KHZ, 32000)]
    )
    def test_names_and_shapes(self, config, rate):
        with torch.device("meta"):
            tokenizer = XYTokenizer(config)
        published = {
            name.replace("weight_v", "weight"): shape
            for name, shape in weights.shapes(GOLDEN / "keys" / KEYS).items()
            if not name.endswith(("weight_g", *TRAINING_ONLY))
        }
        bins = config.n_fft + 2
        published |= {"vocos.head.out.weight": (bins, 512), "vocos.head.out.bias": (bins,)}
        published["vocos.head.istft.window"] = (config.n_fft,)
        assert {name: tuple(tensor.shape) for name, tensor in published_tensors(tokenizer).items()} == published
        assert (config.output_rate, config.samples_in, config.samples_out) == (rate, 1280, rate * 80 // 1000)
        assert config.window_codes == LONG.length == PUBLISHED.length == 375

    def test_sizes_are_read_off_the_shapes(self):
        assert config_of(NamedCheckpoint(KEYS, 1, constant).renamed(published_name)) == XY_TOKENIZER_16KHZ

    @pytest.mark.parametrize("form", ["paper", "ttsd", "suffixless", "transformers"])
    def test_loading_each_published_form(self, tiny, tmp_path, form):
        tensors = {}
        for name, tensor in published_tensors(tiny).items():
            prefix = name.removesuffix("weight")
            if name.startswith("quantizer.") and name != prefix:
                tensors |= weight_normed(prefix, tensor, is_parametrized=form == "transformers")
            else:
                tensors[name] = tensor
        for book in range(TINY.codebooks):
            state = {"inited": torch.ones(1, dtype=torch.bool), "cluster_size": torch.ones(16)}
            tensors |= {f"quantizer.quantizers.{book}.{name}": value for name, value in state.items()}
        if form != "paper":
            tensors = {name.replace("vocos.", "enhanced_vocos."): value for name, value in tensors.items()}
        if form == "transformers":
            tensors = {name.replace(".fc", ".mlp.fc"): value for name, value in tensors.items()}
        names = {"suffixless": "MOSS_TTSD_tokenizer", "transformers": "pytorch_model.bin"}
        content = tensors if form == "transformers" else {"generator": tensors}
        torch.save(content, tmp_path / names.get(form, "xy_tokenizer.ckpt"))
        loaded = XYTokenizer.load(tmp_path)
        assert loaded.config == TINY
        pcm = speechlike(20 * SAMPLES)
        codes = tiny.encode_window(pcm)
        assert torch.equal(loaded.encode_window(pcm), codes)
        torch.testing.assert_close(loaded.decode_window(codes), tiny.decode_window(codes), atol=1e-4, rtol=0)

    def test_another_models_file_is_refused(self, tmp_path):
        torch.save({"conv_pre.weight": torch.zeros(1)}, tmp_path / "other.pt")
        with (
            pytest.raises(CheckpointError, match="not an XY-Tokenizer"),
            open_checkpoint(tmp_path / "other.pt") as opened,
        ):
            config_of(opened)

    def test_half_precision_keeps_quantiser_and_mel_exact(self):
        tokenizer = XYTokenizer.allocate(TINY, dtype=torch.bfloat16)
        assert tokenizer.downsample.down_proj.weight.dtype == torch.bfloat16
        assert tokenizer.quantizer.quantizers[0].codebook.dtype == tokenizer.mel.window.dtype == torch.float32


def weight_normed(prefix, weight, is_parametrized):
    conv = torch.nn.Conv1d(1, 1, 1)
    conv.weight = torch.nn.Parameter(weight.clone())
    parametrizations.weight_norm(conv)
    magnitude, direction = conv.parametrizations.weight.original0, conv.parametrizations.weight.original1
    names = ("parametrizations.weight.original0", "parametrizations.weight.original1")
    spelled = names if is_parametrized else ("weight_g", "weight_v")
    return {prefix + spelled[0]: magnitude.detach(), prefix + spelled[1]: direction.detach()}


class TestParts:
    def test_residual_codes_are_nearest_neighbours(self):
        torch.manual_seed(0)
        quantizer = ResidualVQ(6, 5, 7, codebooks=4, entries=32).requires_grad_(False)
        for book in quantizer.quantizers:
            book.codebook.normal_()
        x = torch.randn(2, 6, 50)
        left = quantizer.input_proj(x).transpose(1, 2).double()
        for stage, codes in zip(quantizer.quantizers, quantizer.encode(x).unbind(dim=1), strict=True):
            distances = (left[:, :, None] - stage.codebook.double()).square().sum(-1)
            assert torch.equal(codes, distances.argmin(-1))
            left = left - stage.codebook.double()[codes]

    def test_residual_decoding_sums_the_codebooks_given(self):
        torch.manual_seed(0)
        quantizer = ResidualVQ(6, 5, 7, codebooks=4, entries=32).requires_grad_(False)
        for book in quantizer.quantizers:
            book.codebook.normal_()
        codes = torch.randint(32, (2, 3, 9))
        total = sum(quantizer.quantizers[i].codebook[codes[:, i]] for i in range(3))
        torch.testing.assert_close(quantizer.decode(codes), quantizer.output_proj(total.transpose(1, 2)))

    def test_encoder_is_whispers(self):
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        torch.manual_seed(0)
        config = replace(TINY, layers=2)
        ours = AudioEncoder(config).eval().requires_grad_(False)
        theirs = WhisperEncoder(
            WhisperConfig(
                num_mel_bins=80,
                d_model=config.d_model,
                encoder_layers=config.layers,
                encoder_attention_heads=config.heads,
                encoder_ffn_dim=config.ffn,
                max_source_positions=config.positions,
            )
        ).eval()
        state = {
            name.replace("positional_embedding", "embed_positions.weight"): t for name, t in ours.state_dict().items()
        }
        theirs.load_state_dict(state)
        mel = torch.randn(1, 80, 2 * config.positions)
        expected = theirs(mel).last_hidden_state
        torch.testing.assert_close(ours(mel, config.positions), expected, atol=1e-5, rtol=0)

    def test_fewer_states_do_not_see_the_rest(self, tiny):
        mel = torch.randn(1, 80, 2 * TINY.positions)
        changed = mel.clone()
        changed[..., 2 * 50 + 1 :] = 9.0  # the last of 50 states reaches one frame past its own two
        encoder = tiny.acoustic_encoder
        assert torch.equal(encoder(mel, 50), encoder(changed, 50))

    def test_inverse_transform_gives_back_what_was_transformed(self):
        n_fft, hop = 64, 16
        signal = torch.randn(2, 40 * hop, dtype=torch.float32)
        margin = (n_fft - hop) // 2
        padded = torch.nn.functional.pad(signal, (margin, margin))
        window = torch.hann_window(n_fft)
        spectrum = torch.stft(padded, n_fft, hop, window=window, center=False, return_complex=True)
        back = InverseSTFT(n_fft, hop)(spectrum.transpose(1, 2))
        assert back.shape == signal.shape
        torch.testing.assert_close(back, signal, atol=1e-4, rtol=0)

    def test_cross_fade_leaves_equal_sounds_alone_and_never_overshoots(self):
        sound = torch.randn(1, 50)
        torch.testing.assert_close(cross_faded(sound[:, :20], sound), sound)
        faded = cross_faded(torch.zeros(1, 20), torch.ones(1, 50))[0]
        assert (faded.diff() >= 0).all() and 0 < faded[0] < 0.1 and (faded[20:] == 1).all()


def cut(tokenizer, windows):
    return XYCodec(tokenizer, windows, windows)


CUTS = [Windows(12, 20, 13), Windows(0, 20, 30, fade=0.0), Windows(30, 2, 3), Windows(5, 1, 0), Windows(0, 50, 0)]


class TestWindows:
    @pytest.mark.parametrize("windows", CUTS)
    @settings(max_examples=8, deadline=None)
    @given(cuts=st.lists(st.integers(0, 90), max_size=6), total=st.integers(1, 90))
    def test_decoding_in_pieces_is_decoding_at_once(self, tiny, windows, cuts, total):
        codec, codes = cut(tiny, windows), some_codes(total)
        whole = codec.decode(codes)
        state, heard = codec.initial_decode_state(), []
        places = [0, *sorted(min(cut, total) for cut in cuts), total]
        for number, (start, end) in enumerate(pairwise(places), start=2):
            pcm, state = codec.decode_step(state, codes[..., start:end], final=number == len(places))
            heard.append(pcm)
        assert torch.equal(torch.cat(heard, dim=-1), whole)
        assert whole.shape == (1, total * TINY.samples_out)

    @pytest.mark.parametrize("windows", CUTS[:3])
    @settings(max_examples=5, deadline=None)
    @given(cuts=st.lists(st.integers(0, 120 * SAMPLES), max_size=5), total=st.integers(SAMPLES, 120 * SAMPLES))
    def test_encoding_in_pieces_is_encoding_at_once(self, tiny, windows, cuts, total):
        codec, pcm = cut(tiny, windows), speechlike(total)
        whole = codec.encode(pcm)
        state, given_codes = codec.initial_encode_state(), []
        places = [0, *sorted(min(cut, total) for cut in cuts), total]
        for number, (start, end) in enumerate(pairwise(places), start=2):
            codes, state = codec.encode_step(state, pcm[:, start:end], final=number == len(places))
            given_codes.append(codes)
        assert torch.equal(torch.cat(given_codes, dim=-1), whole)
        assert whole.shape == (1, TINY.codebooks, total // SAMPLES)

    def test_published_windows_keep_the_first_part_of_each(self, tiny):
        """The official cut: a window every 20 codes, 50 codes long, of which the first 20 are kept."""
        codec = cut(tiny, Windows(0, 20, 30, fade=0.0))
        pcm, codes = speechlike(77 * SAMPLES + 500), some_codes(77)
        starts = range(0, 77, 20)
        encoded = [tiny.encode_window(pcm[:, s * SAMPLES : (s + 50) * SAMPLES])[..., :20] for s in starts]
        assert torch.equal(codec.encode(pcm), torch.cat(encoded, dim=-1)[..., :77])
        decoded = [tiny.decode_window(codes[..., s : s + 50])[:, : 20 * TINY.samples_out] for s in starts]
        assert torch.equal(codec.decode(codes), torch.cat(decoded, dim=-1)[:, : 77 * TINY.samples_out])

    def test_a_window_that_holds_everything_is_the_whole_context(self, tiny):
        codes = some_codes(45)
        for windows in (Windows(0, 45, 5), Windows(0, 40, 10, fade=0.0)):
            heard = cut(tiny, windows).decode(codes)
            full = tiny.decode_window(codes)[:, : windows.hop * TINY.samples_out]
            assert torch.equal(heard[:, : full.shape[-1]], full)

    def test_more_context_is_closer_to_the_whole(self, tiny):
        codes = some_codes(48)
        full = tiny.decode_window(codes)
        errors = [
            relative_error(cut(tiny, Windows(left, 2, right)).decode(codes), full)
            for left, right in ((0, 0), (10, 4), (36, 12))
        ]
        assert errors[0] > errors[1] > errors[2]

    def test_first_sound_comes_after_hop_and_look_ahead(self, tiny):
        codec = cut(tiny, Windows(30, 2, 3))
        state, codes = codec.initial_decode_state(), some_codes(12)
        lengths = []
        for code in codes.split(1, dim=-1):
            pcm, state = codec.decode_step(state, code)
            lengths.append(pcm.shape[-1] // TINY.samples_out)
        assert lengths == [0, 0, 0, 0, 2, 0, 2, 0, 2, 0, 2, 0]

    def test_seams_are_no_rougher_than_the_rest(self, tiny):
        codes, windows = some_codes(48), Windows(20, 8, 6)
        sound = cut(tiny, windows).decode(codes)[0]
        steps = sound.diff().abs()
        seams = [place * TINY.samples_out for place in range(8, 48, 8)]
        near_seams = torch.zeros_like(steps, dtype=torch.bool)
        for seam in seams:
            near_seams[seam - 2 : seam + 322] = True  # the cross-fade lasts 320 samples
        assert steps[near_seams].max() < 1.1 * steps[~near_seams].max()

    def test_a_state_can_be_stepped_twice(self, tiny):
        codec = cut(tiny, Windows(10, 2, 3))
        _, state = codec.decode_step(codec.initial_decode_state(), some_codes(20))
        once, _ = codec.decode_step(state, some_codes(9, seed=1))
        codec.decode_step(state, some_codes(30, seed=2))
        again, _ = codec.decode_step(state, some_codes(9, seed=1))
        assert torch.equal(once, again)

    def test_rows_of_a_batch_do_not_mix(self, tiny):
        codec = cut(tiny, Windows(12, 20, 13))
        pcm = torch.cat([speechlike(60 * SAMPLES), 0.2 * speechlike(60 * SAMPLES, seed=3)])
        codes = codec.encode(pcm)
        assert torch.equal(codes[1], codec.encode(pcm[1]))
        torch.testing.assert_close(codec.decode(codes)[1], codec.decode(codes[1]), atol=1e-4, rtol=0)

    def test_a_sound_longer_than_a_window_comes_back_as_long(self, tiny):
        codec = cut(tiny, Windows(12, 20, 13))
        pcm = speechlike(131 * SAMPLES + 7)[0]
        assert codec.decode(codec.encode(pcm)).shape == (131 * TINY.samples_out,)

    @pytest.mark.parametrize(
        "windows", [Windows(30, 20, 1), Windows(0, 0, 5), Windows(-1, 5, 5), Windows(0, 5, 5, -0.1)]
    )
    def test_impossible_windows_are_refused(self, tiny, windows):
        with pytest.raises(InputError):
            cut(tiny, windows)

    def test_presets_fit_the_published_model(self):
        with torch.device("meta"):
            tokenizer = XYTokenizer(replace(TINY, window_seconds=30))
        for windows in (LONG, PUBLISHED, LOW_LATENCY):
            XYCodec(tokenizer, windows, windows)


@pytest.fixture(scope="module")
def codec(tiny):
    return cut(tiny, Windows(12, 20, 13))


class TestBadInput:
    @pytest.mark.parametrize(
        ("pcm", "rate", "words"),
        [
            (torch.zeros(0), 16000, "has 0"),
            (torch.zeros(160), 16000, "has 160"),
            (torch.zeros(24000), 24000, "24000"),
            (torch.full((16000,), math.nan), 16000, "NaN"),
            (torch.zeros(16000, dtype=torch.int16), 16000, "int16"),
            (torch.zeros(1, 2, 16000), 16000, "[1, 2, 16000]"),
        ],
    )
    def test_sound(self, codec, pcm, rate, words):
        with pytest.raises(InputError) as caught:
            codec.encode(pcm, rate)
        assert words in str(caught.value)

    @pytest.mark.parametrize(
        ("codes", "words"),
        [
            (torch.zeros(3, 0, dtype=torch.long), "[3, 0]"),
            (torch.zeros(5, dtype=torch.long), "[5]"),
            (torch.zeros(4, 5, dtype=torch.long), "3 codebooks"),
            (torch.zeros(0, 5, dtype=torch.long), "3 codebooks"),
            (torch.tensor([[0, 16]]), "code 16"),
            (torch.tensor([[0, -1]]), "code -1"),
            (torch.zeros(3, 5), "float32"),
        ],
    )
    def test_codes(self, codec, codes, words):
        with pytest.raises(InputError) as caught:
            codec.decode(codes)
        assert words in str(caught.value)

    def test_a_stream_keeps_its_shape(self, codec):
        with pytest.raises(InputError):
            codec.encode_step(codec.initial_encode_state(2), torch.zeros(1, 500))
        with pytest.raises(InputError):
            codec.decode_step(codec.initial_decode_state(1, 2), some_codes(4))

    def test_silence_and_clipping_give_codes_and_sound(self, codec):
        for pcm in (torch.zeros(16000), torch.ones(16000), torch.sign(speechlike(16000)[0])):
            codes = codec.encode(pcm)
            assert codes.shape == (3, 12)
            assert torch.isfinite(codec.decode(codes)).all()

    def test_fewer_codebooks(self, codec):
        codes = some_codes(10)[0]
        assert codec.decode(codes[:1]).shape == codec.decode(codes).shape
        assert not torch.equal(codec.decode(codes[:2]), codec.decode(codes))
