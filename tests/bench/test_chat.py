"""`viva bench chat` on a small model, and its reading of llama-bench."""

import json
from dataclasses import replace

import pytest

from tests.s2s.small_parts import small_chat
from vivavoce.bench import chat as bench
from vivavoce.errors import VivaError


def test_tokens_a_second_and_the_floor_are_measured_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: 1e9)
    folder = tmp_path / "chat"
    folder.mkdir()
    result = bench.run(str(small_chat(folder)), "cpu", prompt=8, reply=6, repeats=1, out=tmp_path)
    assert result["ours"]["prompt"] > 0 and result["ours"]["reply"] > 0 and result["llama_cpp"] is None
    assert result["floor_tokens_per_second"] == pytest.approx(1e9 / result["bytes_per_token"])
    assert json.loads((tmp_path / "chat.json").read_text()) == result
    assert "tokens/s" in capsys.readouterr().out


def test_llama_bench_is_run_on_the_same_file_and_its_errors_are_shown(tmp_path):
    program = tmp_path / "llama-bench"
    answer = [{"n_gen": 0, "avg_ts": 90.5}, {"n_gen": 6, "avg_ts": 20.25}]
    program.write_text(f"#!/bin/sh\ntest -f \"$2\" || {{ echo no file >&2; exit 1; }}\necho '{json.dumps(answer)}'\n")
    program.chmod(0o755)
    (tmp_path / "m.gguf").touch()
    speed = bench._measure_peer(str(program), tmp_path / "m.gguf", 8, 6)
    assert speed == bench.ChatSpeed(90.5, 20.25)
    assert bench._best([speed, replace(speed, prompt=100.0)]) == bench.ChatSpeed(100.0, 20.25)
    with pytest.raises(VivaError, match="no file"):
        bench._measure_peer(str(program), tmp_path / "none.gguf", 8, 6)
