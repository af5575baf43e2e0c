"""What may be chosen, in a file and by flags, and what is wrong with it in one line."""

import json
import pickle
import re
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from vivavoce.cascade.parts import CascadeParts
from vivavoce.cli import app
from vivavoce.dialogue.barge_in import OverlapClassifier
from vivavoce.dialogue.model_barge_in import ModelClassifier
from vivavoce.dialogue.moderation import HttpChecker, WordList
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.settings import NoiseSettings, TurnSettings
from vivavoce.errors import InputError
from vivavoce.server import hosting
from vivavoce.server.cluster.options import FleetOptions, PoolOptions
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting import config
from vivavoce.server.hosting.config import ConversationOptions, ModerationOptions, ServingOptions, read_serving_options

TOML = """
chat = "http://localhost:11434/v1"
chat_model = "qwen3"
asr = "openai/whisper-small"
instructions = "@{folder}/instructions.txt"

[turn]
detector = "semantic"
eagerness = "high"
silence_duration_ms = 320

[moderation]
words = "{folder}/words.txt"
regex = ["\\\\d{{16}}"]
hold_ms = 100

[server]
port = 9000
idle_seconds = 60
allowed_origins = ["https://example.org"]
"""
YAML = """
chat: http://localhost:11434/v1
chat_model: qwen3
asr: openai/whisper-small
instructions: "@{folder}/instructions.txt"
turn: {{detector: semantic, eagerness: high, silence_duration_ms: 320}}
moderation: {{words: "{folder}/words.txt", regex: ['\\d{{16}}'], hold_ms: 100}}
server:
  port: 9000
  idle_seconds: 60
  allowed_origins: ["https://example.org"]
"""
NAMES = [
    each.name for kind in (ServingOptions, TurnSettings, ModerationOptions, ServerOptions) for each in fields(kind)
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "instructions.txt").write_text("Be brief.\n", encoding="utf8")
    (tmp_path / "words.txt").write_text("# rude\ndamn\n\n笨蛋\n", encoding="utf8")
    (tmp_path / "c.toml").write_text(TOML.format(folder=tmp_path), encoding="utf8")
    (tmp_path / "c.yaml").write_text(YAML.format(folder=tmp_path), encoding="utf8")
    return tmp_path


@pytest.mark.parametrize("name", ["c.toml", "c.yaml"])
async def test_a_file_says_everything(folder, name):
    chosen = read_serving_options(folder / name, {})
    assert chosen.cascade == CascadeParts(
        "openai/whisper-small", "http://localhost:11434/v1", "mini-tts", chat_model="qwen3"
    )
    turn = TurnSettings(detector="semantic", eagerness="high", silence_duration_ms=320)
    assert chosen.settings().turn == turn and chosen.settings().instructions == "Be brief."
    assert chosen.server == replace(
        ServerOptions(), port=9000, idle_seconds=60.0, allowed_origins=("https://example.org",)
    )
    moderation = chosen.dialogue().speaking.moderation
    assert moderation.window == 0.1
    assert "Damn" in await moderation.verdict("Damn it") and await moderation.verdict("4" * 16)
    assert await moderation.verdict("你这个笨蛋") and await moderation.verdict("Good evening") is None


def test_conversations_and_the_engine_are_configured():
    conversation = {"echo_guard": False, "words_decide": True, "barge_in": "rules", "guards": {"longest_seconds": 9}}
    chosen = read_serving_options(None, {"conversation": conversation, "engine": {"context": 64}})
    options, usual = chosen.dialogue(), ServingOptions().dialogue()
    assert options.echo is None and usual.echo is not None and options.words_decide and not usual.words_decide
    assert isinstance(usual.classifier, ModelClassifier) and isinstance(options.classifier, OverlapClassifier)
    assert options.speaking.guards.max_seconds == 9.0 and chosen.engine.context == 64
    assert usual == DialogueOptions(
        echo=usual.echo, classifier=usual.classifier, turn_model=usual.turn_model, voices=usual.voices
    )


@pytest.mark.parametrize(("barge_in", "who"), [("rules", "the rules"), ("model", "the model")])
def test_the_log_says_who_decides_on_barge_in(barge_in, who, caplog):
    with caplog.at_level("INFO", "vivavoce"):
        ServingOptions(conversation=ConversationOptions(barge_in=barge_in)).dialogue()
    assert f"barge-in is decided by {who}" in caplog.text


def test_flags_override_the_file_and_leave_the_rest(folder):
    over = {"chat_model": None, "turn": {"silence_duration_ms": 500}, "server": {"port": 1, "api_keys": ["12345678"]}}
    chosen = read_serving_options(folder / "c.toml", over)
    assert chosen.turn == TurnSettings(detector="semantic", eagerness="high", silence_duration_ms=500)
    assert (chosen.server.port, chosen.server.idle_seconds, chosen.chat_model) == (1, 60.0, "qwen3")
    assert chosen.server.api_keys == ("12345678",)


def test_former_names_of_options_work_and_are_logged(tmp_path, caplog):
    file = tmp_path / "c.toml"
    file.write_text("[server]\nmost_sessions = 3\nleast_lead_ms = 80\nport = 1\n", encoding="utf8")
    chosen = read_serving_options(file, {"server": {"max_event_bytes": 5}})
    assert chosen.server == ServerOptions(max_sessions=3, min_lead_ms=80, port=1, max_event_bytes=5)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert f"{file}: server: the option 'most_sessions' is deprecated, it is now called 'max_sessions'" in lines
    with pytest.raises(InputError, match="'max_sessions' is set twice"):
        read_serving_options(file, {"server": {"max_sessions": 5}})


def test_former_names_work_in_python(caplog):
    options = ServerOptions(most_sessions=3)
    assert options == ServerOptions(max_sessions=3)
    assert options.most_sessions == 3
    assert replace(options, most_upload_bytes=7).max_upload_bytes == 7
    assert "'most_sessions' is deprecated" in caplog.text
    with pytest.raises(TypeError):
        ServerOptions(most_ports=3)
    fleet = FleetOptions.read({"speech": {"least": 2, "most": 4, "least_slack_ms": 5, "gpus": 1}})
    assert fleet.pools["speech"] == PoolOptions(min_replicas=2, max_replicas=4, min_slack_ms=5.0, gpus=1.0)
    assert hosting.ServingChoices is ServingOptions
    assert hosting.read_choices is read_serving_options
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"modle": "x"}, "unknown option 'modle'; known are model, codec"),
        ({"turn": {"silence": 3}}, "turn: unknown option 'silence'"),
        ({"turn": "semantic"}, "turn must be a table"),
        ({"turn": {"detector": "magic"}}, "one of none, silence, semantic, not 'magic'"),
        ({"server": {"port": "9000"}}, "port must be int, not '9000'"),
        ({"server": {"log_content": 1}}, "log_content must be bool"),
        ({"model": "mini-speech", "chat": "smollm2"}, "not both"),
    ],
)
def test_invalid_options_are_reported_in_one_line(given, complaint):
    with pytest.raises(InputError, match=complaint) as error:
        read_serving_options(None, given)
    assert "\n" not in str(error.value)


tables = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(NAMES), tables, max_size=4))
def test_any_table_is_taken_or_refused(given_table):
    with suppress(InputError):
        assert isinstance(read_serving_options(None, given_table), ServingOptions)


@pytest.mark.parametrize(("name", "content"), [("c.toml", "= 3"), ("c.yaml", "a: [b"), ("c.yml", "- a")])
def test_unreadable_files_are_reported_in_one_line(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf8")
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        read_serving_options(tmp_path / name, {})
    with pytest.raises(InputError, match="cannot be read"):
        read_serving_options(tmp_path / "absent.toml", {})


def test_noise_is_suppressed_where_it_is_asked_for():
    assert read_serving_options(None, {}).settings().noise_reduction is None
    assert read_serving_options(None, {"denoise": True}).settings().noise_reduction == NoiseSettings()


def test_the_checkers_of_replies(folder):
    assert ServingOptions().dialogue().speaking.moderation is None
    by_words = ModerationOptions(words=folder / "words.txt")
    assert isinstance(by_words.moderation().checker, WordList)
    assert isinstance(ModerationOptions(url="http://localhost:1").moderation().checker, HttpChecker)
    held = ServingOptions(moderation=replace(by_words, hold_ms=1500))
    assert held.dialogue().speaking.moderation.window == 1.5


async def test_all_checkers_are_applied(folder):
    both = ModerationOptions(words=folder / "words.txt", url="http://127.0.0.1:9", timeout_seconds=1.0)
    verdict = await both.moderation().verdict("Good evening")
    assert "check failed" in verdict, "an endpoint that is not there stops the reply"
    assert await replace(both, passes_on_failure=True).moderation().verdict("Good evening") is None


def test_the_command_shows_what_it_would_serve_and_no_secrets(folder):
    flags = ["--chat-key", "the chat xyzzy", "--api-key", "the-server-xyzzy", "--moderate-key", "a third xyzzy"]
    flags += ["--webhook-url", "http://127.0.0.1", "--webhook-secret", "whsec_xyzzyxyzzyxyzzyxyzzyxyzzyxyzzy"]
    flags += ["--config", str(folder / "c.toml"), "--port", "8123", "--smart-turn", "installed", "--denoise", "--show"]
    shown = CliRunner().invoke(app, ["serve", *flags])
    assert shown.exit_code == 0, shown.output
    options = json.loads(shown.output)
    assert (
        options["server"]["port"] == 8123 and options["chat_model"] == "qwen3" and options["smart_turn"] == "installed"
    )
    assert options["server"]["webhook_secret"] == "…" and options["denoise"] is True
    assert "xyzzy" not in shown.output


@pytest.mark.parametrize(
    ("turn", "detector"),
    [
        ({"silence_duration_ms": 240}, "silence"),
        ({"silence_duration_ms": 240, "threshold": 0.7}, "silence"),
        ({"silence_duration_ms": 240, "eagerness": "low"}, ServingOptions().turn.detector),
        ({"silence_duration_ms": 240, "detector": "semantic"}, "semantic"),
        ({"eagerness": "low"}, ServingOptions().turn.detector),
    ],
)
def test_who_says_after_how_much_silence_a_turn_ends_means_silence_detection(turn, detector):
    chosen = read_serving_options(None, {"model": "mini-speech", "turn": turn}).turn
    assert chosen == TurnSettings(**{"detector": detector, **turn})


def test_the_command_detects_silence_of_a_given_length_unless_it_says_otherwise():
    def detector(*flags):
        shown = CliRunner().invoke(app, ["serve", "--model", "mini-speech", *flags, "--show"])
        return json.loads(shown.output)["turn"]["detector"]

    assert detector("--silence-ms", "300") == "silence"
    assert detector("--silence-ms", "300", "--turn", "semantic") == "semantic"
    assert detector("--silence-ms", "300", "--eagerness", "high") == "semantic"
    assert detector("--smart-turn", "installed") == "semantic"


def test_the_speaker_is_enrolled_where_it_is_asked_for():
    shown = CliRunner().invoke(app, ["serve", "--model", "mini-speech", "--speaker", "enrol", "--show"])
    assert json.loads(shown.output)["conversation"]["speaker"] == "enrol"
    wrong = CliRunner().invoke(app, ["serve", "--model", "mini-speech", "--speaker", "everybody", "--show"])
    assert wrong.exit_code != 0
    assert not ServingOptions().dialogue().enrols_speaker


@pytest.mark.published
def test_an_enrolled_speaker_has_an_embedding(published_model):
    chosen = ConversationOptions(speaker="enrol", speaker_model=str(published_model("campplus"))).options(None, None)
    assert chosen.enrols_speaker and chosen.voices(np.ones(16_000, np.float32)).shape == (192,)


def test_what_the_docs_say_may_be_chosen_may_be_chosen(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf8")
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "as-written.toml").write_text(block, encoding="utf8")
    assert read_serving_options(tmp_path / "as-written.toml", {}).moderation.regex == (r"\d{16}",)
    everything = re.sub(r"^# (\w+ = )", r"\1", block.replace('model = "mini-speech"', ""), flags=re.MULTILINE)
    (tmp_path / "everything.toml").write_text(everything, encoding="utf8")
    assert read_serving_options(tmp_path / "everything.toml", {}).cascade.chat_model == "qwen3:8b"
    documented = set(re.findall(r"`(--[a-z-]+)`", text.partition("The flags are")[2].partition("In Python")[0]))
    known = {option for each in get_command(app).commands["serve"].params for option in each.opts}
    former = {"--most-sessions"}
    assert documented == known - {"--config", "--show"} - former


REMOTE = {"asr": "http://asr/v1", "chat": "http://chat/v1", "tts": "http://tts/v1"}


@pytest.mark.parametrize(
    ("options", "cores", "processes"),
    [({}, 2, 0), ({}, 16, 2), (REMOTE, 2, 1), (REMOTE, 1, 0), (REMOTE | {"tts": "mini-tts"}, 2, 0)],
    ids=["on two cores", "on sixteen", "elsewhere", "elsewhere, one core", "one of three here"],
)
def test_the_front_end_has_a_process_where_models_leave_a_core(monkeypatch, options, cores, processes):
    monkeypatch.setattr(config, "usable_cores", lambda: cores)
    serving = ServingOptions(device="cpu", **options)
    service = serving.conversation.front_end(serving.models_use_cores)
    assert (0 if service is None else len(service._workers)) == processes
