"""Audio formats of the protocol: 16-bit PCM, G.711 and Opus packets, as streaming encoders and decoders."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.io import float_to_pcm16, pcm16_to_float
from vivavoce.audio.resample import TELEPHONE, LiveResampler
from vivavoce.dialogue.items import Samples
from vivavoce.errors import MissingDependencyError
from vivavoce.server.realtime.session_types import AudioFormat, BetaFormat, Binary, FormatName, SampleRate
from vivavoce.server.wire import WireError

PCM: Final = "audio/pcm"
MU_LAW: Final = "audio/pcmu"
A_LAW: Final = "audio/pcma"
BETA_FORMATS: dict[BetaFormat, FormatName] = {"pcm16": PCM, "g711_ulaw": MU_LAW, "g711_alaw": A_LAW}
PCM_RATE: Final = 24_000
TELEPHONE_RATE: Final = 8_000


@dataclass(frozen=True)
class WireFormat:
    """A format of the protocol; always mono."""

    type: FormatName = PCM
    rate: SampleRate = PCM_RATE

    @property
    def bytes_per_sample(self) -> int:
        return 2 if self.type == PCM else 1

    def as_wire(self) -> AudioFormat:
        """The format object of a session."""
        return AudioFormat(self.type, self.rate) if self.type == PCM else AudioFormat(self.type)

    def seconds(self, size: int) -> float:
        """Duration of this number of bytes."""
        return size / (self.bytes_per_sample * self.rate)


def wire_format(format: AudioFormat | BetaFormat) -> WireFormat:
    """The format of a format object, or of a beta protocol name."""
    kind, rate = (BETA_FORMATS[format], None) if isinstance(format, str) else (format.type or PCM, format.rate)
    return WireFormat(kind, rate or PCM_RATE) if kind == PCM else WireFormat(kind, TELEPHONE_RATE)


def decode(data: bytes, format: WireFormat) -> Samples:
    """The samples of complete audio, at the rate of the format."""
    if format.type == MU_LAW:
        return _mu_law_samples()[np.frombuffer(data, np.uint8)]
    if format.type == A_LAW:
        return _a_law_samples()[np.frombuffer(data, np.uint8)]
    if len(data) % 2:
        raise WireError(f"16-bit PCM has two bytes per sample; {len(data)} bytes end in half a sample", "invalid_audio")
    return pcm16_to_float(data)


def encode(samples: Samples, format: WireFormat) -> bytes:
    """The bytes of samples at the rate of the format."""
    pcm = float_to_pcm16(samples)
    if format.type == MU_LAW:
        return _mu_law_bytes()[pcm.view(np.uint16)].tobytes()
    if format.type == A_LAW:
        return _a_law_bytes()[pcm.view(np.uint16)].tobytes()
    return pcm.astype("<i2", copy=False).tobytes()


def resample(samples: Samples, from_rate: int, to_rate: int) -> Samples:
    """Complete audio at another rate."""
    return resampler(from_rate, to_rate).forward(samples[None])[0]


@cache
def resampler(from_rate: int, to_rate: int) -> LiveResampler:
    """The resampling filters between two rates, with a shorter lag for telephone sound; cached."""
    return LiveResampler(from_rate, to_rate, TELEPHONE if TELEPHONE_RATE in (from_rate, to_rate) else None)


class SoundReader(Protocol):
    """Decodes bytes of a client to samples at the conversation's rate."""

    def read(self, data: bytes) -> Samples:
        """The samples that these bytes complete."""
        ...


class SoundWriter(Protocol):
    """Encodes samples of a conversation to bytes for a client."""

    def write(self, samples: Samples) -> list[bytes]:
        """The packets that these samples complete; may be empty."""
        ...

    def flush(self) -> list[bytes]:
        """The last packets of the audio; the writer can then be used for the next audio."""
        ...


class FormatReader:
    """Decodes a stream of PCM or G.711."""

    def __init__(self, format: WireFormat, rate: int) -> None:
        self.format = format
        self._resampler = resampler(format.rate, rate)
        self._state = self._resampler.initial_state()

    def read(self, data: bytes) -> Samples:
        output, self._state = self._resampler.step(self._state, decode(data, self.format)[None])
        return output[0]


class FormatWriter:
    """Encodes a stream of PCM or G.711."""

    def __init__(self, rate: int, format: WireFormat) -> None:
        self.format = format
        self._resampler = resampler(rate, format.rate)
        self._state = self._resampler.initial_state()

    def write(self, samples: Samples) -> list[bytes]:
        output, self._state = self._resampler.step(self._state, samples[None])
        return [encode(output[0], self.format)] if output.size else []

    def flush(self) -> list[bytes]:
        rest = self._resampler.flush(self._state)[0]
        self._state = self._resampler.initial_state()
        return [encode(rest, self.format)] if rest.size else []


class InputFormats(NamedTuple):
    """How the audio of a client is encoded, and the rate it is decoded to; also sent to door processes."""

    type: FormatName
    rate: SampleRate
    binary: Binary | None
    input_rate: int

    @property
    def format(self) -> WireFormat:
        """The format of audio that is not Opus."""
        return WireFormat(self.type, self.rate)

    def new_reader(self) -> SoundReader:
        """A decoder."""
        return OpusReader(self.input_rate) if self.binary == "opus" else FormatReader(self.format, self.input_rate)


SLICE_SECONDS = 0.2  # long audio is decoded in slices; between them other connections are served


def slices(data: bytes, format: WireFormat) -> list[bytes]:
    """The bytes in slices of whole samples."""
    if len(data) % format.bytes_per_sample:
        raise WireError(f"16-bit PCM has two bytes per sample; {len(data)} bytes end in half a sample", "invalid_audio")
    step = round(SLICE_SECONDS * format.rate) * format.bytes_per_sample
    return [data[begin : begin + step] for begin in range(0, len(data), step)]


# ITU-T G.711. Both laws are piecewise linear with 8 segments of 16 steps, the step doubling with the segment.

_ALL_PCM = np.arange(65_536, dtype=np.uint16).view(np.int16).astype(np.int32)  # every int16, in the order of its bits
_MU_BIAS, _MU_CLIP = 132, 32_635


@cache
def _mu_law_samples() -> Samples:
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    magnitude = ((((code & 0x0F) << 3) + _MU_BIAS) << ((code & 0x70) >> 4)) - _MU_BIAS
    return _scaled(np.where(code & 0x80, -magnitude, magnitude))


@cache
def _mu_law_bytes() -> NDArray[np.uint8]:
    magnitude = np.minimum(np.abs(_ALL_PCM), _MU_CLIP) + _MU_BIAS
    segment = np.floor(np.log2(magnitude)).astype(np.int32) - 7
    code = np.where(_ALL_PCM < 0, 0x80, 0) | segment << 4 | magnitude >> (segment + 3) & 0x0F
    return (~code & 0xFF).astype(np.uint8)


@cache
def _a_law_samples() -> Samples:
    code = np.arange(256, dtype=np.int32) ^ 0x55
    segment, step = (code & 0x70) >> 4, (code & 0x0F) << 4
    magnitude = np.where(segment == 0, step + 8, (step + 0x108) << np.maximum(segment - 1, 0))
    return _scaled(np.where(code & 0x80, magnitude, -magnitude))


@cache
def _a_law_bytes() -> NDArray[np.uint8]:
    is_negative = _ALL_PCM < 0
    magnitude = np.where(is_negative, -_ALL_PCM - 1, _ALL_PCM) >> 3  # 13 bits are left
    segment = np.maximum(np.floor(np.log2(np.maximum(magnitude, 1))).astype(np.int32) - 4, 0)
    code = segment << 4 | magnitude >> np.maximum(segment, 1) & 0x0F
    return (code ^ np.where(is_negative, 0x55, 0xD5)).astype(np.uint8)


def _scaled(pcm: NDArray[np.int32]) -> Samples:
    return pcm16_to_float(pcm.astype(np.int16))


# Opus

RATE = 48_000  # which every Opus decoder supports
FRAME = 960
BITS_PER_SECOND = 32_000


class OpusReader:
    """Decodes Opus packets to samples at `rate`."""

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
            raise WireError(f"{len(data)} bytes are not an Opus packet: {error}", "invalid_audio") from None
        pieces = [to_mono(frame) for frame in frames]
        samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
        output, self._state = self._resampler.step(self._state, samples[None])
        return output[0]


class OpusWriter:
    """Encodes samples at `rate` to Opus packets of 20 ms."""

    def __init__(self, rate: int) -> None:
        self._codec = _av().CodecContext.create("libopus", "w")
        self._codec.sample_rate, self._codec.layout, self._codec.format = RATE, "mono", "s16"
        self._codec.bit_rate = BITS_PER_SECOND
        self._codec.options = {"application": "voip", "frame_duration": "20"}
        self._codec.open()
        self._resampler = resampler(rate, RATE)
        self._state = self._resampler.initial_state()
        self._pending: Samples = np.zeros(0, np.float32)
        self._sent = 0

    def write(self, samples: Samples) -> list[bytes]:
        """The packets that these samples complete."""
        output, self._state = self._resampler.step(self._state, samples[None])
        return self._packets(output[0])

    def flush(self) -> list[bytes]:
        """The last packet, padded with silence."""
        rest = self._resampler.flush(self._state)[0]
        self._state = self._resampler.initial_state()
        missing = -(len(self._pending) + len(rest)) % FRAME
        return self._packets(np.concatenate([rest, np.zeros(missing, np.float32)]))

    def _packets(self, samples: Samples) -> list[bytes]:
        pending = np.concatenate([self._pending, samples])
        whole = len(pending) - len(pending) % FRAME
        self._pending = pending[whole:]
        return [packet for start in range(0, whole, FRAME) for packet in self._encode(pending[start : start + FRAME])]

    def _encode(self, samples: Samples) -> list[bytes]:
        frame = _av().AudioFrame.from_ndarray(float_to_pcm16(samples)[None], format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), self._sent
        self._sent += FRAME
        return [bytes(packet) for packet in self._codec.encode(frame)]


def to_mono(frame: Any) -> Samples:
    """The float samples of a PyAV frame, mixed to mono."""
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
