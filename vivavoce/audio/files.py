"""Sound files in and out: whole, or in blocks when they are long."""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from os import PathLike, fspath
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.decoding import decode
from vivavoce.audio.pcm import float_to_pcm16
from vivavoce.audio.resample import StreamingResampler
from vivavoce.audio.sound import Sound, downmix
from vivavoce.errors import InputError, MissingDependencyError

Source = str | PathLike[str] | bytes | bytearray | memoryview | BinaryIO

LIBSNDFILE_FORMATS = {  # our name: container and encoding as libsndfile calls them
    "wav": ("WAV", "PCM_16"),
    "wav-float": ("WAV", "FLOAT"),
    "flac": ("FLAC", "PCM_16"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "ogg": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
}
FORMATS = (*LIBSNDFILE_FORMATS, "m4a")
OPUS_RATES = (8_000, 12_000, 16_000, 24_000, 48_000)


def read(source: Source, rate: int | None = None, mono: bool = True) -> Sound:
    """The whole sound of a file, of its bytes, or of an open file; at `rate`, else at its own.

    `mono` takes the mean of the channels, however many there are; without it they are kept as they are.
    """
    pieces = list(blocks(source, seconds=30.0, rate=rate, mono=mono))
    return Sound(np.concatenate([piece.samples for piece in pieces], axis=1), pieces[0].rate)


def blocks(source: Source, seconds: float, rate: int | None = None, mono: bool = True) -> Iterator[Sound]:
    """The sound in blocks of `seconds`, the last one shorter: an hour takes no more memory than a block."""
    if not seconds > 0:
        raise InputError(f"a block must last longer than 0 s, not {seconds}")
    with _opened(source) as (file, name):
        decoded = decode(file, name)
        try:
            resampler = StreamingResampler(decoded.rate, rate or decoded.rate, 1 if mono else decoded.channels)
            pieces = _resampled(decoded.blocks, resampler, mono)
            count = 0
            for samples in _regrouped(pieces, max(1, round(seconds * resampler.to_rate))):
                count += samples.shape[1]
                yield Sound(samples, resampler.to_rate)
        except InputError as error:
            if name in str(error):
                raise
            raise InputError(f"{name}: {error}") from error
        if count == 0:
            raise InputError(f"{name} is an audio file with no samples in it")


def write(target: str | PathLike[str] | BinaryIO, sound: Sound, format: str | None = None) -> None:
    """The sound as a file, in the format named or that of the target's ending: one of FORMATS.

    `wav` and `flac` hold 16 bits, limited at full scale; `wav-float` holds the samples as they are.
    """
    format = _format_for(target, format)
    if sound.samples.shape[1] == 0:
        raise InputError("a sound without samples cannot be written")
    encoded = _encode_m4a(sound) if format == "m4a" else _encode_libsndfile(sound, format)
    if not isinstance(target, str | PathLike):
        target.write(encoded)
        return
    try:
        Path(target).write_bytes(encoded)
    except OSError as error:
        raise InputError(f"cannot write {fspath(target)}: {error.strerror}") from error


@contextmanager
def _opened(source: Source) -> Iterator[tuple[BinaryIO, str]]:
    """A seekable file and the name to call it by in an error; closed afterwards if it was opened here."""
    if isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(source), "the sound"
    elif isinstance(source, str | PathLike):
        path = Path(source)
        try:
            file = path.open("rb")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        with file:
            yield file, str(path)
    else:
        yield (source if source.seekable() else io.BytesIO(source.read())), "the sound"


def _resampled(
    pieces: Iterable[NDArray[np.float32]], resampler: StreamingResampler, mono: bool
) -> Iterator[NDArray[np.float32]]:
    for samples in pieces:
        checked = Sound(samples, resampler.from_rate).samples
        yield resampler.step(downmix(checked) if mono else checked)
    yield resampler.flush()


def _regrouped(pieces: Iterable[NDArray[np.float32]], size: int) -> Iterator[NDArray[np.float32]]:
    """The same samples in arrays of `size`, the last one what remains."""
    waiting: list[NDArray[np.float32]] = []
    length = 0
    for piece in pieces:
        waiting.append(piece)
        length += piece.shape[1]
        if length < size:
            continue
        joined = np.concatenate(waiting, axis=1)
        whole = length - length % size
        for begin in range(0, whole, size):
            yield joined[:, begin : begin + size].copy()
        waiting, length = [joined[:, whole:].copy()], length - whole
    if length:
        yield np.concatenate(waiting, axis=1)


def _format_for(target: Any, format: str | None) -> str:
    if format is None and isinstance(target, str | PathLike):
        format = Path(target).suffix.lstrip(".").lower()
    if format not in FORMATS:
        raise InputError(f"cannot write the sound format {format!r}; name one of {', '.join(FORMATS)}")
    return format


def _encode_libsndfile(sound: Sound, format: str) -> bytes:
    import soundfile

    if format == "opus" and sound.rate not in OPUS_RATES:
        sound = sound.resampled(48_000)
    container, encoding = LIBSNDFILE_FORMATS[format]
    samples = float_to_pcm16(sound.samples) if encoding == "PCM_16" else sound.samples
    file = io.BytesIO()
    try:
        soundfile.write(file, samples.T, sound.rate, format=container, subtype=encoding)
    except soundfile.LibsndfileError as error:
        raise InputError(
            f"{format} cannot hold {sound.channels} channel(s) at {sound.rate} Hz: {error.error_string}"
        ) from error
    return file.getvalue()


def _encode_m4a(sound: Sound) -> bytes:
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError("writing m4a needs PyAV: pip install 'vivavoce[media]'") from error
    if sound.channels > 2:
        raise InputError(f"m4a is written with 1 or 2 channels, not {sound.channels}")
    file = io.BytesIO()
    layout = "mono" if sound.channels == 1 else "stereo"
    with av.open(file, "w", format="ipod") as container:
        stream = container.add_stream("aac", rate=sound.rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound.samples), format="fltp", layout=layout)
        frame.sample_rate, frame.time_base, frame.pts = sound.rate, Fraction(1, sound.rate), 0
        try:
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        except (av.error.FFmpegError, ValueError) as error:
            raise InputError(f"m4a cannot hold a sound at {sound.rate} Hz: {error}") from error
    return file.getvalue()
