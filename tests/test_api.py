"""The four functions at the door: `load`, `say`, `transcribe`, `converse`."""

import subprocess
import sys

import numpy as np
import pytest

import vivavoce
from tests.s2s.small_parts import small_asr, small_chat, small_tts
from vivavoce import hub
from vivavoce.audio.level import buzz
from vivavoce.cascade.parts import CascadeParts
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.s2s.moss_speech import MossSpeechBackend
from vivavoce.tts import NanoTTS

QUESTIONS = hub.BUNDLED / "questions"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    asr, chat, tts = (tmp_path_factory.mktemp(name) for name in ("asr", "chat", "tts"))
    return CascadeParts(str(small_asr(asr)), str(small_chat(chat)), str(small_tts(tts)))


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, vivavoce; print(sorted({'torch', 'numpy', 'soundfile'} & set(sys.modules)), dir(vivavoce))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.startswith("[] ") and all(f"'{name}'" in output for name in ("load", "say", "transcribe", "converse"))
    with pytest.raises(AttributeError, match="no attribute 'sing'"):
        _ = vivavoce.sing


def test_a_model_is_loaded_as_what_its_files_say_it_is(parts, tmp_path):
    assert isinstance(vivavoce.load(parts.asr, "cpu"), WhisperTranscriber)
    assert isinstance(vivavoce.load(parts.tts, "cpu"), NanoTTS)
    assert isinstance(vivavoce.load("mini-speech", "cpu"), MossSpeechBackend)
    with pytest.raises(CheckpointError, match="model_type 'llama'"):
        vivavoce.load(parts.chat, "cpu")
    with pytest.raises(CheckpointError, match="names no model_type"):
        vivavoce.load(tmp_path)
    with pytest.raises(InputError, match="no model is called 'nobody'"):
        vivavoce.load("nobody")


def test_what_is_said_can_be_written_down(parts):
    sound = vivavoce.say("Good evening.", model=parts.tts, device="cpu")
    assert sound.seconds >= 0.08
    assert isinstance(vivavoce.transcribe(sound, parts.asr, device="cpu").text, str)


def test_a_conversation_answers_speech_and_text_and_has_a_history():
    with vivavoce.converse(device="cpu") as talk:
        answer = talk.ask(QUESTIONS / "15-breakfast.opus")
        assert "breakfast" in answer.heard.lower() and "seven until ten" in answer.said
        assert 1.0 < answer.sound.seconds < 8.0 and np.abs(answer.sound.samples).max() > 0.03
        written = talk.ask("At what time can I have breakfast?")
        assert written.heard == "At what time can I have breakfast?" and written.said
    with pytest.raises(InputError, match="not open"):
        talk.ask("Hello?")


def test_a_conversation_with_a_cascade(parts):
    with vivavoce.converse(cascade=parts, device="cpu", instructions="Be brief.") as talk:
        answer = talk.ask(buzz(1.0, 16_000))
        assert answer.heard and answer.sound.rate == 16_000 and answer.sound.seconds > 0
