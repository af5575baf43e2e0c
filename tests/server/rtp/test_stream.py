"""Two streams over UDP on loopback: audio, key presses, changes during a call, and what is not accepted."""

import asyncio
import socket
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from aiortc.rtp import RtcpPacket, RtcpSrPacket, RtpPacket, is_rtcp

from tests.server.harness import eventually
from vivavoce.errors import InputError
from vivavoce.server.realtime.audio_formats import MU_LAW, WireFormat, decode, encode
from vivavoce.server.rtp.codecs import CODECS
from vivavoce.server.rtp.line_input import LineInput
from vivavoce.server.rtp.srtp import CryptoAttribute, SrtpKeys
from vivavoce.server.rtp.stream import MediaSettings, RtpStream
from vivavoce.server.wire import WireError

PORTS = (20_000, 29_999)
LOCAL = "127.0.0.1"
LINE = WireFormat(MU_LAW, 8_000)
CODEC = {codec.name: codec for codec in CODECS}


class Listener:
    """Collects what a stream receives."""

    def __init__(self, stream):
        self.pieces, self.digits = [], ""
        stream.on_audio = self.pieces.append
        stream.on_digit = self._press

    def _press(self, digit):
        self.digits += digit

    @property
    def samples(self):
        return np.concatenate([np.zeros(0, np.float32), *self.pieces])


def settings(remote, codec="PCMU", **changes):
    return MediaSettings(CODEC[codec], 101, (LOCAL, remote.port), **changes)


@asynccontextmanager
async def connected(codec="PCMU", **changes):
    first, second = await RtpStream.open(LOCAL, PORTS), await RtpStream.open(LOCAL, PORTS)
    try:
        first.configure(settings(second, codec, **changes))
        second.configure(settings(first, codec, **changes))
        yield first, second
    finally:
        await first.close()
        await second.close()


class Phone:
    """A plain socket at an even port."""

    def __enter__(self):
        while True:
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.socket.bind((LOCAL, 0))
            self.socket.setblocking(False)
            self.address = self.socket.getsockname()
            if self.address[1] % 2 == 0:
                break
            self.socket.close()
        self._received = []
        return self

    def __exit__(self, *error):
        self.socket.close()

    def send(self, data, stream):
        self.socket.sendto(data, (LOCAL, stream.port))

    @property
    def received(self):
        """The packets so far, or since `forget`."""
        self._received += drain(self.socket)
        return self._received

    def forget(self):
        self.received.clear()


def drain(source):
    received = []
    while True:
        try:
            received.append(source.recv(2_000))
        except BlockingIOError:
            return received


def packet(number, ssrc=42, payload_type=0):
    return RtpPacket(payload_type, 0, number % 65_536, 160 * number, ssrc, bytes([0x80]) * 160).serialize()


def sine(frequency, seconds, rate=16_000):
    return (0.3 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def typical(measure, samples, window=1_600):
    """The median of a measure over windows of 100 ms, as a busy machine may lose some."""
    return np.median([measure(samples[at : at + window]) for at in range(0, len(samples) - window, window)])


def dominant_frequency(window, rate=16_000):
    return np.argmax(np.abs(np.fft.rfft(window * np.hanning(len(window)), rate)))


def is_heard(frequency, samples):
    """Whether 300 ms of a sine came through."""
    return len(samples) >= 4_800 and abs(typical(dominant_frequency, samples) - frequency) <= 3


def level(window):
    return np.sqrt(np.mean(window**2))


@pytest.mark.parametrize("codec", CODEC)
async def test_audio_arrives(codec):
    async with connected(codec) as (caller, server):
        heard = Listener(server)
        caller.write(sine(700, 5.0))
        await eventually(lambda: len(heard.samples) > 8_000, "half a second of audio")
    assert typical(dominant_frequency, heard.samples) == pytest.approx(700, abs=3)
    assert typical(level, heard.samples) == pytest.approx(0.3 / np.sqrt(2), rel=0.1)


async def test_replies_are_sent_at_the_speed_of_speech():
    async with connected() as (caller, server):
        heard, loop = Listener(server), asyncio.get_running_loop()
        began = loop.time()
        caller.write(sine(700, 1.0))
        assert caller.queued_seconds == pytest.approx(1.0)
        await eventually(lambda: caller.queued_seconds == 0, "the reply was sent")
        assert loop.time() - began >= 0.9  # a sender that was late at first catches up
        assert caller.played_seconds == pytest.approx(1.0)
        await eventually(lambda: len(heard.samples) > 16_000, "all of it was received")


async def test_clear_drops_what_was_not_sent():
    async with connected() as (caller, _):
        caller.write(sine(700, 10.0))
        await eventually(lambda: caller.played_seconds > 0.1, "some was sent")
        dropped = caller.clear()
        assert caller.played_seconds + caller.queued_seconds + dropped == pytest.approx(10.0, abs=0.001)
        assert caller.queued_seconds <= 0.005
        assert dropped > 9.0


async def test_digits_go_both_ways():
    async with connected() as (caller, server):
        heard, heard_back = Listener(server), Listener(caller)
        caller.send_digits("159#")
        server.send_digits("*d")
        await eventually(lambda: heard.digits == "159#" and heard_back.digits == "*D", "the digits")
        with pytest.raises(ValueError, match="not a telephone key"):
            caller.send_digits("1-2")


async def test_digits_are_tones_where_the_peer_takes_no_events():
    async with connected() as (caller, server):
        caller.configure(replace(settings(server), dtmf_payload_type=None))
        server.configure(replace(settings(caller), dtmf_payload_type=None))
        heard = Listener(server)
        caller.send_digits("5#")
        await eventually(lambda: heard.digits == "5#", "the tones")
        assert caller.statistics().dropped.other_payload_type == 0


async def test_encrypted_audio_arrives_and_other_keys_are_refused():
    ours, theirs = CryptoAttribute.new(), CryptoAttribute.new()
    async with connected() as (caller, server):
        heard, heard_back = Listener(server), Listener(caller)
        caller.configure(settings(server, srtp=SrtpKeys.of(theirs, ours)))
        server.configure(settings(caller, srtp=SrtpKeys.of(ours, theirs)))
        caller.write(sine(700, 5.0))
        await eventually(lambda: len(heard.samples) > 16_000, "audio")
        assert typical(dominant_frequency, heard.samples) == pytest.approx(700, abs=3)
        caller.configure(settings(server, srtp=SrtpKeys.of(ours, theirs)))  # the keys of the wrong sides
        before = heard_back.samples.size
        await eventually(lambda: server.statistics().dropped.unauthentic > 20, "packets are refused")
        refused = caller.statistics().dropped.unauthentic
        await eventually(lambda: caller.statistics().dropped.unauthentic > refused + 20, "packets are refused")
        assert not heard_back.samples[before + 4_800 :].any()  # concealment, then silence


async def test_hold_and_resume():
    async with connected() as (caller, server):
        heard = Listener(server)
        caller.write(sine(700, 60.0))
        await eventually(lambda: heard.pieces, "audio")
        caller.configure(settings(server, direction="inactive"))
        server.configure(settings(caller, direction="inactive"))
        held, sent = len(heard.pieces), caller.statistics().sent
        queued = caller.queued_seconds
        await asyncio.sleep(0.1)
        assert len(heard.pieces) == held
        assert caller.statistics().sent == sent
        assert caller.queued_seconds == queued
        server.configure(settings(caller))
        caller.configure(settings(server))
        await eventually(lambda: len(heard.pieces) > held + 20, "audio again")
        assert typical(level, np.concatenate(heard.pieces[held + 10 :])) > 0.1


async def test_another_codec_during_the_call():
    async with connected("PCMU") as (caller, server):
        caller.write(sine(700, 60.0))
        for codec in ("G722", "L16", "opus", "PCMA"):
            caller.configure(settings(server, codec))
            server.configure(settings(caller, codec))
            heard = Listener(server)
            await eventually(lambda: is_heard(700, heard.samples[-4_800:]), codec)  # noqa: B023


async def test_media_goes_to_the_source_of_the_first_packet():
    """As behind a NAT: the packets come from another port than SDP says, and go back there."""
    stream = await RtpStream.open(LOCAL, PORTS)
    heard = Listener(stream)
    with Phone() as phone, Phone() as stranger, Phone() as announced:
        stream.configure(MediaSettings(CODEC["PCMU"], 101, announced.address))
        for number in range(5):
            phone.send(packet(number), stream)
        await eventually(lambda: heard.pieces, "audio")
        phone.forget()
        announced.forget()
        stranger.send(packet(7), stream)
        await eventually(lambda: stream.statistics().dropped.other_address == 1, "the stranger is refused")
        await eventually(lambda: len(phone.received) > 2, "media to the phone")
        assert not announced.received
        assert not stranger.received
        announced.send(packet(8, ssrc=77), stream)  # the address of SDP has precedence
        await eventually(lambda: len(announced.received) > 2, "media to the negotiated address")
        phone.send(packet(9), stream)
        await eventually(lambda: stream.statistics().dropped.other_address == 2, "the phone is refused")
    await stream.close()


async def test_what_is_not_of_the_call_is_counted_and_dropped():
    stream = await RtpStream.open(LOCAL, PORTS)
    heard = Listener(stream)
    with Phone() as phone:
        stream.configure(MediaSettings(CODEC["PCMU"], 101, phone.address))

        async def send(data, counter, count=1):
            before = getattr(stream.statistics().dropped, counter)
            for each in [data] * count:
                phone.send(each, stream)
            await eventually(lambda: getattr(stream.statistics().dropped, counter) == before + count, counter)

        phone.send(packet(0), stream)
        await send(packet(0)[:11], "malformed")
        await send(b"", "malformed")
        await send(bytes(1_501), "malformed")
        await send(packet(1, payload_type=3), "other_payload_type")
        await send(packet(0), "other_source")  # a duplicate
        await send(packet(20_000), "other_source")
        for ssrc in range(100, 200):
            phone.send(packet(1, ssrc=ssrc), stream)
        await eventually(lambda: stream.statistics().dropped.other_source == 102, "other SSRCs")
        assert stream.statistics().received == 1
        assert heard.digits == ""
    await stream.close()


async def test_reports_are_exchanged():
    async with connected() as (caller, server):
        await eventually(lambda: caller.statistics().received > 10, "media")
        for stream in (caller, server, caller):
            stream._next_report = 0.0  # now
            await asyncio.sleep(0.05)
        await eventually(lambda: server.statistics().round_trip_seconds is not None, "the round trip")
        assert 0 <= server.statistics().round_trip_seconds < 1.0


async def test_the_end_is_announced():
    with Phone() as phone, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as reports:
        reports.bind((LOCAL, phone.address[1] + 1))
        reports.setblocking(False)
        stream = await RtpStream.open(LOCAL, PORTS)
        stream.configure(MediaSettings(CODEC["PCMU"], None, phone.address))
        await eventually(lambda: len(phone.received) > 2, "media")
        await stream.close()
        await stream.close()
        (data,) = drain(reports)
        assert is_rtcp(data)
        sender_report, _, bye = RtcpPacket.parse(data)
        assert isinstance(sender_report, RtcpSrPacket)
        assert sender_report.sender_info.packet_count > 2
        assert bye.sources == [sender_report.ssrc]


async def test_a_peer_that_never_answers_is_sent_nothing_more(monkeypatch):
    monkeypatch.setattr("vivavoce.server.rtp.stream.UNANSWERED_SECONDS", 0.1)
    with Phone() as phone:
        stream = await RtpStream.open(LOCAL, PORTS)
        stream.configure(MediaSettings(CODEC["PCMU"], None, phone.address))
        await eventually(lambda: len(phone.received) > 2, "media")
        await eventually(lambda: stream.statistics().idle_seconds > 0.2, "time passes")
        phone.forget()
        sent = stream.statistics().sent
        await asyncio.sleep(0.1)
        assert not phone.received
        phone.send(packet(0), stream)
        await eventually(lambda: stream.statistics().sent > sent, "it answers")
        await stream.close()


@pytest.mark.parametrize("remote", [("example.org", 4_000), ("224.0.0.1", 4_000), (LOCAL, 70_000), (LOCAL, -1)])
async def test_media_is_sent_to_no_name_nor_group(remote):
    stream = await RtpStream.open(LOCAL, PORTS)
    with pytest.raises(WireError, match="media"):
        stream.configure(MediaSettings(CODEC["PCMU"], None, remote))
    await stream.close()


async def test_a_failing_listener_does_not_stop_the_stream(caplog):
    async with connected() as (_, server):
        calls = []

        def fail(samples):
            calls.append(samples)
            raise RuntimeError("a listener failed")

        server.on_audio = fail
        await eventually(lambda: len(calls) > 3, "it is called again")
    assert "a listener failed" in caplog.text


async def test_ports_are_even_and_a_full_range_is_an_error():
    stream = await RtpStream.open(LOCAL, PORTS)
    assert stream.port % 2 == 0
    with pytest.raises(InputError, match="no two consecutive UDP ports"):
        await RtpStream.open(LOCAL, (stream.port, stream.port + 1))
    await stream.close()
    again = await RtpStream.open(LOCAL, (stream.port, stream.port + 1))
    assert again.port == stream.port
    await again.close()


async def test_a_frame_that_fails_is_logged_with_the_call(caplog):
    stream = await RtpStream.open("127.0.0.1", (20000, 29999), name="rtc_1")

    def fail(samples) -> None:
        raise RuntimeError("no")

    stream._run_frame = fail
    stream.configure(MediaSettings(CODEC["PCMU"], 101, (LOCAL, 9)))
    await eventually(lambda: "20 ms of the call rtc_1 failed" in caplog.text, "it is logged")
    await stream.close()


class EchoingLine(asyncio.DatagramProtocol):
    """Sends each packet back as the line's own, after six others and 15 dB softer."""

    def connection_made(self, transport):
        self._socket, self._payloads = transport, deque([bytes([0xFF]) * 160] * 6)
        self._number = 0

    def datagram_received(self, data, address):
        if not is_rtcp(data):
            self._number += 1
            self._payloads.append(encode((10 ** (-15 / 20) * decode(data[12:], LINE)).astype(np.float32), LINE))
            self._socket.sendto(
                RtpPacket(0, 0, self._number, 160 * self._number, 9, self._payloads.popleft()).serialize(), address
            )


@pytest.mark.parametrize("echo_is_removed", [True, False])
async def test_the_echo_of_a_line_is_removed(monkeypatch, echo_is_removed):
    if not echo_is_removed:
        monkeypatch.setattr(LineInput, "note_sent", lambda line, samples: None)
    loop = asyncio.get_running_loop()
    line, _ = await loop.create_datagram_endpoint(EchoingLine, (LOCAL, 0))
    stream = await RtpStream.open(LOCAL, PORTS)
    try:
        listener = Listener(stream)
        stream.configure(MediaSettings(CODEC["PCMU"], 101, line.get_extra_info("sockname")))
        stream.write(0.1 * np.random.default_rng(0).standard_normal(2 * stream.rate).astype(np.float32))
        await eventually(lambda: len(listener.samples) > 2 * stream.rate, "two seconds were heard")
    finally:
        await stream.close()
        line.close()
    left = np.median([level(listener.samples[at : at + 1_600]) for at in range(stream.rate, 2 * stream.rate, 1_600)])
    assert (left < 0.002) == echo_is_removed
