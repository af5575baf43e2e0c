"""A process that computes the audio front end of conversations.

It takes all messages that have arrived on its socket, computes them together, and answers with one message. Batches
form from what arrives while it computes. It ends with the socket. `front_end_service.py` is the other end.
"""

import logging
import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from vivavoce.audio.rows import FEW
from vivavoce.audio.vad import RATE, WINDOW, voice_activity
from vivavoce.dialogue.front_end_batch import (
    BatchedStream,
    FrontEndBatch,
    HeardChunk,
    InputChunk,
    NoiseChange,
    Operation,
)
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<I")  # the length of a message
RECEIVED_AT_ONCE = 1 << 20
WARM_UP_CHUNKS = 4  # TorchScript compiles during the first calls


class Opened(NamedTuple):
    """A conversation begins; `detectors` are a pickled `VoiceActivity`, or None, and an `EchoRemover`, or None.

    `noise_strength`: that of `NoiseChange`.
    """

    detectors: bytes
    input_rate: int
    output_rate: int
    noise_strength: float | None = None


class Closed(NamedTuple):
    """A conversation has ended."""


class Heard(NamedTuple):
    """Audio of the user."""

    samples: bytes
    now: float


class TimelineCall(NamedTuple):
    """A call of the conversation's `OutputTimeline`; bytes stand for samples."""

    name: str
    arguments: tuple[Any, ...]


Message = Opened | Closed | Heard | NoiseChange | TimelineCall
Answer = tuple[int, int, list[tuple[Any, ...]] | str]
"""The conversation, the number of input samples processed, and the chunks as heard, or the name of an error."""


def framed(message: object) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


class MessageReader:
    """Cuts a byte stream into the messages of `framed`."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that these bytes complete."""
        buffer, messages = self._buffer, []
        buffer += data
        while len(buffer) >= HEADER.size and len(buffer) >= HEADER.size + HEADER.unpack_from(buffer)[0]:
            end = HEADER.size + HEADER.unpack_from(buffer)[0]
            messages.append(pickle.loads(buffer[HEADER.size : end]))
            del buffer[:end]
        return messages


def received(connection: socket.socket) -> Iterator[list[Any]]:
    """All whole messages that have arrived, again and again until the other end closes."""
    reader = MessageReader()
    while data := connection.recv(RECEIVED_AT_ONCE):
        if messages := reader.feed(data):
            yield messages


@dataclass
class WorkerSession:
    """A conversation and what is to be computed for it."""

    batch: FrontEndBatch
    stream: BatchedStream
    operations: list[Operation] = field(default_factory=list)


class Worker:
    """The front ends of the conversations of one process."""

    def __init__(self) -> None:
        self._batches: dict[bytes, FrontEndBatch] = {}
        self._sessions: dict[int, WorkerSession] = {}

    def apply(self, id: int, message: Message) -> None:
        """Take a message of a conversation; what is computed waits for `compute`."""
        if isinstance(message, Opened):
            batch = self._batch(message.detectors)
            session = WorkerSession(batch, batch.join(message.input_rate, message.output_rate))
            session.operations.append(NoiseChange(message.noise_strength))
            self._sessions[id] = session
        elif isinstance(message, Closed):
            session = self._sessions.pop(id)
            session.batch.leave(session.stream)
        else:
            self._sessions[id].operations.append(_operation(message))

    def compute(self) -> list[Answer]:
        """Compute what waits."""
        answers: list[Answer] = []
        for batch in self._batches.values():
            mine = [(id, each) for id, each in self._sessions.items() if each.operations and each.batch is batch]
            for (id, session), heard in zip(mine, _heard(batch, [each for _, each in mine]), strict=True):
                samples = sum(len(each.samples) for each in session.operations if isinstance(each, InputChunk))
                session.operations = []
                if samples or isinstance(heard, str):
                    answers.append(
                        (id, samples, heard if isinstance(heard, str) else [_packed(each) for each in heard])
                    )
        return answers

    def warm_up(self, detectors: bytes) -> None:
        """Compile everything, with streams of noise."""
        batch = self._batch(detectors)
        streams = [batch.join(rate, rate) for rate in (24_000, RATE) for _ in range(FEW)]
        noise = np.random.default_rng(0).normal(0, 0.1, (WARM_UP_CHUNKS, 2 * WINDOW)).astype(np.float32)
        batch.process([(stream, [NoiseChange(1.0)]) for stream in streams])
        for number, chunk in enumerate(noise):
            moment = 2 * number * WINDOW / RATE
            for stream in streams:
                stream.timeline.play(moment, noise[0], moment)
            batch.process([(stream, [InputChunk(chunk, moment)]) for stream in streams])
        for stream in streams:
            batch.leave(stream)

    def _batch(self, detectors: bytes) -> FrontEndBatch:
        if detectors not in self._batches:
            activity, echo = pickle.loads(detectors)
            self._batches[detectors] = FrontEndBatch(activity or voice_activity(), echo)
        return self._batches[detectors]


def _heard(batch: FrontEndBatch, sessions: Sequence[WorkerSession]) -> Sequence[list[HeardChunk] | str]:
    try:
        return batch.process([(each.stream, each.operations) for each in sessions])
    except Exception as error:  # only the conversation in which it is fails
        log_failure(logger, error, "the audio front end of %d conversations failed", len(sessions))
        if len(sessions) == 1:
            return [type(error).__name__]
        return [_heard(batch, [each])[0] for each in sessions]


def _operation(message: Heard | NoiseChange | TimelineCall) -> Operation:
    if isinstance(message, Heard):
        return InputChunk(_samples(message.samples), message.now)
    if isinstance(message, NoiseChange):
        return message
    name, arguments = message
    given = [_samples(each) if isinstance(each, bytes) else each for each in arguments]
    return lambda timeline: getattr(timeline, name)(*given)


def _samples(data: bytes) -> Any:
    return np.frombuffer(data, np.float32)


def _packed(chunk: HeardChunk) -> tuple[Any, ...]:
    windows = [(each.samples.tobytes(), *each[1:]) for each in chunk.windows]
    return windows, chunk.quiet_ms


def main(descriptor: int) -> None:
    """Serve the other end of this socket."""
    torch.set_num_threads(1)
    worker = Worker()
    with socket.socket(fileno=descriptor) as connection:
        for messages in received(connection):
            for message in messages:
                if isinstance(message, bytes):
                    worker.warm_up(message)
                    connection.sendall(framed(None))
                else:
                    for id, each in message:
                        worker.apply(id, each)
            if answers := worker.compute():
                connection.sendall(framed(answers))
