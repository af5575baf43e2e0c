"""Audio files in responses, encoded while their samples are still being generated; and uploads, decoded."""

import asyncio
import io
import struct
from collections.abc import AsyncIterator
from fractions import Fraction
from typing import Any

import av
import numpy as np

from vivavoce.audio.io import Sound, TooLongError, float_to_pcm16, read, write
from vivavoce.dialogue.items import Samples
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.audio_formats import FormatWriter, SoundWriter, WireFormat, resampler
from vivavoce.server.wire import WireError

CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
ENCODED = {  # FFmpeg's container and codec, and the sample rate it is given
    "mp3": ("mp3", "libmp3lame", 24_000),
    "opus": ("ogg", "libopus", 48_000),
    "aac": ("adts", "aac", 24_000),
}
UNKNOWN_SIZE = 0xFFFF_FFFF  # the size field of a WAV whose length is not known yet


async def decoded(data: bytes, rate: int | None, options: ServerOptions) -> Sound:
    """The sound of an uploaded file; WireError 413 where it is too long."""
    try:
        return await asyncio.to_thread(read, data, rate, max_seconds=options.max_audio_seconds)
    except TooLongError as error:
        raise WireError(str(error), "audio_too_long", "file", 413) from error


async def encode(chunks: AsyncIterator[Samples], rate: int, format: str) -> AsyncIterator[bytes]:
    """The bytes of an audio file, while its samples are still being generated."""
    writer = _writer(rate, format)
    if format == "wav":
        yield wav_header(WireFormat().rate)
    async for samples in chunks:
        for data in writer.write(samples):
            yield data
    for data in writer.flush():
        yield data


def _writer(rate: int, format: str) -> SoundWriter:
    if format == "flac":
        return FlacWriter(rate, WireFormat().rate)
    return FFmpegWriter(rate, format) if format in ENCODED else FormatWriter(rate, WireFormat())


def wav_header(rate: int) -> bytes:
    """The header of a mono 16-bit WAV of unknown length."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", UNKNOWN_SIZE, b"WAVE") + form + struct.pack("<4sI", b"data", UNKNOWN_SIZE)


class FlacWriter:
    """Encodes a FLAC file at its end: libsndfile reads only files whose header holds the length."""

    def __init__(self, rate: int, file_rate: int) -> None:
        self._rate, self._file_rate = rate, file_rate
        self._chunks: list[Samples] = []

    def write(self, samples: Samples) -> list[bytes]:
        """An empty list: the file is encoded at the end."""
        self._chunks.append(samples)
        return []

    def flush(self) -> list[bytes]:
        """The whole file."""
        file = io.BytesIO()
        write(file, Sound(np.concatenate(self._chunks), self._rate).resampled(self._file_rate), "flac")
        return [file.getvalue()]


class _MuxerOutput:
    """A file object that collects what the muxer writes."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> list[bytes]:
        taken, self._pieces = [piece for piece in self._pieces if piece], []
        return taken


class FFmpegWriter:
    """One audio file through FFmpeg's encoder and muxer."""

    def __init__(self, rate: int, format: str) -> None:
        container, codec, self._rate = ENCODED[format]
        self._output = _MuxerOutput()
        self._file: Any = av.open(self._output, "w", format=container)
        self._stream: Any = self._file.add_stream(codec, rate=self._rate, layout="mono")
        self._resampler = resampler(rate, self._rate)
        self._state = self._resampler.initial_state()
        self._encoded_samples = 0

    def write(self, samples: Samples) -> list[bytes]:
        """The bytes that these samples complete."""
        output, self._state = self._resampler.step(self._state, samples[None])
        self._encode(output[0])
        return self._output.take()

    def flush(self) -> list[bytes]:
        """The end of the file."""
        self._encode(self._resampler.flush(self._state)[0])
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._output.take()

    def _encode(self, samples: Samples) -> None:
        if not len(samples):
            return
        pcm = np.ascontiguousarray(float_to_pcm16(samples)[None])
        frame = av.AudioFrame.from_ndarray(pcm, format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = self._rate, Fraction(1, self._rate), self._encoded_samples
        self._encoded_samples += len(samples)
        self._file.mux(self._stream.encode(frame))
