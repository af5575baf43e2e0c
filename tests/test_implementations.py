"""Which implementation runs: one chooser, and what `viva doctor --model` prints is what then runs."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from vivavoce import cpu_speed, hub
from vivavoce import implementations as chooser
from vivavoce.asr.backends import load_backend
from vivavoce.cli import app
from vivavoce.cli.doctor import examine_model
from vivavoce.device import Device, pick
from vivavoce.errors import InputError
from vivavoce.models.moss_speech.codec import GraphedCodec
from vivavoce.models.registry import FAMILIES, family_of, model_type
from vivavoce.s2s.moss_speech import load_speech
from vivavoce.tts.nano import NanoTTS

CPU = pick("cpu")
HALF = (torch.bfloat16, torch.float16, torch.float32)
CUDA = Device("cuda", 0, torch.device("cuda", 0), "a GPU", HALF[0], HALF, graphs=True, triton=True)
NPU = Device("npu", 0, torch.device("cpu"), "an NPU", torch.float16, HALF)
DEVICES = {"cpu": CPU, "cuda": CUDA, "cuda without Triton": replace(CUDA, triton=False), "npu": NPU}


def all_choices(device: Device) -> list[chooser.Choice]:
    """Every choice there is for a device, with every property of a checkpoint that decides one."""
    found = [
        *(chooser.choose_moss_speech_lm(device, dtype, plain) for dtype in ("auto", "bfloat16") for plain in (0, 1)),
        *(chooser.choose_flow(device, plain) for plain in (False, True)),
        *(chooser.choose_vocoder(device, steep) for steep in (False, True)),
        *(chooser.choose_whisper_encoder(device, dtype, plain) for dtype in ("auto", "float32") for plain in (0, 1)),
        *(chooser.choose_whisper_decoder(device, "auto", plain) for plain in (False, True)),
        *(chooser.choose_nano_lm(device, dtype, size) for dtype in ("auto", "bfloat16") for size in (256, 768)),
        *(chooser.choose_cosyvoice_flow(device, dtype, version) for dtype in ("auto", "float32") for version in (2, 3)),
        *(chooser.choose_cosyvoice_vocoder(device, version) for version in (2, 3)),
        *(chooser.choose_chat_model(device, False, size) for size in (256, 576)),
        *(chooser.choose_asr_backend(device, **facts) for facts in ({}, {"is_moonshine": True})),
        *(chooser.choose_asr_backend(device, 1024, has_faster_whisper=installed) for installed in (False, True)),
        chooser.choose_moss_speech_codec(device),
        chooser.choose_speech_encoder(device),
        chooser.choose_cosyvoice_lm(device),
        chooser.choose_turn_recogniser(device),
        chooser.choose_decode_steps(device, device.dtype),
        chooser.choose_draft_heads(device, device.dtype),
        chooser.choose_draft_model(device, device.dtype),
    ]
    return found + [chooser.choose_nano_codec(device, choice) for choice in found if choice.stage == "language model"]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_choice_is_a_class_with_a_reason(device):
    for choice in all_choices(device):
        assert isinstance(choice.cls, type), choice
        assert choice.cls.__name__ == choice.name
        assert choice.why and "\n" not in choice.why
        if device.kind == "npu":
            assert "Graphed" not in choice.name and "Cpu" not in choice.name


def test_graphs_are_for_devices_that_have_them():
    assert chooser.choose_moss_speech_codec(CUDA).cls is GraphedCodec
    assert chooser.choose_decode_steps(CUDA, torch.float16).name == "StepGraphs"
    assert "Triton is not installed" in chooser.choose_decode_steps(replace(CUDA, triton=False), torch.float16).why


def test_int8_is_for_cpus_and_for_large_layers():
    with pytest.raises(InputError, match="run on CPUs, not on a GPU"):
        chooser.choose_nano_lm(CUDA, "int8")
    assert not chooser.choose_chat_model(CPU, False, 256).is_int8
    assert chooser.choose_chat_model(CPU, False, 576).is_int8 == cpu_speed.is_int8_fast()
    large = chooser.choose_chat_model(CPU, False, 576)
    assert "measured" in large.why or "VNNI" in large.why


def test_measurements_say_what_is_faster():
    small, large = torch.ones(16, 16), torch.ones(512, 512)
    assert cpu_speed.speed_ratio(lambda: large @ large, lambda: small @ small) > 2
    assert cpu_speed.speed_ratio(lambda: small @ small, lambda: large @ large) < 0.5
    assert cpu_speed.bfloat16_speedup() == cpu_speed.bfloat16_speedup()
    assert (cpu_speed.bfloat16_speedup() > 0) == cpu_speed.has_products_in(torch.bfloat16)


def test_measuring_leaves_the_threads_as_they_were():
    before = torch.get_num_threads()
    cpu_speed.speed_ratio(lambda: None, lambda: None)
    assert torch.get_num_threads() == before


def promised(name: str, device: str = "cpu") -> dict[str, tuple[str, str]]:
    return {stage.stage: (stage.implementation, stage.dtype) for stage in examine_model(name, device).stages}


def dtype_of(choice: str) -> torch.dtype:
    return getattr(torch, choice)


def test_the_speech_model_runs_as_the_doctor_says():
    says, runs = promised("mini-speech"), load_speech("mini-speech", "cpu")
    model, codec = runs.core.model, runs.codec
    assert says.keys() == {"language model", "text prompts", "decode steps", "speech encoder", "flow", "vocoder"}
    assert says["language model"] == (type(model).__name__, "float32")
    assert says["text prompts"][0] == "CpuTextTrunk" and dtype_of(says["text prompts"][1]) == model._text_dtype
    assert model.text_lm_head.weight.dtype == torch.float32
    assert (says["decode steps"][0] == "StepGraphs") == runs.core.runner.use_graphs
    assert says["speech encoder"][0] == type(codec.speech_encoder.encoder).__name__
    assert says["flow"][0] == type(codec.flow).__name__
    assert dtype_of(says["flow"][1]) == codec.flow._dtype
    assert says["vocoder"][0] == type(codec.vocoder.hift).__name__


@pytest.mark.gpu
def test_the_speech_model_runs_on_a_gpu_as_the_doctor_says():
    says, runs = promised("mini-speech", "cuda"), load_speech("mini-speech", "cuda")
    assert says["language model"][0] == type(runs.core.model).__name__
    assert dtype_of(says["language model"][1]) == runs.core.model.text_lm_head.weight.dtype
    assert (says["decode steps"][0] == "StepGraphs") == runs.core.runner.use_graphs
    assert says["speech encoder"][0] == type(runs.codec.speech_encoder).__name__
    assert says["flow"][0] == type(runs.codec.flow).__name__
    assert says["vocoder"][0] == type(runs.codec.vocoder).__name__


def test_the_tts_model_runs_as_the_doctor_says():
    says, runs = promised("mini-tts"), NanoTTS.load("mini-tts", "cpu")
    assert says == {
        "language model": (type(runs.generator).__name__, "float32"),
        "codec decoder": (type(runs.decode).__name__, "float32"),
    }


def test_the_recogniser_runs_as_the_doctor_says():
    says, runs = promised("mini-asr"), load_backend("mini-asr", device="cpu")
    encoder = runs.transcriber.model.encoder
    assert says["backend"][0] == type(runs).__name__
    assert says["speech encoder"][0] == encoder.fast.original_name
    assert dtype_of(says["speech encoder"][1]) == encoder.conv1.weight.dtype
    assert says["text decoder"][0] == runs.engine.writer.paged.original_name


def test_the_doctor_prints_a_table_or_json():
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", "--model", "mini-tts", "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    assert "CpuFrameGenerator" in shown.stdout and "hidden size 256 is below 512" in shown.stdout
    result = CliRunner().invoke(app, ["doctor", "--model", "mini-tts", "--device", "cpu", "--json"])
    said = json.loads(result.stdout)
    assert (said["model"], said["family"], said["device"]) == ("mini-tts", "moss-tts-nano", "cpu")
    assert said["stages"][0].keys() == {"stage", "implementation", "module", "dtype", "why"}


def test_every_family_has_a_loader():
    for family in FAMILIES:
        assert callable(chooser.import_entry(family.loader)), family
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_a_folder_is_of_the_family_its_files_say(tmp_path):
    minis = {name: family_of(folder) for name, folder in hub.bundled().items()}
    assert (minis["mini-speech"].name, minis["mini-speech"].task) == ("moss-speech", "s2s")
    assert (minis["mini-tts"].name, minis["mini-asr"].name) == ("moss-tts-nano", "whisper")
    assert minis["mini-asr-draft"] is None and model_type(hub.bundled()["mini-asr-draft"]) == "whisper-draft"
    assert family_of(hub.bundled()["mini-speech"] / "codec").name == "moss-speech-codec"
    assert family_of(hub.bundled()["mini-speech"], "tts", "asr") is None
    for name, family in {
        "llm.pt": "cosyvoice-lm",
        "tiny.pt": "whisper",
        "a.gguf": "llama",
        "a.ckpt": "xy-tokenizer",
    }.items():
        assert family_of(tmp_path / name).name == family
    (tmp_path / "cosyvoice3.yaml").touch()
    assert family_of(tmp_path).name == "cosyvoice"


@pytest.mark.parametrize("content", ["", "[1]", '{"model_type": 3}', "\xff"])
def test_a_config_that_cannot_be_read_says_nothing(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("latin1"))
    assert model_type(tmp_path) is None
    assert family_of(tmp_path) is None
