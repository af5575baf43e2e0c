"""Streaming audio output: sinks that encode to a file or pipe, and playback on this machine's loudspeaker."""

import io
import logging
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.io import LIBSNDFILE_FORMATS, OPUS_RATES, downmix, float_to_pcm16
from vivavoce.audio.resample import LiveResampler
from vivavoce.errors import InputError, MissingDependencyError

logger = logging.getLogger(__name__)

Samples = NDArray[np.float32]
FORMATS = ("wav", "flac", "mp3", "opus", "pcm")
MP3_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
UNKNOWN_SIZE = 0xFFFF_FFFF  # in the header of a WAV stream
PLAYERS: dict[str, Callable[[int, int], list[str]]] = {
    "aplay": lambda rate, channels: ["-q", "-t", "raw", "-f", "S16_LE", "-r", str(rate), "-c", str(channels)],
    "ffplay": lambda rate, channels: [
        *("-loglevel", "quiet", "-nodisp", "-autoexit", "-f", "s16le", "-ar", str(rate)),
        *("-ch_layout", "mono" if channels == 1 else "stereo", "-i", "-"),
    ],
}


class SoundSink(Protocol):
    """Takes audio piece by piece."""

    def write(self, samples: Samples) -> None:
        """Write samples.  # [channel, time]"""
        ...

    def close(self) -> None:
        """Finish the file or stream."""
        ...


def shaped(pieces: Iterable[Samples], channels: int, rate: int, to_rate: int, mono: bool) -> Iterator[Samples]:
    """Downmix pieces of audio if `mono`, and resample them.  # [channel, time]"""
    resampler = LiveResampler(rate, to_rate)
    state = resampler.initial_state(1 if mono else channels)
    for piece in pieces:
        new, state = resampler.step(state, downmix(piece) if mono else piece)
        if new.shape[1]:
            yield new
    if (rest := resampler.flush(state)).shape[1] and rate != to_rate:
        yield rest


def check_format(format: str, rate: int) -> None:
    """Refuse a format or rate that cannot be written, before any audio is generated."""
    if format not in FORMATS:
        raise InputError(f"cannot write the sound format {format!r}; use one of {', '.join(FORMATS)}")
    rates = {"opus": OPUS_RATES, "mp3": MP3_RATES}.get(format)
    if rates is not None and rate not in rates:
        raise InputError(f"{format} cannot hold {rate} Hz; use --rate with one of {', '.join(map(str, rates))}")


def sink(target: Path | BinaryIO, format: str, rate: int, channels: int) -> SoundSink:
    """A sink of this format for a path, which is created, or for an open stream."""
    check_format(format, rate)
    if not isinstance(target, Path):
        return _open(target, format, rate, channels)
    try:
        file = target.open("wb+")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    return _FileSink(_open(file, format, rate, channels), file)


def _open(file: BinaryIO, format: str, rate: int, channels: int) -> SoundSink:
    if format in ("wav", "pcm"):
        return PcmSink(file, rate, channels, has_header=format == "wav")
    return EncodedSink(file, format, rate, channels)


class PcmSink:
    """Raw 16-bit samples, or a WAV file; the length in its header is written at the end if the file is seekable."""

    def __init__(self, file: BinaryIO, rate: int, channels: int, has_header: bool) -> None:
        self._file, self._bytes = file, 0
        self._header = (lambda size: wav_header(rate, channels, size)) if has_header else None
        if self._header is not None:
            file.write(self._header(None))

    def write(self, samples: Samples) -> None:
        """Write and flush, so that a reader of the stream gets the samples immediately."""
        self._bytes += self._file.write(float_to_pcm16(samples).T.astype("<i2").tobytes())
        self._file.flush()

    def close(self) -> None:
        """Write the header with the length."""
        if self._header is not None and _is_seekable(self._file):
            self._file.seek(0)
            self._file.write(self._header(self._bytes))
        self._file.flush()


def wav_header(rate: int, channels: int, size: int | None) -> bytes:
    """The header of a 16-bit WAV; without a size, that of a stream of unknown length."""
    whole, data = (UNKNOWN_SIZE, UNKNOWN_SIZE) if size is None else (size + 36, size)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, rate * 2 * channels, 2 * channels, 16)
    return struct.pack("<4sI4s", b"RIFF", whole, b"WAVE") + form + struct.pack("<4sI", b"data", data)


class EncodedSink:
    """libsndfile's encoders. FLAC has its length at its start, so to a pipe it is written at the end."""

    def __init__(self, file: BinaryIO, format: str, rate: int, channels: int) -> None:
        try:
            import soundfile
        except ImportError as error:
            raise MissingDependencyError(f"{format} needs soundfile: pip install soundfile") from error
        container, encoding = LIBSNDFILE_FORMATS[format]
        self._file = file
        self._buffer = io.BytesIO() if format == "flac" and not _is_seekable(file) else None
        target_file = self._buffer or (file if _is_seekable(file) else _ForwardOnlyFile(file))
        self._sound: Any = soundfile.SoundFile(target_file, "w", rate, channels, encoding, format=container)

    def write(self, samples: Samples) -> None:
        """Encode samples; whole blocks are written."""
        self._sound.write(np.ascontiguousarray(samples.T).clip(-1.0, 1.0))

    def close(self) -> None:
        """Write the last block, and the length if the format has one."""
        self._sound.close()
        if self._buffer is not None:
            self._file.write(self._buffer.getvalue())
        self._file.flush()


class _ForwardOnlyFile:
    """Makes a pipe look seekable to an encoder; writes to what has been sent are dropped."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._position, self._end = file, 0, 0

    def write(self, data: bytes) -> int:
        new = bytes(data)[max(0, self._end - self._position) :]
        self._file.write(new)
        self._position += len(data)
        self._end = max(self._end, self._position)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        return b""

    def flush(self) -> None:
        self._file.flush()


class _FileSink:
    """A sink that closes its file."""

    def __init__(self, inner: SoundSink, file: BinaryIO) -> None:
        self._inner, self._file = inner, file

    def write(self, samples: Samples) -> None:
        self._inner.write(samples)

    def close(self) -> None:
        self._inner.close()
        self._file.close()


class Player:
    """This machine's loudspeaker: through sounddevice if it is installed, else through aplay or ffplay."""

    def __init__(self, rate: int, channels: int) -> None:
        self._stream = _device_stream(rate, channels)
        self._program = None if self._stream is not None else _program(rate, channels)

    def write(self, samples: Samples) -> None:
        """Play samples; blocks while the player's buffer is full."""
        if self._stream is not None:
            self._stream.write(np.ascontiguousarray(samples.T))
        elif self._program is not None and self._program.stdin is not None:
            with suppress(BrokenPipeError):
                self._program.stdin.write(float_to_pcm16(samples).T.astype("<i2").tobytes())

    def close(self) -> None:
        """Block until everything has been played."""
        if self._stream is not None:
            self._stream.stop()
            self._stream.close()
        elif self._program is not None and self._program.stdin is not None:
            with suppress(BrokenPipeError):
                self._program.stdin.close()
            if self._program.wait():
                raise InputError("the audio could not be played on this machine; write it to a file: --out FILE")


def _device_stream(rate: int, channels: int) -> Any:
    try:
        import sounddevice

        stream = sounddevice.OutputStream(samplerate=rate, channels=channels, dtype="float32")
        stream.start()
    except Exception:  # not installed, or no loudspeaker; the exception types vary
        logger.debug("sounddevice cannot play on this machine", exc_info=True)
        return None
    return stream


def _program(rate: int, channels: int) -> subprocess.Popen[bytes]:
    for name, arguments in PLAYERS.items():
        if (path := shutil.which(name)) is not None:
            return subprocess.Popen([path, *arguments(rate, channels)], stdin=subprocess.PIPE)
    raise MissingDependencyError(
        "no audio player was found: use --out FILE, or pip install 'vivavoce[microphone]', or install aplay or ffplay"
    )


def _is_seekable(file: BinaryIO) -> bool:
    return bool(file.seekable())
