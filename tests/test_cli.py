"""`viva` parses options, prints results, and reports errors in one line."""

import json
import os
import re
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import vivavoce
from vivavoce import hub
from vivavoce.cli import app
from vivavoce.cli.doctor import EXTRAS
from vivavoce.errors import VivaError
from vivavoce.evaluation import machine as memory

COMMANDS = [
    ["doctor"],
    ["demo"],
    ["serve"],
    ["models"],
    ["models", "list"],
    ["models", "fetch"],
    ["models", "check"],
    ["bench", "lm"],
    ["bench", "answer"],
    ["bench", "turn"],
    ["train", "ear"],
]


def viva(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a process of its own."""
    command = Path(sys.executable).with_name("viva")
    settings = os.environ | {"VIVA_OFFLINE": "1", "COLUMNS": "200"} | environment
    return subprocess.run([command, *arguments], env=settings, capture_output=True, text=True, check=False)


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VIVA_OFFLINE", "1")
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
    return folder


def test_the_command_is_installed():
    (entry,) = entry_points(group="console_scripts", name="viva")
    assert entry.value == "vivavoce.cli:main"
    done = viva("--version")
    assert (done.returncode, done.stdout) == (0, f"viva {vivavoce.__version__}\n")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command):
    done = invoke(*command, "--help")
    assert done.exit_code == 0
    assert "usage:" in done.stdout.lower()


def test_every_command_a_program_may_read_has_json():
    for command in COMMANDS:
        if command not in (["models"], ["serve"], ["train", "ear"]):
            assert "--json" in re.sub(r"\x1b\[[\d;]*m", "", invoke(*command, "--help").stdout), command


def test_importing_the_command_line_does_not_load_torch():
    code = "import sys, vivavoce.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_shell_completes_commands_and_models():
    asked = {"_VIVA_COMPLETE": "complete_bash", "COMP_WORDS": "viva models check fnlp/", "COMP_CWORD": "3"}
    assert viva(**asked).stdout.split() == [model.name for model in hub.KNOWN if model.name.startswith("fnlp/")]


def test_an_error_is_one_line_on_stderr_and_exit_code_1():
    done = viva("models", "check", "fnlp/MOSS-Speech")
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"error: fnlp/MOSS-Speech@\w+ is not .* `viva models fetch [^`]+` .*\n", done.stderr)


def test_viva_debug_shows_the_traceback():
    done = viva("models", "check", "no-such-model", VIVA_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "InputError" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["models", "fetch"],
        ["bench", "lm", "--batch", "1,none"],
        ["bench", "lm", "--shape", "huge"],
        ["bench", "lm", "--batch", "0"],
        ["bench", "lm", "--context", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(arguments):
    assert invoke(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--model", "mini-asr"], "describes a 'whisper' model"),
        (["demo", "--chat", "smollm2"], "needs --cascade"),
        (["demo", "--cascade", "--model", "mini-speech"], "leave out --model"),
        (["encode", "a.wav", "--out", "codes.json", "--codec", "mini-tts"], "has a 'moss_tts_nano' model"),
        (["transcribe", "a.wav", "--model", __file__], "is a file"),
        (["quantize", "mini-asr", "--verify"], "no folder that `viva quantize` wrote"),
        (["bench", "cosyvoice", "--tiny", "--only", "hops,nobody"], "unknown section 'nobody'"),
        (["bench", "tts", "--model", "nobody"], "no model is called 'nobody'"),
    ],
)
def test_an_impossible_request_gives_a_message_with_what_to_do(arguments, message):
    done = invoke(*arguments)
    assert isinstance(done.exception, VivaError) and message in str(done.exception)


@pytest.mark.parametrize(
    "command", [["demo"], ["transcribe", "a.wav"], ["plan"], ["bench", "lm"], ["verify", "x"]], ids=" ".join
)
def test_a_folder_that_cannot_be_created_is_an_error_before_any_work(command):
    done = invoke(*command, "--out", f"{__file__}/results")
    assert done.exit_code == 2 and "cannot be created" in re.sub(r"[\s│]+", " ", done.output)


def test_a_port_in_use_is_an_error_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = invoke("serve", "--port", str(taken.getsockname()[1]))
    assert isinstance(done.exception, VivaError) and "choose another --port" in str(done.exception)


def test_doctor_describes_the_machine():
    said = json.loads(invoke("doctor", "--json").stdout)
    assert said["version"] == vivavoce.__version__
    assert said["devices"][-1]["device"] == "cpu"
    assert 0 < said["devices"][-1]["memory_free"] <= said["devices"][-1]["memory_total"]
    assert said["disk_free"] > 0
    assert said["offline"]
    assert [extra["extra"] for extra in said["extras"]] == list(EXTRAS)
    assert not next(extra for extra in said["extras"] if extra["extra"] == "test")["missing"]


def test_doctor_says_what_to_do_about_absent_and_broken_models(empty_cache):
    def advice() -> str:
        return "\n".join(json.loads(invoke("doctor", "--json").stdout)["advice"])

    moss = hub.known("fnlp/MOSS-Speech")
    assert re.search(
        r"fnlp/MOSS-Speech \(18.2 GB\) does not fit the disk|`viva models fetch fnlp/MOSS-Speech`", advice()
    )
    snapshot = empty_cache / "models--fnlp--MOSS-Speech" / "snapshots" / moss.revision
    snapshot.mkdir(parents=True)
    for name in moss.files[1:]:
        (snapshot / name).write_text("{}")
    assert "fnlp/MOSS-Speech is incomplete, it lacks config.json" in advice()
    (snapshot / "config.json").write_text("{}")
    assert "fnlp/MOSS-Speech is not" not in advice().replace("fnlp/MOSS-Speech-Codec", "")


def test_doctor_prints_tables():
    said = viva("doctor").stdout
    for word in ("Devices", "cpu", "float32", "Models", "fnlp/MOSS-Speech-Codec", "Extras"):
        assert word in said


def test_models_list(empty_cache):
    said = json.loads(invoke("models", "list", "--json").stdout)
    assert [model["name"] for model in said["known"]] == [model.name for model in hub.KNOWN]
    assert [found["name"] for found in said["local"] if found["source"] == "bundled"] == list(hub.bundled())
    assert "fnlp/MOSS-Speech" in invoke("models", "list").stdout


def test_models_check_says_whole(model):
    done = invoke("models", "check", str(model))
    assert done.exit_code == 0
    assert "complete" in done.stdout
    assert json.loads(invoke("models", "check", str(model), "--json").stdout)["ok"]


def test_models_check_names_what_is_damaged(model):
    os.truncate(model / "model.safetensors", 100)
    done = viva("models", "check", str(model))
    assert done.returncode == 1
    assert "damaged model.safetensors was cut short" in done.stdout
    assert done.stderr.count("\n") == 1
    done = viva("models", "check", str(model), "--json")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert not said["ok"]
    assert said["problems"][0].startswith("model.safetensors was cut short")


def test_models_fetch_takes_what_is_cached(empty_cache, model):
    revision = "a" * 40
    snapshot = empty_cache / "models--someone--model" / "snapshots" / revision
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    said = json.loads(invoke("models", "fetch", "someone/model", "--revision", revision, "--offline", "--json").stdout)
    assert (said["ok"], said["path"]) == (True, str(snapshot))


def test_demo_runs_and_its_json_stands_alone():
    done = invoke("demo", "--device", "cpu", "--json")
    assert done.exit_code == 0, done.exception
    result = json.loads(done.stdout)
    assert result["said"] == result["expected"]["said"]
    assert "breakfast" in result["heard"].lower()
    assert result["seconds_of_speech"] > 1.0


def test_bench_lm_runs_small_and_writes_what_it_prints(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MAX_BUFFER_BYTES", 2**24)
    sizes = ["--shape", "small", "--batch", "1", "--context", "32", "--prefill", "16"]
    done = invoke("bench", "lm", "--device", "cpu", *sizes, "--no-peer", "--out", str(tmp_path / "out"), "--json")
    assert done.exit_code == 0, done.exception
    assert isinstance(json.loads(done.stdout), dict)
    assert list((tmp_path / "out").glob("*.json"))


def test_an_absent_device_is_one_line():
    done = viva("demo", "--device", "cuda:99")
    assert done.returncode == 1
    assert "cuda:99" in done.stderr
    assert done.stderr.count("\n") == 1
