"""Arbitrary and damaged packets: nothing is raised, and memory stays flat."""

import contextlib
import resource
from pathlib import Path

import numpy as np
import pytest
from aiortc.rtp import RtpPacket
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.rtp.network import CODEC, PEER, Call
from vivavoce.server.rtp.comfort_noise import ComfortNoise, NoiseDescription
from vivavoce.server.rtp.srtp import KEY_BYTES, CryptoAttribute, SrtpKeys
from vivavoce.server.rtp.stream import MediaSettings, RtpStream
from vivavoce.server.wire import WireError

PAYLOAD_TYPES = [0, 8, 9, 13, 101, 111, 118]

headers = st.tuples(
    st.sampled_from(PAYLOAD_TYPES), st.integers(0, 65_535), st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3])
)
packets = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda header, payload: RtpPacket(header[0], 0, *header[1:], payload).serialize(),
        headers,
        st.binary(max_size=400),
    ),
    # A report header of any type before arbitrary bytes.
    st.builds(
        lambda kind, count, body: bytes([0x80 | count, kind, 0, len(body) // 4]) + body,
        st.integers(192, 208),
        st.integers(0, 31),
        st.binary(max_size=120),
    ),
)


@given(st.lists(packets, max_size=30), st.sampled_from(sorted(CODEC)))
@settings(max_examples=60, deadline=None)
def test_any_packets_are_taken_and_audio_goes_on(data, name):
    call = Call(name)
    now = 0.0
    for number, each in enumerate(data):
        now = number * 0.02
        call.receiver.receive(each, PEER, now)
        samples = call.receiver.pull(now)
        assert samples is None or np.isfinite(samples).all()
    valid = RtpPacket(CODEC[name].payload_type, 0, 0, 0, 9, bytes(160)).serialize()
    for number in range(4):
        call.receiver.receive(valid[:3] + bytes([number]) + valid[4:], PEER, now + 1 + number * 0.02)
    assert call.receiver.pull(now + 2) is not None


@given(st.binary(max_size=40))
@settings(deadline=None)
def test_any_description_makes_finite_noise(payload):
    noise = ComfortNoise()
    if (description := NoiseDescription.parse(payload)) is not None:
        noise.describe(description)
    made = noise.make(800)
    assert np.isfinite(made).all() and np.abs(made).max() < 1.0


@given(st.text("1 AES_CM_128_HMAC_SHA1_80inline:|^=+/abc", max_size=80))
def test_any_crypto_attribute_is_read_or_refused(value):
    for text in (value, f"1 AES_CM_128_HMAC_SHA1_80 inline:{value}"):
        with contextlib.suppress(WireError):
            assert len(CryptoAttribute.parse(text).key) == KEY_BYTES


class Damage:
    """Packets of a call, mixed with damaged ones, floods of other sources, reports and arbitrary bytes."""

    def __init__(self, codec, seed=0):
        self.call, self.random = Call(codec), np.random.default_rng(seed)

    def next(self):
        packet = self.call.sender.packet()
        match int(self.random.integers(6)):
            case 0:
                return packet
            case 1:
                return packet[: self.random.integers(len(packet) + 1)]
            case 2:
                changed = bytearray(packet)
                for at in self.random.integers(len(packet), size=3):
                    changed[at] = self.random.integers(256)
                return bytes(changed)
            case 3:
                return packet[:8] + self.random.bytes(4) + packet[12:]
            case 4:
                return bytes([0x80 | self.random.integers(32), self.random.integers(200, 208)]) + self.random.bytes(46)
            case _:
                return self.random.bytes(int(self.random.integers(1_600)))


@contextlib.asynccontextmanager
async def opened(codec, srtp=None):
    stream = await RtpStream.open("127.0.0.1", (20_000, 29_999))
    stream.configure(MediaSettings(CODEC[codec], 101, ("127.0.0.1", 9), srtp=srtp))
    stream.on_digit = lambda digit: None
    try:
        yield stream
    finally:
        await stream.close()


async def attack(stream, damage, count):
    """Deliver packets as the sockets do, and run the clock of the stream on a time of the test."""
    for number in range(count):
        source = ("127.0.0.1", 9) if number % 3 else (f"127.0.0.{number % 200}", number % 60_000)
        stream._received(damage.next(), source, number % 7 == 0)
        if number % 4 == 0:
            stream._run_frame(stream._loop.time() + number * 0.02)


async def test_damaged_packets_are_counted():
    async with opened("PCMU") as stream:
        await attack(stream, Damage("PCMU"), 600)
        dropped = stream.statistics().dropped
        assert dropped.malformed > 10
        assert dropped.other_address > 10
        assert dropped.other_source + dropped.other_payload_type > 10
        assert stream.statistics().received > 10


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text(encoding="utf8").split()[1])
    return pages * resource.getpagesize()


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's memory from /proc")
@pytest.mark.parametrize(("codec", "encrypted"), [("PCMU", False), ("G722", True)])
async def test_memory_stays_flat_over_100_000_damaged_packets(codec, encrypted):
    keys = SrtpKeys.of(CryptoAttribute.new(), CryptoAttribute.new()) if encrypted else None
    async with opened(codec, keys) as stream:
        damage = Damage(codec)
        await attack(stream, damage, 10_000)
        before = resident_bytes()
        await attack(stream, damage, 100_000)
        assert resident_bytes() - before < 4_000_000
