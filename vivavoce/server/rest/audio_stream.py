"""Sound that is still being made, as a file that is already being sent."""

import io
import struct
from collections.abc import AsyncIterator
from fractions import Fraction
from typing import Any

import numpy as np

from vivavoce.audio.io import Sound, float_to_pcm16, write
from vivavoce.dialogue.events import Samples
from vivavoce.errors import MissingDependencyError
from vivavoce.server.realtime.audio_formats import FormatWriter, SoundWriter, WireFormat, resampler

CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
ENCODED = {  # FFmpeg's container and codec, and the rate it is given
    "mp3": ("mp3", "libmp3lame", 24_000),
    "opus": ("ogg", "libopus", 48_000),
    "aac": ("adts", "aac", 24_000),
}
UNKNOWN_SIZE = 0xFFFF_FFFF  # a WAV of a length not yet known


async def encoded(pieces: AsyncIterator[Samples], rate: int, format: str) -> AsyncIterator[bytes]:
    """The bytes of a sound file, as its sound comes."""
    writer = _writer(rate, format)
    if format == "wav":
        yield wav_header(WireFormat().rate)
    async for samples in pieces:
        for data in writer.write(samples):
            yield data
    for data in writer.flush():
        yield data


def _writer(rate: int, format: str) -> SoundWriter:
    if format == "flac":
        return FlacWriter(rate)
    return FileWriter(rate, format) if format in ENCODED else FormatWriter(rate, WireFormat())


def wav_header(rate: int) -> bytes:
    """The head of a mono 16-bit WAV that ends when it ends."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", UNKNOWN_SIZE, b"WAVE") + form + struct.pack("<4sI", b"data", UNKNOWN_SIZE)


class FlacWriter:
    """A FLAC tells its length at its start, or libsndfile does not read it: it is sent when it is whole."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._pieces: list[Samples] = []

    def write(self, samples: Samples) -> list[bytes]:
        """Nothing yet."""
        self._pieces.append(samples)
        return []

    def flush(self) -> list[bytes]:
        """The whole file."""
        file = io.BytesIO()
        write(file, Sound(np.concatenate(self._pieces), self._rate), "flac")
        return [file.getvalue()]


class _Sink:
    """What a muxer writes, until it is taken."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> list[bytes]:
        taken, self._pieces = [piece for piece in self._pieces if piece], []
        return taken


class FileWriter:
    """One sound through FFmpeg's encoder and muxer."""

    def __init__(self, rate: int, format: str) -> None:
        try:
            import av
        except ImportError as error:
            raise MissingDependencyError(f"{format} needs PyAV: pip install 'vivavoce[media]'") from error
        container, codec, self._rate = ENCODED[format]
        self._av: Any = av
        self._sink = _Sink()
        self._file: Any = av.open(self._sink, "w", format=container)
        self._stream: Any = self._file.add_stream(codec, rate=self._rate, layout="mono")
        self._resampler = resampler(rate, self._rate)
        self._state = self._resampler.initial_state()
        self._sent = 0

    def write(self, samples: Samples) -> list[bytes]:
        """The bytes these samples complete."""
        output, self._state = self._resampler.step(self._state, samples[None])
        self._encode(output[0])
        return self._sink.take()

    def flush(self) -> list[bytes]:
        """The end of the file."""
        self._encode(self._resampler.flush(self._state)[0])
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._sink.take()

    def _encode(self, samples: Samples) -> None:
        if not len(samples):
            return
        pcm = np.ascontiguousarray(float_to_pcm16(samples)[None])
        frame = self._av.AudioFrame.from_ndarray(pcm, format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = self._rate, Fraction(1, self._rate), self._sent
        self._sent += len(samples)
        self._file.mux(self._stream.encode(frame))
