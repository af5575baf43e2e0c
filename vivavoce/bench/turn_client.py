"""Client side of a benchmark call: the WebSocket connection, simulated network impairments, and the audio player.

The player has a start buffer and records when each sample of a reply was played.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import numpy as np

from vivavoce.audio.player import PlaybackClock
from vivavoce.bench.turn_sounds import FRAME, RATE, Samples, voiced
from vivavoce.errors import InputError, MissingDependencyError, VivaError

RESEND_SECONDS = 0.2  # TCP retransmission delay


@dataclass(frozen=True)
class Line:
    """Network impairments.

    Lost upstream audio becomes silence, as behind a telephone gateway; a lost downstream message is retransmitted and
    delays everything behind it, as on a TCP socket.
    """

    loss: float = 0.0
    jitter: float = 0.0
    """Mean extra delay in seconds, exponentially distributed."""
    delay: float = 0.0
    """Constant delay in seconds."""


PERFECT = Line()


@dataclass
class LineDirection:
    """One direction of a line; messages are never reordered."""

    line: Line
    seed: int = 0
    _last: float = 0.0
    _source: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._source = np.random.default_rng(self.seed)

    def is_lost(self) -> bool:
        return bool(self._source.random() < self.line.loss)

    def arrival(self, sent: float, resent: bool = False) -> float:
        """Arrival time of a message; with `resent`, lost messages are retransmitted."""
        late = self.line.delay + (self._source.exponential(self.line.jitter) if self.line.jitter else 0.0)
        if resent and self.is_lost():
            late += RESEND_SECONDS
        self._last = max(self._last, sent + late)
        return self._last


Event = dict[str, Any]
OPEN_SECONDS = 20.0


class WireClosedError(VivaError):
    """The connection is closed."""


class Wire(Protocol):
    """A connection; `receive` raises `WireClosedError` when it is closed."""

    async def send(self, event: Event) -> None: ...

    async def receive(self) -> Event: ...


def realtime_url(url: str, model: str | None = None) -> str:
    """The WebSocket URL of a server given as `host:8000`, `https://host/v1` or in full."""
    parts = urlsplit(url if "://" in url else f"ws://{url}")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes or not parts.netloc:
        raise InputError(f"{url!r} is not the address of a server; write ws://host:8000/v1/realtime")
    path = parts.path.rstrip("/")
    if not path:
        path = "/v1/realtime"
    elif path.endswith("/v1"):
        path += "/realtime"
    query = dict(parse_qsl(parts.query))
    if model is not None:
        query["model"] = model
    return urlunsplit((schemes[parts.scheme], parts.netloc, path, urlencode(query), ""))


class SocketWire:
    """A WebSocket of the `websockets` library."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    async def send(self, event: Event) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            await self._socket.send(json.dumps(event))
        except ConnectionClosed as error:
            raise WireClosedError(_close_reason(error)) from error

    async def receive(self) -> Event:
        """The next event; other messages are ignored."""
        from websockets.exceptions import ConnectionClosed

        while True:
            try:
                message = await self._socket.recv()
            except ConnectionClosed as error:
                raise WireClosedError(_close_reason(error)) from error
            event = json.loads(message) if isinstance(message, str) else None
            if isinstance(event, dict):
                return event


@asynccontextmanager
async def connect(url: str, key: str | None = None) -> AsyncIterator[Wire]:
    """A connection to a Realtime server; failures are an `InputError` of one line."""
    try:
        from websockets.asyncio.client import connect as open_socket
        from websockets.exceptions import InvalidStatus, WebSocketException
    except ImportError as error:
        raise MissingDependencyError("talking to a server needs websockets: pip install 'vivavoce[server]'") from error
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    opening = open_socket(
        url,
        additional_headers=headers,
        max_size=None,
        max_queue=None,
        compression=None,
        open_timeout=OPEN_SECONDS,
    )
    try:
        socket = await opening
    except InvalidStatus as error:
        status = error.response.status_code
        hint = "; give --api-key" if status in (401, 403) else ""
        raise InputError(f"{url} refused the connection with HTTP {status}{hint}") from error
    except (OSError, TimeoutError, WebSocketException) as error:
        raise InputError(f"cannot connect to {url}: {error}; is the server running?") from error
    async with socket:
        yield SocketWire(socket)


class ImpairedWire:
    """A wire with network impairments. Use as `async with`."""

    def __init__(self, wire: Wire, line: Line, seed: int = 0) -> None:
        self._wire = wire
        self._up, self._down = LineDirection(line, seed), LineDirection(line, seed + 1)
        self._outgoing: asyncio.Queue[tuple[float, Event]] = asyncio.Queue()
        self._incoming: asyncio.Queue[tuple[float, Event | WireClosedError]] = asyncio.Queue()

    async def __aenter__(self) -> "ImpairedWire":
        self._tasks = [asyncio.create_task(self._forward_sent()), asyncio.create_task(self._forward_received())]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def send(self, event: Event) -> None:
        self._outgoing.put_nowait((self._up.arrival(_now()), event))

    async def receive(self) -> Event:
        moment, event = await self._incoming.get()
        await asyncio.sleep(max(0.0, moment - _now()))
        if isinstance(event, WireClosedError):
            raise event
        return event

    async def _forward_sent(self) -> None:
        while True:
            moment, event = await self._outgoing.get()
            await asyncio.sleep(max(0.0, moment - _now()))
            try:
                await self._wire.send(event)
            except WireClosedError:
                return

    async def _forward_received(self) -> None:
        while True:
            try:
                event = await self._wire.receive()
            except WireClosedError as error:
                self._incoming.put_nowait((_now(), error))
                return
            self._incoming.put_nowait((self._down.arrival(_now(), resent=True), event))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _close_reason(error: Any) -> str:
    close = error.rcvd
    return (
        "the server closed the connection"
        if close is None
        else f"the server closed with {close.code} {close.reason}".rstrip()
    )


VOICE_THRESHOLD = 0.006  # about -44 dBFS: detects voice before a reply is complete


@dataclass
class PlayedSpan:
    """Samples `first` to `last` of a reply, played without a gap from `start` on; `last` None while playing."""

    start: float
    first: int
    last: int | None = None


@dataclass
class PlayedReply:
    """One reply: received audio, arrival times and playback times."""

    id: str
    created: float
    item: str | None = None
    status: str | None = None
    reason: str | None = None
    transcript: str = ""
    pieces: list[Samples] = field(default_factory=list, repr=False)
    arrivals: list[tuple[float, int]] = field(default_factory=list, repr=False)
    """Time and total samples received."""
    spans: list[PlayedSpan] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Underruns in seconds, each followed by more audio."""
    is_whole: bool = False
    dropped: list[tuple[float, str]] = field(default_factory=list)
    """Times and reasons at which unplayed audio was dropped."""
    voice_at: int | None = None
    """First sample above the voice threshold."""
    _player: PlaybackClock = field(default_factory=PlaybackClock, repr=False)
    _received: int = 0
    _next: int = 0
    """Next sample to play when playback resumes."""
    _free_at: float = 0.0

    @property
    def sound(self) -> Samples:
        return np.concatenate(self.pieces) if self.pieces else np.zeros(0, np.float32)

    def feed(self, now: float, samples: Samples, free: float = 0.0) -> None:
        """Receive audio; it is played no earlier than `free`, when the previous reply has ended."""
        self._free_at = max(self._free_at, free)
        self.arrivals.append((now, self._received + len(samples)))
        if self.voice_at is None and (loud := np.flatnonzero(np.abs(samples) > VOICE_THRESHOLD)).size:
            self.voice_at = self._received + int(loud[0])
        moment = self._moment(now)
        self._check_underrun(moment)
        self.pieces.append(samples)
        self._received += len(samples)
        self._player.feed(moment, len(samples) / RATE)
        if not self._is_playing and self._received - self._next >= round(self._player.start_buffer * RATE):
            self._start_playing(moment)

    def finish(self, now: float) -> None:
        """End of audio: play the rest even below the start buffer."""
        if self.is_whole:
            return
        moment = self._moment(now)
        self._check_underrun(moment)
        self._player.finish(moment)
        self.is_whole = True
        if not self._is_playing and self._received > self._next:
            self._start_playing(moment)

    def drop(self, now: float, reason: str) -> bool:
        """Drop unplayed audio; returns whether the reply was audible."""
        had_sound = self.is_audible(now)
        if not had_sound:
            return False
        if self._is_playing:
            self.spans[-1].last = self.position(now)
        self.dropped.append((now, reason))
        self._player, self._next, self._free_at = PlaybackClock(), self._received, 0.0
        return True

    def is_audible(self, now: float) -> bool:
        """Whether it is playing, buffered, or more audio is expected."""
        if not self._received:
            return False
        if not self.is_whole:
            return not self.dropped or self._received > self._next
        return self.position(now) < self._received and self._next < self._received

    def position(self, now: float) -> int:
        """Samples played by now, including dropped ones."""
        if not self._is_playing:
            return self._next
        span = self.spans[-1]
        return min(self._received, max(span.first, span.first + round((now - span.start) * RATE)))

    def ends_at(self) -> float:
        """End of playback of the audio received so far."""
        if not self._is_playing:
            return self._heard_until()
        return self.spans[-1].start + (self._received - self.spans[-1].first) / RATE

    def heard_at(self, sample: int) -> float | None:
        """Playback time of a sample; None if it is not played."""
        for span in self.spans:
            if span.first <= sample < (self._received if span.last is None else span.last):
                return span.start + (sample - span.first) / RATE
        return None

    def arrived_at(self, sample: int) -> float | None:
        """Arrival time of a sample."""
        return next((moment for moment, count in self.arrivals if count > sample), None)

    def voiced_spans(self, join: float = 0.3) -> list[tuple[float, float]]:
        """Intervals of audible voice; gaps shorter than `join` are bridged."""
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
        frames = np.flatnonzero(voiced(self.sound))
        return int(frames[0]) * FRAME if frames.size else None

    def read(self, begin: float, count: int) -> Samples:
        """Played audio from a time on, with silence where nothing plays."""
        found = np.zeros(count, np.float32)
        sound: Samples | None = None
        for span in self.spans:
            last = self._received if span.last is None else span.last
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
        return max(now, self._free_at)

    def _check_underrun(self, moment: float) -> None:
        previous = self._player.underruns
        self._player.advance(moment)
        if self._player.underruns > previous and self._is_playing:
            self.spans[-1].last = self._next = self._received

    def _start_playing(self, moment: float) -> None:
        if self.spans and self._next == self.spans[-1].last:  # an underrun, not a drop
            self.gaps.append(moment - self._heard_until())
        self.spans.append(PlayedSpan(moment, self._next))

    def _heard_until(self) -> float:
        if not self.spans:
            return 0.0
        span = self.spans[-1]
        return span.start + ((self._received if span.last is None else span.last) - span.first) / RATE


@dataclass
class Loudspeaker:
    """Playback of all replies of a call, in sequence."""

    replies: dict[str, PlayedReply] = field(default_factory=dict)

    def reply(self, id: str, now: float) -> PlayedReply:
        """The reply of this id, created if new."""
        return self.replies.setdefault(id, PlayedReply(id, now))

    def feed(self, now: float, id: str, samples: Samples) -> None:
        reply = self.reply(id, now)
        free = max((other.ends_at() for other in self.replies.values() if other is not reply), default=0.0)
        reply.feed(now, samples, free)

    def drop(self, now: float, reason: str, id: str | None = None) -> list[PlayedReply]:
        """Stop all replies or one; returns those that were audible."""
        chosen = [reply for reply in self.replies.values() if id in (None, reply.id)]
        return [reply for reply in chosen if reply.drop(now, reason)]

    def is_audible(self, now: float) -> bool:
        return any(reply.is_audible(now) for reply in self.replies.values())

    def read(self, begin: float, count: int) -> Samples:
        found = np.zeros(count, np.float32)
        for reply in self.replies.values():
            if reply.spans and reply.ends_at() > begin:
                found += reply.read(begin, count)
        return found
