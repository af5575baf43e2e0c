"""Key presses as RTP events, over simulated losses and as other senders shape them."""

import numpy as np
import pytest
from aiortc.rtp import RtpPacket

from tests.server.rtp.network import PEER, Call, Network
from vivavoce.server.rtp.dtmf_events import DIGITS, DigitReceiver, TelephoneEvent, check_digits

HUNDRED = "".join(np.random.default_rng(5).choice(list("0123456789*#ABCD"), 100))


def dial(network, digits=HUNDRED, codec="PCMU", seed=1):
    call = Call(codec, network, seed=seed)
    for digit in digits:
        call.sender.add_digit(digit)
    call.run(0.25 * len(digits) + 1)
    return call.digits


@pytest.mark.parametrize("codec", ["PCMU", pytest.param("opus", marks=pytest.mark.full)])
def test_a_hundred_digits_arrive_once_each_in_order(codec):
    assert dial(Network(), codec=codec) == HUNDRED


def test_losses_reordering_and_duplicates_change_no_digit():
    for seed in range(3):
        assert dial(Network(loss=0.2, jitter=0.06, duplication=0.2), seed=seed) == HUNDRED


def test_the_same_key_twice_is_two_digits():
    assert dial(Network(loss=0.1, jitter=0.06), "1111222#") == "1111222#"


def test_each_of_the_packets_alone_reports_the_digit():
    call = Call()
    call.sender.add_digit("7")
    for packet in [call.sender.packet() for _ in range(8)]:
        receiver = Call().receiver
        assert receiver.receive(packet, PEER, 0.0) == "7"
        assert receiver.receive(packet, PEER, 0.0) is None


def test_the_packets_of_a_digit_are_those_of_rfc_4733():
    call = Call()
    before = RtpPacket.parse(call.sender.packet())
    call.sender.add_digit("#")
    packets = [RtpPacket.parse(call.sender.packet()) for _ in range(8)]
    events = [TelephoneEvent.parse(packet.payload) for packet in packets]
    assert {packet.timestamp for packet in packets} == {(before.timestamp + 160) % (1 << 32)}
    assert [packet.marker for packet in packets] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert [event.duration for event in events] == [160, 320, 480, 640, 800, 800, 800, 800]
    assert [event.is_end for event in events] == [False] * 5 + [True] * 3
    assert {event.code for event in events} == {11}
    assert [call.sender.packet() for _ in range(3)] == [None] * 3
    after = RtpPacket.parse(call.sender.packet())
    assert (after.timestamp - before.timestamp) % (1 << 32) == 12 * 160
    assert after.sequence_number == before.sequence_number + 9
    assert after.marker == 1


def test_replies_wait_for_the_digits():
    call = Call()
    call.queue.write(np.ones(16_000, np.float32))
    call.sender.add_digit("1")
    for _ in range(11):
        call.sender.packet()
    assert call.queue.queued_seconds == 1.0


def test_a_key_held_for_long_is_one_digit():
    receiver, timestamp, digits = DigitReceiver(), 1_000, []
    for segment in range(3):
        for duration in range(8_000, 65_535, 8_000):
            payload = TelephoneEvent(5, False, duration).format()
            digits.append(receiver.receive(payload, timestamp, is_marked=segment == 0 and duration == 8_000))
        timestamp += 65_535
    assert [digit for digit in digits if digit] == ["5"]


def test_a_sender_that_restarts_its_timestamps_is_followed():
    receiver = DigitReceiver()
    assert receiver.receive(TelephoneEvent(1, True, 800).format(), 3_000_000_000, True) == "1"
    assert receiver.receive(TelephoneEvent(2, True, 800).format(), 3_000_000_000 - 8_000, False) is None  # late
    assert receiver.receive(TelephoneEvent(2, True, 800).format(), 2_000_000_000, True) == "2"


def test_other_events_and_short_payloads_are_no_digits():
    receiver = DigitReceiver()
    assert receiver.receive(TelephoneEvent(16, True, 800).format(), 0, True) is None  # hook flash
    assert receiver.receive(b"\x01\x80", 0, True) is None
    assert receiver.receive(TelephoneEvent(1, True, 800).format(), 0, True) == "1"


def test_only_keys_can_be_sent():
    assert check_digits("1a#") == "1A#"
    assert check_digits(DIGITS) == DIGITS
    with pytest.raises(ValueError, match="'X' is not a telephone key"):
        check_digits("12x")
