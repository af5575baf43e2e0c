"""What a caller hears of the replies: a player with a start buffer, and a record of when each sample was played."""

from dataclasses import dataclass, field

import numpy as np

from vivavoce.audio.player import SimulatedPlayer
from vivavoce.bench.turn_sounds import FRAME, RATE, Samples, voiced

LIVE_VOICE = 0.006  # about -44 dBFS: enough to know that somebody speaks, before a reply is whole


@dataclass
class PlayedSpan:
    """Samples `first` to `last` of a reply, played without a gap from `start` on; `last` None: still going on."""

    start: float
    first: int
    last: int | None = None


@dataclass
class PlayedReply:
    """One reply: what came, when, and when it was heard."""

    id: str
    created: float
    item: str | None = None
    status: str | None = None
    reason: str | None = None
    transcript: str = ""
    pieces: list[Samples] = field(default_factory=list, repr=False)
    arrivals: list[tuple[float, int]] = field(default_factory=list, repr=False)
    """When how many samples had come."""
    spans: list[PlayedSpan] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Seconds in which the player was dry, and sound followed."""
    is_whole: bool = False
    dropped: list[tuple[float, str]] = field(default_factory=list)
    """When what had not been played was thrown away, and why."""
    voice_at: int | None = None
    """The first sample that is loud enough to be voice, as far as is known while it comes."""
    _player: SimulatedPlayer = field(default_factory=SimulatedPlayer, repr=False)
    _fed: int = 0
    _next: int = 0
    """The next sample to be played when playing begins again."""
    _free: float = 0.0

    @property
    def sound(self) -> Samples:
        """All that came."""
        return np.concatenate(self.pieces) if self.pieces else np.zeros(0, np.float32)

    def feed(self, now: float, samples: Samples, free: float = 0.0) -> None:
        """Sound arrives; it is played after `free`, when the player has done what it had before."""
        self._free = max(self._free, free)
        self.arrivals.append((now, self._fed + len(samples)))
        if self.voice_at is None and (loud := np.flatnonzero(np.abs(samples) > LIVE_VOICE)).size:
            self.voice_at = self._fed + int(loud[0])
        moment = self._moment(now)
        self._notice_dryness(moment)
        self.pieces.append(samples)
        self._fed += len(samples)
        self._player.feed(moment, len(samples) / RATE)
        if not self._is_playing and self._fed - self._next >= round(self._player.start_buffer * RATE):
            self._begin(moment)

    def finish(self, now: float) -> None:
        """No more sound comes: what is there is played, however little."""
        if self.is_whole:
            return
        moment = self._moment(now)
        self._notice_dryness(moment)
        self._player.finish(moment)
        self.is_whole = True
        if not self._is_playing and self._fed > self._next:
            self._begin(moment)

    def drop(self, now: float, reason: str) -> bool:
        """Throw away what was not played yet; whether anything was being heard, or was to be."""
        had_sound = self.is_audible(now)
        if not had_sound:
            return False
        if self._is_playing:
            self.spans[-1].last = self.position(now)
        self.dropped.append((now, reason))
        self._player, self._next, self._free = SimulatedPlayer(), self._fed, 0.0
        return True

    def is_audible(self, now: float) -> bool:
        """Whether it is being heard, or more of it is expected or waits."""
        if not self._fed:
            return False
        if not self.is_whole:
            return not self.dropped or self._fed > self._next
        return self.position(now) < self._fed and self._next < self._fed

    def position(self, now: float) -> int:
        """Samples played by now, those that were dropped included."""
        if not self._is_playing:
            return self._next
        span = self.spans[-1]
        return min(self._fed, max(span.first, span.first + round((now - span.start) * RATE)))

    def ends(self) -> float:
        """When what is there will have been played."""
        if not self._is_playing:
            return self._heard_until()
        return self.spans[-1].start + (self._fed - self.spans[-1].first) / RATE

    def heard_at(self, sample: int) -> float | None:
        """When this sample is heard; None if it never is."""
        for span in self.spans:
            if span.first <= sample < (self._fed if span.last is None else span.last):
                return span.start + (sample - span.first) / RATE
        return None

    def arrived_at(self, sample: int) -> float | None:
        """When this sample came."""
        return next((moment for moment, count in self.arrivals if count > sample), None)

    def voiced_spans(self, join: float = 0.3) -> list[tuple[float, float]]:
        """When voice was heard, by the clock; shorter silences inside are joined."""
        found: list[tuple[float, float]] = []
        for frame in np.flatnonzero(voiced(self.sound)):
            begin, end = self.heard_at(int(frame) * FRAME), self.heard_at(int(frame + 1) * FRAME - 1)
            if begin is None or end is None:
                continue
            if found and begin - found[-1][1] <= join:
                found[-1] = (found[-1][0], end)
            else:
                found.append((begin, end))
        return found

    def first_voiced(self) -> int | None:
        """The first voiced sample."""
        frames = np.flatnonzero(voiced(self.sound))
        return int(frames[0]) * FRAME if frames.size else None

    def read(self, begin: float, count: int) -> Samples:
        """What is heard of it from a moment on, silence included."""
        found = np.zeros(count, np.float32)
        sound: Samples | None = None
        for span in self.spans:
            last = self._fed if span.last is None else span.last
            offset = round((span.start - begin) * RATE)
            low, high = max(0, offset), min(count, offset + last - span.first)
            if low < high:
                sound = self.sound if sound is None else sound
                found[low:high] = sound[span.first + low - offset : span.first + high - offset]
        return found

    @property
    def _is_playing(self) -> bool:
        return bool(self.spans) and self.spans[-1].last is None

    def _moment(self, now: float) -> float:
        """Not before the player is free."""
        return max(now, self._free)

    def _notice_dryness(self, moment: float) -> None:
        before = self._player.underruns
        self._player.advance(moment)
        if self._player.underruns > before and self._is_playing:
            self.spans[-1].last = self._next = self._fed

    def _begin(self, moment: float) -> None:
        if self.spans and self._next == self.spans[-1].last:  # it ran dry; nothing was dropped in between
            self.gaps.append(moment - self._heard_until())
        self.spans.append(PlayedSpan(moment, self._next))

    def _heard_until(self) -> float:
        if not self.spans:
            return 0.0
        span = self.spans[-1]
        return span.start + ((self._fed if span.last is None else span.last) - span.first) / RATE


@dataclass
class Loudspeaker:
    """All replies of a call, one after another."""

    replies: dict[str, PlayedReply] = field(default_factory=dict)

    def reply(self, id: str, now: float) -> PlayedReply:
        """The reply of this id; new if it was not known."""
        return self.replies.setdefault(id, PlayedReply(id, now))

    def feed(self, now: float, id: str, samples: Samples) -> None:
        """Sound of a reply arrives."""
        reply = self.reply(id, now)
        free = max((other.ends() for other in self.replies.values() if other is not reply), default=0.0)
        reply.feed(now, samples, free)

    def drop(self, now: float, reason: str, id: str | None = None) -> list[PlayedReply]:
        """Stop playing: all, or one reply; those that were to be heard."""
        chosen = [reply for reply in self.replies.values() if id in (None, reply.id)]
        return [reply for reply in chosen if reply.drop(now, reason)]

    def is_audible(self, now: float) -> bool:
        """Whether anything is being heard or waits to be."""
        return any(reply.is_audible(now) for reply in self.replies.values())

    def read(self, begin: float, count: int) -> Samples:
        """What is heard from a moment on."""
        found = np.zeros(count, np.float32)
        for reply in self.replies.values():
            if reply.spans and reply.ends() > begin:
                found += reply.read(begin, count)
        return found
