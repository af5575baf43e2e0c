"""The bundled voice through every door: the command, the server, and each method that makes it smaller."""

import json

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.minis.test_mini_cascade import bundled
from vivavoce.audio.io import read
from vivavoce.cli import app
from vivavoce.quant.policy import METHODS
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting.config import ServingOptions
from vivavoce.server.hosting.hosts import load_models
from vivavoce.tts import SpeakingStyle
from vivavoce.tts.interface import open_speech_model

TEXT = "Good evening, how can I help you?"


def viva(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def is_speech(seconds: float, loudest: float) -> bool:
    return 0.8 < seconds < 6.0 and 0.05 < loudest <= 1.0


@bundled("mini-tts")
def test_the_command_says_it_with_no_model_and_no_voice_named(tmp_path):
    result = json.loads(viva("say", TEXT, "--out", str(tmp_path / "said.opus"), "--device", "cpu", "--json"))
    sound = read(tmp_path / "said.opus")
    assert is_speech(sound.seconds, np.abs(sound.samples).max())
    assert result["seconds"] == pytest.approx(sound.seconds, abs=0.1)


@bundled("mini-tts")
def test_a_stream_is_the_whole():
    speaker = open_speech_model("mini-tts", "cpu")
    pieces = list(speaker.stream(TEXT, None, SpeakingStyle(seed=5)))
    whole = speaker.say(TEXT, None, SpeakingStyle(seed=5))
    assert len(pieces) > 2
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole.samples, atol=1e-4)


@bundled("mini-tts")
async def test_the_server_says_it():
    host = load_models(ServingOptions(device="cpu", tts="mini-tts"))
    server = build_app(host, ServerOptions(), host.speech, host.transcriber)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://127.0.0.1") as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert "mini-tts" in [model["id"] for model in listed if model["viva"]["kind"] == "speech"]
        spoken = {"input": TEXT, "model": "mini-tts", "voice": "alloy"}
        for kind in ("wav", "mp3"):
            answer = await http.post("/v1/audio/speech", json=spoken | {"response_format": kind})
            assert answer.status_code == 200, answer.text
            sound = read(answer.content)
            assert is_speech(sound.seconds, np.abs(sound.samples).max())


@bundled("mini-tts")
def test_every_method_makes_a_folder_that_speaks(tmp_path):
    words = tmp_path / "words.jsonl"
    words.write_text(json.dumps({"text": "Yes."}))
    for method in METHODS:
        out = str(tmp_path / method)
        viva("quantize", "mini-tts", "--method", method, "--out", out, "--calibration", str(words), "--steps", "1")
        sound = open_speech_model(out, "cpu").say("Good evening, everyone.")
        assert is_speech(sound.seconds, np.abs(sound.samples).max()), method
