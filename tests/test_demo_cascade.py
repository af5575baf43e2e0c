"""The cascade's demo on small random models: it says the same things about itself as speech to speech does."""

import json

import pytest

from tests.s2s.small_parts import small_asr, small_chat, small_tts
from vivavoce.audio.io import read
from vivavoce.cascade.parts import CascadeParts
from vivavoce.cli.demo import run_cascade
from vivavoce.cli.demo_languages import hotel_instructions

SAME_AS_SPEECH = {
    "heard",
    "said",
    "expected",
    "turn_end_ms",
    "first_sound_ms",
    "v2v_ms",
    "seconds_of_speech",
    "underruns",
}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_cascade_answers_the_bundled_question_and_reports_its_times(tmp_path, capsys, language):
    for name in ("asr", "chat", "tts"):
        (tmp_path / name).mkdir()
    asr, chat, tts = small_asr(tmp_path / "asr"), small_chat(tmp_path / "chat"), small_tts(tmp_path / "tts")
    (tts / "generation_config.json").write_text(json.dumps({"languages": [language]}))
    told = run_cascade("cpu", CascadeParts(str(asr), str(chat), str(tts)), out=tmp_path / "out", language=language)
    assert told.keys() >= SAME_AS_SPEECH | {"recogniser_ms", "first_words_ms", "first_piece_ms", "rtf"}
    assert told["expected"]["said"] in hotel_instructions(language)
    assert told["heard"] and told["seconds_of_speech"] > 0 and told["v2v_ms"] >= told["turn_end_ms"] - 100
    assert read(tmp_path / "out" / "reply.wav").seconds == round(told["seconds_of_speech"], 6)
    assert json.loads((tmp_path / "out" / "demo.json").read_text(encoding="utf8"))["said"] == told["said"]
    printed = capsys.readouterr().out
    assert "V2V" in printed and "first words" in printed
