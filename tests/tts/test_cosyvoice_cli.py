"""CosyVoice from the command line: store a voice with its transcript, speak with instructions, remove it."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.models.tiny_cosyvoice import write_folder
from vivavoce.audio.io import Sound, read, write
from vivavoce.cli import app


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    root = tmp_path_factory.mktemp("cosyvoice")
    tone = 0.2 * np.sin(2 * np.pi * 180 * np.arange(72_000) / 24_000)
    write(root / "ann.wav", Sound(tone.astype(np.float32), 24_000), "wav")
    model = ["--model", str(write_folder(root / "model", 3)), "--device", "cpu"]
    return root, model, ["--voices", str(root / "voices")]


def viva(*words):
    return CliRunner().invoke(app, list(words))


def test_a_voice_is_stored_with_its_transcript_and_follows_instructions(given):
    root, model, store_option = given
    about = ["--text", "hello world hello there", "--consent", "on tape"]
    added = viva("voices", "add", "ann", "--wav", str(root / "ann.wav"), *about, *model, *store_option, "--json")
    assert json.loads(added.stdout)["text"] == "hello world hello there.", added.output
    (listed,) = json.loads(viva("voices", "list", "--json", *store_option).stdout)
    assert (listed["name"], listed["consent"], listed["text"]) == ("ann", "on tape", "hello world hello there.")
    sounds = {}
    for how in ("", "happy", "Speak slowly."):
        out = root / f"{how}.wav"
        made = viva("say", "Hello.", "--voice", "ann", "--out", str(out), "--instructions", how, *model, *store_option)
        assert made.exit_code == 0, made.output
        sounds[how] = read(out).samples
    assert sounds["Speak slowly."].shape[1] > 1.1 * sounds[""].shape[1]
    assert sounds["happy"].shape != sounds[""].shape or not np.allclose(sounds["happy"], sounds[""], atol=0.01)
    assert viva("voices", "remove", "ann", *store_option).exit_code == 0
    assert not list((root / "voices").iterdir())


@pytest.mark.parametrize("files", [[], ["ann.wav", "--wav", "ann.wav"]])
def test_a_voice_needs_one_recording(given, files):
    root, model, store_option = given
    done = viva(
        "voices",
        "add",
        "bob",
        *(str(root / file) if file != "--wav" else file for file in files),
        *model,
        *store_option,
    )
    assert done.exit_code != 0
    assert "one recording" in str(done.exception)
