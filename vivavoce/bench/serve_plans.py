"""What the processes of `viva bench serve` tell each other, in JSON and MessagePack."""

import msgspec


class EncodedQuestion(msgspec.Struct, frozen=True):
    """A question as messages; its last voiced sample is the last of the message `last`."""

    messages: list[bytes]
    onset: float
    """Seconds from the start of the first message to the first voiced sample."""
    last: int


class EncodedSounds(msgspec.Struct, frozen=True):
    """The messages of one transport, each with the same seconds of audio; the noise can be repeated."""

    packet_seconds: float
    noise: list[bytes]
    questions: list[EncodedQuestion]


class CallPlan(msgspec.Struct, frozen=True):
    """What a caller does."""

    number: int
    start: float
    """Seconds after the start of the level."""
    questions: list[int]
    """One for each turn."""
    interrupt_after: float | None = None
    """Seconds of the first reply that are heard before the caller interrupts it, with the same question."""


class CallerPlan(msgspec.Struct, frozen=True):
    """The work of one caller process."""

    url: str
    key: str | None
    transport: str
    sounds: str
    """The file of the `EncodedSounds`."""
    reply_seconds: float
    calls: list[CallPlan]
    ends: float | None = None
    """Seconds after the start at which everybody leaves; None: when all conversations are over."""


class TurnResult(msgspec.Struct):
    """One question and its reply. Times are seconds."""

    asked_at: float
    """When the last speech sample was sent, from the start of the level."""
    interrupts: bool = False
    """Whether the question interrupted a reply."""
    first_sound: float | None = None
    """From the last speech sample sent to the first sound received; None: never answered."""
    yielded: float | None = None
    """From the onset of the interruption to the end of playback; None: the reply played on."""
    underruns: int = 0
    dry_seconds: float = 0.0
    first_dry_at: float | None = None
    """Seconds into the reply."""
    sound_seconds: float = 0.0
    is_over: bool = False
    """Whether the reply was heard to its end, or interrupted."""


class CallResult(msgspec.Struct):
    """One conversation."""

    number: int
    turns: list[TurnResult] = msgspec.field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    opened: float | None = None
    """Seconds until the session was open."""
    refused: float | None = None
    """Seconds until it was refused."""
    refusal: str = ""
    false_stops: int = 0
    """Replies that were stopped although the caller was silent."""
    failure: str = ""


class CallerReport(msgspec.Struct):
    """How late and how busy a caller process was."""

    cpu_share: float
    lateness_ms: dict[str, float]
    """Of the microphones' messages: p50, p99 and max."""
    messages: int
