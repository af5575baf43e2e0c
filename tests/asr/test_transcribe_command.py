"""`viva transcribe`: files, folders and standard input, in every format."""

import io
import json

import pytest
import soundfile
from typer.testing import CliRunner

from tests.asr import test_transcribe
from tests.asr.test_transcribe import RATE, noise
from vivavoce.cli import app
from vivavoce.models.whisper.drafts import WhisperHeads
from vivavoce.models.whisper.model import Whisper

whisper = test_transcribe.folder


@pytest.fixture(scope="module")
def folder(whisper):
    """The Whisper that writes nonsense, content with its first try."""
    file = whisper / "generation_config.json"
    off = dict.fromkeys(("logprob_threshold", "compression_ratio_threshold", "no_speech_threshold"))
    file.write_text(json.dumps(json.loads(file.read_text()) | off))
    return whisper


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    root = tmp_path_factory.mktemp("sounds")
    (root / "deep").mkdir()
    for name, seconds in (("b.wav", 1.2), ("a.flac", 2.6), ("deep/c.wav", 0.8)):
        soundfile.write(root / name, noise(seconds, len(name)), RATE)
    (root / "notes.txt").write_text("no sound")
    return root


def viva(folder, *arguments, **given):
    return CliRunner().invoke(app, ["transcribe", *map(str, arguments), "--model", str(folder), *DEVICE], **given)


DEVICE = ("--device", "cpu", "--backend", "ours", "--no-gate")


def test_a_folder_is_gone_through_in_order(folder, sounds):
    result = json.loads(viva(folder, sounds, "--json").stdout)
    assert [one["file"].rpartition("/")[2] for one in result["files"]] == ["a.flac", "b.wav", "c.wav"]
    for one, seconds in zip(result["files"], (2.6, 1.2, 0.8), strict=True):
        assert one["duration"] == pytest.approx(seconds, abs=0.01) and one["rtf"] > 0 and one["language"] == "en"


@pytest.mark.parametrize(
    ("format", "begins"),
    [("srt", "1\n00:00:0"), ("vtt", "WEBVTT"), ("json", '{\n  "text"'), ("verbose_json", '{\n  "task"')],
)
def test_every_format_comes_out(folder, sounds, format, begins):
    result = viva(folder, sounds / "b.wav", "--format", format)
    assert result.exit_code == 0 and result.stdout.startswith(begins)


def test_standard_input_is_a_sound_like_any(folder, sounds):
    file = viva(folder, sounds / "b.wav").stdout
    assert viva(folder, "-", input=(sounds / "b.wav").read_bytes()).stdout == file
    assert file.strip()


def test_noise_is_suppressed_before_the_model_hears_it(folder, sounds):
    plain, denoised = (
        json.loads(viva(folder, sounds / "b.wav", "--json", *flags).stdout)["files"][0]
        for flags in ((), ("--denoise",))
    )
    assert denoised["duration"] == plain["duration"]
    assert denoised["text"] != plain["text"]


def test_a_file_that_fails_does_not_stop_the_others(folder, sounds, tmp_path):
    (tmp_path / "broken.wav").write_bytes(b"RIFF....")
    result = viva(folder, tmp_path / "broken.wav", sounds / "b.wav", tmp_path / "none.wav", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["b.txt"]
    errors = "".join(result.stderr.split())  # the terminal wraps lines
    assert "broken.wav" in errors and "none.wav" in errors and "Traceback" not in errors


def test_a_folder_without_sounds_is_refused(folder, tmp_path):
    result = viva(folder, tmp_path)
    assert result.exit_code == 1 and "holds no sound file" in str(result.exception)


def test_heads_leave_the_text_and_are_reported(folder, sounds, tmp_path):
    model = Whisper.load(folder)
    WhisperHeads.for_decoder(model.decoder, 3).save(tmp_path, model.config)
    plain = viva(folder, sounds / "b.wav")
    drafted = viva(folder, sounds / "b.wav", "--heads", tmp_path, "--lookup", "--json")
    result = json.loads(drafted.stdout)
    assert result["files"][0]["text"] == plain.stdout.strip()
    assert result["drafts"]["drafts"] > 0 and sum(result["drafts"]["kept_histogram"]) == result["drafts"]["drafts"]
    assert "tokens in" in drafted.stderr


def test_an_empty_file_is_an_error_of_one_line(folder, tmp_path):
    buffer = io.BytesIO()
    soundfile.write(buffer, noise(0.0), RATE, format="WAV")
    result = viva(folder, "-", input=buffer.getvalue())
    assert result.exit_code == 1 and "no samples" in result.stderr
