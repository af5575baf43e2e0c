"""`viva encode`, `viva speak-codes` and `viva resynthesise` on small random checkpoints of all three codecs."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.models.test_bigvgan import TINY as TINY_BIGVGAN
from tests.models.test_moss_speech_codec import CODEC, campplus, some_sound  # noqa: F401 - campplus is a fixture
from tests.models.test_xy_tokenizer import TINY as TINY_XY
from vivavoce.audio.io import read, write
from vivavoce.cli import app
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.bigvgan import BigVGAN
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.codecs import CodeFile, open_codec
from vivavoce.models.xy_tokenizer.model import XYTokenizer
from vivavoce.nn.modules import fill_randomly

RATES = {"moss-speech": 24_000, "xy-tokenizer": 16_000, "bigvgan": 24_000}


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def folders(tmp_path_factory, campplus):  # noqa: F811
    root = tmp_path_factory.mktemp("codecs")
    moss = root / "moss-speech"
    CODEC.save(moss)
    (moss / "flow" / "campplus.onnx").write_bytes(campplus[0].read_bytes())
    tokenizer = XYTokenizer(replace(TINY_XY, window_seconds=30)).eval()
    fill_randomly(tokenizer)
    (root / "xy-tokenizer").mkdir()
    torch.save({"generator": published_tensors(tokenizer)}, root / "xy-tokenizer" / "xy_tokenizer.ckpt")
    config = replace(TINY_BIGVGAN, sampling_rate=24_000, num_mels=20, n_fft=256)
    vocoder = BigVGAN(config)
    fill_randomly(vocoder)
    (root / "bigvgan").mkdir()
    torch.save(published_tensors(vocoder), root / "bigvgan" / "bigvgan_generator.pt")
    (root / "bigvgan" / "config.json").write_text(json.dumps(asdict(config)))
    return root


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    file = tmp_path_factory.mktemp("sound") / "hello.wav"
    write(file, some_sound(2.4, 44_100, channels=2))
    return file


@pytest.mark.parametrize("name", RATES)
def test_a_sound_goes_through_a_codec_and_is_drawn(folders, recording, tmp_path, name):
    out, plot = tmp_path / "out.wav", tmp_path / "out.png"
    said = run("resynthesise", recording, "-o", out, "--codec", folders / name, "--plot", plot, "--device", "cpu")
    decoded = read(out)
    assert decoded.rate == RATES[name]
    assert decoded.seconds == pytest.approx(2.4, abs=0.09)
    assert f"{RATES[name]} Hz" in said
    assert np.abs(decoded.samples).max() > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["moss-speech", "xy-tokenizer"])
def test_codes_written_and_spoken_are_the_resynthesis(folders, recording, tmp_path, name):
    codes, spoken, at_once = tmp_path / "codes.json", tmp_path / "spoken.wav", tmp_path / "at_once.wav"
    voice = ["--voice", recording] if name == "moss-speech" else []
    place = ["--codec", folders / name, "--device", "cpu"]
    run("encode", recording, "-o", codes, *place)
    run("speak-codes", codes, "-o", spoken, *voice, *place)
    run("resynthesise", recording, "-o", at_once, *voice, *place)
    np.testing.assert_array_equal(read(spoken).samples, read(at_once).samples)
    written = CodeFile.read(codes)
    assert written.codec == name
    assert written.codes.shape[1] in (29, 30)


def test_the_bundled_codec_needs_no_naming(recording, tmp_path):
    codes, spoken, at_once = tmp_path / "codes.json", tmp_path / "spoken.wav", tmp_path / "at_once.wav"
    run("encode", recording, "-o", codes, "--device", "cpu")
    run("speak-codes", codes, "-o", spoken, "--device", "cpu")
    run("resynthesise", recording, "-o", at_once, "--device", "cpu")
    np.testing.assert_array_equal(read(spoken).samples, read(at_once).samples)
    assert np.abs(read(spoken).samples).max() > 0.01


def test_what_a_codec_cannot_do_is_said(folders, recording, tmp_path):
    sound = read(recording)
    with pytest.raises(InputError, match="no codes"):
        open_codec(folders / "bigvgan").encode(sound)
    with pytest.raises(InputError, match="no codes"):
        open_codec(folders / "bigvgan").decode(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(InputError, match="needs a voice"):
        open_codec(folders / "moss-speech").decode(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(InputError, match="include the voice"):
        open_codec(folders / "xy-tokenizer").resynthesise(sound, sound)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_codec(tmp_path / "nowhere")
    wrong = tmp_path / "wrong.json"
    CodeFile("xy-tokenizer", torch.zeros(3, 4, dtype=torch.long)).write(wrong)
    result = CliRunner().invoke(
        app, ["speak-codes", str(wrong), "-o", "x.wav", "--codec", str(folders / "moss-speech")]
    )
    assert "was encoded by xy-tokenizer" in str(result.exception)


@pytest.mark.parametrize(
    "content", ["", "{}", '{"codec": "x", "codes": [[1.5]]}', '{"codec": "x", "codes": []}', "[1]"]
)
def test_a_file_without_codes_is_refused(tmp_path, content):
    file = tmp_path / "codes.json"
    file.write_text(content)
    with pytest.raises(InputError, match="codes"):
        CodeFile.read(file)
    with pytest.raises(InputError, match="cannot read"):
        CodeFile.read(tmp_path / "absent.json")
