"""A sound begins where it can be heard, however it is cut into pieces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivavoce.audio.level import OnsetGate

RATE = 24_000
GATE = OnsetGate(RATE)


def sound(silent: float, voiced: float = 0.3) -> np.ndarray:
    noise = np.random.default_rng(3).standard_normal(round((silent + voiced) * RATE)).astype(np.float32)
    level = np.where(np.arange(len(noise)) < round(silent * RATE), 1e-3, 0.1)
    return (noise * level).astype(np.float32)


def gated(samples: np.ndarray, sizes: list[int]) -> tuple[np.ndarray, int]:
    state, pieces, begin = GATE.initial_state(), [], 0
    for size in sizes:
        piece, state = GATE.step(state, samples[begin : begin + size])
        pieces.append(piece)
        begin += size
    piece, state = GATE.step(state, samples[begin:], final=True)
    return np.concatenate([*pieces, piece]), state.dropped


@pytest.mark.parametrize("silent", [0.0, 0.004, 0.07, 0.2, 0.39])
def test_silence_before_the_first_word_is_left_out_but_for_a_breath(silent):
    samples = sound(silent)
    heard, dropped = gated(samples, [])
    assert np.array_equal(heard, samples[dropped:])
    assert silent - 0.016 <= dropped / RATE <= max(0.0, silent - 0.009)


@given(st.floats(0, 0.6), st.lists(st.integers(0, 5000), max_size=12))
def test_pieces_of_any_size_give_what_the_whole_gives(silent, sizes):
    samples = sound(silent)
    whole, dropped = gated(samples, [])
    pieces, also = gated(samples, sizes)
    assert also == dropped
    assert np.array_equal(whole, pieces)


def test_a_sound_that_stays_silent_is_let_out_in_time():
    heard, dropped = gated(np.zeros(RATE, np.float32), [2000] * 6)
    assert dropped == round(0.4 * RATE)
    assert len(heard) == RATE - dropped
