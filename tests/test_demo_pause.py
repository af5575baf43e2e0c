"""`viva demo` on a question with a pause, at which the turn is taken for over and a reply begun."""

import numpy as np
import pytest

from vivavoce.audio.io import Sound, read, write
from vivavoce.cli.demo import run
from vivavoce.hub import BUNDLED

pytestmark = pytest.mark.full


def test_a_question_with_a_pause_is_answered_as_a_whole(tmp_path):
    question = read(BUNDLED / "questions" / "11-directions.opus", rate=16_000).samples[0]
    silence = np.zeros(round(0.7 * 16_000), np.float32)
    middle = len(question) // 2
    write(tmp_path / "question.wav", Sound(np.concatenate([question[:middle], silence, question[middle:]]), 16_000))
    result = run("cpu", "mini-speech", tmp_path / "question.wav")
    assert "tell me" in result["heard"] and result["said"]
    assert result["turn_end_ms"] > 0, "the end after the whole question"
