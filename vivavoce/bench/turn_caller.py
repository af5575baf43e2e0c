"""A simulated caller: a real-time microphone, a loudspeaker, and the event handling of a stock client."""

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vivavoce.audio.io import float_to_pcm16, pcm16_to_float
from vivavoce.audio.level import from_db
from vivavoce.bench.turn_client import (
    OPEN_SECONDS,
    PERFECT,
    Event,
    Line,
    LineDirection,
    Loudspeaker,
    PlayedReply,
    Wire,
    WireClosedError,
)
from vivavoce.bench.turn_sounds import RATE, SPEECH_DBFS, Samples, room_noise, voiced_bounds
from vivavoce.errors import InputError

PACKET = RATE // 50
NOISE_SECONDS = 10.0
QUIET_ROOM_DBFS = -70.0
SOUND = {"response.output_audio.delta", "response.audio.delta"}
SOUND_DONE = {"response.output_audio.done", "response.audio.done"}
WORDS = {"response.output_audio_transcript.delta", "response.audio_transcript.delta"}


@dataclass(frozen=True)
class CallEnvironment:
    """Acoustics and network of the caller."""

    snr_db: float | None = None
    """Signal-to-noise ratio; None: a quiet room."""
    echo_db: float | None = None
    """Loudspeaker level in the microphone; None: a headset."""
    echo_delay: float = 0.06
    echo_response: Samples | None = field(default=None, compare=False, repr=False)
    """Impulse response from loudspeaker to microphone; None: the direct sound alone."""
    background: Samples | None = field(default=None, compare=False, repr=False)
    """What the microphone hears all the time, in a loop; None: room noise."""
    line: Line = PERFECT


@dataclass(frozen=True)
class CallerUtterance:
    """A sound of the caller, with the times of its first and last voiced sample."""

    kind: str
    start: float
    first: float
    last: float
    end: float
    pause: tuple[float, float] | None = None
    """Start and end of a pause inside it."""


@dataclass
class Microphone:
    """Packets of 20 ms at absolute deadlines; room noise between utterances."""

    environment: CallEnvironment
    loudspeaker: Loudspeaker
    seed: int = 0
    began: float = 0.0
    sent: int = 0
    lateness: list[float] = field(default_factory=list)
    """Lateness of each packet in seconds."""
    record: list[Samples] = field(default_factory=list)
    _utterances: list[tuple[int, Samples]] = field(default_factory=list)
    _noise: Samples = field(init=False, repr=False)
    _direction: LineDirection = field(init=False, repr=False)

    def __post_init__(self) -> None:
        snr, background = self.environment.snr_db, self.environment.background
        level = QUIET_ROOM_DBFS if snr is None else SPEECH_DBFS - snr
        self._noise = room_noise(NOISE_SECONDS, level, self.seed) if background is None else background
        self._direction = LineDirection(self.environment.line, self.seed)

    def say(self, samples: Samples, kind: str, pause: tuple[int, int] | None = None) -> CallerUtterance:
        """Queue samples from the next packet on; `pause` is the sample range of a pause in them."""
        begin = max([self.sent * PACKET, *(start + len(sound) for start, sound in self._utterances)])
        self._utterances.append((begin, samples))
        first, last = voiced_bounds(samples)
        start = self.began + begin / RATE
        pause_times = None if pause is None else (start + pause[0] / RATE, start + pause[1] / RATE)
        return CallerUtterance(
            kind, start, start + first / RATE, start + last / RATE, start + len(samples) / RATE, pause_times
        )

    def packet(self) -> Samples:
        """The next 20 ms of input; lost packets are silence."""
        begin = self.sent * PACKET
        self.sent += 1
        samples = np.take(self._noise, np.arange(begin, begin + PACKET), mode="wrap")
        for start, sound in self._utterances:
            low, high = max(begin, start), min(begin + PACKET, start + len(sound))
            if low < high:
                samples[low - begin : high - begin] += sound[low - start : high - start]
        self._utterances = [(start, sound) for start, sound in self._utterances if start + len(sound) > begin + PACKET]
        echo = self.environment.echo_db
        if echo is not None:
            moment = self.began + begin / RATE - self.environment.echo_delay
            samples += np.float32(from_db(echo)) * self._echo(moment)
        if self._direction.line.loss and self._direction.is_lost():
            samples = np.zeros_like(samples)
        self.record.append(samples)
        return samples

    def _echo(self, moment: float) -> Samples:
        """A packet of what the loudspeaker played from this moment on, as it arrives at the microphone."""
        response = self.environment.echo_response
        if response is None:
            return self.loudspeaker.read(moment, PACKET)
        before = len(response) - 1
        played = self.loudspeaker.read(moment - before / RATE, before + PACKET)
        return np.convolve(played, response, mode="valid") if played.any() else played[before:]


class BenchCaller:
    """One session, used as `async with`. All events are recorded with their time."""

    def __init__(self, wire: Wire, session: Event, environment: CallEnvironment | None = None, seed: int = 0) -> None:
        self.wire, self.session = wire, session
        self.environment = environment or CallEnvironment()
        self.loudspeaker = Loudspeaker()
        self.microphone = Microphone(self.environment, self.loudspeaker, seed)
        self.events: list[tuple[float, Event]] = []
        """All received events; audio is replaced by its length in bytes."""
        self.active: set[str] = set()
        """Ids of unfinished responses."""
        self.closed: str | None = None
        self._ready = asyncio.Event()
        self._packet_due = asyncio.Event()

    async def __aenter__(self) -> "BenchCaller":
        self._receiver = asyncio.create_task(self._receive())
        await self.wire.send({"type": "session.update", "session": self.session})
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await self._ready.wait()
            self._check_open()
        except (TimeoutError, WireClosedError) as error:
            self._receiver.cancel()
            why = str(error) or f"it did not answer session.update within {OPEN_SECONDS:.0f} s"
            raise InputError(f"no session with the server: {why}") from error
        self.microphone.began = self.now()
        self._sender = asyncio.create_task(self._speak())
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in (self._sender, self._receiver):
            task.cancel()
        await asyncio.gather(self._sender, self._receiver, return_exceptions=True)

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    def say(self, samples: Samples, kind: str, pause: tuple[int, int] | None = None) -> CallerUtterance:
        """Start speaking; returns immediately."""
        return self.microphone.say(samples, kind, pause)

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition, polled once per packet, because waking more often would cost more than the check."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._check_open()
                    await self._packet_due.wait()
        except TimeoutError:
            return condition()
        return True

    async def wait(self, moment: float) -> None:
        await self.until(lambda: self.now() >= moment, max(0.0, moment - self.now()) + 1.0)

    def heard_since(self, moment: float) -> PlayedReply | None:
        """The first reply whose voice became audible at or after this time."""
        for reply in self.loudspeaker.replies.values():
            heard = None if reply.voice_at is None else reply.heard_at(reply.voice_at)
            if heard is not None and moment <= heard <= self.now():
                return reply
        return None

    @property
    def is_quiet(self) -> bool:
        """Whether no response is active or audible."""
        return not self.active and not self.loudspeaker.is_audible(self.now())

    async def stop_replies(self) -> None:
        """Cancel the active response and stop playback."""
        if self.active:
            await self.wire.send({"type": "response.cancel"})
        await self._stop_playing("bench")

    async def _speak(self) -> None:
        microphone = self.microphone
        while True:
            due = microphone.began + (microphone.sent + 1) * PACKET / RATE
            await asyncio.sleep(max(0.0, due - self.now()))
            microphone.lateness.append(self.now() - due)
            self._packet_due.set()
            self._packet_due = asyncio.Event()
            pcm = float_to_pcm16(microphone.packet()).astype("<i2", copy=False).tobytes()
            try:
                await self.wire.send({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()})
            except WireClosedError as error:
                self.closed = self.closed or str(error)
                self._packet_due.set()
                return

    async def _receive(self) -> None:
        while True:
            try:
                event = await self.wire.receive()
            except WireClosedError as error:
                self.closed = str(error)
                self._ready.set()
                return
            try:
                await self._handle_event(self.now(), event)
            except (KeyError, TypeError, ValueError) as error:
                self.closed = f"the server's {event.get('type')} event cannot be read: {error!r}"
                return

    async def _handle_event(self, now: float, event: Event) -> None:
        kind = str(event.get("type"))
        is_sound = kind in SOUND
        self.events.append((now, event | {"delta": len(event["delta"]) * 3 // 4} if is_sound else event))
        if is_sound:
            self.loudspeaker.feed(now, event["response_id"], pcm16_to_float(base64.b64decode(event["delta"])))
            self.loudspeaker.reply(event["response_id"], now).item = event.get("item_id")
        elif kind in WORDS:
            self.loudspeaker.reply(event["response_id"], now).transcript += event.get("delta") or ""
        elif kind in SOUND_DONE:
            self.loudspeaker.reply(event["response_id"], now).finish(now)
        elif kind == "response.created":
            self.active.add(event["response"]["id"])
            self.loudspeaker.reply(event["response"]["id"], now)
        elif kind == "response.done":
            self._finish_response(now, event["response"])
        elif kind == "input_audio_buffer.speech_started":
            await self._stop_playing("speech_started")
        elif kind == "output_audio_buffer.cleared":
            self.loudspeaker.drop(now, "cleared", event.get("response_id"))
        elif kind == "session.updated" or (kind == "error" and not self._ready.is_set()):
            self._ready.set()

    def _finish_response(self, now: float, response: Event) -> None:
        reply = self.loudspeaker.reply(response["id"], now)
        self.active.discard(reply.id)
        if reply.status is not None:  # only the first response.done counts
            return
        reply.status = response.get("status")
        reply.reason = (response.get("status_details") or {}).get("reason")
        if reply.status == "cancelled":
            reply.drop(now, "cancelled")
        reply.finish(now)

    async def _stop_playing(self, reason: str) -> None:
        """Drop unplayed audio and send `conversation.item.truncate`, as stock clients do."""
        for reply in self.loudspeaker.drop(self.now(), reason):
            if reply.item is not None and reply.spans:
                heard = sum((span.last or span.first) - span.first for span in reply.spans)
                event = {"type": "conversation.item.truncate", "item_id": reply.item, "content_index": 0}
                await self.wire.send(event | {"audio_end_ms": heard * 1000 // RATE})

    def _check_open(self) -> None:
        if self.closed is not None:
            raise WireClosedError(self.closed)
