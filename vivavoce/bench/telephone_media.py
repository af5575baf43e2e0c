"""Speech quality over a lossy telephone line: two RTP streams of the server's own, with a network between them."""

import asyncio
from typing import Any

import numpy as np

from vivavoce.audio.io import Sound
from vivavoce.bench.telephone_line import LineSettings
from vivavoce.bench.turn_sounds import RATE, Samples, gather
from vivavoce.errors import MissingDependencyError
from vivavoce.evaluation.scoring import DNSMOS
from vivavoce.server.rtp.codecs import CODECS
from vivavoce.server.rtp.stream import MediaSettings, RtpStream

Address = tuple[str, int]

HOST = "127.0.0.1"
PORTS = (30_000, 39_999)
STREAM_RATE = 16_000
TAIL_SECONDS = 1.0
CODEC = "PCMU"


class LossyNetwork(asyncio.DatagramProtocol):
    """Passes packets between two ports; those of the first are lost and delayed."""

    def __init__(self, line: LineSettings, seed: int) -> None:
        self._line, self._chance = line, np.random.default_rng(seed)
        self.first: Address = ("", 0)
        self.second: Address = ("", 0)

    def connection_made(self, transport: Any) -> None:
        self._socket: asyncio.DatagramTransport = transport
        self.port = int(transport.get_extra_info("sockname")[1])

    def datagram_received(self, data: bytes, address: tuple[str | Any, int]) -> None:
        if address == self.second:
            self._socket.sendto(data, self.first)
        elif self._chance.random() >= self._line.loss:
            delay = self._chance.random() * self._line.jitter_seconds
            asyncio.get_running_loop().call_later(delay, self._pass_on, data)

    def _pass_on(self, data: bytes) -> None:
        if not self._socket.is_closing():
            self._socket.sendto(data, self.second)

    def close(self) -> None:
        """Pass on nothing more."""
        self._socket.close()


def spoken_passage(seconds: float) -> Samples:
    """Recorded speech of at least this length, at 16 kHz."""
    parts, length = [], 0.0
    for question in gather().questions:
        parts.append(Sound(question.sound, RATE).resampled(STREAM_RATE).samples[0])
        length += len(parts[-1]) / STREAM_RATE
        if length >= seconds:
            break
    return np.concatenate(parts)


async def heard_over(line: LineSettings, samples: Samples, seed: int = 0) -> Samples:
    """What the second end of a call hears of the first."""
    loop = asyncio.get_running_loop()
    _, network = await loop.create_datagram_endpoint(lambda: LossyNetwork(line, seed), (HOST, 0))
    sender, receiver = [await RtpStream.open(HOST, PORTS, STREAM_RATE) for _ in range(2)]
    network.first, network.second = (HOST, sender.port), (HOST, receiver.port)
    heard: list[Samples] = []
    receiver.on_audio = heard.append
    codec = next(each for each in CODECS if each.name == CODEC)
    try:
        for stream in (receiver, sender):
            stream.configure(MediaSettings(codec, None, (HOST, network.port)))
        sender.write(samples)
        while sender.queued_seconds:
            await asyncio.sleep(sender.queued_seconds)
        await asyncio.sleep(TAIL_SECONDS)
    finally:
        await asyncio.gather(sender.close(), receiver.close())
        network.close()
    return np.concatenate(heard) if heard else np.zeros(0, np.float32)


async def measure_quality(line: LineSettings, seconds: float) -> dict[str, float | None]:
    """Predicted mean opinion scores of a clean and of a lossy line; None without the package that predicts them."""
    samples = spoken_passage(seconds)
    clean, lossy = await asyncio.gather(heard_over(LineSettings(), samples), heard_over(line, samples))
    try:
        score = DNSMOS()
    except MissingDependencyError:
        return {"clean": None, "lossy": None}
    return {name: score.overall(Sound(heard, STREAM_RATE)) for name, heard in (("clean", clean), ("lossy", lossy))}
