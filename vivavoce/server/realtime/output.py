"""Paced output: events in order, audio in chunks shortly before playback needs them, nothing after a clear.

This is the only place where audio is delayed. The lead over playback grows with the jitter of the client's own audio.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from vivavoce.audio.player import ROUNDING_SECONDS, PlaybackClock
from vivavoce.dialogue.items import Samples
from vivavoce.engine.sliding_maximum import Extreme
from vivavoce.server.config import ServerOptions

LATE_SECONDS = 0.02  # lateness of timers, which is no missed deadline
TIMER_SECONDS = 0.001  # the resolution of uvloop's clock: a shorter timer would fire until the time is over
RAMP_SECONDS = 0.01


@dataclass
class Schedule:
    """When the next chunk of a reply is due, by the clock of a client that plays without a start buffer."""

    lead: float
    """Seconds by which audio is sent before playback needs it."""
    clock: PlaybackClock = field(default_factory=lambda: PlaybackClock(start_buffer=0.0))
    missed: int = 0
    """Chunks that were available at their deadline and sent late."""
    slack: float = math.inf
    """Minimum seconds before an underrun; negative after one."""
    is_cut: bool = False
    _cut_at: float = 0.0

    @property
    def sent(self) -> float:
        """Seconds of audio sent; for a reply that was cut, seconds played."""
        return self.clock.played(self._cut_at) if self.is_cut else self.clock.sent

    @property
    def underruns(self) -> int:
        """Number of playback underruns."""
        return self.clock.underruns

    def due(self, now: float) -> float:
        """When the next chunk may be sent: the first one now, others when they are played minus the lead."""
        return now if self.clock.started is None else self.clock.ends - self.lead

    def send(self, now: float, seconds: float, was_waiting: bool, earliest: float = -math.inf) -> None:
        """Record a chunk that is sent; `was_waiting`: it was available at its deadline."""
        if self.clock.started is not None:
            self.slack = min(self.slack, self.clock.ends - now)
        if was_waiting and now - self.due(now) > LATE_SECONDS:
            self.missed += 1
        self.clock.feed(now, seconds, earliest)

    def resume(self, now: float) -> None:
        """Continue after a reconnect: the client has played all that it had received."""
        self.clock.resume(now)

    def cut(self, now: float) -> None:
        """Drop the audio that was not played yet."""
        if not self.is_cut:
            self.clock.stop(now)
            self.is_cut, self._cut_at = True, now

    def played(self, now: float) -> float:
        """Seconds of the reply that were played."""
        return self.clock.played(now)

    def is_over(self, now: float) -> bool:
        """Whether all audio that was sent has been played or dropped."""
        return self.is_cut or now >= self.clock.ends


@dataclass
class Volume:
    """Gain of the output; changes are ramped to avoid clicks."""

    rate: int
    gain: float = 1.0
    _applied: float = 1.0

    def apply(self, samples: Samples) -> Samples:
        """The samples with the gain applied, ramped from the previous gain."""
        if self._applied == self.gain == 1.0:
            return samples
        curve = np.full(len(samples), self.gain, np.float32)
        ramp = min(len(samples), round(RAMP_SECONDS * self.rate))
        if self._applied != self.gain and ramp:
            curve[:ramp] = np.linspace(self._applied, self.gain, ramp + 1, dtype=np.float32)[1:]
        if len(samples):
            self._applied = self.gain
        return samples * curve


REPORT_SECONDS = 0.05  # between reports of the playback position

SendEvent = Callable[[], None]
"""Builds and sends events when their turn comes."""


class OutputPiece(NamedTuple):
    """A chunk of audio of an item."""

    reply: str
    item: str
    samples: Samples
    is_end: bool = False
    """Whether this is the last chunk of the item."""


@dataclass
class PlayingReply:
    """The output state of one reply."""

    schedule: Schedule
    volume: Volume
    reported_ms: int = 0
    sent_samples: int = 0
    is_complete: bool = False
    """All audio of the reply was added."""
    is_cleared: bool = False


class ClientPlayer(Protocol):
    """Receives what leaves a `PacedOutput`."""

    def play(self, piece: OutputPiece) -> None:
        """Send a chunk now."""
        ...

    def playback_position(self, reply: str, milliseconds: int) -> None:
        """The estimated playback position of a reply."""
        ...

    def playback_finished(self, reply: str, schedule: Schedule) -> None:
        """All audio of a reply was played or dropped."""
        ...


class PacedOutput:
    """A queue of events and audio with a playback clock. An event waits only for the audio queued before it."""

    def __init__(self, listener: ClientPlayer, rate: int, lead: Callable[[float], float], piece_seconds: float) -> None:
        self._listener, self._rate, self._lead = listener, rate, lead
        self._piece = max(1, round(piece_seconds * rate))
        self._queue: deque[SendEvent | OutputPiece] = deque()
        self._playing: dict[str, PlayingReply] = {}
        self._timer: asyncio.Handle | None = None
        self._is_woken = False
        self._failed: asyncio.Future[None] | None = None
        self._is_open = True
        self._has_waited = False

    @property
    def held_seconds(self) -> float:
        """Seconds of audio in the queue."""
        return sum(len(entry.samples) for entry in self._queue if isinstance(entry, OutputPiece)) / self._rate

    @property
    def is_idle(self) -> bool:
        """Whether the queue is empty and no reply is being played."""
        return not self._queue and not self._playing

    def send_in_order(self, send: SendEvent) -> None:
        """Send events after the queued audio."""
        if self._queue:
            self._queue.append(send)
        else:
            send()

    def send_with_audio(self, reply: str, item: str, seconds: float, send: SendEvent) -> None:
        """Send events before the audio of an item from `seconds` on; now, where that audio was sent already."""
        playing = self._playing.get(reply)
        at = round(seconds * self._rate) - (0 if playing is None else playing.sent_samples)
        index = len(self._queue)
        for position, entry in enumerate(self._queue):
            if not isinstance(entry, OutputPiece) or (entry.reply, entry.item) != (reply, item):
                continue
            if at <= 0 or entry.is_end:
                index = position
                break
            if at < len(entry.samples):
                first, rest = entry.samples[:at], entry.samples[at:]
                self._queue[position] = entry._replace(samples=first, is_end=False)
                self._queue.insert(position + 1, entry._replace(samples=rest))
                index = position + 1
                break
            at -= len(entry.samples)
        self._queue.insert(index, send)
        self._send_events_before_sound()

    def add(self, piece: OutputPiece, gain: float = 1.0) -> None:
        """Queue audio; the gain also applies to the audio of the reply that is already queued."""
        if piece.reply not in self._playing:
            self._playing[piece.reply] = PlayingReply(Schedule(self._lead(self._now())), Volume(self._rate))
        playing = self._playing[piece.reply]
        playing.volume.gain = gain
        if len(piece.samples) and not playing.is_cleared:
            self._queue.append(piece)
            self._wake()

    def end_item(self, reply: str, item: str) -> None:
        """Mark the end of an item's audio."""
        if reply in self._playing and not self._playing[reply].is_cleared:
            self._queue.append(OutputPiece(reply, item, np.zeros(0, np.float32), is_end=True))
            self._wake()

    def clear(self, reply: str) -> bool:
        """Drop the unplayed audio of a reply and send its events now; whether there was any audio to drop."""
        playing = self._playing.get(reply)
        if playing is None:
            return False
        had_sound = self.has_unplayed(reply)
        playing.schedule.cut(self._now())
        playing.is_cleared = True
        self._queue = deque(
            entry for entry in self._queue if not (isinstance(entry, OutputPiece) and entry.reply == reply)
        )
        self._send_events_before_sound()
        self._wake()
        return had_sound

    def has_unplayed(self, reply: str) -> bool:
        """Whether audio of a reply is queued or being played."""
        playing = self._playing.get(reply)
        if playing is None:
            return False
        pieces = (entry for entry in self._queue if isinstance(entry, OutputPiece) and entry.reply == reply)
        return not playing.schedule.is_over(self._now()) or any(len(piece.samples) for piece in pieces)

    def end(self, reply: str) -> bool:
        """Mark the end of a reply's audio; whether it had any."""
        if reply not in self._playing:
            return False
        self._playing[reply].is_complete = True
        self._wake()
        return True

    def played_ms(self, reply: str) -> int:
        """Milliseconds of a reply played so far."""
        playing = self._playing.get(reply)
        return 0 if playing is None else round(playing.schedule.played(self._now()) * 1000)

    def pause(self) -> None:
        """Hold the audio while no client is connected."""
        self._is_open = False

    def resume(self) -> None:
        """Continue after a client has reconnected."""
        self._is_open = True
        for playing in self._playing.values():
            playing.schedule.resume(self._now())
        self._wake()

    async def run(self) -> None:
        """Send what is due until cancelled. Timers do it, without a task switch for each chunk."""
        self._failed = asyncio.get_running_loop().create_future()
        self._wake()
        try:
            await self._failed
        finally:
            self._failed, self._is_woken = None, False
            if self._timer is not None:
                self._timer.cancel()

    def _wake(self) -> None:
        """Send what is due with the next iteration of the event loop."""
        if self._failed is None or self._is_woken:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._is_woken = True
        self._timer = self._failed.get_loop().call_soon(self._run_once)

    def _run_once(self) -> None:
        if self._failed is None or self._failed.done():
            return
        self._timer, self._is_woken = None, False
        try:
            delay = self._advance()
        except Exception as error:
            self._failed.set_exception(error)
            return
        if delay is not None and self._timer is None:
            self._timer = self._failed.get_loop().call_later(max(delay, TIMER_SECONDS), self._run_once)

    def _advance(self) -> float | None:
        """Send what is due; the seconds until the next deadline, None without one."""
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
            if due - now > ROUNDING_SECONDS:
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
        playing.sent_samples += len(samples)
        if len(samples):
            playing.schedule.send(now, len(samples) / self._rate, self._has_waited, self._others_end(playing))
        self._has_waited = False
        self._listener.play(
            OutputPiece(piece.reply, piece.item, playing.volume.apply(samples), piece.is_end and not len(rest))
        )

    def _others_end(self, playing: PlayingReply) -> float:
        """When the audio of all other replies has been played."""
        if len(self._playing) == 1:
            return -math.inf
        others = (each.schedule for each in self._playing.values() if each is not playing)
        return max((each.clock.ends for each in others if not each.is_cut), default=-math.inf)

    def _report(self) -> float | None:
        """Report changed playback positions, and remove replies whose playback has ended."""
        for reply, playing in list(self._playing.items()):
            milliseconds = self.played_ms(reply)
            if milliseconds != playing.reported_ms:
                playing.reported_ms = milliseconds
                self._listener.playback_position(reply, milliseconds)
            if playing.is_complete and playing.schedule.is_over(self._now()):
                del self._playing[reply]
                self._listener.playback_finished(reply, playing.schedule)
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


# Jitter and lead


class Pacing(NamedTuple):
    """How audio is sent to a kind of client, in milliseconds."""

    min_lead_ms: int
    max_lead_ms: int
    piece_ms: int

    @classmethod
    def of_sockets(cls, options: ServerOptions) -> "Pacing":
        """For clients that buffer what they play."""
        return cls(min(options.min_lead_ms, options.lead_ms), options.lead_ms, options.piece_ms)

    @classmethod
    def of_calls(cls, options: ServerOptions) -> "Pacing":
        """Where audio that was sent is played without delay, and cannot be dropped."""
        return cls(options.call_lead_ms, options.call_lead_ms, options.call_piece_ms)


WINDOW_SECONDS = 5.0
MIN_ARRIVALS = 10  # below, the jitter is not estimated


class Arrivals:
    """Measures the jitter of audio that should arrive at a constant rate."""

    def __init__(self) -> None:
        self._latest, self._earliest = Extreme(WINDOW_SECONDS), Extreme(WINDOW_SECONDS)
        self._newest: deque[float] = deque(maxlen=MIN_ARRIVALS)  # times of arrival

    def note(self, now: float, received: float) -> None:
        """Record that `received` seconds of audio in total have arrived."""
        delay = now - received
        self._latest.note(now, delay)
        self._earliest.note(now, -delay)
        self._newest.append(now)

    def jitter(self, now: float) -> float | None:
        """Seconds between the smallest and the largest recent delay; None after too few arrivals."""
        latest, earliest = self._latest.largest(now), self._earliest.largest(now)
        is_known = len(self._newest) == MIN_ARRIVALS and self._newest[0] >= now - WINDOW_SECONDS
        return latest + earliest if is_known and latest is not None and earliest is not None else None


@dataclass(frozen=True)
class Lead:
    """Seconds by which audio is sent before playback needs it.

    Audio that has been sent can no longer be ducked, so the lead is only as large as the jitter requires. The jitter is
    taken to be the same in both directions.
    """

    min_seconds: float
    max_seconds: float
    """Used while the jitter is unknown: a client that sends no audio cannot interrupt a reply either."""
    arrivals: Arrivals

    def __call__(self, now: float) -> float:
        """The lead at this time."""
        jitter = self.arrivals.jitter(now)
        return self.max_seconds if jitter is None else min(self.max_seconds, self.min_seconds + jitter)
