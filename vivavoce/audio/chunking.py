"""How many frames become sound together: few at first, for a quick answer, more as the lead over the player grows.

Small chunks answer soon but cost a decoder pass each; large ones are cheap but late. A decoder says what it can do (its
`Grain`); a policy says, whenever frames are waiting, how many of them to decode now.
"""

from dataclasses import dataclass
from typing import Protocol

from vivavoce.audio.player import PlaybackClock
from vivavoce.errors import InputError

REPLY_SECONDS = 4.0
MANY_REPLIES = 8  # of so many, one may wait for a chunk twice as long as usual


@dataclass(frozen=True)
class ChunkUnit:
    """What a streaming decoder asks for: frames come in multiples of `frames`, each chunk after `lookahead` more."""

    frames: int = 1
    lookahead: int = 0
    frame_seconds: float = 0.08


class ChunkPolicy(Protocol):
    """Decides the size of the next chunk."""

    @property
    def unit(self) -> ChunkUnit:
        """What the decoder asks for."""
        ...

    def wanted(self, chunks: int, lead: float) -> int:
        """Frames the next chunk should have, after so many chunks, with so many seconds of lead over the player."""
        ...

    def max_frames(self, chunks: int, lead: float) -> int:
        """Frames it may have where they are there already."""
        ...


@dataclass(frozen=True)
class LeadPolicy:
    """The first chunk as small as the decoder allows; later ones take a share of the lead, up to `longest` seconds."""

    unit: ChunkUnit
    share: float = 0.5
    max_seconds: float = 1.6
    doubles: bool = False
    """Whether chunks are one, two, four … grains long, so that those of many replies are alike."""
    min_later_units: int = 1
    """Grains that every chunk but the first has at least."""
    end: float = 1.0
    """How many times as long as wanted the last chunk may be, so that no pass is made for a few frames alone."""
    making: float | None = None
    """Seconds in which the longest chunk is made. With such a lead frames that wait already are taken together, with
    less of it two grains of them; None: never."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.max_seconds <= 0:
            raise InputError(f"share must be in (0, 1] and longest above 0, not {self.share} and {self.max_seconds}")

    def wanted(self, chunks: int, lead: float) -> int:
        """Frames that take `share` of the lead to play: the rest of the lead is for making them."""
        affordable = min(lead * self.share, self.max_seconds) / self.unit.frame_seconds
        units = max(1 if chunks == 0 else self.min_later_units, int(affordable / self.unit.frames + 1e-9))
        return (1 << (units.bit_length() - 1) if self.doubles else units) * self.unit.frames

    def max_frames(self, chunks: int, lead: float) -> int:
        """Frames to take at once if they are there already: long chunks cost much less for many replies."""
        if self.making is None or chunks == 0:
            return self.wanted(chunks, lead)
        max_seconds = self.max_seconds / self.unit.frame_seconds
        return max(2 * self.unit.frames, round(max_seconds)) if lead >= self.making else 2 * self.unit.frames

    def sizes(self) -> list[int]:
        """Frames of every chunk it may ask for."""
        seconds = self.unit.frames * self.unit.frame_seconds
        max_frames = max(1, int(self.max_seconds / seconds + 1e-9))
        return sorted({self.wanted(1, units * seconds / self.share) for units in range(1, max_frames + 1)})


@dataclass(frozen=True)
class FixedPolicy:
    """A first chunk of `first` frames, then chunks of `then`, whatever the lead; rounded up to the decoder's grain."""

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
    """Frames to decode now, of those waiting; 0: wait for more. `is_last`: no more will come, take what is left."""
    wanted, max_frames = policy.wanted(chunks, lead), policy.max_frames(chunks, lead)
    while 2 * wanted <= max_frames and waiting >= 2 * wanted + policy.unit.lookahead:
        wanted *= 2
    if waiting >= wanted + policy.unit.lookahead and not (is_last and waiting <= wanted):
        return wanted
    return waiting if is_last else 0


@dataclass
class ChunkGapEstimate:
    """How long the second chunk of a reply takes after its first, for each reply that is being made at the time."""

    seconds: float = 0.0
    share: float = 0.2
    """Of the newest in what is expected."""
    margin: float = 0.03
    """Seconds more than is expected, for each of them."""
    is_batched: bool = False
    """Whether chunks of many replies are made in one pass, so that many hardly take longer than one."""

    def note(self, seconds: float, replies: float) -> None:
        """A second chunk came so long after the first, among so many replies."""
        each = seconds / self._shares(replies)
        expected = each if self.seconds == 0 else (1 - self.share) * self.seconds + self.share * each
        # The wait for a shared pass varies, and the next may be as long as the last.
        self.seconds = max(each, expected) if self.is_batched else expected

    def wait(self, sound: float, replies: float) -> float:
        """Seconds to keep so much sound back for it to last until the next comes, if so many replies want theirs."""
        return max(0.0, (self.seconds + self.margin) * self._shares(replies) - sound)

    def cushion(self, chunk: float, replies: float) -> float:
        """Seconds of sound that each of so many replies should have before its first is heard, to play on to the end.

        One chunk is heard while the next is made, and the more replies there are, the longer that may take for once;
        where it always takes longer than hearing it, as much more is needed as a reply of `REPLY_SECONDS` would lack.
        """
        makes = self.seconds * self._shares(replies)
        return chunk * (1 + replies / MANY_REPLIES) + max(0.0, 1 - chunk / makes if makes else 0.0) * REPLY_SECONDS

    def _shares(self, replies: float) -> float:
        return 1.0 if self.is_batched else max(1.0, replies)


@dataclass(frozen=True)
class ChunkReport:
    """What a policy did to one reply. Times in seconds from the first frame's request."""

    chunks: int
    first_sound: float
    """When the player began."""
    underruns: int
    dry_seconds: float
    added_delay: float
    """How much later the player began than if each frame were sound as soon as it was made."""
    decode_seconds: float


class DecodeTime(Protocol):
    """How long a decoder takes for a chunk."""

    def __call__(self, chunk: int, frames: int, is_last: bool) -> float:
        """Seconds for the `chunk`-th chunk of this many frames."""
        ...


def simulate(policy: ChunkPolicy, frames: int, seconds_per_frame: float, decode_time: DecodeTime) -> ChunkReport:
    """Play a reply of `frames` that the language model makes one every `seconds_per_frame`, decoding beside it."""
    player = PlaybackClock()
    now = decoding = 0.0
    chunks = decoded = 0
    while decoded < frames:
        made = min(frames, int(now / seconds_per_frame + 1e-9))
        is_last = made == frames
        size = next_chunk(policy, made - decoded, is_last, chunks, player.lead(now))
        if size == 0:
            now = max(now, (made + 1) * seconds_per_frame)
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
