"""`viva talk` as a process, with files for microphone and loudspeaker, and what its screen shows."""

import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.server.test_live_conversation import RATE, Listener, Voice
from vivavoce import hub
from vivavoce.audio.io import read, write
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatEnd, ChatText
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.fillers import FillerVoice
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, TurnSettings
from vivavoce.server.hosting import load, read_serving_options
from vivavoce.stacks import StackConfig
from vivavoce.talk.audio import FileAudio, PacketPace
from vivavoce.talk.screen import Screen, meter
from vivavoce.talk.session import TalkSession, talk
from vivavoce.talk.turns import TalkTurn
from vivavoce.tts.hibari import HibariTTS

QUESTIONS = hub.BUNDLED / "questions"
BREAKFAST, WIFI = QUESTIONS / "15-breakfast.opus", QUESTIONS / "16-wifi.opus"
SECONDS = 400  # until a process that hangs is killed


def viva_talk(*arguments: str | Path, config: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vivavoce.cli", "talk", *map(str, arguments)]
    environment = os.environ | {"VIVA_CONFIG": "" if config is None else str(config)}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SECONDS, env=environment, stdin=subprocess.DEVNULL
    )


def conversation(*arguments: str | Path, config: Path | None = None) -> dict[str, Any]:
    done = viva_talk(*arguments, "--json", config=config)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_the_bundled_model_answers_a_file_and_both_sides_are_written(tmp_path):
    told = conversation("--wav", BREAKFAST, "--out", tmp_path / "both.wav")
    assert (told["stack"], told["models"]) == ("mini", ["mini-speech"])
    (turn,) = told["turns"]
    assert "breakfast" in turn["heard"] and turn["said"].startswith("Breakfast is served from seven")
    assert not turn["is_interrupted"] and turn["error"] is None
    question, both = read(BREAKFAST), read(tmp_path / "both.wav", mono=False)
    voiced = np.flatnonzero(np.abs(both.samples[1]) > 0.01) / both.rate
    spoken_until = np.flatnonzero(np.abs(both.samples[0]) > 0.01)[-1] / both.rate
    assert spoken_until == pytest.approx(question.seconds, abs=0.3)
    assert voiced[-1] - voiced[0] > 1.5, "the reply is a whole sentence"
    assert 1e3 * (voiced[0] - spoken_until) == pytest.approx(turn["v2v_ms"], abs=120), "the latency is that of the file"


class Interruption:
    """Asks a question, and another one when the reply to the first has been heard for a second."""

    prompt = "two questions"

    async def run(self, hear, rate, playback, is_idle):
        first, second = (read(file).mono().resampled(rate).samples[0] for file in (BREAKFAST, WIFI))
        played: list[np.ndarray] = []
        pace = PacketPace(hear, playback, rate, [], played)
        (silence,) = pace.packets(np.zeros(round(0.02 * rate), np.float32))
        for packet in pace.packets(first):
            await pace.send(packet)
        while sum(bool(np.abs(packet).max() > 0.01) for packet in played) < 50:
            await pace.send(silence)
        for packet in pace.packets(second):
            await pace.send(packet)
        await pace.wait(lambda: is_idle() and playback.is_empty)


@pytest.mark.full
async def test_speech_over_a_reply_interrupts_it():
    host = load(read_serving_options(None, {"stack": "mini"}))
    one, two = await talk(host, Interruption(), Screen(Console(file=io.StringIO())))
    assert one.is_interrupted and "morning" not in one.said, "what was not heard was not said"
    assert not two.is_interrupted and "wifi" in two.said.lower()
    assert one.v2v_ms is not None and two.v2v_ms is not None


@pytest.mark.full
def test_the_stored_stack_talks_and_its_model_reads_what_the_recogniser_wrote(tmp_path):
    StackConfig("desk", asr="mini-asr").write(tmp_path / "config.toml")
    told = conversation(
        "--wav", BREAKFAST, "--wav", WIFI, "--out", tmp_path / "both.wav", config=tmp_path / "config.toml"
    )
    assert (told["stack"], told["models"]) == ("desk", ["mini-asr", "mini-speech"])
    assert ["breakfast" in told["turns"][0]["heard"], "seven until ten" in told["turns"][0]["said"]] == [True, True]
    assert "garden" in told["turns"][1]["said"]


@pytest.mark.full
@pytest.mark.published
def test_people_are_understood_at_the_front_desk(published_model, tmp_path):
    published_model("moonshine-base-en")
    (turn,) = conversation("--stack", "desk", "--wav", QUESTIONS / "01-wake-up.opus", "--out", tmp_path / "both.wav")[
        "turns"
    ]
    assert "8:30" in turn["heard"], "the caption is as the recogniser wrote it"
    assert turn["said"] == "I will wake you at half past eight."  # its training had no digits: they are spelled


@pytest.mark.full
@pytest.mark.published
def test_the_assistant_knows_more_than_the_front_desk(published_model, tmp_path):
    for name in ("whisper-base", "qwen2.5-coder-0.5b-instruct", "kokoro-82m"):
        published_model(name)
    pytest.importorskip("misaki")
    pytest.importorskip("hibari")
    write(tmp_path / "question.wav", HibariTTS().say("What is the capital of France?"))
    (turn,) = conversation("--stack", "assistant", "--wav", tmp_path / "question.wav", "--out", tmp_path / "both.wav")[
        "turns"
    ]
    assert "capital of France" in turn["heard"] and "Paris" in turn["said"]


class SlowChat:
    """Answers when a filler has been spoken."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def reply(self, messages, settings):
        await self.may_answer.wait()
        yield ChatText("Here I am.")
        yield ChatEnd("stop", 5, 7)


async def test_a_filler_is_heard_before_the_reply_and_is_no_turn(tmp_path):
    chat = SlowChat()

    async def speak(text, voice, speed):
        yield np.full(RATE // 4, 0.05, np.float32)
        chat.may_answer.set()

    backend = CascadeBackend(WholeTurns(Listener()), chat, Voice())
    settings = ConversationSettings(transcribe_input=True, turn=TurnSettings(silence_duration_ms=240))
    spoken = LiveConversation(backend, settings, DialogueOptions(fillers=FillerVoice(speak, seconds=0.1)))
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    session = TalkSession(spoken, Screen(console))
    (turn,) = await session.run(FileAudio([BREAKFAST], tmp_path / "both.wav"))
    assert turn.as_dict() | {"v2v_ms": 0} == {
        "heard": "something spoken",
        "said": "Here I am.",
        "fillers": ["One moment, please."],
        "v2v_ms": 0,
        "is_interrupted": False,
        "error": None,
    }
    (filler,) = session._fillers
    first = session.playback.played(filler).first_audible
    assert first is not None and turn.v2v_ms > 1e3 * (first - turn.voiced_until), "that of the reply"
    lines = console.file.getvalue().splitlines()
    assert lines[:3] == ["you  something spoken", "viva One moment, please.", "viva Here I am."]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--out", "both.wav"], "--out belongs to --wav"),
        (["--wav", "absent.wav"], "absent.wav"),
        (["--stack", "grand", "--wav", str(BREAKFAST)], "no stack 'grand'; known are mini, desk, assistant, s2s"),
    ],
)
def test_a_wrong_request_is_one_line(arguments, error, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from vivavoce.cli import app

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["talk", *arguments])
    assert done.exit_code != 0 and error in str(done.exception)


def test_the_screen_prints_captions_latency_and_interruptions():
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    with Screen(console) as screen:
        screen.turn(TalkTurn("item", "What time is it?", "It is [noon].", v2v_ms=412.3))
        screen.turn(TalkTurn("item", "And now?", "It is still", is_interrupted=True, v2v_ms=300.0))
        screen.turn(TalkTurn("item", "", "", error="the reply failed"))
    assert console.file.getvalue().splitlines() == [
        "you  What time is it?",
        "viva It is [noon].",
        "     412 ms from your last sound to the first of the reply",
        "you  And now?",
        "viva It is still —",
        "     300 ms from your last sound to the first of the reply; interrupted",
        "the reply failed",
    ]


def test_the_terminal_shows_meters_and_the_running_turn():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with Screen(console) as screen:
        screen.heard(-10.0)
        screen.show([TalkTurn("item", "What time", "It is")])
        screen.turn(TalkTurn("item", "Hello.", "Hello.", v2v_ms=400.0))
    shown = console.file.getvalue()
    assert "you  What time" in shown and "viva It is" in shown
    assert "latency 400 ms (median of 1)" in shown and "█" in shown


def test_a_meter_is_empty_in_silence_and_full_at_its_top():
    assert (meter(-200.0), meter(0.0)) == ("░" * 12, "█" * 12)
    assert meter(-35.0) == "█" * 6 + "░" * 6
