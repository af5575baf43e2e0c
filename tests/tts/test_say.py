"""`viva say` writes audio while it is generated, in every format; `viva voices` stores voices."""

import io
import json

import av
import numpy as np
import pytest
from typer.testing import CliRunner

from vivavoce.audio.io import read, write
from vivavoce.audio.level import buzz
from vivavoce.cli import app
from vivavoce.cli.say import MIN_LETTER_SECONDS
from vivavoce.errors import InputError
from vivavoce.tts import NanoTTS, SpeakingStyle
from vivavoce.tts.output import EncodedSink, PcmSink, shaped, sink

TEXT = "A table for two. At seven, please."


class Pipe(io.BytesIO):
    """A stream that cannot go back."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_) -> int:
        raise io.UnsupportedOperation("a pipe cannot seek")


def say(folder, *arguments, text=TEXT, given=None):
    command = ["say", *([text] if text else []), "--model", str(folder), "--device", "cpu", *map(str, arguments)]
    return CliRunner().invoke(app, command, input=given)


@pytest.fixture(scope="module")
def said(folder):
    return NanoTTS.load(str(folder), "cpu").say(TEXT)


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
def test_a_file_holds_what_is_said(folder, said, tmp_path, format):
    file = tmp_path / f"said.{format}"
    done = say(folder, "--out", file, "--json")
    assert done.exit_code == 0, done.output
    warning = json.loads(done.stdout)
    heard = read(file, mono=False)
    assert heard.channels == said.channels
    assert heard.seconds == pytest.approx(said.seconds, abs=0.08)
    assert warning["seconds"] == pytest.approx(said.seconds)
    if format in ("wav", "flac"):
        np.testing.assert_allclose(heard.samples, said.samples.clip(-1, 1), atol=1e-4)


def test_text_comes_from_a_file_or_standard_input_and_sound_goes_to_standard_output(folder, said, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    by_file = say(folder, "--file", tmp_path / "text", "--out", "-", "--format", "pcm", text=None)
    by_input = say(folder, "--out", "-", "--format", "pcm", text=None, given=TEXT)
    assert by_file.stdout_bytes == by_input.stdout_bytes
    assert len(by_file.stdout_bytes) == said.samples.size * 2


def test_one_channel_at_another_rate(folder, said, tmp_path):
    file = tmp_path / "said.wav"
    assert say(folder, "--out", file, "--rate", 24_000, "--mono").exit_code == 0
    heard = read(file, mono=False)
    assert (heard.rate, heard.channels) == (24_000, 1)
    assert heard.seconds == pytest.approx(said.seconds, abs=0.01)


def test_a_warning_is_printed_if_the_audio_is_too_short_for_its_text(folder, said, tmp_path):
    long_enough = "Ah."
    assert MIN_LETTER_SECONDS * len(long_enough) < said.seconds < MIN_LETTER_SECONDS * len(TEXT)
    warning = "too short to be all of the text: try another --seed"
    assert warning in say(folder, "--out", tmp_path / "said.wav").stderr
    assert warning not in say(folder, "--out", tmp_path / "said.wav", text=long_enough).stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "said.ogx"], "wav, flac, mp3, opus, pcm"),
        (["--out", "said.opus", "--rate", "44100"], "opus cannot hold 44100 Hz"),
        (["--out", "/nowhere/said.wav"], "cannot write /nowhere/said.wav"),
        (["--out", "said.wav", "--speed", "3"], "speed must be"),
        (["--out", "said.wav", "--pause", "-1"], "pause must be"),
        (["--out", "said.wav", "--voice", "nobody"], "there is no voice 'nobody'"),
        (["--out", "said.wav", "--file", "/nowhere"], "not both"),
    ],
)
def test_impossible_options_are_refused_before_synthesis(folder, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    done = say(folder, *arguments)
    assert done.exit_code == 1 and isinstance(done.exception, InputError)
    assert says in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_corrupt_recording_is_named(folder, tmp_path):
    bad = tmp_path / "voice.wav"
    bad.write_bytes(b"RIFF" + bytes(range(200)))
    done = say(folder, "--voice", bad, "--out", tmp_path / "said.wav")
    assert isinstance(done.exception, InputError) and "voice.wav" in str(done.exception)


def test_text_that_is_not_utf8_is_named(folder, tmp_path):
    (tmp_path / "text").write_bytes(b"caf\xe9")
    done = say(folder, "--file", tmp_path / "text", "--out", tmp_path / "said.wav", text=None)
    assert "not UTF-8" in str(done.exception)


def test_voices_are_added_spoken_with_listed_and_removed(folder, tmp_path):
    recording, kept = tmp_path / "guest.wav", tmp_path / "kept"
    write(recording, buzz(1.0, 16_000))
    store_option = ["--voices", str(kept)]
    model = ["--model", str(folder), "--device", "cpu"]
    added = CliRunner().invoke(
        app, ["voices", "add", "guest", str(recording), "--consent", "on tape", *model, *store_option]
    )
    assert added.exit_code == 0, added.output
    by_name, by_file = tmp_path / "name.wav", tmp_path / "file.wav"
    assert say(folder, "--voice", "guest", "--out", by_name, *store_option).exit_code == 0
    assert say(folder, "--voice", recording, "--out", by_file, *store_option).exit_code == 0
    assert by_name.read_bytes() == by_file.read_bytes()
    (listed,) = json.loads(CliRunner().invoke(app, ["voices", "list", "--json", *store_option]).stdout)
    assert (listed["name"], listed["consent"]) == ("guest", "on tape")
    assert CliRunner().invoke(app, ["voices", "remove", "guest", *store_option]).exit_code == 0
    assert json.loads(CliRunner().invoke(app, ["voices", "list", "--json", *store_option]).stdout) == []


def test_a_voice_of_another_codec_is_made_anew_from_its_recording(folder, tmp_path):
    speaks = NanoTTS.load(str(folder), "cpu", voices=tmp_path)
    recording = buzz(1.0, 16_000)
    kept = speaks.add_voice("guest", recording)
    (tmp_path / "guest.json").write_text(json.dumps({"name": "guest", "codes": [[0] * 8], "codec": "another"}))
    greedy = SpeakingStyle(greedy=True)
    expected = speaks.say(TEXT, recording, greedy).samples
    np.testing.assert_allclose(speaks.say(TEXT, "guest", greedy).samples, expected, atol=1e-3)
    (tmp_path / "guest.flac").unlink()
    with pytest.raises(InputError, match="made for another model"):
        speaks.say(TEXT, "guest")
    assert kept.codes


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
def test_a_pipe_gets_a_file_that_can_be_read(format):
    sound, pipe = buzz(1.0, 24_000), Pipe()
    out = sink(pipe, format, 24_000, 1)
    for part in np.array_split(sound.samples, 10, axis=1):
        out.write(part)
    out.close()
    with av.open(io.BytesIO(pipe.getvalue())) as heard:
        seconds = sum(frame.samples / frame.sample_rate for frame in heard.decode(audio=0))
    assert seconds == pytest.approx(1.0, abs=0.1)


def test_sound_goes_out_while_it_is_made():
    pipe, part = Pipe(), np.zeros((1, 48_000), np.float32)
    for format in ("mp3", "opus"):
        out = EncodedSink(pipe, format, 48_000, 1)
        before = len(pipe.getvalue())
        out.write(part)
        assert len(pipe.getvalue()) > before
    raw = PcmSink(pipe, 48_000, 1, has_header=False)
    before = len(pipe.getvalue())
    raw.write(part[:, :10])
    assert len(pipe.getvalue()) == before + 20


def test_shaping_in_pieces_is_shaping_at_once():
    sound = buzz(0.5, 16_000).samples
    whole = np.concatenate(list(shaped([sound], 1, 16_000, 24_000, mono=True)), axis=1)
    parts = np.concatenate(list(shaped(np.array_split(sound, 7, axis=1), 1, 16_000, 24_000, mono=True)), axis=1)
    np.testing.assert_allclose(parts, whole, atol=1e-6)
