"""Key presses as RTP events (RFC 4733), in both directions."""

import struct
from collections import deque
from dataclasses import dataclass

DIGITS = "0123456789*#ABCD"  # by event code
TONE_SECONDS = 0.1
PAUSE_SECONDS = 0.06  # between two digits, at least 45 ms
END_PACKETS = 3
VOLUME_DBM0 = 10  # the tone has a level of -10 dBm0
MAX_DURATION = 0xFFFF  # of one event; a longer one goes on as the next, at a later timestamp
MAX_LATE = 480_000  # clock units that a packet of an earlier event may be behind, 10 s of Opus
TIMESTAMPS = 1 << 32
_EVENT = struct.Struct("!BBH")


def check_digits(digits: str) -> str:
    """The digits in upper case; ValueError where one is no key."""
    keys = digits.upper()
    if unknown := [key for key in keys if key not in DIGITS]:
        raise ValueError(f"{unknown[0]!r} is not a telephone key; use {DIGITS}")
    return keys


@dataclass(frozen=True)
class TelephoneEvent:
    """The payload of an event packet."""

    code: int
    is_end: bool
    duration: int

    @classmethod
    def parse(cls, payload: bytes) -> "TelephoneEvent | None":
        """The event of a payload; None where it is too short."""
        if len(payload) < _EVENT.size:
            return None
        code, flags, duration = _EVENT.unpack_from(payload)
        return cls(code, bool(flags & 0x80), duration)

    def format(self) -> bytes:
        """The payload."""
        return _EVENT.pack(self.code, (0x80 if self.is_end else 0) | VOLUME_DBM0, self.duration)


class DigitReceiver:
    """Reports each key press once, from whichever of its packets arrives first.

    The packets of an event share a timestamp: later ones, the repeated end packets among them, are ignored, as are
    packets of earlier events that arrive late. An event of more than 65,535 clock units goes on in a second one.
    """

    def __init__(self) -> None:
        self._timestamp: int | None = None
        self._event = TelephoneEvent(0, True, 0)

    def receive(self, payload: bytes, timestamp: int, is_marked: bool) -> str | None:
        """The digit that this packet reports, if it is new."""
        event = TelephoneEvent.parse(payload)
        if event is None or event.code >= len(DIGITS):
            return None
        if self._timestamp is not None and 0 < (self._timestamp - timestamp) % TIMESTAMPS < MAX_LATE:
            return None
        is_same = timestamp == self._timestamp
        is_continued = not (is_same or is_marked) and self._continues(event, timestamp)
        if not is_same or event.duration >= self._event.duration:
            self._timestamp, self._event = timestamp, event
        return None if is_same or is_continued else DIGITS[event.code]

    def _continues(self, event: TelephoneEvent, timestamp: int) -> bool:
        last = self._event
        if self._timestamp is None or last.is_end or last.code != event.code:
            return False
        return (timestamp - self._timestamp) % TIMESTAMPS == MAX_DURATION


@dataclass(frozen=True)
class EventPacket:
    """An event packet to send: its payload and marker, and its age, from which its timestamp follows."""

    payload: bytes
    is_marked: bool
    age: int
    """Clock units since the event began."""


class DigitSender:
    """Makes the event packets of digits, one for each frame of 20 ms."""

    def __init__(self, frame: int, clock_rate: int) -> None:
        self._frame = frame
        self._tone = round(TONE_SECONDS * clock_rate)
        self._pause = round(PAUSE_SECONDS * clock_rate)
        self._packets: deque[EventPacket | None] = deque()

    @property
    def is_sending(self) -> bool:
        """Whether a digit, or the pause after it, is under way."""
        return bool(self._packets)

    def add(self, digit: str) -> None:
        """Send this digit after those before it."""
        code = DIGITS.index(digit)
        ages = range(0, self._tone, self._frame)
        for age in ages:
            payload = TelephoneEvent(code, False, age + self._frame).format()
            self._packets.append(EventPacket(payload, age == 0, age))
        end = TelephoneEvent(code, True, len(ages) * self._frame).format()
        for repeat in range(END_PACKETS):
            self._packets.append(EventPacket(end, False, (len(ages) + repeat) * self._frame))
        self._packets.extend([None] * -(-self._pause // self._frame))

    def next(self) -> EventPacket | None:
        """The packet of the next frame; None in pauses."""
        return self._packets.popleft() if self._packets else None
