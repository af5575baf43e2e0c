"""What replies are made of on their way out: playback, reference, history, guards, moderation, compaction, clock."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dialogue.voices import talk
from vivavoce.audio.player import PlaybackClock, SimulatedClock, WallClock
from vivavoce.dialogue.history import SpokenWords, first_retained, first_words
from vivavoce.dialogue.moderation import CallableChecker, HttpChecker, Moderation, WordList
from vivavoce.dialogue.output_timeline import OutputTimeline
from vivavoce.dialogue.reply import GuardLimits, SoundGuard, loop_length
from vivavoce.errors import InputError, VivaError

SECOND = np.zeros(24_000, "f")


def at_once() -> PlaybackClock:
    return PlaybackClock(start_buffer=0.0)


def test_without_reports_what_was_sent_is_played_at_pace():
    playback = at_once()
    playback.feed(10.0, 1.0)
    playback.feed(10.2, 1.0)
    assert [playback.played(now) for now in (9.0, 10.0, 10.5, 11.5, 13.0)] == pytest.approx([0, 0, 0.5, 1.5, 2])
    assert playback.is_playing(11.9) and not playback.is_playing(12.1)
    assert playback.ends == 12.0 and playback.lead(11.5) == pytest.approx(0.5)


def test_a_reply_that_ran_dry_goes_on_when_more_comes():
    playback = at_once()
    playback.feed(0.0, 1.0)
    playback.feed(3.0, 1.0)
    assert [playback.played(now) for now in (2.0, 3.0, 3.5)] == pytest.approx([1.0, 1.0, 1.5])
    assert playback.underruns == 1 and playback.dry_seconds == 2.0


def test_reports_count_more_than_the_clock_and_never_go_back():
    playback = at_once()
    playback.feed(0.0, 1.0)
    playback.report(0.3, 0.3)
    playback.report(0.2, 0.4)
    assert playback.played(0.9) == 0.3 and playback.is_playing(1.5)
    assert playback.position(0.5) == pytest.approx(0.4) and playback.position(9.0) == pytest.approx(0.5)
    playback.report(7.0, 0.9)
    assert playback.played(0.9) == 1.0 and not playback.is_playing(0.9)


def test_a_client_that_was_away_is_playing_again_when_it_reports():
    playback = at_once()
    playback.feed(0.0, 5.0)
    playback.report(1.0, 1.0)
    assert not playback.is_playing(9.0), "it should have played all of it"
    playback.report(1.2, 30.0)
    assert playback.is_playing(31.0) and not playback.is_playing(36.0)


def test_after_it_was_stopped_nothing_is_heard():
    playback = at_once()
    playback.feed(0.0, 1.0)
    playback.stop(0.4)
    assert playback.played(5.0) == 0.4 and not playback.is_playing(0.5)


def test_sound_behind_other_sound_is_played_when_that_is_over():
    playback = at_once()
    playback.feed(1.0, 1.0, not_before=4.0)
    playback.feed(1.5, 1.0, not_before=4.0)
    assert [playback.played(now) for now in (3.0, 4.5, 7.0)] == pytest.approx([0.0, 0.5, 2.0])
    assert playback.is_playing(3.0) and playback.underruns == 0


def test_a_gap_while_the_player_was_disconnected_is_no_underrun():
    playback = at_once()
    playback.feed(0.0, 1.0)
    playback.resume(8.0)
    playback.feed(8.0, 1.0)
    assert playback.played(8.5) == pytest.approx(1.5) and playback.underruns == 0


def test_the_reference_is_what_was_played_when():
    timeline = OutputTimeline(16_000, 16_000)
    first, second = talk(0.5, 1), talk(0.5, 2)
    timeline.play(1.0, first, 1.0)
    timeline.play(1.5, second, 1.0)
    timeline.set_gain(1.5, 0.5)
    np.testing.assert_array_equal(timeline.read(1.25, 4000), first[4000:])
    np.testing.assert_array_equal(timeline.read(1.5, 100), np.float32(0.5) * second[:100])
    assert not timeline.read(0.9, 1600).any() and not timeline.read(2.0, 100).any()
    timeline.set_gain(2.0, 1.0)
    timeline.play(3.0, first, 3.0)
    assert not timeline.read(2.5, 8000).any()
    np.testing.assert_array_equal(timeline.read(3.0, 8000), first)
    timeline.stop(3.25)
    assert timeline.read(3.0, 4000).any() and not timeline.read(3.25, 4000).any()


def test_the_reference_is_bounded_however_long_the_call():
    timeline = OutputTimeline(24_000, 16_000)
    for second in range(60):
        timeline.play(float(second), SECOND, float(second))
        timeline.read(second + 0.5, 512)
    assert timeline._length < 12 * 16_000


def test_heard_words_end_with_a_word():
    words = SpokenWords().add(0.0, "Good evening. ").add(1.0, "A table for two?")
    assert words.text == "Good evening. A table for two?"
    assert words.until(0.0, 3.0) == ""
    assert words.until(0.5, 3.0) == "Good"
    assert words.until(1.0, 3.0) == "Good evening. "
    assert words.until(2.0, 3.0) == "Good evening. A table"
    assert words.until(3.0, 3.0) == words.text
    assert SpokenWords().until(1.0, 1.0) == ""


@given(st.text(alphabet="ab é好", max_size=40), st.floats(0, 1))
def test_first_words_are_a_beginning(text, share):
    found = first_words(text, share)
    assert text.startswith(found) and (share < 1 or found == text)


def guarded(sound, **limits):
    guard = SoundGuard(24_000, GuardLimits(**limits))
    state = guard.initial_state()
    for start in range(0, len(sound), 5000):
        problem, state = guard.step(state, sound[start : start + 5000])
        if problem:
            return problem
    return None


def test_guards_name_the_problem():
    time = np.arange(24_000 * 8) / 24_000
    noise = np.random.default_rng(0).standard_normal(len(time)).astype("f") * 0.05
    assert guarded(noise) is None
    assert "stuck" in guarded((0.1 * np.sin(2 * np.pi * 220 * time)).astype("f"))
    assert "silent" in guarded(np.zeros(len(time), "f"))
    assert "longer than 5 s" in guarded(noise, max_seconds=5.0)
    assert guarded(np.repeat(talk(8.0, 1), 2)[: len(time)]) is None
    assert guarded(np.zeros(len(time), "f"), silent_seconds=None) is None


def test_loops_of_codes_are_found():
    assert loop_length(list(range(50))) == 0
    assert loop_length([1, 2, 3, *[7] * 10]) == 9
    assert loop_length([9, 8, *[1, 2, 3] * 4]) == 9
    assert loop_length([1, 2, 1]) == 0


async def test_word_lists_match_words_not_parts_of_them():
    checker = WordList(["ass", "坏话"], patterns=[r"\d{4}-\d{4}"])
    assert await checker.check("a classy place") is None
    assert "Ass" in await checker.check("you Ass")
    assert "坏话" in await checker.check("他说坏话了")
    assert "1234-5678" in await checker.check("card 1234-5678")
    with pytest.raises(InputError, match="regular expression"):
        WordList(patterns=["("])
    with pytest.raises(InputError, match="at least one"):
        WordList()


async def test_a_checker_may_be_a_plain_or_an_async_function():
    async def later(text):
        return "rude" if "fool" in text else None

    assert await CallableChecker(lambda text: "no" in text).check("no") == "it was refused"
    assert await CallableChecker(later).check("you fool") == "rude"
    assert await CallableChecker(later).check("dear sir") is None


async def test_a_checker_that_times_out_or_fails_counts_as_configured():
    async def silent(text):
        await asyncio.Event().wait()

    async def broken(text):
        raise VivaError("out of order")

    for function, word in ((silent, "no answer"), (broken, "out of order")):
        strict = Moderation(CallableChecker(function), timeout=0.01)
        assert word in await strict.verdict("x")
        assert await Moderation(CallableChecker(function), timeout=0.01, passes_on_failure=True).verdict("x") is None


class _Moderations(BaseHTTPRequestHandler):
    def do_POST(self):
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        answer = {
            "results": [{"flagged": "bad" in text, "categories": {"violence": "bad" in text, "self-harm": False}}]
        }
        body = json.dumps(answer).encode() if "nonsense" not in text else b"<html>"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


async def test_an_endpoint_may_check():
    server = HTTPServer(("127.0.0.1", 0), _Moderations)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    checker = HttpChecker(f"http://127.0.0.1:{server.server_port}/v1/moderations", key="k")
    assert await checker.check("good") is None
    assert await checker.check("bad") == "violence"
    with pytest.raises(VivaError, match="no usable answer"):
        await checker.check("nonsense")
    server.shutdown()
    server.server_close()
    with pytest.raises(InputError, match="http"):
        HttpChecker("file:///etc/passwd")


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(0, 50), st.integers(100, 1000))
def test_compaction_keeps_the_newest_and_makes_room(lengths, fixed, capacity):
    first = first_retained(lengths, fixed, capacity)
    kept = lengths[first:]
    assert fixed + sum(kept) <= 0.75 * capacity or len(kept) <= 1
    if fixed + sum(lengths) <= 0.75 * capacity:
        assert first == 0
    assert first_retained(lengths, fixed, capacity, first) == first, "once compacted, it stays"


async def test_clocks_wait_for_their_moment():
    clock = SimulatedClock()
    done = []

    async def wait(moment):
        await clock.until(moment)
        done.append(moment)

    tasks = [asyncio.ensure_future(wait(moment)) for moment in (2.0, 1.0, 0.0)]
    await asyncio.sleep(0)
    assert done == [0.0]
    clock.advance(1.0)
    await asyncio.sleep(0)
    assert done == [0.0, 1.0]
    clock.advance(5.0)
    await asyncio.gather(*tasks)
    assert done == [0.0, 1.0, 2.0] and clock.now() == 6.0
    wall = WallClock()
    started = wall.now()
    await wall.until(started + 0.001)
    assert wall.now() >= started + 0.001


def test_output_that_is_not_read_is_neither_resampled_nor_accumulated():
    timeline, read = OutputTimeline(24_000, 16_000), OutputTimeline(24_000, 16_000)
    sound = talk(1.0, 1)
    for number in range(600):
        moment, piece = 10 + number / 20, np.roll(sound, -number * 1200)[:1200]
        timeline.play(moment, piece, moment)
        read.play(moment, piece, moment)
        read.read(moment, 100)
    assert timeline._length == 0 and len(timeline._played) < 20 * 20
    np.testing.assert_allclose(timeline.read(35.0, 16_000), read.read(35.0, 16_000), atol=1e-5)
