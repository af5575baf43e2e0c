"""TensorRT-LLM checkpoints: read by their rules, they compute what our models compute."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.export.trtllm_models import MOSS, WHISPER, cosyvoice, hidden_states, moss_speech, whisper
from tests.export.trtllm_reader import Reader, plain_codes
from vivavoce.export.trtllm import whisper as cosyvoice_export
from vivavoce.export.trtllm.export import activation_peaks, export_trtllm
from vivavoce.export.trtllm.folder import MANIFEST, read_manifest
from vivavoce.export.trtllm.moss_speech import joint_id, module_names, row_of
from vivavoce.export.trtllm.options import TrtLlmOptions, WeightLayout, round_per_channel
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.whisper.model import Whisper

CLOSE = {"rtol": 0, "atol": 2e-4}
FP16 = {"dtype": "float16"}


@pytest.fixture(scope="module")
def moss(tmp_path_factory: pytest.TempPathFactory) -> tuple[MossSpeech, Path, Tensor]:
    """A small MOSS-Speech, its folder, and rows of text and speech."""
    folder = tmp_path_factory.mktemp("moss")
    model = moss_speech(folder)
    torch.manual_seed(0)
    text, audio = torch.randint(0, 300, (24,)), torch.randint(0, 64, (24,))
    text[6:15] = MOSS.modality_pad_token_id
    return model, folder, torch.stack([text, audio], dim=1)


def joint(rows: Tensor) -> Tensor:
    return torch.tensor([joint_id(MOSS, tuple(row)) for row in rows.tolist()])


def read_moss(folder: Path, rows: Tensor, sm: int = 90) -> tuple[Reader, Tensor, Tensor]:
    """Both heads' logits, from the files of a whole export alone."""
    reader = Reader(folder, sm)
    config = reader.config
    shared, tail = config["num_shared_layers"], config["num_modality_layers"]
    x = reader.embed(joint(rows))
    for index in range(shared):
        x = reader.decoder_layer(index, x)
    text = audio = x
    for index in range(shared, shared + tail):
        text = reader.decoder_layer(index, text)
    for index in range(shared + tail, shared + 2 * tail):
        audio = reader.decoder_layer(index, audio)
    text = reader.head(reader.rms_norm("transformer.text_ln_f", text), config["text_vocab_size"], "text_lm_head")
    audio = reader.head(reader.rms_norm("transformer.audio_ln_f", audio), config["audio_vocab_size"], "audio_lm_head")
    return reader, text, audio


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_moss_speech_whole(moss: tuple[MossSpeech, Path, Tensor], tp: int, tmp_path: Path) -> None:
    model, folder, rows = moss
    export_trtllm(folder, tmp_path / "out", TrtLlmOptions(tp=tp))
    reader, text, audio = read_moss(tmp_path / "out", rows)
    wanted_text, wanted_audio = model.logits(hidden_states(model, rows))
    torch.testing.assert_close(text, wanted_text, **CLOSE)
    torch.testing.assert_close(audio, wanted_audio, **CLOSE)
    own_row = {"transformer.vocab_embedding.weight"}  # other ranks have the same table and are not asked for it
    assert all(rank.used | own_row == set(rank.tensors) for rank in reader.ranks)
    if tp == 4:  # two key heads for four ranks
        keys = [rank.get("transformer.layers.0.attention.qkv.weight")[2 * 32 : 3 * 32] for rank in reader.ranks]
        assert torch.equal(keys[0], keys[1]) and torch.equal(keys[2], keys[3]) and not torch.equal(keys[1], keys[2])


@pytest.mark.parametrize("tp", [1, 4])
def test_the_trunks_states_feed_our_tails(moss: tuple[MossSpeech, Path, Tensor], tp: int, tmp_path: Path) -> None:
    model, folder, rows = moss
    export_trtllm(folder, tmp_path / "out", TrtLlmOptions(tp=tp), part="trunk")
    reader = Reader(tmp_path / "out")
    x = reader.embed(joint(rows))
    for index in range(reader.config["num_hidden_layers"]):
        x = reader.decoder_layer(index, x)
    caught = []
    hook = model.model.shared_block.register_forward_hook(lambda module, given, found: caught.append(sum(found)))
    hidden_states(model, rows)
    hook.remove()
    torch.testing.assert_close(x, caught[0], **CLOSE)
    assert reader.config["architecture"] == "Qwen3ForCausalLM"
    assert all((rank.get("transformer.ln_f.weight") == 1).all() for rank in reader.ranks)


@pytest.mark.parametrize(("version", "tp"), [(2, 1), (2, 2), (3, 4)])
def test_cosyvoices_language_model(version: int, tp: int, tmp_path: Path) -> None:
    model = cosyvoice(tmp_path / "model", version)
    export_trtllm(tmp_path / "model" / "llm.pt", tmp_path / "out", TrtLlmOptions(tp=tp, version="0.13.0"))
    reader = Reader(tmp_path / "out")
    prompt = load_file(tmp_path / "out" / cosyvoice_export.PROMPT_FILE)
    rows = model.prompt([5, 7, 9, 11, 190], codes=[3, 80, 41])
    ids, table = cosyvoice_export.prompt_ids(model.config, prompt, rows)
    known = torch.cat([reader.embed(torch.arange(model.config.speech_rows)), table.float()])  # their prompt tuning
    x = known[ids]
    for index in range(2):
        x = reader.decoder_layer(index, x)
    logits = reader.head(reader.rms_norm("transformer.ln_f", x), model.config.speech_rows)
    wanted = model.logits(hidden_states(model, torch.tensor(rows)))
    torch.testing.assert_close(logits + prompt.get("head_bias", 0), wanted, **CLOSE)


@pytest.fixture(scope="module")
def asr(tmp_path_factory: pytest.TempPathFactory) -> tuple[Whisper, Path]:
    folder = tmp_path_factory.mktemp("whisper")
    return whisper(folder), folder


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_whisper(asr: tuple[Whisper, Path], tp: int, tmp_path: Path) -> None:
    model, folder = asr
    export_trtllm(folder, tmp_path / "out", TrtLlmOptions(tp=tp, version="0.13"))
    encoder, decoder = Reader(tmp_path / "out" / "encoder"), Reader(tmp_path / "out" / "decoder")
    mel, tokens = torch.randn(2, 16, 90), torch.randint(0, WHISPER.vocab_size, (2, 9))
    with torch.no_grad():
        states, logits = model.encoder(mel), model(mel, tokens)
    found = encoder.whisper_states(mel)
    torch.testing.assert_close(found, states, rtol=0, atol=2e-2)  # their sinusoids are rounded to 16 bits
    torch.testing.assert_close(decoder.whisper_logits(tokens, states), logits, rtol=0, atol=2e-4)
    assert encoder.ranks[0].tensors["transformer.conv1.weight"].shape == (256, 16, 3, 1)


@pytest.mark.parametrize(("quantise", "bits", "sm", "tp"), [("int8", 8, 90, 2), ("int8", 8, 89, 1), ("int4", 4, 80, 1)])
def test_rounded_weights_are_within_half_a_step(
    moss: tuple[MossSpeech, Path, Tensor], quantise: str, bits: int, sm: int, tp: int, tmp_path: Path
) -> None:
    _, folder, _ = moss
    export_trtllm(folder, tmp_path / "exact", TrtLlmOptions(tp=tp))
    export_trtllm(folder, tmp_path / "rounded", TrtLlmOptions(tp=tp, quantise=quantise, sm=sm))
    exact, rounded = Reader(tmp_path / "exact"), Reader(tmp_path / "rounded", sm)
    linears = [name.removesuffix(".per_channel_scale") for name in rounded.ranks[0].tensors if "per_channel" in name]
    assert len(linears) == 4 * 5  # every layer's qkv, dense, fc, gate and proj, and no head
    for before, after in zip(exact.ranks, rounded.ranks, strict=True):
        for name in linears:
            wanted, found = before.weight(name), after.weight(name)
            steps = 1 << (bits - 1)
            step = wanted.abs().amax(1, keepdim=True) / steps
            # Half a step, up to a whole one where the last positive code is missing, and the scale's own 16 bits.
            allowed = torch.where(wanted > (steps - 0.5) * step, step, step / 2) + wanted.abs() / 128
            assert ((wanted - found).abs() <= allowed).all()
            assert after.tensors[f"{name}.weight"].shape == (wanted.shape[1], wanted.shape[0] * bits // 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sm", [80, 90, 120])
def test_kernel_layouts_are_permutations(bits: int, sm: int) -> None:
    torch.manual_seed(0)
    codes = round_per_channel(torch.randn(48, 128), bits).codes
    stored = WeightLayout.of(sm).arrange(codes, bits)
    assert torch.equal(plain_codes(stored, 48, bits, sm), codes.T.long())


def test_fp8_scales_come_from_what_the_model_did(moss: tuple[MossSpeech, Path, Tensor], tmp_path: Path) -> None:
    model, folder, rows = moss
    peaks = activation_peaks(model, module_names(MOSS), [[tuple(row) for row in rows.tolist()]])
    options = TrtLlmOptions(tp=2, quantise="fp8", kv_cache="fp8", peaks=peaks)
    export_trtllm(folder, tmp_path / "out", options)
    reader, text, audio = read_moss(tmp_path / "out", rows)
    tensors = reader.ranks[1].tensors
    attention = "transformer.layers.0.attention"
    with torch.no_grad():
        first = model.model.shared_block.layers[0]
        entering = first.input_layernorm(model.model.embed(rows))
    assert tensors[f"{attention}.qkv.activation_scaling_factor"].item() == pytest.approx(
        entering.abs().max().item() / 448
    )
    weights = first.self_attn.qkv_proj.weight
    assert tensors[f"{attention}.qkv.weights_scaling_factor"].item() == pytest.approx(weights.abs().max().item() / 448)
    assert tensors[f"{attention}.qkv.weight"].dtype == torch.float8_e4m3fn
    assert tensors[f"{attention}.kv_cache_scaling_factor"].item() == pytest.approx(peaks[f"{attention}.kv"] / 448)
    assert "fc" in str(peaks) and len(peaks) == 4 * 5 + 4
    wanted_text, wanted_audio = model.logits(hidden_states(model, rows))
    for found, wanted in ((text, wanted_text), (audio, wanted_audio)):
        assert torch.cosine_similarity(found, wanted, dim=-1).min() > 0.98
    assert reader.config["quantization"]["exclude_modules"] == ["text_lm_head", "audio_lm_head"]


def test_a_row_and_its_joint_id_are_the_same_thing() -> None:
    for row in ((7, MOSS.audio_pad_token_id), (MOSS.modality_pad_token_id, 40)):
        assert row_of(MOSS, joint_id(MOSS, row)) == row


def test_values_are_written_as_the_chosen_type(moss: tuple[MossSpeech, Path, Tensor], tmp_path: Path) -> None:
    _, folder, _ = moss
    export_trtllm(folder, tmp_path / "out", TrtLlmOptions(**FP16))
    with safe_open(tmp_path / "out" / "rank0.safetensors", "pt") as opened:
        assert {opened.get_slice(name).get_dtype() for name in opened.keys()} == {"F16"}  # noqa: SIM118
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


def test_an_export_says_what_it_is(moss: tuple[MossSpeech, Path, Tensor], tmp_path: Path) -> None:
    _, folder, _ = moss
    export_trtllm(folder, tmp_path / "out", replace(TrtLlmOptions(), tp=2))
    manifest = read_manifest(tmp_path / "out")
    assert manifest["kind"] == "moss-speech" and manifest["options"]["tp"] == 2
    assert set(manifest["files"]) == {
        *("config.json", "rank0.safetensors", "rank1.safetensors", "build_engine.sh", "moss_speech_network.py")
    }
    assert (tmp_path / "out" / MANIFEST).is_file() and not list(tmp_path.glob("*.partial"))
