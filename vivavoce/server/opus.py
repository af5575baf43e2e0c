"""Opus packets for binary frames: one packet of 20 ms a frame, by FFmpeg's libopus."""

from fractions import Fraction
from typing import Any

import numpy as np

from vivavoce.audio.pcm import float_to_pcm16
from vivavoce.dialogue.interface import Samples
from vivavoce.errors import MissingDependencyError
from vivavoce.server.formats import resampler
from vivavoce.server.wire_error import WireError

RATE = 48_000  # what every Opus decoder can give
FRAME = 960
BITS_PER_SECOND = 32_000


class OpusReader:
    """A client's packets to samples at `rate`."""

    def __init__(self, rate: int) -> None:
        self._codec = _av().CodecContext.create("libopus", "r")
        self._codec.sample_rate, self._codec.layout = RATE, "mono"
        self._resampler = resampler(RATE, rate)
        self._state = self._resampler.initial_state()

    def read(self, data: bytes) -> Samples:
        """The samples of one packet."""
        av = _av()
        try:
            frames = self._codec.decode(av.Packet(data)) if data else []
        except (av.error.FFmpegError, ValueError) as error:
            raise WireError(f"{len(data)} bytes are no Opus packet: {error}", "invalid_audio") from None
        pieces = [mono(frame) for frame in frames]
        samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
        output, self._state = self._resampler.step(self._state, samples[None])
        return output[0]


class OpusWriter:
    """Samples at `rate` to packets."""

    def __init__(self, rate: int) -> None:
        self._codec = _av().CodecContext.create("libopus", "w")
        self._codec.sample_rate, self._codec.layout, self._codec.format = RATE, "mono", "s16"
        self._codec.bit_rate = BITS_PER_SECOND
        self._codec.options = {"application": "voip", "frame_duration": "20"}
        self._codec.open()
        self._resampler = resampler(rate, RATE)
        self._state = self._resampler.initial_state()
        self._waiting: Samples = np.zeros(0, np.float32)
        self._sent = 0

    def write(self, samples: Samples) -> list[bytes]:
        """The packets these samples complete."""
        output, self._state = self._resampler.step(self._state, samples[None])
        return self._packets(output[0])

    def flush(self) -> list[bytes]:
        """The rest, filled up with silence to a packet."""
        rest = self._resampler.flush(self._state)[0]
        self._state = self._resampler.initial_state()
        missing = -(len(self._waiting) + len(rest)) % FRAME
        return self._packets(np.concatenate([rest, np.zeros(missing, np.float32)]))

    def _packets(self, samples: Samples) -> list[bytes]:
        waiting = np.concatenate([self._waiting, samples])
        whole = len(waiting) - len(waiting) % FRAME
        self._waiting = waiting[whole:]
        return [packet for begin in range(0, whole, FRAME) for packet in self._encode(waiting[begin : begin + FRAME])]

    def _encode(self, samples: Samples) -> list[bytes]:
        frame = _av().AudioFrame.from_ndarray(float_to_pcm16(samples)[None], format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), self._sent
        self._sent += FRAME
        return [bytes(packet) for packet in self._codec.encode(frame)]


def mono(frame: Any) -> Samples:
    """One channel of float samples, whatever the decoder gave."""
    array = frame.to_ndarray()
    channels = len(frame.layout.channels)
    if array.shape[0] != channels:  # packed: one row with the channels interleaved
        array = array.reshape(-1, channels).T
    scale = 1.0 if array.dtype.kind == "f" else float(2 ** (8 * array.dtype.itemsize - 1))
    return np.asarray(array.mean(axis=0) / scale, np.float32)


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError("Opus needs PyAV: pip install 'vivavoce[media]'") from error
    return av
