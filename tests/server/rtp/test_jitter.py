"""The jitter buffer, with arrival times as plain numbers."""

import numpy as np
import pytest

from vivavoce.server.rtp.jitter import (
    MAX_DELAY,
    MAX_HELD,
    MIN_DELAY,
    DelayEstimator,
    JitterBuffer,
    MediaPacket,
    Missing,
)

RATE = 8_000
FRAME = 160


def packet(number, first=0):
    return MediaPacket((first + number * FRAME) % (1 << 32), bytes([number % 256]))


def add(buffer, number, arrival=None, first=0):
    buffer.add(packet(number, first), number * 0.02 if arrival is None else arrival)


def play(buffer, frames, start, arrivals):
    """Pull a frame every 20 ms while packets arrive; the number of each packet played, or why there was none."""
    waiting = sorted(arrivals)
    played = []
    for frame in range(frames):
        now = start + frame * 0.02
        while waiting and waiting[0][0] <= now:
            arrival, number = waiting.pop(0)
            add(buffer, number, arrival)
        match buffer.next(now):
            case MediaPacket() as found:
                played.append(found.payload[0])
                buffer.played(FRAME)
            case Missing.LOST:
                played.append("lost")
                buffer.played(FRAME)
            case Missing.LATE:
                played.append("late")
                buffer.stalled(FRAME)
            case missing:
                played.append(missing.name.lower())
    return played


def test_packets_are_played_in_order_after_the_delay():
    played = play(JitterBuffer(RATE), 8, 0.0, [(number * 0.02, number) for number in (0, 2, 1, 3, 4, 5)])
    assert played[:3] == ["paused", "paused", 0]
    assert played[3:] == [1, 2, 3, 4, 5]


def test_a_lost_packet_is_skipped_at_its_time():
    arrivals = [(number * 0.02, number) for number in range(10) if number != 4]
    assert play(JitterBuffer(RATE), 12, 0.0, arrivals)[2:] == [0, 1, 2, 3, "lost", 5, 6, 7, 8, 9]


def test_a_packet_that_comes_after_its_time_is_counted_and_dropped():
    buffer = JitterBuffer(RATE)
    arrivals = [(number * 0.02 + (0.15 if number == 4 else 0), number) for number in range(20)]
    assert play(buffer, 20, 0.0, arrivals)[2:] == [0, 1, 2, 3, "lost", *range(5, 18)]
    assert buffer.late == 1


def test_an_empty_buffer_waits_and_nothing_is_skipped():
    stalled = [(max(number * 0.02, 0.24 if number > 4 else 0), number) for number in range(20)]
    played = play(JitterBuffer(RATE), 24, 0.0, stalled)
    assert [each for each in played if isinstance(each, int)] == list(range(17))
    assert "late" in played and "lost" not in played


def test_a_loss_with_an_empty_buffer_adds_no_delay():
    buffer = JitterBuffer(RATE)
    for number in range(100):
        add(buffer, number)
    while not isinstance(buffer.next(0.5), Missing):
        buffer.played(FRAME)
    buffer.stalled(FRAME)  # of packet 100, which is lost
    add(buffer, 101)
    assert buffer.next(102 * 0.02) == packet(101)


def test_a_pause_of_the_sender_starts_anew_at_the_target_delay():
    buffer = JitterBuffer(RATE)
    numbers = [*range(50), *range(150, 200)]
    played = play(buffer, 205, 0.0, [(number * 0.02, number) for number in numbers])
    assert [each for each in played if isinstance(each, int)] == numbers
    assert played.count("paused") > 90 and "lost" not in played


def test_the_delay_follows_the_jitter():
    random, calm, rough = np.random.default_rng(1), DelayEstimator(), DelayEstimator()
    for _ in range(400):
        calm.add(5.0 + 0.001 * random.random())
        rough.add(5.0 + 0.06 * random.random())
    assert calm.target == pytest.approx(MIN_DELAY, abs=0.001)
    assert rough.target == pytest.approx(0.064, abs=0.003)
    for _ in range(400):
        rough.add(5.0)
    assert rough.target == MIN_DELAY
    for number in range(400):
        rough.add(5.0 + number % 2)
    assert rough.target == MAX_DELAY


def test_timestamps_wrap_around():
    buffer, first = JitterBuffer(RATE), (1 << 32) - 5 * FRAME
    for number in range(20):
        add(buffer, number, first=first)
    played = []
    while isinstance(found := buffer.next(10.0), MediaPacket):
        played.append(found.payload[0])
        buffer.played(FRAME)
    assert played == list(range(20))


def test_timestamps_that_jump_start_anew():
    buffer = JitterBuffer(RATE)
    for number in range(50):
        add(buffer, number)
    add(buffer, 0, 1.0, first=1 << 30)
    assert buffer.next(2.0) == packet(0, 1 << 30)


def test_a_flood_is_bounded():
    buffer = JitterBuffer(RATE)
    for number in range(10 * MAX_HELD):
        add(buffer, number, arrival=number * 0.02)
    assert len(buffer._held) == MAX_HELD
    assert buffer.overflowed == 9 * MAX_HELD


def test_a_duplicate_is_played_once():
    arrivals = [(number * 0.02, number) for number in range(10) for _ in range(2)]
    assert play(JitterBuffer(RATE), 12, 0.0, arrivals)[2:] == list(range(10))
