"""Turns as pure logic: chances of speech in, what they mean out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivavoce.audio.vad import WINDOW_MS
from vivavoce.dialogue.settings import TurnSettings
from vivavoce.dialogue.turn_taker import TurnEvent, TurnState, TurnTaker, windows

BEGAN, LIKELY, WENT_ON, OVER = TurnEvent.BEGAN, TurnEvent.LIKELY_OVER, TurnEvent.WENT_ON, TurnEvent.OVER


QUICK = TurnSettings(silence_duration_ms=240)


def play(probabilities, settings=None, finished=None):
    """The windows at which something happened, and what."""
    taker, state, events = TurnTaker(settings or QUICK), TurnState(), []
    for index, probability in enumerate(probabilities):
        event, state = taker.step(state, probability, finished)
        if event is not None:
            events.append((index, event))
    return events, state


def test_a_turn_begins_is_likely_over_and_over():
    events, state = play([0.0] * 5 + [0.9] * 10 + [0.0] * 10)
    assert events == [(6, BEGAN), (17, LIKELY), (21, OVER)]
    assert state == TurnState(heard_ms=25 * WINDOW_MS, speech_until_ms=15 * WINDOW_MS)


def test_silence_is_counted_to_the_nearest_window():
    assert [windows(ms) for ms in (1, 32, 48, 49, 200, 240, 500)] == [1, 1, 1, 2, 6, 7, 16]


def test_a_pause_after_a_likely_end_is_a_pause():
    events, _ = play([0.9] * 5 + [0.0] * 4 + [0.9] * 5 + [0.0] * 8)
    assert [event for _, event in events] == [BEGAN, LIKELY, WENT_ON, LIKELY, OVER]


def test_speech_ends_at_a_lower_probability_than_it_starts():
    assert play([0.4] * 20)[0] == []
    assert play([0.6, 0.6] + [0.4] * 20)[0] == [(1, BEGAN)]
    assert play([0.6, 0.6] + [0.34] * 20)[0][-1][1] is OVER


def test_a_click_is_no_turn():
    assert play([0.9] + [0.0] * 20)[0] == []
    assert play(([0.9] + [0.0] * 4) * 5)[0] == []


def test_where_speech_began_and_ended_is_known():
    _, state = play([0.0] * 10 + [0.9] * 10 + [0.0] * 2)
    assert (state.speech_from_ms, state.speech_until_ms, state.silence_ms) == (320, 640, 64)


def test_silence_counts_from_where_the_voice_stopped_inside_a_window():
    taker, state = TurnTaker(TurnSettings(silence_duration_ms=200)), TurnState()
    for _ in range(5):
        _, state = taker.step(state, 0.9)
    _, state = taker.step(state, 0.9, quiet_ms=20)
    assert (state.speech_until_ms, state.silence_ms) == (172, 20)
    events = []
    for _ in range(5):
        event, state = taker.step(state, 0.0)
        events.append(event)
    assert events == [None, LIKELY, None, None, None]
    assert taker.peek(state, 8)[0] is None  # 188 ms of silence
    assert taker.peek(state, 12) == (OVER, TurnState(heard_ms=11 * WINDOW_MS, speech_until_ms=172))


def test_silence_between_windows_makes_an_end_likely_but_ends_no_speech():
    taker, state = TurnTaker(TurnSettings()), TurnState()
    assert taker.peek(state, 28) == (None, state)
    for _ in range(4):
        _, state = taker.step(state, 0.9)
    assert taker.peek(state, 28) == (None, state)
    for _ in range(2):
        _, state = taker.step(state, 0.0)
    event, after = taker.peek(state, 16)
    assert event is LIKELY and after.is_likely_over
    assert taker.step(after, 0.9)[0] is WENT_ON


@pytest.mark.parametrize(("eagerness", "silence"), [("high", 12), ("auto", 16), ("medium", 16), ("low", 39)])
def test_without_a_model_eagerness_stretches_the_silence(eagerness, silence):
    events, _ = play([0.9] * 5 + [0.0] * 60, TurnSettings(detector="semantic", eagerness=eagerness))
    assert events[-1] == (4 + silence, OVER)


@pytest.mark.parametrize(
    ("finished", "eagerness", "silence"),
    [
        (0.9, "auto", 7),
        (0.3, "auto", 47),
        (0.01, "auto", 125),
        (0.01, "high", 62),
        (0.2, "high", 25),
        (0.4, "high", 7),
        (0.6, "low", 11),
        (0.4, "low", 56),
        (0.1, "low", 250),
    ],
)
def test_a_turn_model_shortens_or_lengthens_the_wait(finished, eagerness, silence):
    settings = TurnSettings(detector="semantic", eagerness=eagerness)
    events, _ = play([0.9] * 5 + [0.0] * 300, settings, finished)
    assert events[-1] == (4 + silence, OVER)


@given(
    st.lists(st.floats(0, 1), max_size=200),
    st.integers(32, 1000),
    st.sampled_from(["silence", "semantic"]),
    st.sampled_from([None, 0.1, 0.9]),
)
def test_the_order_of_events_is_always_that_of_turns(probabilities, silence, detector, finished):
    events, state = play(probabilities, TurnSettings(detector=detector, silence_duration_ms=silence), finished)
    allowed = {None: {BEGAN}, BEGAN: {LIKELY, OVER}, LIKELY: {WENT_ON, OVER}, WENT_ON: {LIKELY, OVER}, OVER: {BEGAN}}
    last = None
    for _, event in events:
        assert event in allowed[last]
        last = event
    assert state.heard_ms == len(probabilities) * WINDOW_MS
    assert state.has_started == (last not in (None, OVER))
    assert state.is_likely_over == (last is LIKELY)
