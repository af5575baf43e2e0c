"""Two streams over UDP on loopback: audio, key presses, changes during a call, and what is not accepted."""

from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.server.harness import eventually
from vivavoce.server.rtp.codecs import CODECS
from vivavoce.server.rtp.stream import MediaSettings, RtpStream

PORTS = (20_000, 29_999)
LOCAL = "127.0.0.1"
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


def sine(frequency, seconds, rate=16_000):
    return (0.3 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def typical(measure, samples, window=1_600):
    """The median of a measure over windows of 100 ms, as a busy machine may lose some."""
    return np.median([measure(samples[at : at + window]) for at in range(0, len(samples) - window, window)])


def dominant_frequency(window, rate=16_000):
    return np.argmax(np.abs(np.fft.rfft(window * np.hanning(len(window)), rate)))


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
