"""Paced output: events in order, sound in pieces a little before it is played, nothing after it was cleared.

This is the only place where sound is delayed.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vivavoce.audio.player import PlaybackClock
from vivavoce.dialogue.events import Samples
from vivavoce.engine.sequence import Extreme

LATE_SECONDS = 0.02  # a timer's own lateness is no missed deadline
RAMP_SECONDS = 0.01


@dataclass
class Schedule:
    """When the next piece of one reply is due, by the clock of a player that starts at once."""

    lead: float
    """Seconds by which sound is sent before it is played."""
    clock: PlaybackClock = field(default_factory=lambda: PlaybackClock(start_buffer=0.0))
    missed: int = 0
    """Pieces that were there at their deadline and left late."""
    slack: float = math.inf
    """The least time that was left before the player ran dry; negative where it did."""
    is_cut: bool = False
    _cut_at: float = 0.0

    @property
    def sent(self) -> float:
        """Seconds of sound; of a reply that was cut, those that were played."""
        return self.clock.played(self._cut_at) if self.is_cut else self.clock.sent

    @property
    def underruns(self) -> int:
        """How often the player ran dry."""
        return self.clock.underruns

    def due(self, now: float) -> float:
        """When the next piece may be sent: at once for the first, then when it is played minus the lead."""
        return now if self.clock.started is None else self.clock.ends - self.lead

    def send(self, now: float, seconds: float, was_waiting: bool, not_before: float = -math.inf) -> None:
        """Note a piece that is sent; `was_waiting`: it had been there at its deadline."""
        if self.clock.started is not None:
            self.slack = min(self.slack, self.clock.ends - now)
        if was_waiting and now - self.due(now) > LATE_SECONDS:
            self.missed += 1
        self.clock.feed(now, seconds, not_before)

    def resume(self, now: float) -> None:
        """A client is connected again: it has played what it had."""
        self.clock.resume(now)

    def cut(self, now: float) -> None:
        """Drop what was not played yet."""
        if not self.is_cut:
            self.clock.stop(now)
            self.is_cut, self._cut_at = True, now

    def played(self, now: float) -> float:
        """Seconds that a client which plays at once has played."""
        return self.clock.played(now)

    def is_over(self, now: float) -> bool:
        """Whether all sound that was sent has been played or dropped."""
        return self.is_cut or now >= self.clock.ends


@dataclass
class Volume:
    """Gain of the output; changes are ramped, so that they do not click."""

    rate: int
    gain: float = 1.0
    _reached: float = 1.0

    def apply(self, samples: Samples) -> Samples:
        """The samples at the volume asked for, going there from the one before."""
        if self._reached == self.gain == 1.0:
            return samples
        curve = np.full(len(samples), self.gain, np.float32)
        ramp = min(len(samples), round(RAMP_SECONDS * self.rate))
        if self._reached != self.gain and ramp:
            curve[:ramp] = np.linspace(self._reached, self.gain, ramp + 1, dtype=np.float32)[1:]
        if len(samples):
            self._reached = self.gain
        return samples * curve


REPORT_SECONDS = 0.05  # between reports of what was played

SendEvent = Callable[[], None]
"""Sends events, built when they are sent."""


@dataclass(frozen=True)
class OutputPiece:
    """Sound that waits, or goes out."""

    reply: str
    item: str
    samples: Samples
    is_end: bool = False
    """The item's sound ends here."""


@dataclass
class PlayingReply:
    """How far the sound of one reply is."""

    schedule: Schedule
    volume: Volume
    reported_ms: int = 0
    is_whole: bool = False
    """No more sound comes."""
    is_cleared: bool = False


class ClientPlayer(Protocol):
    """Receives what leaves a `PacedOutput`."""

    def sound(self, piece: OutputPiece) -> None:
        """This sound goes out now."""
        ...

    def heard(self, reply: str, milliseconds: int) -> None:
        """So much of a reply has been heard by now."""
        ...

    def finished(self, reply: str, schedule: Schedule) -> None:
        """All sound of a reply was heard, or dropped."""
        ...


class PacedOutput:
    """A queue with a clock. Events with no sound before them are sent at once."""

    def __init__(self, listener: ClientPlayer, rate: int, lead: Callable[[float], float], piece_seconds: float) -> None:
        self._listener, self._rate, self._lead = listener, rate, lead
        self._piece = max(1, round(piece_seconds * rate))
        self._queue: deque[SendEvent | OutputPiece] = deque()
        self._playing: dict[str, PlayingReply] = {}
        self._changed = asyncio.Event()
        self._is_open = True
        self._has_waited = False

    @property
    def held_seconds(self) -> float:
        """Sound that waits here."""
        return sum(len(entry.samples) for entry in self._queue if isinstance(entry, OutputPiece)) / self._rate

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is being heard."""
        return not self._queue and not self._playing

    def send_in_order(self, send: SendEvent) -> None:
        """Send events, after the sound that waits."""
        if self._queue:
            self._queue.append(send)
        else:
            send()

    def add(self, piece: OutputPiece, gain: float = 1.0) -> None:
        """Queue sound; its gain applies at once, also to what waits already."""
        if piece.reply not in self._playing:
            self._playing[piece.reply] = PlayingReply(Schedule(self._lead(self._now())), Volume(self._rate))
        playing = self._playing[piece.reply]
        playing.volume.gain = gain
        if len(piece.samples) and not playing.is_cleared:
            self._queue.append(piece)
            self._changed.set()

    def end_item(self, reply: str, item: str) -> None:
        """The sound of an item ends with what was added."""
        if reply in self._playing and not self._playing[reply].is_cleared:
            self._queue.append(OutputPiece(reply, item, np.zeros(0, np.float32), is_end=True))
            self._changed.set()

    def clear(self, reply: str) -> bool:
        """Drop what was not heard of a reply; whether there was anything. Its events go out now."""
        playing = self._playing.get(reply)
        if playing is None:
            return False
        was_playing = not playing.schedule.is_over(self._now())
        playing.schedule.cut(self._now())
        playing.is_cleared = True
        before = self.held_seconds
        self._queue = deque(
            entry for entry in self._queue if not (isinstance(entry, OutputPiece) and entry.reply == reply)
        )
        had_sound = was_playing or self.held_seconds < before
        self._send_events_before_sound()
        self._changed.set()
        return had_sound

    def end(self, reply: str) -> bool:
        """No more sound of this reply comes; whether there was any."""
        if reply not in self._playing:
            return False
        self._playing[reply].is_whole = True
        self._changed.set()
        return True

    def heard_ms(self, reply: str) -> int:
        """Milliseconds of a reply heard by now."""
        playing = self._playing.get(reply)
        return 0 if playing is None else round(playing.schedule.played(self._now()) * 1000)

    def pause(self) -> None:
        """No client is connected: sound waits."""
        self._is_open = False

    def resume(self) -> None:
        """A client is connected again."""
        self._is_open = True
        for playing in self._playing.values():
            playing.schedule.resume(self._now())
        self._changed.set()

    async def run(self) -> None:
        """Send what is due, for ever."""
        while True:
            self._changed.clear()
            delay = self._advance()
            try:
                async with asyncio.timeout(delay):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _advance(self) -> float | None:
        """Send what is due; seconds until there is more to do, None if nothing waits for the clock."""
        delays = [self._send_due(), self._report()]
        return min((delay for delay in delays if delay is not None), default=None)

    def _send_due(self) -> float | None:
        while self._queue:
            self._send_events_before_sound()
            if not self._queue or not self._is_open:
                return None
            piece = self._queue[0]
            assert isinstance(piece, OutputPiece)
            playing, now = self._playing[piece.reply], self._now()
            playing.schedule.lead = self._lead(now)
            due = playing.schedule.due(now) if len(piece.samples) else now
            if due > now:
                self._has_waited = True
                return due - now
            self._send(piece, playing, now)
        return None

    def _send(self, piece: OutputPiece, playing: PlayingReply, now: float) -> None:
        samples, rest = piece.samples[: self._piece], piece.samples[self._piece :]
        if len(rest):
            self._queue[0] = OutputPiece(piece.reply, piece.item, rest, piece.is_end)
        else:
            self._queue.popleft()
        if len(samples):
            playing.schedule.send(now, len(samples) / self._rate, self._has_waited, self._others_end(playing))
        self._has_waited = False
        self._listener.sound(
            OutputPiece(piece.reply, piece.item, playing.volume.apply(samples), piece.is_end and not len(rest))
        )

    def _others_end(self, playing: PlayingReply) -> float:
        """When the sound of the replies before this one has been played."""
        others = (each.schedule for each in self._playing.values() if each is not playing)
        return max((each.clock.ends for each in others if not each.is_cut), default=-math.inf)

    def _report(self) -> float | None:
        """Report what was played since the last time, and drop replies that are over."""
        for reply, playing in list(self._playing.items()):
            milliseconds = self.heard_ms(reply)
            if milliseconds != playing.reported_ms:
                playing.reported_ms = milliseconds
                self._listener.heard(reply, milliseconds)
            if playing.is_whole and playing.schedule.is_over(self._now()):
                del self._playing[reply]
                self._listener.finished(reply, playing.schedule)
        return REPORT_SECONDS if self._playing else None

    def _send_events_before_sound(self) -> None:
        while self._queue:
            entry = self._queue[0]
            if isinstance(entry, OutputPiece):
                return
            self._queue.popleft()
            entry()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


# Lead

WINDOW_SECONDS = 5.0
MIN_ARRIVALS = 10  # arrivals from which something can be said


class Arrivals:
    """Measures the jitter of audio that should arrive evenly."""

    def __init__(self) -> None:
        self._latest, self._soonest = Extreme(WINDOW_SECONDS), Extreme(WINDOW_SECONDS)
        self._newest: deque[float] = deque(maxlen=MIN_ARRIVALS)  # when they came

    def note(self, now: float, heard: float) -> None:
        """By now, so many seconds of sound have come."""
        late = now - heard
        self._latest.note(now, late)
        self._soonest.note(now, -late)
        self._newest.append(now)

    def unevenness(self, now: float) -> float | None:
        """Seconds between the soonest and the latest of the last moments; None where too little came."""
        latest, soonest = self._latest.largest(now), self._soonest.largest(now)
        is_known = len(self._newest) == MIN_ARRIVALS and self._newest[0] >= now - WINDOW_SECONDS
        return latest + soonest if is_known and latest is not None and soonest is not None else None


@dataclass(frozen=True)
class Lead:
    """Seconds by which sound is sent before it is to be heard."""

    min_seconds: float
    max_seconds: float
    """Where nothing is known of the way: a client that sends no sound cannot talk over a reply either."""
    arrivals: Arrivals

    def __call__(self, now: float) -> float:
        """The lead now."""
        uneven = self.arrivals.unevenness(now)
        return self.max_seconds if uneven is None else min(self.max_seconds, self.min_seconds + uneven)
