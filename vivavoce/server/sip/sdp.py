"""SDP of telephone calls (RFC 8866): which audio a peer offers, our answer to it, and our own offers (RFC 3264)."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Final, Literal, TypeAlias

from vivavoce.server.rtp.codecs import CODECS, TELEPHONE_EVENT, RtpCodec
from vivavoce.server.rtp.srtp import CryptoAttribute, SrtpKeys
from vivavoce.server.rtp.stream import MediaSettings
from vivavoce.server.wire import WireError

Direction: TypeAlias = Literal["sendrecv", "sendonly", "recvonly", "inactive"]

DIRECTIONS: Final[dict[str, Direction]] = {
    **{"sendrecv": "sendrecv", "sendonly": "sendonly", "recvonly": "recvonly", "inactive": "inactive"}
}
ANSWERED: Final[dict[Direction, Direction]] = {
    **{"sendrecv": "sendrecv", "sendonly": "recvonly", "recvonly": "sendonly", "inactive": "inactive"}
}
PLAIN, SECURE = ("RTP/AVP", "RTP/AVPF"), ("RTP/SAVP", "RTP/SAVPF")
STATIC_CODECS = {0: ("PCMU", 8_000, 1), 8: ("PCMA", 8_000, 1), 9: ("G722", 8_000, 1)}
DIGITS_PAYLOAD_TYPE = 101
MAX_MEDIA = 16
MAX_FORMATS = 64

_MEDIA = re.compile(r"([a-z]{1,16}) (\d{1,5})(?:/\d+)? ([A-Z0-9/]{1,32})((?: [\w*-]{1,32})*)", re.IGNORECASE)
_RTPMAP = re.compile(r"(\d{1,3}) +([\w.-]{1,32})/(\d{1,6})(?:/(\d{1,2}))?")


@dataclass(frozen=True)
class MediaSection:
    """One m= section."""

    kind: str
    port: int
    profile: str
    formats: tuple[str, ...]
    address: str
    attributes: tuple[str, ...]
    """The values of its a= lines, and of those of the session before them."""

    @property
    def direction(self) -> Direction:
        """That of the peer; an address of zeros means hold, as before RFC 3264."""
        named = [DIRECTIONS[each] for each in self.attributes if each in DIRECTIONS]
        direction = named[-1] if named else "sendrecv"
        is_zero = self.address in ("0.0.0.0", "::")
        return "sendonly" if is_zero and direction == "sendrecv" else direction

    def values(self, name: str) -> list[str]:
        """The values of its attributes of this name."""
        return [each[len(name) + 1 :] for each in self.attributes if each.startswith(f"{name}:")]


@dataclass(frozen=True)
class PeerAudio:
    """The audio of a peer as its SDP describes it."""

    remote: tuple[str, int]
    profile: str
    direction: Direction
    codecs: tuple[RtpCodec, ...]
    """Those we support, with the peer's payload types and in its order."""
    digits: tuple[tuple[int, int], ...]
    """Payload types of telephone events, and their clock rates."""
    crypto: tuple[CryptoAttribute, ...]
    has_rtcp_mux: bool = False

    @property
    def is_secure(self) -> bool:
        return self.profile in SECURE

    @property
    def codec(self) -> RtpCodec:
        """The one we prefer."""
        names = [each.name.lower() for each in CODECS]
        return min(self.codecs, key=lambda codec: names.index(codec.name.lower()))

    def digits_payload_type(self, codec: RtpCodec) -> int | None:
        """For keys pressed, beside a codec: at its clock rate where the peer has that."""
        matching = [payload_type for payload_type, rate in self.digits if rate == codec.clock_rate]
        others = [payload_type for payload_type, _ in self.digits]
        return next(iter((*matching, *others)), None)


@dataclass(frozen=True)
class Description:
    """A session description."""

    media: tuple[MediaSection, ...]

    @classmethod
    def parse(cls, text: str) -> "Description":
        """The description; WireError where it is malformed."""
        session: list[str] = []
        sections: list[list[str]] = []
        for line in text.replace("\r\n", "\n").split("\n"):
            if line.startswith("m="):
                sections.append([])
            if line.strip():
                (sections[-1] if sections else session).append(line)
        if not sections or not text.startswith("v=0") or len(sections) > MAX_MEDIA:
            raise _invalid("the SDP has no media, or too many")
        return cls(tuple(_media(session, section) for section in sections))

    @property
    def audio_index(self) -> int:
        """Which of the media is the audio of the call; WireError where none can be."""
        for index, media in enumerate(self.media):
            if media.kind == "audio" and media.port and media.profile in (*PLAIN, *SECURE):
                return index
        raise _invalid("the SDP has no audio over RTP")

    @property
    def audio(self) -> PeerAudio:
        """The audio of the call; WireError where there is none that can be used."""
        media = self.media[self.audio_index]
        codecs, digits = _codecs(media)
        if not codecs:
            names = ", ".join(each.name for each in CODECS)
            raise _invalid(f"none of the codecs is supported; use one of {names}")
        crypto = _crypto(media) if media.profile in SECURE else ()
        remote, has_rtcp_mux = (media.address, media.port), "rtcp-mux" in media.attributes
        return PeerAudio(remote, media.profile, media.direction, codecs, digits, crypto, has_rtcp_mux)


@dataclass
class LocalAudio:
    """Our end of the audio: writes offers and answers, and turns those of the peer into settings of the stream."""

    host: str
    port: int
    is_secure: bool = False
    """Whether our own offers are for SRTP, as the last one that we answered was."""
    _version: int = 0
    _crypto: CryptoAttribute | None = None

    def __post_init__(self) -> None:
        self._id = secrets.randbits(48)

    def answer(self, text: str) -> tuple[str, MediaSettings]:
        """The answer to an offer, and the settings that they agree on; WireError where it cannot be answered."""
        offer = Description.parse(text)
        audio, index = offer.audio, offer.audio_index
        keys, attributes = None, ["rtcp-mux"] if audio.has_rtcp_mux else []
        self.is_secure = audio.is_secure
        if audio.is_secure:
            if not audio.crypto:
                raise _invalid("the offer of SRTP has no a=crypto that is supported")
            remote = audio.crypto[0]
            known = self._crypto
            is_kept = known is not None and (known.suite, known.tag) == (remote.suite, remote.tag)
            local = known if known is not None and is_kept else CryptoAttribute.new(remote.suite, remote.tag)
            self._crypto, keys = local, SrtpKeys.of(local, remote)
            attributes.append(f"crypto:{local.format()}")
        codec, direction = audio.codec, ANSWERED[audio.direction]
        digits = audio.digits_payload_type(codec)
        sections = [
            self._section(audio.profile, [codec], _digits_of(audio, digits), direction, attributes)
            if at == index
            else f"m={media.kind} 0 {media.profile} {' '.join(media.formats) or '0'}\r\n"
            for at, media in enumerate(offer.media)
        ]
        settings = MediaSettings(codec, digits, audio.remote, direction, keys, audio.has_rtcp_mux)
        return self._description(sections), settings

    def offer(self, codecs: Sequence[RtpCodec] = CODECS, direction: Direction = "sendrecv") -> str:
        """An offer of ours."""
        attributes, profile = [], PLAIN[0]
        if self.is_secure:
            self._crypto = self._crypto or CryptoAttribute.new()
            profile = SECURE[0]
            attributes.append(f"crypto:{self._crypto.format()}")
        digits = [(DIGITS_PAYLOAD_TYPE, 8_000)]
        return self._description([self._section(profile, codecs, digits, direction, attributes)])

    def answered(self, text: str) -> MediaSettings:
        """The settings of the peer's answer to our offer; WireError where it does not fit."""
        audio = Description.parse(text).audio
        keys = None
        if audio.is_secure != self.is_secure:
            raise _invalid("the answer changes whether the audio is encrypted")
        if self._crypto is not None and audio.is_secure:
            if not audio.crypto:
                raise _invalid("the answer has no a=crypto that is supported")
            keys = SrtpKeys.of(self._crypto, audio.crypto[0])
        codec = audio.codecs[0]  # the answerer's choice
        digits = audio.digits_payload_type(codec)
        return MediaSettings(codec, digits, audio.remote, ANSWERED[audio.direction], keys)

    def _description(self, sections: Sequence[str]) -> str:
        self._version += 1
        family = "IP6" if ":" in self.host else "IP4"
        origin = f"o=viva {self._id} {self._version} IN {family} {self.host}\r\n"
        return f"v=0\r\n{origin}s=-\r\nc=IN {family} {self.host}\r\nt=0 0\r\n" + "".join(sections)

    def _section(
        self,
        profile: str,
        codecs: Sequence[RtpCodec],
        digits: Sequence[tuple[int, int]],
        direction: Direction,
        attributes: Sequence[str],
    ) -> str:
        payload_types = [codec.payload_type for codec in codecs] + [payload_type for payload_type, _ in digits]
        lines = [f"m=audio {self.port} {profile} {' '.join(map(str, payload_types))}"]
        for codec in codecs:
            channels = f"/{codec.channels}" if codec.channels > 1 else ""
            lines.append(f"a=rtpmap:{codec.payload_type} {codec.name}/{codec.clock_rate}{channels}")
            if codec.fmtp:
                lines.append(f"a=fmtp:{codec.payload_type} {codec.fmtp}")
        for payload_type, rate in digits:
            lines += [f"a=rtpmap:{payload_type} {TELEPHONE_EVENT}/{rate}", f"a=fmtp:{payload_type} 0-15"]
        lines += ["a=ptime:20", f"a={direction}", *(f"a={each}" for each in attributes)]
        return "".join(f"{line}\r\n" for line in lines)


def _media(session: Sequence[str], section: Sequence[str]) -> MediaSection:
    match = _MEDIA.fullmatch(section[0][2:].strip())
    if match is None or int(match[2]) > 65_535:
        raise _invalid("an m= line is malformed")
    formats = tuple(match[4].split())
    if len(formats) > MAX_FORMATS:
        raise _invalid(f"an m= line has at most {MAX_FORMATS} formats")
    connections = [line[2:].split() for line in (*session, *section) if line.startswith("c=")]
    attributes = tuple(line[2:].strip() for line in (*session, *section) if line.startswith("a="))
    address = connections[-1][-1].partition("/")[0] if connections and connections[-1] else ""
    kind, port = match[1].lower(), int(match[2])
    if kind == "audio" and port:
        try:
            parsed = ip_address(address)
        except ValueError:
            raise _invalid("the c= line of the audio has no IP address") from None
        if parsed.is_multicast:
            raise _invalid("the audio goes to a multicast address")
    return MediaSection(kind, port, match[3].upper(), formats, address, attributes)


def _codecs(media: MediaSection) -> tuple[tuple[RtpCodec, ...], tuple[tuple[int, int], ...]]:
    """The codecs that we support, and the telephone events with their clock rates."""
    maps = dict(STATIC_CODECS)
    for value in media.values("rtpmap"):
        if (match := _RTPMAP.fullmatch(value)) is not None:
            maps[int(match[1])] = (match[2], int(match[3]), int(match[4] or 1))
    codecs, digits = [], []
    for payload_type in (int(each) for each in media.formats if each.isascii() and each.isdigit()):
        if payload_type > 127 or payload_type not in maps:
            continue
        name, rate, channels = maps[payload_type]
        if name.lower() == TELEPHONE_EVENT:
            digits.append((payload_type, rate))
        for known in CODECS:
            if (name.lower(), rate, channels) == (known.name.lower(), known.clock_rate, known.channels):
                codecs.append(replace(known, payload_type=payload_type))
    return tuple(codecs), tuple(digits)


def _crypto(media: MediaSection) -> tuple[CryptoAttribute, ...]:
    """The a=crypto attributes that are supported."""
    found = []
    for value in media.values("crypto"):
        try:
            found.append(CryptoAttribute.parse(value))
        except WireError:  # another suite may follow
            continue
    return tuple(found)


def _digits_of(audio: PeerAudio, payload_type: int | None) -> list[tuple[int, int]]:
    return [each for each in audio.digits if each[0] == payload_type][:1]


def _invalid(message: str) -> WireError:
    return WireError(message, "invalid_sdp")
