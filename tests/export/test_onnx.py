"""ONNX graphs equal their torch models, also at sizes other than those they were traced with."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.export.operators import operators_listed_once  # noqa: F401 - a fixture
from tests.models.hift_cases import quietened
from tests.models.tiny import CONFIG
from tests.models.tiny_codec import tiny_codec
from tests.models.tiny_cosyvoice import write_folder
from vivavoce.errors import CheckpointError, InputError, VivaError
from vivavoce.export.onnx import (
    MANIFEST,
    MAX_PARAMETERS,
    bigvgan_graphs,
    export_onnx,
    kind_of,
    lm_graphs,
    whisper_graphs,
    xy_graphs,
)
from vivavoce.export.onnx_codec import speech_graphs, vocoder_graph
from vivavoce.export.onnx_graph import OPSET, ExportedGraph, OnnxExport, difference, export_graph, open_session
from vivavoce.models.bigvgan import BigVGAN, BigVGANConfig
from vivavoce.models.cosyvoice.folder import CosyVoiceSizes, load_speech
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.model import Whisper
from vivavoce.models.xy_tokenizer.model import XYTokenizer, XYTokenizerConfig
from vivavoce.nn.modules import fill_randomly

ENCODER_AND_FLOW = ("speech_encoder", "flow_conditions", "flow_step")
WHISPER = WhisperConfig(
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    vocab_size=100,
    max_source_positions=60,
    max_target_positions=40,
    num_mel_bins=16,
)
BIGVGAN = BigVGANConfig(
    num_mels=8,
    upsample_rates=(4,),
    upsample_kernel_sizes=(8,),
    upsample_initial_channel=16,
    resblock_kernel_sizes=(3,),
    resblock_dilation_sizes=((3,),),
)
XY = XYTokenizerConfig(
    n_fft=64,
    d_model=64,
    heads=1,
    ffn=64,
    layers=1,
    adapter_layers=1,
    codebooks=2,
    codebook_entries=16,
    codebook_size=8,
    vocos_dim=16,
    vocos_inner=32,
    vocos_layers=1,
)


SHORT_HIFT = HiFTConfig(
    channels=16,
    f0_channels=8,
    f0_layers=1,
    upsample_rates=(8,),
    upsample_kernels=(16,),
    source_resblock_kernels=(7,),
    resblock_kernels=(3,),
    dilations=(1,),
)


def of(graphs: Iterator[OnnxExport], folder: Path) -> dict[str, ExportedGraph]:
    torch.manual_seed(0)
    return {graph.name: export_graph(graph, folder) for graph in graphs}


def bigvgan() -> BigVGAN:
    vocoder = BigVGAN(BIGVGAN).requires_grad_(False).eval()
    fill_randomly(vocoder)
    return vocoder


def xy_tokenizer() -> XYTokenizer:
    tokenizer = XYTokenizer(XY).requires_grad_(False).eval()
    fill_randomly(tokenizer)
    torch.manual_seed(1)
    for quantizer in tokenizer.quantizer.quantizers:
        quantizer.codebook.normal_()
    return tokenizer


def test_whisper_transcribes_through_two_graphs(tmp_path: Path) -> None:
    whisper = Whisper.random(WHISPER)
    written = of(whisper_graphs(whisper), tmp_path)
    assert all(graph.difference < 1e-5 for graph in written.values())
    encoder, decoder = (open_session(written[name].file) for name in ("encoder", "decoder"))
    mel, tokens = torch.randn(2, 16, 90), torch.randint(0, 100, (2, 9))
    _, keys, values = encoder.run(None, {"mel": mel.numpy()})
    past = np.zeros((1, 2, 2, 0, 16), np.float32)
    pasts, logits = (past, past), []
    for piece in tokens.split([4, 1, 1, 3], dim=1):  # a prompt, then token by token, then several
        feed = dict(zip(("past_keys", "past_values"), pasts, strict=True))
        feed |= {"tokens": piece.numpy(), "memory_keys": keys, "memory_values": values}
        new, *pasts = decoder.run(None, feed)
        logits.append(new)
    assert difference(whisper(mel, tokens), np.concatenate(logits, axis=1)) < 1e-5


def test_a_language_model_goes_on_from_its_past(tmp_path: Path) -> None:
    model = MossSpeech.random(replace(CONFIG, num_shared_layers=1), dtype=torch.float32, deviation=0.3)
    graph = of(lm_graphs(model, ("text_logits", "audio_logits")), tmp_path)["lm"]
    assert graph.difference < 1e-5
    assert graph.inputs["rows"] == ["row", 2]
    assert onnx.load(graph.file).opset_import[0].version == OPSET
    session = open_session(graph.file)
    rows = torch.stack([torch.randint(0, 320, (9,)), torch.randint(0, 72, (9,))], dim=1).numpy()
    nothing = np.zeros((3, 0, 2, 16), np.float32)
    whole = session.run(None, {"rows": rows, "past_keys": nothing, "past_values": nothing})
    _, _, keys, values = session.run(None, {"rows": rows[:6], "past_keys": nothing, "past_values": nothing})
    rest = session.run(None, {"rows": rows[6:], "past_keys": keys, "past_values": values})
    for at_once, in_two in zip(whole, rest, strict=True):
        assert np.abs((at_once if at_once.shape[0] == 3 else at_once[6:]) - in_two).max() < 1e-4


def test_a_vocoder_without_state(tmp_path: Path) -> None:
    assert of(bigvgan_graphs(bigvgan()), tmp_path)["vocoder"].difference <= 1e-4


def test_the_xy_decoder_does_without_complex_numbers(tmp_path: Path) -> None:
    tokenizer = xy_tokenizer()
    torch.manual_seed(0)
    graph = next(graph for graph in xy_graphs(tokenizer) if graph.name == "decoder")
    assert export_graph(graph, tmp_path).difference <= 1e-4
    codes = torch.randint(0, 16, (2, 2, 7))
    assert difference(tokenizer.decode_window(codes), graph.module(codes).numpy()) < 1e-5


def test_the_xy_encoder_is_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = xy_tokenizer()
    encoder = next(graph for graph in xy_graphs(tokenizer) if graph.name == "encoder")
    sound = torch.randn(2, 9 * tokenizer.config.samples_in)
    mel = tokenizer.mel(sound)[..., : 9 * 8]
    found = encoder.module(mel)
    assert found.shape == (2, 2, 9)
    assert difference(tokenizer.encode_window(sound)[..., :8], found[..., :8].numpy()) <= 0.1


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small codec with a voice."""
    folder, small_codec = tmp_path_factory.mktemp("codec"), tiny_codec()
    config = small_codec.flow.config
    torch.manual_seed(0)
    frames = torch.randn(10 * config.ratio, config.mel_bands)
    small_codec.save_voice("someone", VoicePrompt(torch.randint(0, 64, (10,)), frames, torch.randn(config.speaker_dim)))
    small_codec.save(folder)
    return folder


@pytest.fixture(scope="module")
def graphs(codec: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its graphs."""
    folder = tmp_path_factory.mktemp("onnx") / "deeper"
    export_onnx(codec, folder, ENCODER_AND_FLOW)
    return folder


def test_a_codec_encodes_and_makes_mels_through_onnx(codec: Path, graphs: Path) -> None:
    loaded = MossSpeechCodec.load(codec)
    prompt = loaded.named.prompt("someone")
    flow = loaded.flow
    codes = torch.randint(0, 64, (17,))
    wanted = flow(codes, prompt, streaming=True)
    assert difference(wanted, mel_of(graphs, codes, prompt, flow.config.euler_steps, flow.config.ratio)) < 1e-4
    mel = torch.randn(1, loaded.speech_encoder.encoder.config.num_mel_bins, 230)
    codes_by_onnx = open_session(graphs / "speech_encoder.onnx").run(None, {"mel": mel.numpy()})[0]
    assert difference(loaded.speech_encoder.encoder(mel), codes_by_onnx) == 0


def mel_of(folder: Path, codes: Tensor, prompt: VoicePrompt, steps: int, ratio: int) -> np.ndarray:
    """A reply's mel with nothing but onnxruntime and numpy: the loop that docs/export.md shows."""
    conditions, step = (open_session(folder / f"{name}.onnx") for name in ("flow_conditions", "flow_step"))
    length = min(len(prompt.codes), len(prompt.mel) // ratio)
    everything = np.concatenate([prompt.codes[:length].numpy(), codes.numpy()])[None]
    speaker = prompt.speaker[None].numpy()
    features, voice, x = conditions.run(None, {"codes": everything, "speaker": speaker})
    known = np.zeros_like(features)
    known[0, : length * ratio] = prompt.mel[: length * ratio].numpy()
    for number in range(steps):
        feed = {"x": x, "features": features, "voice": voice, "prompt_mel": known, "step": np.array(number)}
        x = step.run(None, feed)[0]
    return x[0, length * ratio :].T


def test_a_vocoder_draws_its_noise_from_the_seed(tmp_path: Path) -> None:
    hift = quietened(HiFT(SHORT_HIFT).requires_grad_(False).eval())
    session = open_session(of(iter([vocoder_graph(hift)]), tmp_path)["vocoder"].file)
    mel = torch.randn(2, 80, 21)
    sound = session.run(None, {"mel": mel.numpy(), "seed": np.array([5, 6])})[0]
    for row, seed in enumerate((5, 6)):
        assert difference(hift(mel[row : row + 1], seed), sound[row : row + 1]) < 1e-4
    assert np.abs(sound - session.run(None, {"mel": mel.numpy(), "seed": np.array([7, 6])})[0])[0].max() > 1e-4


@pytest.mark.parametrize("version", [2, 3])
def test_cosyvoices_parts_are_its_models(version: int, tmp_path: Path) -> None:
    """In torch, since tracing them takes long; the tracing itself is tested on the parts of a codec."""
    folder = write_folder(tmp_path, version)
    speech = load_speech(folder, CosyVoiceSizes.of_folder(folder, version), "cpu", torch.float32)
    assert kind_of(folder).name == "cosyvoice"
    conditions, step, vocoder = (graph.module for graph in speech_graphs(speech))
    torch.manual_seed(0)
    prompt = VoicePrompt(torch.randint(0, 6561, (30,)), torch.randn(60, 80), torch.randn(192))
    codes = torch.randint(0, 6561, (41,))
    features, voice, x = conditions(torch.cat([prompt.codes, codes])[None], prompt.speaker[None])
    known = functional.pad(prompt.mel, (0, 0, 0, 82))[None]
    for number in range(speech.flow.config.euler_steps):
        x = step(x, features, voice, known, torch.tensor(number))
    mel = speech.flow(codes, prompt, streaming=True)
    torch.testing.assert_close(x[0, 60:].T, mel, rtol=0, atol=1e-5)
    whole = getattr(speech.vocoder, "hift", speech.vocoder)
    wanted = whole(mel[None], seed=4)
    assert difference(wanted, vocoder(mel[None], torch.tensor([4])).numpy()) < 1e-4


def test_the_manifest_lists_the_comparisons(graphs: Path) -> None:
    manifest = json.loads((graphs / MANIFEST).read_text())
    assert manifest["kind"] == "moss-speech-codec"
    assert [graph["name"] for graph in manifest["graphs"]] == list(ENCODER_AND_FLOW)
    assert all(graph["difference"] <= graph["tolerance"] and len(graph["checked"]) >= 3 for graph in manifest["graphs"])
    assert not list(graphs.glob("*.partial*"))


class Doubled(nn.Module):
    """Computes something else while it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.compiler.is_exporting() else x


def test_a_graph_that_is_not_its_model_is_refused(tmp_path: Path) -> None:
    graph = OnnxExport("liar", Doubled(), {"x": torch.ones(3, 2)}, {"x": {0: "row"}}, ("y",))
    with pytest.raises(VivaError, match=r"liar: ONNX differs from torch by 1 of the largest value"):
        export_graph(graph, tmp_path)
    assert not list(tmp_path.iterdir())


def test_bad_input_is_one_line(tmp_path: Path, codec: Path, graphs: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        kind_of(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is not a model that can be exported to ONNX; supported are moss-speech, "):
        kind_of(tmp_path)
    with pytest.raises(InputError, match="is a file; give a folder"):
        export_onnx(codec, codec / "config.json")
    cut = tmp_path / "cut.onnx"
    cut.write_bytes((graphs / "flow_step.onnx").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"cut.onnx cannot be opened as an ONNX graph .*export it again"):
        open_session(cut)
    with torch.device("meta"):
        large = MossSpeech(MossSpeechConfig())
    assert sum(weight.numel() for weight in large.parameters()) > MAX_PARAMETERS
    with pytest.raises(InputError, match=r"9.1 B parameters are too many for ONNX; `viva export trtllm`"):
        next(lm_graphs(large))
