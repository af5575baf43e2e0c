"""Our own sound in the user's microphone does not count as the user's; the user's does."""

import numpy as np
import pytest
from scipy.signal import fftconvolve

from tests.dialogue.voices import silence, talk
from vivavoce.audio.echo import BLOCK, EchoGuard
from vivavoce.audio.vad import speech_probabilities, voice_activity
from vivavoce.errors import InputError

RATE = 16_000


def room(delay: float, reverberation: float = 0.25, seed: int = 1) -> np.ndarray:
    """From loudspeaker to microphone: a delay, the direct sound, and a tail; of power 1."""
    noise = np.random.default_rng(seed)
    tail = noise.standard_normal(round(reverberation * RATE))
    tail *= np.exp(-np.arange(len(tail)) / RATE * 6.9 / max(reverberation, 1e-3))
    response = np.concatenate([[3.0], np.zeros(40), tail]) if reverberation else np.ones(1)
    return np.concatenate([np.zeros(round(delay * RATE)), response / np.sqrt(np.square(response).sum())])


def through(guard: EchoGuard, microphone: np.ndarray, played: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the guard leaves, and the share it takes, block by block."""
    state, left, shares = guard.initial_state(), [], []
    for start in range(0, len(played) - BLOCK + 1, BLOCK):
        block = slice(start, start + BLOCK)
        sound, share, state = guard.step(state, microphone[block].astype("f"), played[block].astype("f"))
        left.append(sound)
        shares.append(share)
    return np.concatenate(left), np.array(shares)


def max_speech_run(samples: np.ndarray) -> int:
    """Windows in the longest run of speech."""
    marks = "".join(
        "x" if probability >= 0.5 else " " for probability in speech_probabilities(voice_activity(), samples)
    )
    return max(map(len, marks.split()), default=0)


def output(seconds: float = 6.0) -> np.ndarray:
    return np.concatenate([silence(0.3), talk(seconds, seed=8, level_dbfs=-20)])


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15, 0.3])
@pytest.mark.parametrize("reverberation", [0.0, 0.25])
def test_the_output_fed_back_20_db_softer_is_not_heard_as_speech(delay, reverberation):
    played = output()
    echo = 0.1 * fftconvolve(played, room(delay, reverberation))[: len(played)] + silence(len(played) / RATE)
    assert max_speech_run(echo) > 20, "without the guard it is"
    left, shares = through(EchoGuard(), echo, played)
    assert max_speech_run(left) <= 1
    assert np.median(shares[20:]) > 0.95


def test_soft_speech_is_detected_soon_with_headphones():
    """While the way is learned soft sounds may be echo, unless half a second of our sound was not heard at all."""
    played = talk(3.0, seed=8, level_dbfs=-20)
    user = np.concatenate([np.zeros(round(0.7 * RATE)), talk(1.0, seed=3, level_dbfs=-32), np.zeros(2 * RATE)])
    microphone = silence(3.0) + user[: len(played)]
    left, shares = through(EchoGuard(), microphone, played)
    spoken = slice(23 * BLOCK, 50 * BLOCK)
    assert np.square(left[spoken]).sum() > 0.9 * np.square(microphone[spoken]).sum()
    assert np.median(shares[23:50]) < 0.1
    echo = 0.1 * fftconvolve(played, room(0.1))[: len(played)]
    left, _ = through(EchoGuard(), microphone + echo, played)
    assert max_speech_run(left[: 22 * BLOCK]) <= 1, "and who does not is guarded as before"


@pytest.mark.parametrize("begin", [-0.2, 0.3])
def test_soft_speech_in_the_first_second_of_output_is_kept(begin):
    """Echo resembles the output; this does not."""
    played = np.concatenate([np.zeros(RATE // 2), talk(2.5, seed=8, level_dbfs=-20)])
    user, first = talk(0.7, seed=3, level_dbfs=-30), RATE // 2 + round(begin * RATE)
    microphone = silence(3.0)[: len(played)]
    microphone[first : first + len(user)] += user
    left, _ = through(EchoGuard(), microphone, played)
    spoken = slice(first + (4 * BLOCK if begin > 0 else 0), first + len(user))
    assert np.square(left[spoken]).sum() > 0.7 * np.square(microphone[spoken]).sum()


def test_headphones_count_for_the_next_reply_until_they_are_taken_off():
    parts = [output(3.0), np.zeros(2 * RATE), output(3.0), np.zeros(2 * RATE), output(4.0)]
    played = np.concatenate(parts)
    second, third = (sum(map(len, parts[:number])) for number in (2, 4))
    user, first = talk(0.6, seed=3, level_dbfs=-30), second + round(0.4 * RATE)
    microphone = silence(len(played) / RATE)[: len(played)]
    microphone[first : first + len(user)] += user
    echo = 0.2 * fftconvolve(played[third:], room(0.1))
    microphone[third:] += echo[: len(microphone) - third]
    left, _ = through(EchoGuard(), microphone, played)
    spoken = slice(first, first + len(user))
    assert np.square(left[spoken]).sum() > 0.8 * np.square(microphone[spoken]).sum(), "from its first block on"
    assert max_speech_run(left[third:]) <= 12 < max_speech_run(microphone[third:])


def test_a_second_reply_after_a_pause_through_a_longer_buffer_is_not_heard_either():
    first, second = output(3.0), output(3.0)
    pause = np.zeros(RATE * 2)
    played = np.concatenate([first, pause, second, pause])
    echo = np.zeros(len(played))
    for begin, part, delay in ((0, first, 0.1), (len(first) + len(pause), second, 0.16)):
        sound = 0.1 * fftconvolve(part, room(delay))
        echo[begin : begin + len(sound)] += sound[: len(echo) - begin]
    left, _ = through(EchoGuard(), echo + silence(len(echo) / RATE), played)
    assert max_speech_run(left) <= 1


@pytest.mark.parametrize("delay", [0.05, 0.2])
def test_speech_over_the_output_is_detected(delay):
    played = output(6.0)
    echo = 0.1 * fftconvolve(played, room(delay))[: len(played)]
    microphone = echo + silence(len(played) / RATE)
    user, begin = talk(1.5, seed=2, level_dbfs=-24), RATE * 3
    microphone[begin : begin + len(user)] += user
    left, _ = through(EchoGuard(), microphone, played)
    probabilities = speech_probabilities(voice_activity(), left)
    first, last = begin // BLOCK, (begin + len(user)) // BLOCK
    assert (probabilities[:first] < 0.5).all()
    assert np.argmax(probabilities[first:] >= 0.5) <= 4, "within 160 ms"
    assert (probabilities[first:last] >= 0.5).mean() > 0.8


def test_skipped_output_is_processed_when_an_echo_follows():
    played = talk(3.0, seed=3)[: 80 * BLOCK]
    guard, state = EchoGuard(), EchoGuard().initial_state()
    blocks = played.reshape(-1, BLOCK)
    for block in blocks[:70]:
        _, share, state = guard.step(state, np.zeros(BLOCK, "f"), block)
    assert share == 0 and state.skipped  # nothing was computed for it
    for block in blocks[70:]:
        _, _, state = guard.step(state, (0.3 * block).astype("f"), block)
    assert not state.skipped
    pairs = np.stack([played[end - 2 * BLOCK : end] for end in range(len(played), 0, -BLOCK)][: guard.partitions])
    np.testing.assert_allclose(state.played, np.fft.rfft(pairs), atol=1e-3)


def test_without_output_nothing_is_changed():
    microphone = talk(1.0)
    left, shares = through(EchoGuard(), microphone, np.zeros(len(microphone)))
    np.testing.assert_array_equal(left, microphone[: len(left)])
    assert not shares.any()


def test_a_state_is_a_value():
    guard, played = EchoGuard(), output(1.0).astype("f")
    state = guard.initial_state()
    for start in range(0, 20 * BLOCK, BLOCK):
        _, _, state = guard.step(state, 0.1 * played[start : start + BLOCK], played[start : start + BLOCK])
    block = played[:BLOCK]
    first = guard.step(state, 0.1 * block, block)
    second = guard.step(state, 0.1 * block, block)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[2].path, second[2].path)


def test_other_sizes_are_refused():
    guard = EchoGuard()
    with pytest.raises(InputError, match="512"):
        guard.step(guard.initial_state(), np.zeros(100, "f"), np.zeros(BLOCK, "f"))
