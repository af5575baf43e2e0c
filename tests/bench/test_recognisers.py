"""`viva bench recognisers` counts errors of any recogniser on recordings with texts."""

import gzip
import json
import shutil

import pytest
from typer.testing import CliRunner

from tests.asr.test_published import DATA
from vivavoce.bench.recognisers import asterisk_prompts, characters
from vivavoce.cli import app
from vivavoce.errors import InputError
from vivavoce.evaluation.asterisk_prompts import SOUNDS, TEXTS


def test_prompts_of_asterisk_are_those_with_words_and_a_sound(tmp_path):
    with pytest.raises(InputError, match="asterisk-core-sounds-en"):
        asterisk_prompts(tmp_path)
    (tmp_path / SOUNDS).mkdir(parents=True)
    (tmp_path / TEXTS).parent.mkdir(parents=True)
    for sound in (DATA / "english").glob("*.g722"):
        shutil.copy(sound, tmp_path / SOUNDS / sound.name)
    lines = [
        "; a remark: with four words in it",
        "conf-getpin: Please enter the conference pin number.",
        "all-circuits-busy-now: All circuits are busy now.",
        "auth-incorrect: [a tone of some kind]",
        "vm-tomakecall: press 4 to place an outgoing call",
        "agent-newlocation: Too short.",
        "not-there: This one has no sound.",
    ]
    with gzip.open(tmp_path / TEXTS, "wt", encoding="utf8") as stream:
        stream.write("\n".join(lines))
    found = asterisk_prompts(tmp_path)
    assert sorted(one.text for one in found) == [
        "All circuits are busy now.",
        "Please enter the conference pin number.",
    ]
    assert all(1.0 < one.seconds < 4.0 for one in found)
    assert [one.text for one in asterisk_prompts(tmp_path, 1)] == [one.text for one in asterisk_prompts(tmp_path, 1)]


def test_characters_are_counted_without_punctuation():
    assert characters("对，这就是我， OK!") == "对这就是我ok"


@pytest.mark.full
def test_the_command_measures_and_writes(tmp_path):
    command = ["bench", "recognisers", "--max-recordings", "3", "--device", "cpu", "--json", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--snr", "20", "--denoise"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    mini, denoised = result["recognisers"]
    assert (mini["denoised"], denoised["denoised"]) == (False, True) and denoised["wer"] < 0.5
    assert (mini["model"], mini["backend"], result["recordings"]) == ("mini-asr", "ours", 3)
    assert 0 <= mini["wer"] < 0.5 and mini["rtf"] > 0 and mini["processor_rtf"] > 0
    assert json.loads((tmp_path / "recognisers.json").read_text()) == result
