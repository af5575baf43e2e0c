"""`viva bench speakers`: the choice of recordings, pairs, and the equal error rate."""

import json

import numpy as np
import pytest

from tests.dialogue.marked_voices import by_mark, voice
from vivavoce.audio.io import Sound, write
from vivavoce.bench import speakers
from vivavoce.errors import InputError


class MarkEncoder:
    """Embeds by the mark of a voice."""

    def embed(self, samples):
        return by_mark(samples)


@pytest.fixture
def folder(tmp_path):
    for is_user, name in ((True, "low"), (False, "high")):
        (tmp_path / name).mkdir()
        for number in range(3):
            sound = Sound(voice(1.0 + 0.3 * number, is_user)[None], 16_000)
            write(tmp_path / name / f"{number}.wav", sound)
            write(tmp_path / name / f"song-{number}.wav", sound)
    return tmp_path


def test_the_equal_error_rate_is_where_both_errors_are_as_frequent():
    same, different = np.float32([0.9, 0.8, 0.7, 0.3]), np.float32([0.1, 0.2, 0.4, 0.0])
    rate, threshold = speakers.equal_error_rate(same, different)
    assert rate == pytest.approx(0.25) and 0.3 < threshold <= 0.7
    assert speakers.equal_error_rate(np.float32([0.6, 0.7]), np.float32([0.1, 0.2]))[0] == 0.0
    with pytest.raises(InputError):
        speakers.equal_error_rate(same, different[:0])


def test_recordings_are_chosen_by_their_names(folder):
    chosen = speakers.choose(folder, 2, ["song-*"])
    assert list(chosen) == ["high", "low"] and all(len(paths) == 2 for paths in chosen.values())
    assert chosen == speakers.choose(folder, 2, ["song-*"])
    assert not any("song" in path.name for paths in chosen.values() for path in paths)
    with pytest.raises(InputError, match="two speakers"):
        speakers.choose(folder / "low", 2)


def test_a_recording_is_compared_with_all_others_but_itself():
    vectors, names = np.eye(4, dtype=np.float32), np.array(["a", "a", "b", "b"])
    same, different = speakers.all_pairs(vectors, vectors, names)
    assert len(same) == 4 and len(different) == 8 and not same.any()
    same, different = speakers.enrolled_pairs(vectors, names, 1)
    assert len(same) == len(different) == 2


def test_two_voices_have_no_errors(folder):
    recordings = speakers.read_recordings(speakers.choose(folder, 3, ["song-*"]))
    measured = speakers.measure(recordings, MarkEncoder())
    assert measured["speakers"] == 2 and measured["recordings"] == 6
    assert measured["rows"][0]["equal_error_rate"] == 0.0
    assert [row["pairs"] for row in measured["rows"][-2:]] == [[4, 4], [2, 2]]  # means of one and of two


@pytest.mark.published
def test_the_result_is_printed_and_written(folder, published_model, capsys):
    result = speakers.run(folder, str(published_model("campplus")), 2, ["song-*"], folder / "out")
    assert json.loads((folder / "out" / "speakers.json").read_text()) == result
    assert "error rate" in capsys.readouterr().err
