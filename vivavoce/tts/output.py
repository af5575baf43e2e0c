"""Sound that is still being made into a file, a pipe, or a player, in the format it is wanted in."""

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
UNKNOWN_SIZE = 0xFFFF_FFFF  # of a WAV that ends when it ends
PLAYERS: dict[str, Callable[[int, int], list[str]]] = {
    "aplay": lambda rate, channels: ["-q", "-t", "raw", "-f", "S16_LE", "-r", str(rate), "-c", str(channels)],
    "ffplay": lambda rate, channels: [
        *("-loglevel", "quiet", "-nodisp", "-autoexit", "-f", "s16le", "-ar", str(rate)),
        *("-ch_layout", "mono" if channels == 1 else "stereo", "-i", "-"),
    ],
}


class SoundSink(Protocol):
    """Takes sound piece by piece."""

    def write(self, samples: Samples) -> None:
        """The next samples.  # [channel, time]"""
        ...

    def close(self) -> None:
        """There is no more."""
        ...


def shaped(pieces: Iterable[Samples], channels: int, rate: int, to_rate: int, mono: bool) -> Iterator[Samples]:
    """The pieces of a sound in one channel if wanted so, and at another rate.  # [channel, time]"""
    resampler = LiveResampler(rate, to_rate)
    state = resampler.initial_state(1 if mono else channels)
    for piece in pieces:
        new, state = resampler.step(state, downmix(piece) if mono else piece)
        if new.shape[1]:
            yield new
    if (rest := resampler.flush(state)).shape[1] and rate != to_rate:
        yield rest


def check_format(format: str, rate: int) -> None:
    """Refuse, before anything is said, what could not be written."""
    if format not in FORMATS:
        raise InputError(f"cannot write the sound format {format!r}; name one of {', '.join(FORMATS)}")
    rates = {"opus": OPUS_RATES, "mp3": MP3_RATES}.get(format)
    if rates is not None and rate not in rates:
        raise InputError(f"{format} has no {rate} Hz; use --rate with one of {', '.join(map(str, rates))}")


def sink(target: Path | BinaryIO, format: str, rate: int, channels: int) -> SoundSink:
    """A file (made now), or an open stream, that takes sound in this format."""
    check_format(format, rate)
    if not isinstance(target, Path):
        return _open(target, format, rate, channels)
    try:
        file = target.open("wb+")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    return _Closing(_open(file, format, rate, channels), file)


def _open(file: BinaryIO, format: str, rate: int, channels: int) -> SoundSink:
    if format in ("wav", "pcm"):
        return PcmSink(file, rate, channels, has_header=format == "wav")
    return EncodedSink(file, format, rate, channels)


class PcmSink:
    """16-bit samples, behind the head of a WAV file or none; its length is put right at the end where that can be."""

    def __init__(self, file: BinaryIO, rate: int, channels: int, has_header: bool) -> None:
        self._file, self._bytes = file, 0
        self._head = (lambda size: wav_head(rate, channels, size)) if has_header else None
        if self._head is not None:
            file.write(self._head(None))

    def write(self, samples: Samples) -> None:
        """Written and flushed: whoever reads the stream hears it now."""
        self._bytes += self._file.write(float_to_pcm16(samples).T.astype("<i2").tobytes())
        self._file.flush()

    def close(self) -> None:
        """The head with the length."""
        if self._head is not None and _is_seekable(self._file):
            self._file.seek(0)
            self._file.write(self._head(self._bytes))
        self._file.flush()


def wav_head(rate: int, channels: int, size: int | None) -> bytes:
    """The first 44 bytes of a 16-bit WAV; without a size it ends when it ends."""
    whole, data = (UNKNOWN_SIZE, UNKNOWN_SIZE) if size is None else (size + 36, size)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, rate * 2 * channels, 2 * channels, 16)
    return struct.pack("<4sI4s", b"RIFF", whole, b"WAVE") + form + struct.pack("<4sI", b"data", data)


class EncodedSink:
    """libsndfile's encoders. To a pipe, FLAC goes out when it is whole: it tells its length at its start."""

    def __init__(self, file: BinaryIO, format: str, rate: int, channels: int) -> None:
        try:
            import soundfile
        except ImportError as error:
            raise MissingDependencyError(f"{format} needs soundfile: pip install soundfile") from error
        container, encoding = LIBSNDFILE_FORMATS[format]
        self._file = file
        self._held = io.BytesIO() if format == "flac" and not _is_seekable(file) else None
        through = self._held or (file if _is_seekable(file) else _OnlyForward(file))
        self._sound: Any = soundfile.SoundFile(through, "w", rate, channels, encoding, format=container)

    def write(self, samples: Samples) -> None:
        """Encoded as far as whole blocks go."""
        self._sound.write(np.ascontiguousarray(samples.T).clip(-1.0, 1.0))

    def close(self) -> None:
        """The last block, and the length where the format has one."""
        self._sound.close()
        if self._held is not None:
            self._file.write(self._held.getvalue())
        self._file.flush()


class _OnlyForward:
    """A pipe that an encoder may believe to be a file: what it would write over is left as it went out."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._place, self._end = file, 0, 0

    def write(self, data: bytes) -> int:
        new = bytes(data)[max(0, self._end - self._place) :]
        self._file.write(new)
        self._place += len(data)
        self._end = max(self._end, self._place)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._end}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        return b""

    def flush(self) -> None:
        self._file.flush()


class _Closing:
    """A sink that owns its file."""

    def __init__(self, inner: SoundSink, file: BinaryIO) -> None:
        self._inner, self._file = inner, file

    def write(self, samples: Samples) -> None:
        self._inner.write(samples)

    def close(self) -> None:
        self._inner.close()
        self._file.close()


class Player:
    """The loudspeaker of this machine: sounddevice where it is installed, else a program that plays raw samples."""

    def __init__(self, rate: int, channels: int) -> None:
        self._stream = _device_stream(rate, channels)
        self._program = None if self._stream is not None else _program(rate, channels)

    def write(self, samples: Samples) -> None:
        """Waits while the player has enough."""
        if self._stream is not None:
            self._stream.write(np.ascontiguousarray(samples.T))
        elif self._program is not None and self._program.stdin is not None:
            with suppress(BrokenPipeError):
                self._program.stdin.write(float_to_pcm16(samples).T.astype("<i2").tobytes())

    def close(self) -> None:
        """Waits until all was heard."""
        if self._stream is not None:
            self._stream.stop()
            self._stream.close()
        elif self._program is not None and self._program.stdin is not None:
            with suppress(BrokenPipeError):
                self._program.stdin.close()
            if self._program.wait():
                raise InputError("the sound could not be played here; write it to a file: --out FILE")


def _device_stream(rate: int, channels: int) -> Any:
    try:
        import sounddevice

        stream = sounddevice.OutputStream(samplerate=rate, channels=channels, dtype="float32")
        stream.start()
    except Exception:  # not installed, or no loudspeaker: libraries differ in how they say so
        logger.debug("sounddevice cannot play here", exc_info=True)
        return None
    return stream


def _program(rate: int, channels: int) -> subprocess.Popen[bytes]:
    for name, arguments in PLAYERS.items():
        if (path := shutil.which(name)) is not None:
            return subprocess.Popen([path, *arguments(rate, channels)], stdin=subprocess.PIPE)
    raise MissingDependencyError(
        "nothing here plays sound: give --out FILE, or pip install 'vivavoce[microphone]', or install aplay or ffplay"
    )


def _is_seekable(file: BinaryIO) -> bool:
    return bool(file.seekable())
