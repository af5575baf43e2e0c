"""One caller of `viva bench serve`: an open microphone, a player, and what was measured in the conversation.

A sample of the microphone is spoken at its place in the packets' schedule, and sent when its packet is complete.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from vivavoce.audio.player import PlaybackClock
from vivavoce.bench.serve_plans import CallPlan, CallResult, EncodedQuestion, EncodedSounds, TurnResult
from vivavoce.bench.serve_transport import CallerConnection, CallRefusedError, ReceivedEvent
from vivavoce.errors import VivaError

LEAD_IN_SECONDS = 0.6  # of room noise before the first question
PAUSE_SECONDS = 1.0  # between the end of a reply and the next question
OPEN_SECONDS = 20.0
ANSWER_SECONDS = 30.0  # a question without an answer by then was never answered
YIELD_SECONDS = 5.0  # a reply that plays on for this long did not yield
EXTRA_REPLY_SECONDS = 30.0
SOCKET_REPLY_ENDS = ("response.output_audio.done", "response.done")
CALL_REPLY_ENDS = ("output_audio_buffer.stopped",)  # sound is sent as it is played
MIN_SILENT_PACKETS = 2  # a single one may be a pause of the voice


@dataclass
class HeardReply:
    """The playback of one reply."""

    id: str
    clock: PlaybackClock = field(default_factory=PlaybackClock)
    first_at: float | None = None
    stopped_at: float | None = None
    is_done: bool = False
    silent_packets: int = 0
    """In a row, of a transport that also sends silence."""
    gaps: int = 0
    gap_seconds: float = 0.0
    """Of silence that was sent inside the reply."""

    def feed_packet(self, now: float, seconds: float, is_silent: bool, not_before: float) -> None:
        """Receive a packet of a transport that sends all the time; silence inside the reply is an underrun."""
        if self.first_at is None and is_silent:
            return
        if is_silent:
            self.silent_packets += 1
        else:
            if self.silent_packets >= MIN_SILENT_PACKETS:
                self.gaps += 1
                self.gap_seconds += self.silent_packets * seconds
            self.silent_packets = 0
        self.feed(now, seconds, not_before)

    def feed(self, now: float, seconds: float, not_before: float) -> None:
        """Receive sound; it is played after that of earlier replies."""
        if self.stopped_at is not None:
            return
        if self.first_at is None:
            self.first_at = now
        self.clock.feed(now, seconds, not_before)

    def finish(self, now: float) -> None:
        """No more sound will come."""
        if not self.is_done and self.stopped_at is None:
            self.clock.finish(now)
        self.is_done = True

    def stop(self, now: float) -> None:
        """Drop the sound that was not played."""
        if self.stopped_at is None:
            self.clock.advance(now)
            self.clock.stop(now)
            self.stopped_at = now

    def is_audible(self, now: float) -> bool:
        """Whether it is being played, or more of it is expected."""
        if self.first_at is None or self.stopped_at is not None:
            return False
        return not self.is_done or now < self.clock.ends

    @property
    def ends(self) -> float:
        """When the sound received so far has been played."""
        return -math.inf if self.stopped_at is not None else self.clock.ends


@dataclass
class CallerMicrophone:
    """Sends a message at each deadline: noise, or the question that is being asked."""

    sounds: EncodedSounds
    offset: int
    lateness: list[float]
    now: Callable[[], float]
    sent: int = 0
    began: float = 0.0
    speaks_until: float = -math.inf
    _queue: deque[bytes] = field(default_factory=deque)
    _waiting: dict[int, asyncio.Future[float]] = field(default_factory=dict)

    def say(self, question: EncodedQuestion) -> tuple[float, asyncio.Future[float]]:
        """Speak from the next message on: the onset of the voice, and when its last sample will have been sent."""
        begin = self.sent + len(self._queue)
        self._queue.extend(question.messages)
        starts = self.began + begin * self.sounds.packet_seconds
        self.speaks_until = starts + len(question.messages) * self.sounds.packet_seconds
        ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting[begin + question.last] = ended
        return starts + question.onset, ended

    async def run(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send in real time until cancelled."""
        noise, seconds = self.sounds.noise, self.sounds.packet_seconds
        self.began = self.now()
        while True:
            due = self.began + (self.sent + 1) * seconds
            if (delay := due - self.now()) > 0:
                await asyncio.sleep(delay)
            self.lateness.append(self.now() - due)
            await send(self._queue.popleft() if self._queue else noise[(self.sent + self.offset) % len(noise)])
            if (ended := self._waiting.pop(self.sent, None)) is not None and not ended.done():
                ended.set_result(self.now())
            self.sent += 1


class Call:
    """A conversation as planned. `run` never raises but for cancellation."""

    def __init__(
        self,
        plan: CallPlan,
        sounds: EncodedSounds,
        reply_seconds: float,
        began: float,
        lateness: list[float],
        transport: str = "websocket",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self._sounds, self._reply_seconds, self._began = plan, sounds, reply_seconds, began
        self._now = now
        self.result = CallResult(plan.number)
        offset = plan.number * 37 % len(sounds.noise)  # so that callers do not send the same noise
        self._microphone = CallerMicrophone(sounds, offset, lateness, now)
        self._replies: dict[str, HeardReply] = {}
        self._current: HeardReply | None = None
        self._is_open = False
        self._refusal: tuple[float, str] | None = None
        self._changed = asyncio.Event()
        self._reply_ends = CALL_REPLY_ENDS if transport == "webrtc" else SOCKET_REPLY_ENDS

    async def run(self, connect: "Callable[[Call], CallerConnection]") -> CallResult:
        """Connect, converse and leave."""
        started = self._now()
        self.result.started = started - self._began
        connection = connect(self)
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await connection.open()
            receiving = asyncio.create_task(connection.receive())
            tasks.append(receiving)
            if not await self._until(lambda: self._is_open, OPEN_SECONDS, receiving):
                if receiving.done():
                    receiving.result()
                raise TimeoutError("the session was not opened")
            self.result.opened = self._now() - started
            speaking = asyncio.create_task(self._microphone.run(connection.send))
            talking = asyncio.create_task(self._converse())
            tasks += [speaking, talking]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in (talking, receiving, speaking):
                if task.done():
                    task.result()
                    break
        except CallRefusedError as error:
            if self.result.opened is None:
                at, self.result.refusal = self._refusal or (self._now(), str(error))
                self.result.refused = at - started
            else:
                self.result.failure = str(error)
        except (VivaError, OSError, TimeoutError) as error:
            self.result.failure = str(error) or type(error).__name__
        finally:
            self.result.ended = self._now() - self._began
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await connection.close()
        return self.result

    # What the connection reports

    def on_audio(self, now: float, seconds: float, reply: str | None) -> None:
        """Sound of a reply, or of the current one where the transport does not name it."""
        heard = self._reply(reply) if reply is not None else self._current
        if heard is None:
            return
        if heard.first_at is None:
            self._changed.set()
        heard.feed(now, seconds, self._others_end(heard))

    def on_packet(self, now: float, seconds: float, is_silent: bool) -> None:
        """A packet of a transport that also sends silence between replies."""
        heard = self._current
        if heard is None or heard.is_done:
            return
        if heard.first_at is None:
            self._changed.set()
        heard.feed_packet(now, seconds, is_silent, self._others_end(heard))

    def on_event(self, now: float, event: ReceivedEvent) -> None:
        """An event of the server other than sound."""
        kind = event.type
        if kind == "session.created":
            self._is_open = True
        elif kind == "response.created" and event.response is not None:
            self._current = self._reply(event.response.id)
        elif kind in self._reply_ends:
            id = event.response.id if event.response is not None else event.response_id
            if id is not None:
                self._reply(id).finish(now)
        elif kind in ("input_audio_buffer.speech_started", "output_audio_buffer.cleared"):
            self._stop_playing(now)
        elif kind == "error" and event.error is not None:
            if not self._is_open:
                self._refusal = (now, event.error.code or event.error.message)
            else:
                self.result.failure = event.error.code or event.error.message
        else:
            return
        self._changed.set()

    # The conversation

    async def _converse(self) -> None:
        await asyncio.sleep(LEAD_IN_SECONDS)
        for number, question in enumerate(self.plan.questions):
            if number:
                await asyncio.sleep(PAUSE_SECONDS)
            turn, reply = await self._ask(question)
            if reply is not None and number == 0 and self.plan.interrupt_after is not None:
                turn, reply = await self._interrupt(turn, reply, self.plan.interrupt_after)
            if reply is None:
                return
            await self._listen(turn, reply)
            if not turn.is_over:
                self.result.failure = self.result.failure or "a reply did not end"
                return

    async def _ask(self, question: int) -> tuple[TurnResult, HeardReply | None]:
        """Ask, and wait for the first sound of a new reply."""
        known = set(self._replies)
        _, ended = self._microphone.say(self._sounds.questions[question])
        asked_at = await ended
        turn = TurnResult(asked_at - self._began)
        self.result.turns.append(turn)
        return turn, await self._first_sound(turn, asked_at, known)

    async def _first_sound(self, turn: TurnResult, asked_at: float, known: set[str]) -> HeardReply | None:
        def answer() -> HeardReply | None:
            new = (reply for id, reply in self._replies.items() if id not in known)
            return next((reply for reply in new if reply.first_at is not None and reply.stopped_at is None), None)

        await self._until(lambda: answer() is not None, ANSWER_SECONDS)
        reply = answer()
        if reply is not None and reply.first_at is not None:
            turn.first_sound = reply.first_at - asked_at
        return reply

    async def _interrupt(
        self, turn: TurnResult, reply: HeardReply, after: float
    ) -> tuple[TurnResult, HeardReply | None]:
        """Speak over the reply, and wait for the reply to that."""
        await asyncio.sleep(after)
        if not reply.is_audible(self._now()):  # it was shorter
            await self._listen(turn, reply)
            return await self._ask(self.plan.questions[0])
        known = set(self._replies)
        onset, ended = self._microphone.say(self._sounds.questions[self.plan.questions[0]])
        await self._until(lambda: reply.stopped_at is not None, onset - self._now() + YIELD_SECONDS)
        self._note(turn, reply)
        turn.is_over = reply.stopped_at is not None
        asked_at = await ended
        following = TurnResult(asked_at - self._began, interrupts=True)
        following.yielded = None if reply.stopped_at is None else reply.stopped_at - onset
        self.result.turns.append(following)
        if reply.stopped_at is None:
            self.result.failure = "a reply was not interrupted"
            return following, None
        return following, await self._first_sound(following, asked_at, known)

    async def _listen(self, turn: TurnResult, reply: HeardReply) -> None:
        """Hear a reply to its end."""
        limit = 1.5 * self._reply_seconds + EXTRA_REPLY_SECONDS
        try:
            turn.is_over = await self._until(lambda: reply.is_done or reply.stopped_at is not None, limit)
            if turn.is_over and reply.stopped_at is None:
                await asyncio.sleep(max(0.0, reply.ends - self._now()))
        finally:
            self._note(turn, reply)

    @staticmethod
    def _note(turn: TurnResult, reply: HeardReply) -> None:
        turn.underruns = reply.clock.underruns + reply.gaps
        turn.dry_seconds = reply.clock.dry_seconds + reply.gap_seconds
        turn.first_dry_at = reply.clock.first_dry_at
        turn.sound_seconds = reply.clock.sent

    def _stop_playing(self, now: float) -> None:
        """Stop, as stock clients do when they are told that the user speaks."""
        for reply in self._replies.values():
            if reply.is_audible(now):
                reply.stop(now)
                self.result.false_stops += now > self._microphone.speaks_until + PAUSE_SECONDS / 2

    def _others_end(self, heard: HeardReply) -> float:
        return max((each.ends for each in self._replies.values() if each is not heard), default=-math.inf)

    def _reply(self, id: str) -> HeardReply:
        return self._replies.setdefault(id, HeardReply(id))

    async def _until(
        self, condition: Callable[[], bool], seconds: float, connection: asyncio.Task[None] | None = None
    ) -> bool:
        """Wait for a condition, at most this long; also until the connection ends."""
        if connection is not None:
            connection.add_done_callback(lambda _: self._changed.set())
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    if connection is not None and connection.done():
                        return condition()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True
