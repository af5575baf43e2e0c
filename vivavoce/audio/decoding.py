"""Audio files to float32 blocks: libsndfile for what it reads, PyAV for everything else FFmpeg knows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vivavoce.errors import InputError, MissingDependencyError

BLOCK = 65_536  # samples a channel decoded at once
UNKNOWN_SIZE = 0x7FFF_0000  # a WAV that was written as a stream announces at least this, whatever it holds
LENGTH_TOLERANCE_SECONDS = 0.1  # encoder padding; what is missing beyond it was cut off


@dataclass(frozen=True)
class Decoded:
    """An opened audio file: its rate, its channel count, and its samples still to be decoded, block by block."""

    rate: int
    channels: int
    blocks: Iterator[NDArray[np.float32]]  # each [channel, time]


def decode(file: BinaryIO, name: str) -> Decoded:
    """The sound in a seekable file; InputError, naming it, where there is none or it was cut short."""
    size = file.seek(0, 2)
    if size == 0:
        raise InputError(f"{name} is empty (0 bytes)")
    check_not_cut(file, name)
    file.seek(0)
    decoded = _open_libsndfile(file, name)
    if decoded is None:
        file.seek(0)
        decoded = _open_pyav(file, name)
    return decoded


def check_not_cut(file: BinaryIO, name: str) -> None:
    """Raise InputError for a WAV or Ogg file that ends before it says it does; libsndfile reads those in silence."""
    file.seek(0)
    magic = file.read(12)
    if magic[:4] == b"RIFF" and magic[8:] == b"WAVE":
        announced, present = _wav_data_sizes(file)
        if present < announced < UNKNOWN_SIZE:
            raise InputError(f"{name} is cut short: it announces {announced} bytes of samples and holds {present}")
    if magic[:4] == b"OggS" and not _ends_with_last_ogg_page(file):
        raise InputError(f"{name} is cut short: its Ogg stream has no last page")


def _wav_data_sizes(file: BinaryIO) -> tuple[int, int]:
    """Bytes of samples that the header of a WAV file announces, and bytes that are there."""
    size = file.seek(0, 2)
    position = 12
    while position + 8 <= size:
        file.seek(position)
        chunk, length = file.read(4), int.from_bytes(file.read(4), "little")
        position += 8
        if chunk == b"data":
            return length, size - position
        position += length + length % 2
    return 0, 0


def _ends_with_last_ogg_page(file: BinaryIO) -> bool:
    size = file.seek(0, 2)
    file.seek(max(0, size - 65_307))  # the largest page there can be
    tail = file.read()
    page = tail.rfind(b"OggS")
    if page < 0 or page + 27 > len(tail):
        return False
    segments = tail[page + 27 : page + 27 + tail[page + 26]]
    is_whole = len(segments) == tail[page + 26] and page + 27 + len(segments) + sum(segments) <= len(tail)
    return is_whole and bool(tail[page + 5] & 4)


def _open_libsndfile(file: BinaryIO, name: str) -> Decoded | None:
    import soundfile

    try:
        opened = soundfile.SoundFile(file)
    except (soundfile.LibsndfileError, TypeError):  # TypeError: named .raw, which has no header to read
        return None
    return Decoded(opened.samplerate, opened.channels, _libsndfile_blocks(opened, name))


def _libsndfile_blocks(opened: Any, name: str) -> Iterator[NDArray[np.float32]]:
    import soundfile

    count = 0
    with opened:
        while True:
            try:
                block = opened.read(BLOCK, dtype="float32", always_2d=True)
            except soundfile.LibsndfileError as error:
                raise InputError(f"{name} is damaged or cut short after {count} samples: {error}") from error
            if len(block) == 0:
                break
            count += len(block)
            yield np.ascontiguousarray(block.T)
        _check_length(name, count / opened.samplerate, opened.frames / opened.samplerate)


def _open_pyav(file: BinaryIO, name: str) -> Decoded:
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} is no WAV, FLAC, MP3, Ogg or Opus; for m4a, webm and others: pip install 'vivavoce[media]'"
        ) from error
    try:
        # A playlist could name other files and addresses; the file given is the only one that may be read.
        container = av.open(file, options={"protocol_whitelist": "none"})
    except (av.error.FFmpegError, EOFError) as error:
        raise InputError(f"{name} is not an audio file, or is damaged at its start") from error
    if not container.streams.audio:
        container.close()
        raise InputError(f"{name} holds no audio track")
    stream = container.streams.audio[0]
    return Decoded(stream.rate, stream.channels, _pyav_blocks(container, stream, name))


def _pyav_blocks(container: Any, stream: Any, name: str) -> Iterator[NDArray[np.float32]]:
    import av

    count = 0
    to_float = av.AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
    with container:
        try:
            for frame in container.decode(stream):
                for piece in to_float.resample(frame):
                    count += piece.samples
                    yield piece.to_ndarray()
            for piece in to_float.resample(None):
                count += piece.samples
                yield piece.to_ndarray()
        except av.error.FFmpegError as error:
            raise InputError(f"{name} is damaged or cut short after {count} samples: {error}") from error
        if stream.duration is not None:
            _check_length(name, count / stream.rate, float(stream.duration * stream.time_base))


def _check_length(name: str, seconds: float, announced: float) -> None:
    if announced - seconds > LENGTH_TOLERANCE_SECONDS:
        raise InputError(f"{name} is cut short: it announces {announced:.2f} s and holds {seconds:.2f} s")
