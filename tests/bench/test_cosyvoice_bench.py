"""The bench of CosyVoice runs whole on small shapes, and a failing section does not hide the others."""

import json

import torch

from tests.models.tiny_cosyvoice import write_folder
from vivavoce.bench.cosyvoice import Bench, TimedPart, _or_error, run
from vivavoce.bench.cosyvoice_shapes import CosyVoiceBenchSetup
from vivavoce.bench.tts import NamedModel
from vivavoce.bench.tts_contenders import TTSBenchSetup as TTSSetup
from vivavoce.device import pick


def test_every_section_is_measured_and_written(tmp_path):
    only = ["memory", "hops", "first_sound", "together", "finite"]
    result = run("cpu", "float32", tiny=True, streams=[2], hops=4, rounds=1, only=only, out=tmp_path)
    assert json.loads((tmp_path / "cosyvoice.json").read_text()) == result
    assert result["memory"]["voice_seconds"] == 9.4  # ten, cut so that the first hop has fifteen codes
    assert result["first_sound"]["ms"] > 0
    assert result["together"][0]["first_ms_worst"] >= result["together"][0]["first_ms_median"] > 0
    assert result["finite"] == {"bfloat16_not_finite_of_8": 0}


def test_a_part_is_reported_with_its_floors():
    bench = Bench(CosyVoiceBenchSetup(pick("cpu"), torch.float32, tiny=True), rounds=1)
    part = bench._flow_part(bench.speech, bench.plain, bench.voice, bandwidth=1e10)
    assert 0 < part.bytes_ms < part.ms
    assert 0 < part.flops_ms < part.ms
    assert TimedPart("x", "float32", 3.0, 1.0, 2.0, 0.1).over_floor == 1.5


def test_the_tts_bench_runs_cosyvoice(tmp_path, monkeypatch):
    monkeypatch.setattr("vivavoce.tts.interface.DEFAULT_VOICE_FOLDER", tmp_path / "no voices")
    folder = write_folder(tmp_path / "model", 3)
    pieces = NamedModel(str(folder), "float32", TTSSetup(pick("cpu"), "tiny", 5, None)).stream(seed=0)
    assert len(next(iter(pieces))[0]) > 0


def test_a_failing_section_reports_its_error():
    def broken():
        raise ValueError("no such thing")

    assert _or_error(broken) == {"error": "ValueError: no such thing"}
