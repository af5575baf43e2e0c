"""`viva bench serve` on the untrained miniature: sessions receive whole replies; gaps and failures are counted."""

import asyncio
import json

import numpy as np
import pytest

from vivavoce.bench import serve
from vivavoce.bench.serve_parts import ServeLoad, WordTokenizer
from vivavoce.dialogue.events import ReplyAudio, ReplyDone, Usage
from vivavoce.errors import InputError

REPLY = 1.6


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("serve")
    result = serve.run(
        "cpu", "auto", "tiny", [1, 2], seconds=REPLY, question=0.4, spread=0.2, newcomers=1, keep_going=True, out=out
    )
    return result, out


def test_every_session_receives_its_whole_reply(measured):
    result, _ = measured
    assert [level["sessions"] for level in result["levels"]] == [1, 2]
    for level in result["levels"]:
        assert not level["failed"]
        # Silence before the first word is left out, at most 0.4 s of it.
        assert REPLY - 0.4 <= level["sound_seconds"] / level["sessions"] <= REPLY + 1e-6
        assert 0 < level["ttfa_ms"][50] <= level["v2v_ms"][50]
        assert level["passes"] >= 2 * level["sessions"]
        assert level["holds"] == (level["underruns"] == 0)


def test_the_result_is_written_and_read_again(measured):
    result, out = measured
    read = json.loads((out / "serve.json").read_text(encoding="utf8"))
    assert read["levels"][1]["ttfa_ms"]["50"] == result["levels"][1]["ttfa_ms"][50]
    assert (out / "serve.png").is_file()
    assert read["most_without_a_gap"] in (0, 1, 2)


class ScriptedConversation:
    """A conversation that emits these events at these times of the loop's clock."""

    output_rate = 1000

    def __init__(self, events):
        self._events = events

    async def events(self):
        started = asyncio.get_running_loop().time()
        for at, event in self._events:
            await asyncio.sleep(max(0.0, started + at - asyncio.get_running_loop().time()))
            yield event


def sound(seconds, level=0.5):
    return ReplyAudio("reply", "item", np.full(round(seconds * 1000), level, np.float32), 1.0)


async def test_a_gap_is_an_underrun_and_a_failure_is_reported():
    done = ReplyDone("reply", "failed", Usage(0, 0, 0, 0), "no memory")
    results = await serve._listen(ScriptedConversation([(0.0, sound(0.1)), (0.3, sound(0.1)), (0.32, done)]), 0.0)
    assert (results.underruns, results.reason) == (1, "failed: no memory")
    assert results.dry_seconds > 0.1
    assert results.sound_seconds == pytest.approx(0.2)


async def test_silence_before_the_first_voice_is_part_of_the_wait_for_it():
    done = ReplyDone("reply", "completed", Usage(0, 0, 0, 0))
    results = await serve._listen(
        ScriptedConversation([(0.0, sound(0.1, level=0.0)), (0.0, sound(0.1)), (0.0, done)]), 0.0
    )
    assert results.reason == ""
    assert results.v2v - results.ttfa == pytest.approx(0.1)


def test_the_engine_has_room_for_all_sessions_and_newcomers():
    load = ServeLoad(sessions=128, question_seconds=2.0, reply_seconds=60.0)
    assert load.reply_rows == 750
    assert load.limits().cache_rows >= 128 * (25 + 750)
    assert load.limits().sequences_per_step > 128


def test_heads_of_turns_have_as_many_ids_as_published_ones():
    tokenizer = WordTokenizer(1000)
    assert len(tokenizer.encode("<|im_start|>assistant\n")) == 3
    assert tokenizer.encode("<|im_end|>\n") == tokenizer.encode("<|im_end|>\n")
    assert all(0 <= each < 1000 for each in tokenizer.encode("You are a helpful assistant."))


@pytest.mark.parametrize(("shape", "sessions"), [("vast", [1]), ("tiny", []), ("tiny", [0])])
def test_bad_options_are_refused(shape, sessions):
    with pytest.raises(InputError):
        serve.run("cpu", "auto", shape, sessions, seconds=1.0)
