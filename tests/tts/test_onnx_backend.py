"""The ONNX backend generates the same codes as torch, and works without torch."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.export.operators import operators_listed_once  # noqa: F401 - a fixture
from vivavoce.audio.level import buzz
from vivavoce.errors import CheckpointError, InputError
from vivavoce.export.nano_onnx import LocalFixedSampledFrame, nano_graphs
from vivavoce.export.onnx import export_onnx
from vivavoce.models.checkpoint import save_weights
from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig, QuantizerConfig, StageConfig
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import LocalFrame, MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import NanoSampling
from vivavoce.nn.modules import fill_randomly
from vivavoce.train.tts.batches import write_tokenizer
from vivavoce.train.tts.train import TINY_LM
from vivavoce.tts import NanoTTS, SpeakingStyle, StoredVoice
from vivavoce.tts.interface import SpeechSettings, open_speech_model
from vivavoce.tts.onnx import OnnxTTS

TEXT = "A table for two, please."
LM = dataclasses.replace(
    TINY_LM, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, n_vq=2, audio_vocab_size=24,
    audio_pad_token_id=24, max_positions=512,
)  # fmt: skip


def stage(inputs: int, outputs: int) -> StageConfig:
    return StageConfig(inputs, outputs, 1, 0.4, d_model=8, num_heads=2, dim_feedforward=16)


CODEC = MossAudioTokenizerConfig(
    sample_rate=1000,
    channels=2,
    encoder=(20, stage(20, 6), 8),
    decoder=(8, stage(6, 20), 20),
    quantizer=QuantizerConfig(48, 12, 48, num_quantizers=2, codebook_size=24, codebook_dim=4),
)
OF_THE_MODEL = ("prefill", "decode_step", "local_decoder", "local_cached_step", "local_fixed_sampled_frame")
OF_THE_CODEC = ("encode", "decode_full", "decode_step")
PUBLISHED = [f"moss_tts_{name}" for name in OF_THE_MODEL] + [f"moss_audio_tokenizer_{name}" for name in OF_THE_CODEC]
NOT_SPOKEN_WITH = ("moss_tts_local_decoder", "moss_audio_tokenizer_decode_full")
"""Tracing takes seconds a graph; these are compared with the model as they stand before it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("nano")
    model = MossTTSNano.random(LM, deviation=0.3)
    codec = MossAudioTokenizerNano(CODEC).eval()
    fill_randomly(codec, 0)
    (root / "codec").mkdir()
    save_weights(model, root)
    save_weights(codec, root / "codec")
    LM.write(root)
    CODEC.write(root / "codec")
    write_tokenizer(root, LM.vocab_size)
    voices = {"bell": StoredVoice("bell", [[1, 2], [3, 4], [5, 6]])}
    SpeechSettings(NanoSampling(max_new_frames=9, audio_top_k=8), 60, voices=voices).write(root)
    return root


@pytest.fixture(scope="module")
def graphs(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("onnx")
    written = export_onnx(folder, out, [name for name in PUBLISHED if name not in NOT_SPOKEN_WITH])
    assert all(graph.difference <= graph.tolerance for graph in written)
    return out


@pytest.fixture(scope="module")
def torch_speaker(folder):
    return NanoTTS.load(str(folder), "cpu", "float32")


def test_the_folder_has_the_published_files(graphs, folder):
    names = {file.name for file in graphs.iterdir()}
    assert [graph.name for graph in nano_graphs(folder)] == PUBLISHED
    assert {file for file in names if file.endswith(".onnx")} == {f"{name}.onnx" for name in PUBLISHED} - {
        f"{name}.onnx" for name in NOT_SPOKEN_WITH
    }
    assert {"browser_poc_manifest.json", "tts_browser_onnx_meta.json", "codec_browser_onnx_meta.json"} <= names
    manifest = json.loads((graphs / "browser_poc_manifest.json").read_text())
    assert manifest["tts_config"]["n_vq"] == LM.n_vq
    assert manifest["builtin_voices"][0]["prompt_audio_codes"] == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("voice", [None, "bell"])
@pytest.mark.parametrize("style", [SpeakingStyle(greedy=True), SpeakingStyle(seed=3)], ids=["greedy", "drawn"])
def test_onnx_says_what_torch_says(graphs, torch_speaker, voice, style):
    exact = OnnxTTS.load(str(graphs), exact=True)
    expected = torch_speaker.say(TEXT, voice, style)
    found = exact.say(TEXT, voice, style)
    assert (found.rate, found.channels) == (expected.rate, expected.channels)
    np.testing.assert_allclose(found.samples, expected.samples, atol=1e-4)


def test_a_recording_has_the_codes_torch_gives_it(graphs, torch_speaker):
    recording = buzz(1.0, 1000)
    assert OnnxTTS.load(str(graphs))._encode_reference(recording) == torch_speaker._encode_reference(recording)
    assert OnnxTTS.load(str(graphs)).codec_id == torch_speaker.codec_id


def test_what_the_backend_does_without_is_the_model_too(folder, torch_speaker):
    frame, whole = (next(g for g in nano_graphs(folder) if g.name == name) for name in NOT_SPOKEN_WITH)
    model, codec = torch_speaker.model, torch_speaker.codec
    hidden, slot, prefix = frame.example.values()
    codes = model.audio_embeddings.embed(0, prefix[:, 0].long())
    positions = torch.stack([hidden, model.transformer.wte(slot.long()), codes], dim=1)
    states = model._local(LocalFrame(model.rotary, model.config, 1, hidden), positions)
    _, logits = frame.module(*frame.example.values())
    for book in range(LM.n_vq):
        torch.testing.assert_close(logits[:, book], model.code_logits(book, states[:, 1 + book]))
    sound, lengths = whole.module(*whole.example.values())
    torch.testing.assert_close(sound, codec.decode(whole.example["audio_codes"].transpose(1, 2).long()))
    assert lengths.tolist() == [sound.shape[-1]]


def test_frames_drawn_in_the_graph_go_by_their_seed(graphs):
    speaks = open_speech_model(str(graphs), "cpu")
    first, again, other = (speaks.say(TEXT, "bell", SpeakingStyle(seed=seed)).samples for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or not np.allclose(first, other)


def test_the_frame_graph_draws_as_its_settings_say(graphs, folder, torch_speaker):
    """Inverse of the distribution by uniform numbers: over many of them, every code comes as often as it should."""
    frame = LocalFixedSampledFrame(torch_speaker.model, SpeechSettings.read(folder).sampling)
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(1)) * 2
    seen = torch.zeros(1, 24, dtype=torch.bool)
    uniform = (torch.arange(4000) + 0.5) / 4000
    drawn = frame.drawn(logits.expand(4000, -1), seen.expand(4000, -1), uniform)
    scores, ids = (logits / 0.8).topk(8)
    chances = scores.softmax(-1)
    kept = chances * (chances.cumsum(-1) - chances < 0.95)
    wanted = torch.zeros(24).scatter(0, ids[0], (kept / kept.sum())[0])
    assert torch.allclose(drawn.bincount(minlength=24) / 4000, wanted, atol=1e-3)


def test_a_step_that_takes_one_row_reads_the_prompt_whole(graphs, torch_speaker):
    speaks = OnnxTTS.load(str(graphs), exact=True)
    speaks.step.inputs["input_ids"] = dataclasses.make_dataclass("Input", ["shape", "type"])(
        [1, 1, 1 + LM.n_vq], "tensor(int32)"
    )  # as the published graph is
    greedy = SpeakingStyle(greedy=True)
    np.testing.assert_allclose(
        speaks.say(TEXT, "bell", greedy).samples, torch_speaker.say(TEXT, "bell", greedy).samples, atol=1e-4
    )


def test_bad_folders_and_options_are_errors_of_one_line(graphs, tmp_path):
    with pytest.raises(InputError, match="run in the dtype they were exported in"):
        OnnxTTS.load(str(graphs), dtype="int8")
    for file in graphs.iterdir():
        (tmp_path / file.name).write_bytes(b"no graph" if file.suffix == ".onnx" else file.read_bytes())
    with pytest.raises(CheckpointError, match="cannot be opened as an ONNX graph"):
        OnnxTTS.load(str(tmp_path))


def test_it_speaks_where_there_is_no_torch(graphs):
    code = f"""
import sys
for absent in ("torch", "soundfile", "soxr", "transformers", "onnx"):
    sys.modules[absent] = None
from vivavoce.tts.onnx import OnnxTTS
from vivavoce.tts.interface import SpeakingStyle
sound = OnnxTTS.load({str(graphs)!r}).say({TEXT!r}, "bell", SpeakingStyle(seed=1))
print(sound.samples.shape[1], "torch" in sys.modules and sys.modules["torch"] is not None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = OnnxTTS.load(str(graphs)).say(TEXT, "bell", SpeakingStyle(seed=1)).samples.shape[1]
    assert done.stdout.split() == [str(expected), "False"]
