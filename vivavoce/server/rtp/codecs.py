"""The codecs of telephone calls as RTP payloads: G.711, G.722, L16 and Opus."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Protocol

import av
import numpy as np

from vivavoce.audio.io import float_to_pcm16, pcm16_to_float
from vivavoce.dialogue.items import Samples
from vivavoce.server.realtime.audio_formats import (
    A_LAW,
    MU_LAW,
    RATE,
    TELEPHONE_RATE,
    OpusReader,
    OpusWriter,
    WireFormat,
    decode,
    encode,
    to_mono,
)
from vivavoce.server.rtp.concealment import PitchConcealment
from vivavoce.server.wire import WireError

TELEPHONE_EVENT: Final = "telephone-event"
COMFORT_NOISE_PAYLOAD_TYPE: Final = 13  # RFC 3389, at a clock of 8 kHz
FRAME_SECONDS: Final = 0.02
FRAMES_PER_SECOND: Final = 50
WIDEBAND_RATE: Final = 16_000
MU_LAW_FORMAT: Final = WireFormat(MU_LAW, TELEPHONE_RATE)
A_LAW_FORMAT: Final = WireFormat(A_LAW, TELEPHONE_RATE)


@dataclass(frozen=True)
class RtpCodec:
    """A codec as SDP names it."""

    name: str
    payload_type: int
    clock_rate: int
    """Of RTP timestamps; that of G.722 is half its sample rate (RFC 3551)."""
    channels: int = 1
    fmtp: str | None = None

    @property
    def sample_rate(self) -> int:
        """Of the audio it carries, which is mono here."""
        return WIDEBAND_RATE if self.name.upper() == "G722" else self.clock_rate

    @property
    def is_stateless(self) -> bool:
        """Whether samples are encoded one by one, whatever was before."""
        return self.name.upper() in ("PCMU", "PCMA", "L16")

    @property
    def has_comfort_noise(self) -> bool:
        """Whether the static payload type of comfort noise can stand beside it."""
        return self.clock_rate == TELEPHONE_RATE


Codec = RtpCodec  # for modules that know no other codecs
CODECS: Final = (
    RtpCodec("opus", 111, RATE, 2, "stereo=0;sprop-stereo=0"),
    RtpCodec("G722", 9, TELEPHONE_RATE),
    RtpCodec("PCMU", 0, TELEPHONE_RATE),
    RtpCodec("PCMA", 8, TELEPHONE_RATE),
    RtpCodec("L16", 118, WIDEBAND_RATE),
)
"""Supported codecs, the preferred first; a peer may have other payload types for those from 96 on."""


class PayloadDecoder(Protocol):
    """Decodes the payloads of one stream, in order."""

    def decode(self, payload: bytes) -> Samples:
        """The samples of a payload; WireError where it is not valid."""
        ...

    def conceal(self, count: int) -> Samples:
        """As many samples in place of lost ones."""
        ...


PayloadEncoder = Callable[[Samples], bytes]
"""Encodes 20 ms of samples."""


def new_decoder(codec: RtpCodec) -> PayloadDecoder:
    """A decoder for a stream of this codec; WireError where it is not supported."""
    match codec.name.upper():
        case "OPUS":
            return OpusDecoder()
        case "G722":
            return ConcealingDecoder(G722Decoder().decode, codec.sample_rate)
        case "PCMU":
            return ConcealingDecoder(lambda payload: decode(payload, MU_LAW_FORMAT), codec.sample_rate)
        case "PCMA":
            return ConcealingDecoder(lambda payload: decode(payload, A_LAW_FORMAT), codec.sample_rate)
        case "L16":
            return ConcealingDecoder(decode_l16, codec.sample_rate)
    raise _unsupported(codec)


def new_encoder(codec: RtpCodec) -> PayloadEncoder:
    """An encoder for a stream of this codec; WireError where it is not supported."""
    match codec.name.upper():
        case "OPUS":
            return OpusEncoder().encode
        case "G722":
            return G722Encoder().encode
        case "PCMU":
            return lambda samples: encode(samples, MU_LAW_FORMAT)
        case "PCMA":
            return lambda samples: encode(samples, A_LAW_FORMAT)
        case "L16":
            return lambda samples: float_to_pcm16(samples).astype(">i2").tobytes()
    raise _unsupported(codec)


def _unsupported(codec: RtpCodec) -> WireError:
    names = ", ".join(each.name for each in CODECS)
    return WireError(f"codec {codec.name!r} is not supported; use one of {names}", "invalid_sdp")


def decode_l16(payload: bytes) -> Samples:
    """The samples of 16-bit PCM in network byte order."""
    if len(payload) % 2:
        raise WireError(f"an L16 payload of {len(payload)} bytes ends in half a sample", "invalid_audio")
    return pcm16_to_float(np.frombuffer(payload, ">i2").astype(np.int16))


class ConcealingDecoder:
    """Decodes a codec that cannot conceal lost packets itself."""

    def __init__(self, decode: Callable[[bytes], Samples], rate: int) -> None:
        self._decode = decode
        self._concealment = PitchConcealment(rate)

    def decode(self, payload: bytes) -> Samples:
        """The samples of a payload, joined smoothly to concealed ones before."""
        return self._concealment.received(self._decode(payload))

    def conceal(self, count: int) -> Samples:
        """Samples that continue the last ones, fading to silence."""
        return self._concealment.lost(count)


class OpusDecoder:
    """Decodes Opus; libopus conceals lost packets."""

    def __init__(self) -> None:
        self._reader = OpusReader(RATE)
        self._lost: bytes | None = None  # stands for a lost packet
        self._concealed: Samples = np.zeros(0, np.float32)

    def decode(self, payload: bytes) -> Samples:
        """The samples of a payload."""
        samples = self._reader.read(payload)
        # A packet of a header byte alone has an empty frame, which libopus treats as a lost one. Code 0: one frame.
        self._lost = bytes([payload[0] & 0xFC]) if payload else self._lost
        self._concealed = self._concealed[:0]
        return samples

    def conceal(self, count: int) -> Samples:
        """What libopus makes up for lost packets."""
        while len(self._concealed) < count:
            samples = np.zeros(count, np.float32) if self._lost is None else self._reader.read(self._lost)
            self._concealed = np.concatenate([self._concealed, samples])
        samples, self._concealed = self._concealed[:count], self._concealed[count:]
        return samples


class OpusEncoder:
    """Encodes packets of 20 ms."""

    def __init__(self) -> None:
        self._writer = OpusWriter(RATE)

    def encode(self, samples: Samples) -> bytes:
        """The packet of 20 ms of samples."""
        return b"".join(self._writer.write(samples))


class G722Decoder:
    """Decodes G.722 at 64 kbit/s."""

    def __init__(self) -> None:
        self._codec: Any = av.CodecContext.create("g722", "r")
        self._codec.sample_rate, self._codec.layout = WIDEBAND_RATE, "mono"

    def decode(self, payload: bytes) -> Samples:
        """The samples of a payload."""
        try:
            frames = self._codec.decode(av.Packet(payload)) if payload else []
        except (av.error.FFmpegError, ValueError) as error:
            raise WireError(f"{len(payload)} bytes are not G.722: {error}", "invalid_audio") from None
        pieces = [to_mono(frame) for frame in frames]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


class G722Encoder:
    """Encodes G.722 at 64 kbit/s."""

    def __init__(self) -> None:
        self._codec: Any = av.CodecContext.create("g722", "w")
        self._codec.sample_rate, self._codec.layout, self._codec.format = WIDEBAND_RATE, "mono", "s16"
        self._codec.open()
        self._sent = 0

    def encode(self, samples: Samples) -> bytes:
        """The payload of 20 ms of samples."""
        frame = av.AudioFrame.from_ndarray(float_to_pcm16(samples)[None], format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = WIDEBAND_RATE, Fraction(1, WIDEBAND_RATE), self._sent
        self._sent += len(samples)
        return b"".join(bytes(packet) for packet in self._codec.encode(frame))
