"""`viva bench asr` in miniature: the figures are there and mean what they say."""

import json

import pytest
import soundfile

from tests.asr import test_transcribe
from tests.asr.test_transcribe import RATE, noise
from vivavoce.bench import asr, asr_shape
from vivavoce.bench.asr import spoken_sentences
from vivavoce.errors import InputError
from vivavoce.models.whisper.config import SIZES, WhisperConfig
from vivavoce.models.whisper.drafts import WhisperHeads
from vivavoce.models.whisper.model import Whisper

folder = test_transcribe.folder


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    root = tmp_path_factory.mktemp("speech")
    for number in range(2):
        soundfile.write(root / f"{number}.wav", noise(0.6 + 0.3 * number, number), RATE)
        (root / f"{number}.txt").write_text("a table for three")
    return root


@pytest.mark.full
def test_every_contender_hears_every_recording(folder, speech, tmp_path, capsys):
    model = Whisper.load(folder)
    WhisperHeads.for_decoder(model.decoder, 3).save(tmp_path / "heads", model.config)
    result = asr.run(
        str(folder), heads=str(tmp_path / "heads"), width=2, speech=speech, batches=(2,), device="cpu", peer=False,
        out=tmp_path,
    )  # fmt: skip
    assert json.loads((tmp_path / "asr.json").read_text()) == json.loads(json.dumps(result))
    by_name = {one["name"]: one for one in result["contenders"]}
    assert {"ours", "ours, heads", "ours, heads, tree of 2 wide", "ours, lookup"} <= by_name.keys()
    plain, heads = by_name["ours"], by_name["ours, heads"]
    assert plain["tokens"] == heads["tokens"] and heads["same_text_as_plain"] == 2
    assert heads["passes"] <= plain["passes"] == plain["tokens"] and sum(heads["kept_histogram"]) == heads["drafts"]
    assert [row["in_flight"] for row in result["batches"]] == [2]
    assert {one["policy"] for one in result["live"]} == {"local-agreement", "alignatt"}
    assert "ours, heads" in capsys.readouterr().err


def test_a_shape_is_measured_beside_its_floor(monkeypatch, tmp_path, capsys):
    small = WhisperConfig(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                          decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)  # fmt: skip
    monkeypatch.setitem(SIZES, "tiny", small)
    monkeypatch.setattr(asr_shape, "REPEATS", 2)
    monkeypatch.setattr(asr_shape, "read_bandwidth", lambda device: 1e9)
    result = asr_shape.run("tiny", "cpu", "float32", (1, 2), requests=2, tokens=4, out=tmp_path)
    for step in result["steps"]:
        assert step["over_floor"] == pytest.approx(step["step_ms"] / step["floor_ms"])
    one, two = (step["floor_ms"] for step in result["steps"])
    window = 2 * 32 * 4 * (1500 + asr_shape.CONTEXT)  # keys and values of one layer, in bytes
    assert (two - one) * 1e6 == pytest.approx(window)
    assert result["requests"]["count"] == 2 and "requests of 4 tokens" in capsys.readouterr().out
    with pytest.raises(InputError, match="large-v2"):
        asr_shape.run("huge")


def test_recordings_come_with_their_texts(speech, tmp_path):
    assert [one.text for one in spoken_sentences(speech, max_recordings=2)] == ["a table for three"] * 2
    assert len(spoken_sentences()) == 30
    with pytest.raises(InputError, match="holds no sound"):
        spoken_sentences(tmp_path)
