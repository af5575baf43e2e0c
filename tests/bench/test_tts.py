"""`viva bench tts` measures what it says it does; the plain path it compares with writes the model's own codes."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from tests.models.nano_reference import NanoReference
from tests.models.tiny_nano import CONFIG, LetterTokenizer, tiny_nano, tiny_nano_codec
from vivavoce.bench import tts
from vivavoce.bench.tts_contenders import CONTENDERS, PlainNano, TTSBenchSetup
from vivavoce.cli import app
from vivavoce.device import pick
from vivavoce.errors import InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoPrompt, NanoSampling


def test_the_plain_path_is_the_model():
    model = tiny_nano(dtype=torch.float32)
    vectors = model.transformer.wte.weight
    vectors[CONFIG.audio_end_token_id] = vectors[CONFIG.audio_assistant_slot_token_id]  # generation does not stop
    rows = MossTTSNanoPrompt(CONFIG, LetterTokenizer()).clone("Good evening.", [[1, 2, 3, 4, 5]] * 6)
    greedy = NanoSampling(audio_top_k=1, audio_repetition_penalty=1.3)
    plain = PlainNano(model, tiny_nano_codec(), rows, 6, greedy)
    past = []
    hidden, generated = plain.read(plain.rows, past), []
    for _ in range(6):
        generated.append(plain.frame(hidden, generated))
        hidden = plain.read(plain.row(generated[-1]), past)
    reference = NanoReference(CONFIG, published_tensors(model))
    assert [row[1:] for row in reference.generate(rows, 6, 1.3)] == [tuple(codes.tolist()) for codes in generated]


def test_all_backends_generate_the_same_length(tmp_path):
    result = tts.run("cpu", threads=[1], streams=[1, 3], frames=12, shape="tiny", out=tmp_path)
    names = [speed["backend"] for speed in result["speeds"]]
    assert {"plain", "float32"} <= set(names) and set(names) | set(result["absent"]) <= set(CONTENDERS)
    assert all(speed["rtf"] > 0 and speed["first_sound_ms"] > 0 for speed in result["speeds"])
    assert next(speed for speed in result["speeds"] if speed["backend"] == "plain")["times_plain"] == 1.0
    assert [run_figures["seconds"] for run_figures in result["streams"]] == pytest.approx([0.96, 3 * 0.96])
    assert json.loads((tmp_path / "tts.json").read_text())["frames"] == 12
    assert (tmp_path / "tts.png").stat().st_size > 0


@pytest.mark.parametrize("name", ["plain", "float32"])
def test_every_part_of_a_frame_is_measured(name):
    contender = CONTENDERS[name](TTSBenchSetup(pick("cpu"), "tiny", 5))
    stages = contender.stages()
    assert {"global", "local", "codec"} <= set(stages)
    for action in stages.values():
        action()


def test_an_unknown_backend_is_named():
    with pytest.raises(InputError, match="'jax' is not known; use plain, float32"):
        tts.run("cpu", ["jax"], shape="tiny")


def test_the_command_prints_json():
    command = ["bench", "tts", "--device", "cpu", "--tiny", "--frames", "5", "--threads", "1", "--json"]
    done = CliRunner().invoke(app, [*command, "--backend", "float32"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["speeds"][0]["backend"] == "float32"


def test_it_runs_on_a_box_with_torch_alone():
    absent = ["rich", "typer", "soundfile", "soxr", "av", "onnxruntime", "matplotlib", "huggingface_hub", "tokenizers"]
    absent += ["filelock"]
    code = f"""
import sys
for name in {absent}:
    sys.modules[name] = None
from vivavoce.bench.tts import main
main(["--device", "cpu", "--tiny", "--frames", "5", "--threads", "1", "--streams", "2", "--backend", "float32"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["streams"][0]["streams"] == 2


@pytest.mark.gpu
def test_a_gpu_has_no_underruns_with_eight_streams():
    result = tts.run("cuda", ["bfloat16"], streams=[8], frames=40)
    assert result["streams"][0]["underruns"] == 0
