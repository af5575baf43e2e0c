"""The audio front end of all conversations of a process, computed by worker processes beside it.

What conversations hear and play within one iteration of the event loop goes to a worker as one message, and comes back
as one (`front_end_worker.py`). Changes of what is played travel with the audio, so that both take effect in the order
of the calls. Workers are processes and not threads: Python's lock would make threads wait for the event loop after
every operation on samples, and it is needed for the models.
"""

import asyncio
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from vivavoce.audio.resample import check_rate
from vivavoce.audio.vad import VoiceActivity
from vivavoce.dialogue.front_end import AudioWindow, Deliver, EchoRemover, checked
from vivavoce.dialogue.front_end_batch import NoiseChange
from vivavoce.dialogue.front_end_worker import (
    Answer,
    Closed,
    Heard,
    Message,
    MessageReader,
    Opened,
    TimelineCall,
    framed,
    main,
)
from vivavoce.dialogue.items import Samples
from vivavoce.errors import VivaError
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)

MAX_DELAYS = 512
SLICE_SECONDS = 0.002  # for which results are delivered before other callbacks of the event loop run


@dataclass(eq=False)
class ServedFrontEnd:
    """The front end of one conversation; also its `PlayedOutput`."""

    worker: "FrontEndWorker"
    opened: Opened
    deliver: Deliver
    has_echo: bool
    pending: int = 0
    """Samples passed to the worker whose windows were not delivered."""
    is_closed: bool = False
    _sent_at: float | None = None  # the oldest of the pending samples
    _failure: Exception | None = None
    _drained: list[tuple[int, "asyncio.Future[None]"]] = field(default_factory=list)

    def hear(self, samples: Samples, now: float) -> None:
        """Take the next samples; `now` is the capture time of the last, or later."""
        self._raise_failure()
        samples = checked(samples)
        self.pending += len(samples)
        if self._sent_at is None:
            self._sent_at = asyncio.get_running_loop().time()
        self.worker.send(self, Heard(samples.tobytes(), now))

    def reduce_noise(self, strength: float | None) -> None:
        """Suppress noise from now on, by a strength from 0 to 1; None: not at all."""
        self._raise_failure()
        self.opened = self.opened._replace(noise_strength=strength)  # for a process that takes the place of this one
        self.worker.send(self, NoiseChange(strength))

    @property
    def unprocessed_seconds(self) -> float:
        """Seconds of audio that are still to be processed."""
        return self.pending / self.opened.input_rate

    async def drain(self, max_seconds: float = 0.0) -> None:
        """Wait until no more than these seconds of audio are still to be processed."""
        limit = int(max_seconds * self.opened.input_rate)
        if self.pending > limit and not self.is_closed:
            drained = asyncio.get_running_loop().create_future()
            self._drained.append((limit, drained))
            await drained
        self._raise_failure()

    def close(self) -> None:
        """Drop what is pending."""
        if not self.is_closed:
            self.is_closed = True
            self.worker.remove(self)
            self.drop_pending()

    def set_gain(self, moment: float, gain: float) -> None:
        """Set the gain of the output from this moment on."""
        self._call("set_gain", moment, gain)

    def play(self, moment: float, samples: Samples, now: float) -> None:
        """Add samples that are played from this moment on, or after the samples before them."""
        self._call("play", moment, np.asarray(samples, np.float32).tobytes(), now)

    def stop(self, moment: float) -> None:
        """Drop the output from this moment on."""
        self._call("stop", moment)

    def receive(self, samples: int, heard: list[tuple[Any, ...]] | str) -> None:
        """Deliver results of the worker."""
        self.pending -= samples
        if self._sent_at is not None:
            received_at = asyncio.get_running_loop().time()
            self.worker.delays.append(received_at - self._sent_at)
            self._sent_at = received_at if self.pending else None
        try:
            if isinstance(heard, str):
                raise VivaError(f"the audio front end failed ({heard})")
            for windows, quiet_ms in heard:
                self.deliver([AudioWindow(np.frombuffer(data, np.float32), *rest) for data, *rest in windows], quiet_ms)
        except Exception as error:  # raised to the conversation's next caller; other conversations go on
            log_failure(logger, error, "the audio front end of a conversation failed")
            self._failure = error
        self._wake()

    def drop_pending(self) -> None:
        """Expect no more results of what was sent."""
        self.pending = 0
        self._wake()

    def _call(self, name: str, *arguments: Any) -> None:
        if self.has_echo and not self.is_closed:  # without echo cancellation nothing reads the timeline
            self.worker.send(self, TimelineCall(name, arguments))

    def _wake(self) -> None:
        waiting, self._drained = self._drained, []
        for limit, drained in waiting:
            if self.pending > limit:
                self._drained.append((limit, drained))
            elif not drained.done():
                drained.set_result(None)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class FrontEndWorker(asyncio.Protocol):
    """The connection to a worker process. If the process dies, another begins with all conversations anew."""

    def __init__(self) -> None:
        self.sessions: dict[int, ServedFrontEnd] = {}
        self.delays: deque[float] = deque(maxlen=MAX_DELAYS)
        """Seconds from audio to its windows, recently."""
        self._ids: dict[ServedFrontEnd, int] = {}
        self._count = 0
        self._outgoing: list[tuple[int, Message]] = []
        self._answers: deque[Answer] = deque()  # not delivered yet
        self._reader = MessageReader()
        self._transport: asyncio.WriteTransport | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._warming: asyncio.Future[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._is_closing = False

    async def start(self) -> None:
        """Start the process."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            command = [sys.executable, "-c", f"from {main.__module__} import main; main({theirs.fileno()})"]
            # Its matrices are small: threads of the linear algebra library would cost more than they compute.
            environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
            )
        self._reader = MessageReader()
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)

    async def warm_up(self, detectors: bytes) -> None:
        """Compile everything before the first conversation."""
        assert self._transport is not None
        self._warming = asyncio.get_running_loop().create_future()
        self._transport.write(framed(detectors))
        await self._warming

    def open(self, opened: Opened, deliver: Deliver, has_echo: bool) -> ServedFrontEnd:
        """The front end of a new conversation."""
        session = ServedFrontEnd(self, opened, deliver, has_echo)
        self._count += 1
        self._ids[session], self.sessions[self._count] = self._count, session
        self.send(session, opened)
        return session

    def send(self, session: ServedFrontEnd, message: Message) -> None:
        """Send a message with the others of this iteration of the event loop."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append((self._ids[session], message))

    def remove(self, session: ServedFrontEnd) -> None:
        """Close the conversation in the worker."""
        self.send(session, Closed())
        del self.sessions[self._ids.pop(session)]

    async def close(self) -> None:
        """End the process."""
        self._is_closing = True
        if self._restarting is not None:
            await self._restarting
        if self._transport is not None:
            self._transport.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.wait)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.WriteTransport, transport)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop: take the results of whole messages."""
        answers: list[Answer] | None
        for answers in self._reader.feed(data):
            if answers is None:
                self._warmed()
                continue
            is_idle = not self._answers
            self._answers.extend(answers)
            if is_idle:
                self._deliver()

    def _deliver(self) -> None:
        """Deliver results, in slices: a message has those of all conversations, and timers must not wait for them."""
        loop = asyncio.get_running_loop()
        stop = loop.time() + SLICE_SECONDS
        while self._answers and loop.time() < stop:
            id, samples, heard = self._answers.popleft()
            if id in self.sessions:
                self.sessions[id].receive(samples, heard)
        if self._answers:
            loop.call_soon(self._deliver)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._transport = None
        self._warmed()
        if self._is_closing:
            return
        logger.error("an audio front end process ended; another takes its %d conversations", len(self.sessions))
        self._outgoing = [(id, session.opened) for id, session in self.sessions.items()]
        self._answers.clear()
        for session in self.sessions.values():
            session.drop_pending()
        self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        try:
            if self.process is not None:
                await asyncio.to_thread(self.process.wait)
            await self.start()
        except OSError as error:  # conversations stay without audio; the next that opens finds them so
            log_failure(logger, error, "no audio front end process could be started")

    def _warmed(self) -> None:
        if self._warming is not None and not self._warming.done():
            self._warming.set_result(None)

    def _flush(self) -> None:
        if self._transport is not None and self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            self._transport.write(framed(outgoing))


class FrontEndService:
    """Front ends for conversations on one event loop, while it is entered."""

    def __init__(self, workers: int = 1) -> None:
        self._workers = [FrontEndWorker() for _ in range(workers)]

    async def __aenter__(self) -> Self:
        for worker in self._workers:
            await worker.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            await worker.close()

    @property
    def delay(self) -> float | None:
        """Median seconds from audio to its windows, recently; None: there was none."""
        delays = [delay for worker in self._workers for delay in worker.delays]
        return median(delays) if delays else None

    @property
    def pids(self) -> list[int]:
        """The ids of its processes."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def open(
        self,
        activity: VoiceActivity | None,
        echo: EchoRemover | None,
        rates: tuple[int, int],
        deliver: Deliver,
    ) -> ServedFrontEnd:
        """The front end of a conversation with these rates of input and output."""
        for rate in rates:
            check_rate(rate)
        worker = min(self._workers, key=lambda each: len(each.sessions))
        return worker.open(Opened(_pickled(activity, echo), *rates), deliver, echo is not None)

    async def warm_up(self, activity: VoiceActivity | None, echo: EchoRemover | None) -> None:
        """Compile everything before the first conversation."""
        for worker in self._workers:
            await worker.warm_up(_pickled(activity, echo))


def _pickled(activity: VoiceActivity | None, echo: EchoRemover | None) -> bytes:
    return pickle.dumps((activity, echo), pickle.HIGHEST_PROTOCOL)
