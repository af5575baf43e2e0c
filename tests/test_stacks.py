"""Named stacks, the stored choice, and `viva setup`, which makes it."""

import json
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vivavoce import hub
from vivavoce.cli import app
from vivavoce.cli.setup import MachineSummary
from vivavoce.errors import CapacityError, CheckpointError, InputError, MissingDependencyError
from vivavoce.hub.catalogue import KnownModel, ModelFile
from vivavoce.server.hosting.config import read_serving_options
from vivavoce.stacks import ENGLISH_PARTS, STACKS, StackConfig, choose_stack, config_file, read_config

GIGABYTE = 10**9
BIG = MachineSummary(64, 256 * GIGABYTE, "H200", 140 * GIGABYTE, "cache", 1000 * GIGABYTE)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VIVA_CONFIG", str(tmp_path / "vivavoce" / "config.toml"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "vivavoce" / "config.toml"


def test_every_stack_names_models_that_can_be_had():
    bundled = hub.bundled()
    for stack in STACKS.values():
        assert stack.models and stack.languages and stack.parameters
        for name in stack.models:
            known = hub.known(name)
            assert name in bundled or (known is not None and known.licence), name


def test_the_bundled_stack_answers_where_nothing_was_chosen(file):
    assert read_config() is None
    assert choose_stack(None) is STACKS["mini"]
    assert choose_stack("assistant") is STACKS["assistant"]
    with pytest.raises(InputError, match="known are mini, desk, assistant, s2s"):
        choose_stack("grand")


def test_a_stored_choice_is_read_again_with_its_parts(file):
    StackConfig("assistant", **ENGLISH_PARTS).write(file)
    chosen = choose_stack(None)
    assert chosen.models == ("moonshine-base-en", "qwen2.5-coder-0.5b-instruct", "hibari")
    assert chosen.languages == ("en",), "a part that knows English only decides"
    assert choose_stack("assistant") == chosen
    assert choose_stack("mini") is STACKS["mini"], "the parts belong to the stack that they were stored for"


def test_the_desk_takes_the_bundled_recogniser_until_a_better_one_is_fetched(file, monkeypatch, caplog):
    assert choose_stack("desk").models == ("mini-asr", "mini-speech")
    assert "moonshine-base-en is not on this machine" in caplog.text
    StackConfig("desk", asr="whisper-base").write(file)
    assert choose_stack("desk").asr == "mini-asr", "a stored one that is gone is replaced, too"
    monkeypatch.setattr("vivavoce.stacks.find_spec", lambda module: object())
    monkeypatch.setattr("vivavoce.stacks.Stack.missing_models", ())
    assert choose_stack("desk").asr == "whisper-base"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('stack = "grand"', "no stack 'grand'"),
        ("stack = 3", "stack = 3 is not understood"),
        ('stack = "mini"\nvolume = "11"', "volume = '11' is not understood"),
        ('stack = "mini"\nchat = "smollm2"', "no chat and no tts"),
        ('stack = "assistant"\nmodel = "mini-speech"', "is a cascade"),
        ("stack = ", "cannot be read"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(file, content, error):
    file.parent.mkdir()
    file.write_text(content, encoding="utf8")
    with pytest.raises(InputError, match=error):
        choose_stack(None)


def test_the_config_is_in_the_folder_of_the_platform(monkeypatch, tmp_path):
    monkeypatch.delenv("VIVA_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    expected = tmp_path / "vivavoce" if sys.platform == "linux" else Path.home()
    assert config_file().is_relative_to(expected) and config_file().name == "config.toml"


def test_serve_takes_the_stored_stack_unless_models_are_named(file):
    StackConfig("desk").write(file)
    stored = read_serving_options(None, {})
    assert (stored.stack, stored.model, stored.asr) == ("desk", "mini-speech", "mini-asr")
    assert stored.turns_as_text
    named = read_serving_options(None, {"model": "mini-speech"})
    assert (named.stack, named.asr, named.turns_as_text) == (None, None, False)
    other = read_serving_options(
        None, {"stack": "assistant", "chat": "http://localhost:1/v1", "instructions": "Short."}
    )
    assert (other.asr, other.chat, other.instructions) == ("whisper-base", "http://localhost:1/v1", "Short.")
    with pytest.raises(InputError, match="not both"):
        read_serving_options(None, {"stack": "assistant", "model": "mini-speech"})
    with pytest.raises(InputError, match="needs --asr"):
        read_serving_options(None, {"model": "mini-speech", "turns_as_text": True})


def test_a_machine_is_offered_what_it_can_run(file, monkeypatch):
    monkeypatch.setattr("vivavoce.stacks.find_spec", lambda module: object())
    small = MachineSummary(1, 700_000_000, None, 0, "cache", 10 * GIGABYTE)
    medium = replace(small, memory=GIGABYTE)
    large = replace(small, memory=8 * GIGABYTE)
    assert [each.proposal().name for each in (small, medium, large, BIG)] == ["mini", "desk", "assistant", "assistant"]
    assert large.obstacle(STACKS["s2s"]) == "needs a GPU with 28.0 GB"
    assert replace(large, disk=GIGABYTE // 2).proposal().name == "desk"
    monkeypatch.setattr("vivavoce.stacks.find_spec", lambda module: None)
    assert "vivavoce[talk]" in large.obstacle(STACKS["assistant"]) and large.proposal().name == "mini"


def setup(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["setup", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_setup_stores_the_stack_that_demo_and_serve_take(file):
    assert "mini is the default" in setup("--stack", "mini", "--yes")
    assert read_config() == StackConfig("mini")
    shown = CliRunner().invoke(app, ["serve", "--show"])
    assert json.loads(shown.output)["stack"] == "mini"


def test_setup_asks_on_a_terminal_only(file):
    with pytest.raises(InputError, match="run it again with --yes"):
        setup("--stack", "mini")
    assert not file.exists()


def test_setup_refuses_what_cannot_run(file, monkeypatch):
    monkeypatch.setattr("vivavoce.cli.setup.MachineSummary.look", lambda: replace(BIG, gpu=None, gpu_memory=0))
    with pytest.raises(CapacityError, match="needs a GPU"):
        setup("--stack", "s2s", "--yes")
    monkeypatch.setattr("vivavoce.stacks.find_spec", lambda module: None)
    with pytest.raises(MissingDependencyError, match=r"assistant needs pip install 'vivavoce\[talk\]'"):
        setup("--stack", "assistant", "--yes")
    monkeypatch.setenv("VIVA_CONFIG", "")
    with pytest.raises(InputError, match="VIVA_CONFIG is empty"):
        setup("--stack", "mini", "--yes")
    assert not file.exists()


def test_setup_names_sizes_and_licences_and_fetches(file, tmp_path, monkeypatch):
    """A small listed model in the place of the recogniser: it comes from a folder, as it would from a hub."""
    data = b"weights" * 1000
    listed = ModelFile("weights.bin", sha256(data).hexdigest(), len(data), ())
    small = KnownModel(
        "small-asr", "small", len(data), ("weights.bin",), licence="MIT-0", languages="English", listed=(listed,)
    )
    monkeypatch.setattr("vivavoce.hub.KNOWN", (small,))
    monkeypatch.setitem(STACKS, "desk", STACKS["desk"].with_parts(asr="small-asr"))
    monkeypatch.setenv("VIVA_MODELS", str(tmp_path / "models"))
    with pytest.raises(CheckpointError, match=r"weights\.bin could not be fetched"):
        setup("--stack", "desk", "--yes")
    assert not file.exists(), "a choice is stored when its models are here"
    (tmp_path / "models" / "small-asr").mkdir(parents=True)
    (tmp_path / "models" / "small-asr" / "weights.bin").write_bytes(data)
    said = setup("--stack", "desk", "--yes")
    assert "small-asr" in said and "MIT-0" in said and "to fetch" in said
    assert (tmp_path / "cache" / "vivavoce" / "small-asr" / "weights.bin").read_bytes() == data
    assert read_config() == StackConfig("desk")
    assert "nothing" in setup("--stack", "desk", "--yes"), "what is here is not fetched again"
