"""`viva bench codec` measures what it says, writes what it prints, and its parts add up."""

import json

import pytest
from typer.testing import CliRunner

from vivavoce.cli import app


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    asked = ["bench", "codec", "--shape", "small", "--device", "cpu", "--sessions", "1,2", "--hops", "10", "--json"]
    result = CliRunner().invoke(app, [*asked, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout), out


def test_json_and_picture_are_written(measured):
    printed, out = measured
    assert json.loads((out / "codec.json").read_text()) == printed
    assert (out / "codec.png").read_bytes().startswith(b"\x89PNG")


def test_every_hop_and_session_was_timed(measured):
    printed, _ = measured
    assert len(printed["hops_ms"]) == 10
    assert [row["sessions"] for row in printed["sessions"]] == [1, 2]
    assert printed["rtf"] == pytest.approx(printed["hop_ms"]["5"] / 400)
    assert set(printed["recomputed_ms"]) == {"5"}


def test_a_wider_window_and_more_look_ahead_come_closer_to_the_whole(measured):
    printed, _ = measured
    windows = [printed["windows"][key] for key in sorted(printed["windows"], key=int)]
    assert windows == sorted(windows, reverse=True)
    held_back = [printed["look_right"][key] for key in sorted(printed["look_right"], key=int)]
    assert held_back == sorted(held_back, reverse=True)
    assert held_back[-1] < 1e-4


def test_pieces_meet_without_clicks(measured):
    for row in measured[0]["policies"]:
        assert row["largest_jump_at_edges"] <= row["p999_jump_inside"], row["policy"]


def test_every_policy_says_what_it_did(measured):
    rows = measured[0]["policies"]
    assert len(rows) == 5
    assert all({"policy", "underruns", "added_delay", "first_sound", "chunks"} <= row.keys() for row in rows)
