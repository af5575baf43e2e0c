"""Reading and writing sound files, whole or in blocks, and conversion between PCM and float samples."""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike, fspath
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.resample import Quality, StreamingResampler, check_rate, resample
from vivavoce.errors import InputError, MissingDependencyError

BLOCK = 65_536  # samples a channel decoded at once
UNKNOWN_SIZE = 0x7FFF_0000  # a WAV written as a stream announces at least this size
MAX_WAV_CHUNKS = 1000  # before the samples; a file of tiny chunks would take long to walk through
LENGTH_TOLERANCE_SECONDS = 0.1  # encoder padding; more missing than this means a truncated file


class TooLongError(InputError):
    """A sound is longer than its reader allows."""


@dataclass(frozen=True)
class Decoded:
    """An opened audio file: its rate, its channel count, and its samples still to be decoded, block by block."""

    rate: int
    channels: int
    blocks: Iterator[NDArray[np.float32]]  # each [channel, time]


def decode(file: BinaryIO, name: str) -> Decoded:
    """Open a seekable file for decoding; InputError where it holds no sound or is truncated."""
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
    """Raise InputError for a truncated WAV or Ogg file, which libsndfile reads without an error."""
    file.seek(0)
    magic = file.read(12)
    if magic[:4] == b"RIFF" and magic[8:] == b"WAVE":
        announced, present = _wav_data_sizes(file)
        if present < announced < UNKNOWN_SIZE:
            raise InputError(f"{name} is cut short: it announces {announced} bytes of samples and holds {present}")
    if magic[:4] == b"OggS" and not _ends_with_last_ogg_page(file):
        raise InputError(f"{name} is cut short: its Ogg stream has no last page")


def _wav_data_sizes(file: BinaryIO) -> tuple[int, int]:
    """Bytes of samples that the header of a WAV file announces, and bytes present."""
    size = file.seek(0, 2)
    position = 12
    for _ in range(MAX_WAV_CHUNKS):
        if position + 8 > size:
            break
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
                block = opened.read(max(1, BLOCK // opened.channels), dtype="float32", always_2d=True)
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


FULL_SCALE = 32768.0  # every int16 value is unchanged by conversion to float32 and back


def pcm16_to_float(data: bytes | NDArray[np.int16]) -> NDArray[np.float32]:
    """Float samples of little-endian 16-bit PCM: bytes as one channel, an int16 array in its shape."""
    if isinstance(data, np.ndarray):
        if data.dtype != np.int16:
            raise InputError(f"16-bit PCM must be an int16 array, this one is {data.dtype}")
        return data.astype(np.float32) / np.float32(FULL_SCALE)
    if len(data) % 2:
        raise InputError(f"16-bit PCM has two bytes a sample, but {len(data)} bytes is an odd number: a sample was cut")
    return np.frombuffer(data, dtype="<i2").astype(np.float32) / np.float32(FULL_SCALE)


def float_to_pcm16(samples: NDArray[np.floating]) -> NDArray[np.int16]:
    """The nearest int16 samples; values outside [-1, 1] are clipped to full scale."""
    check_finite(samples)
    scaled = np.rint(np.asarray(samples, dtype=np.float64) * FULL_SCALE)
    return np.clip(scaled, -32768, 32767).astype(np.int16)


def check_finite(samples: NDArray[np.floating]) -> None:
    """Raise InputError where samples are NaN or infinite."""
    finite = np.isfinite(samples)
    if not finite.all():
        first = int(np.argwhere(~finite)[0, -1])
        count = int(finite.size - np.count_nonzero(finite))
        raise InputError(f"{count} of {finite.size} samples are NaN or infinite, the first at sample {first}")


@dataclass(frozen=True, eq=False)
class Sound:
    """Finite float32 samples, full scale at ±1, with their rate. One-dimensional samples become one channel."""

    samples: NDArray[np.float32]  # [channel, time]
    rate: int

    def __post_init__(self) -> None:
        samples = np.atleast_2d(self.samples)
        if samples.dtype.kind != "f":
            raise InputError(f"a sound has float samples, not {samples.dtype}; pcm16_to_float converts 16-bit PCM")
        if samples.ndim != 2 or samples.shape[0] == 0:
            raise InputError(f"a sound has the shape [channel, time], not {list(samples.shape)}")
        check_rate(self.rate)
        check_finite(samples)
        object.__setattr__(self, "samples", np.asarray(samples, dtype=np.float32))

    @property
    def channels(self) -> int:
        return int(self.samples.shape[0])

    @property
    def seconds(self) -> float:
        return float(self.samples.shape[1] / self.rate)

    def mono(self) -> "Sound":
        """The mean of all channels."""
        return self if self.channels == 1 else Sound(downmix(self.samples), self.rate)

    def resampled(self, rate: int, quality: Quality = "HQ") -> "Sound":
        """The sound at another rate."""
        return self if rate == self.rate else Sound(resample(self.samples, self.rate, rate, quality), rate)


def downmix(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """One channel, the mean of all: no channel can push it past full scale.  # [channel, time] → [1, time]"""
    return np.asarray(samples.mean(axis=0, keepdims=True), dtype=np.float32)


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


def read(source: Source, rate: int | None = None, mono: bool = True, max_seconds: float | None = None) -> Sound:
    """The whole sound of a file, of its bytes, or of an open file; at `rate`, else at its own.

    `mono` takes the mean of the channels; without it all channels are returned. `TooLongError` where it lasts longer
    than `max_seconds`: a compressed file may be a thousand times larger when it is decoded.
    """
    pieces = list(blocks(source, seconds=30.0, rate=rate, mono=mono, max_seconds=max_seconds))
    return Sound(np.concatenate([piece.samples for piece in pieces], axis=1), pieces[0].rate)


def blocks(
    source: Source, seconds: float, rate: int | None = None, mono: bool = True, max_seconds: float | None = None
) -> Iterator[Sound]:
    """The sound in blocks of `seconds`, the last one shorter: an hour takes no more memory than a block.

    `TooLongError` after `max_seconds` of it.
    """
    if not seconds > 0:
        raise InputError(f"a block must last longer than 0 s, not {seconds}")
    with _opened(source) as (file, name):
        decoded = decode(file, name)
        try:
            resampler = StreamingResampler(decoded.rate, rate or decoded.rate, 1 if mono else decoded.channels)
            pieces = _resampled(_limited(decoded, max_seconds), resampler, mono)
            count = 0
            for samples in _regrouped(pieces, max(1, round(seconds * resampler.to_rate))):
                count += samples.shape[1]
                yield Sound(samples, resampler.to_rate)
        except InputError as error:
            if name in str(error) or isinstance(error, TooLongError):
                raise
            raise InputError(f"{name}: {error}") from error
        if count == 0:
            raise InputError(f"{name} is an audio file with no samples in it")


def write(target: str | PathLike[str] | BinaryIO, sound: Sound, format: str | None = None) -> None:
    """The sound as a file, in the format named or that of the target's ending: one of FORMATS.

    `wav` and `flac` hold 16 bits, limited at full scale; `wav-float` holds the float samples.
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
    """A seekable file and its name for error messages; closed afterwards if it was opened here."""
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


def _limited(decoded: Decoded, max_seconds: float | None) -> Iterator[NDArray[np.float32]]:
    """The decoded blocks; TooLongError once they last longer than `max_seconds`."""
    count = 0
    for block in decoded.blocks:
        count += block.shape[1]
        if max_seconds is not None and count > max_seconds * decoded.rate:
            raise TooLongError(f"the sound is longer than {max_seconds:g} s; send it in parts")
        yield block


def _resampled(
    pieces: Iterable[NDArray[np.float32]], resampler: StreamingResampler, mono: bool
) -> Iterator[NDArray[np.float32]]:
    for samples in pieces:
        checked = Sound(samples, resampler.from_rate).samples
        yield resampler.step(downmix(checked) if mono else checked)
    yield resampler.flush()


def _regrouped(pieces: Iterable[NDArray[np.float32]], size: int) -> Iterator[NDArray[np.float32]]:
    """The samples in arrays of `size`; the last one may be shorter."""
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
