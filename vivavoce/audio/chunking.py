"""Chunk sizes of streaming decoders: small at first, for a quick answer, larger as the lead over playback grows.

Small chunks have low latency but cost a decoder pass each; large ones are cheap but late. A decoder states its minimal
chunk (`ChunkUnit`); a policy decides, whenever frames are waiting, how many of them to decode now.
"""

from dataclasses import dataclass
from typing import Protocol

from vivavoce.audio.player import PlaybackClock
from vivavoce.errors import InputError

REPLY_SECONDS = 4.0
MANY_REPLIES = 8  # among this many, a chunk may take twice as long as usual
LONGER_GAP = 1.25  # times the expected gap between chunks: the next one may be longer
GAP_MARGIN = 0.05  # seconds added to it, for short gaps


@dataclass(frozen=True)
class ChunkUnit:
    """The minimal chunk of a streaming decoder: chunks are multiples of `frames`, each followed by `lookahead` more."""

    frames: int = 1
    lookahead: int = 0
    frame_seconds: float = 0.08


class ChunkPolicy(Protocol):
    """Decides the size of the next chunk."""

    @property
    def unit(self) -> ChunkUnit:
        """The decoder's minimal chunk."""
        ...

    def wanted(self, chunks: int, lead: float) -> int:
        """Frames the next chunk should have, after `chunks` previous ones, with `lead` seconds over playback."""
        ...

    def max_frames(self, chunks: int, lead: float) -> int:
        """Frames the next chunk may have where they are available already."""
        ...


@dataclass(frozen=True)
class LeadPolicy:
    """The first chunk as small as the decoder allows; later ones take a share of the lead, up to `max_seconds`."""

    unit: ChunkUnit
    share: float = 0.5
    max_seconds: float = 1.6
    doubles: bool = False
    """Whether chunks are one, two, four … units long, so that those of several replies can be batched."""
    first_units: int = 1
    """Minimum units of the first chunk."""
    min_later_units: int = 1
    """Minimum units of every other chunk."""
    end: float = 1.0
    """Maximum length of the last chunk, as a multiple of the wanted one: saves a pass for a few frames."""
    making: float | None = None
    """Seconds that decoding the longest chunk takes. With at least this lead, all waiting frames are decoded in one
    chunk, with less at most two units; None: never."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.max_seconds <= 0:
            raise InputError(
                f"share must be in (0, 1] and max_seconds above 0, not {self.share} and {self.max_seconds}"
            )

    def wanted(self, chunks: int, lead: float) -> int:
        """Frames that take `share` of the lead to play: the rest of the lead is for decoding them."""
        affordable = min(lead * self.share, self.max_seconds) / self.unit.frame_seconds
        units = max(self.min_later_units if chunks else self.first_units, int(affordable / self.unit.frames + 1e-9))
        return (1 << (units.bit_length() - 1) if self.doubles else units) * self.unit.frames

    def max_frames(self, chunks: int, lead: float) -> int:
        """Frames to decode in one chunk if available: long chunks cost much less for many replies."""
        if self.making is None or chunks == 0:
            return self.wanted(chunks, lead)
        max_seconds = self.max_seconds / self.unit.frame_seconds
        return max(2 * self.unit.frames, round(max_seconds)) if lead >= self.making else 2 * self.unit.frames

    def sizes(self) -> list[int]:
        """All sizes of later chunks, in frames."""
        seconds = self.unit.frames * self.unit.frame_seconds
        max_frames = max(1, int(self.max_seconds / seconds + 1e-9))
        return sorted({self.wanted(1, units * seconds / self.share) for units in range(1, max_frames + 1)})


@dataclass(frozen=True)
class FixedPolicy:
    """A first chunk of `first` frames, then chunks of `then`, whatever the lead; rounded up to whole units."""

    unit: ChunkUnit
    first: int = 2
    then: int = 4

    def __post_init__(self) -> None:
        if self.first < 1 or self.then < 1:
            raise InputError(f"chunks need at least one frame, not {self.first} and {self.then}")

    def wanted(self, chunks: int, lead: float) -> int:
        """The fixed size."""
        frames = self.first if chunks == 0 else self.then
        return -(-frames // self.unit.frames) * self.unit.frames

    def max_frames(self, chunks: int, lead: float) -> int:
        """As many as wanted."""
        return self.wanted(chunks, lead)


def next_chunk(policy: ChunkPolicy, waiting: int, is_last: bool, chunks: int, lead: float) -> int:
    """Frames to decode now, of those waiting; 0: wait for more. `is_last`: no more will come, decode the rest."""
    wanted, max_frames = policy.wanted(chunks, lead), policy.max_frames(chunks, lead)
    while 2 * wanted <= max_frames and waiting >= 2 * wanted + policy.unit.lookahead:
        wanted *= 2
    if waiting >= wanted + policy.unit.lookahead and not (is_last and waiting <= wanted):
        return wanted
    return waiting if is_last else 0


@dataclass
class ChunkGapEstimate:
    """Running means of the gap between a reply's first and second chunk, and of the replies generated meanwhile.

    The two are averaged separately. A mean of gaps per reply would count a gap observed alone, which includes costs
    that concurrent replies share, once for each of many replies.
    """

    seconds: float = 0.0
    """Mean gap; 0: none observed yet."""
    replies: float = 1.0
    """Mean number of replies among which the gaps were observed."""
    share: float = 0.2
    """Weight of the newest gap in the means."""
    margin: float = 0.03
    """Seconds by which `wait` exceeds the expected gap, per reply."""
    is_batched: bool = False
    """Whether chunks of many replies are decoded in one pass, so that many take hardly longer than one."""

    def note(self, seconds: float, replies: float) -> None:
        """Add a gap that was observed among this many replies."""
        share = self.share if self.seconds else 1.0
        mean = self.seconds + share * (seconds - self.seconds)
        # The wait for a shared pass varies: the next may be as long as the last.
        self.seconds = max(seconds, mean) if self.is_batched else mean
        self.replies += share * (max(1.0, replies) - self.replies)

    def expected(self, replies: float) -> float:
        """Seconds from the first to the second chunk of a reply among this many; 0: unknown."""
        return self.seconds if self.is_batched else self.seconds * max(1.0, replies) / self.replies

    def wait(self, sound: float, replies: float) -> float:
        """Seconds to delay a first chunk of this much sound so that it lasts until the second; 0 while unknown."""
        margin = self.margin if self.is_batched else self.margin * max(1.0, replies)
        return max(0.0, self.expected(replies) + margin - sound) if self.seconds else 0.0

    def cushion(self, chunk: float, replies: float) -> float:
        """Seconds of sound that each of this many replies should buffer before playback starts, to play without gaps.

        Enough to play until the next chunk, which may take longer than expected, but at most one chunk and a share of
        it that grows with the number of replies. Where decoding a chunk takes longer than playing it, what a reply of
        `REPLY_SECONDS` would lack is added.
        """
        max_cushion, expected = chunk * (1 + replies / MANY_REPLIES), self.expected(replies)
        if not expected:
            return max_cushion
        lacking = max(0.0, 1 - chunk / expected) * REPLY_SECONDS
        return min(max_cushion, LONGER_GAP * expected + GAP_MARGIN) + lacking


@dataclass(frozen=True)
class ChunkReport:
    """Simulated playback of one reply under a policy. Times in seconds from the request of the first frame."""

    chunks: int
    first_sound: float
    """When playback started."""
    underruns: int
    dry_seconds: float
    added_delay: float
    """Delay of playback against decoding each frame as soon as it is generated."""
    decode_seconds: float


class DecodeTime(Protocol):
    """Decoding time of a chunk."""

    def __call__(self, chunk: int, frames: int, is_last: bool) -> float:
        """Seconds for the `chunk`-th chunk of this many frames."""
        ...


def simulate(policy: ChunkPolicy, frames: int, seconds_per_frame: float, decode_time: DecodeTime) -> ChunkReport:
    """Simulate a reply of `frames`, generated one every `seconds_per_frame` and decoded concurrently."""
    player = PlaybackClock()
    now = decoding = 0.0
    chunks = decoded = 0
    while decoded < frames:
        generated = min(frames, int(now / seconds_per_frame + 1e-9))
        is_last = generated == frames
        size = next_chunk(policy, generated - decoded, is_last, chunks, player.lead(now))
        if size == 0:
            now = max(now, (generated + 1) * seconds_per_frame)
            continue
        seconds = decode_time(chunks, size, is_last)
        now, decoding = now + seconds, decoding + seconds
        player.feed(now, size * policy.unit.frame_seconds)
        chunks, decoded = chunks + 1, decoded + size
    player.finish(now)
    assert player.started is not None
    return ChunkReport(
        chunks, player.started, player.underruns, player.dry_seconds, player.started - seconds_per_frame, decoding
    )
