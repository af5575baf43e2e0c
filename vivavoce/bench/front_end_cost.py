"""CPU time of the audio front end for each 32 ms of a conversation: alone in plain code, and as one of a batch."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vivavoce.audio.echo import EchoGuard
from vivavoce.audio.level import buzz
from vivavoce.audio.vad import RATE, WINDOW_SECONDS, voice_activity
from vivavoce.dialogue.front_end import AudioFrontEnd
from vivavoce.dialogue.front_end_batch import FrontEndBatch, InputChunk, NoiseChange, Operation
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.output_timeline import OutputTimeline

WIRE_RATE = 24_000
CHUNK_SECONDS = 0.04
PLAYED_SECONDS = 0.4  # a piece of a reply
SETTLING_CHUNKS = 40  # until the echo guard knows whether there is echo
MEASURED_CHUNKS = 16
SESSIONS = (1, 16, 64, 192)
ROOM_NOISE = 3e-4


@dataclass(frozen=True)
class FrontEndCost:
    """CPU microseconds for a window of one session."""

    when: str
    plain_us: float
    batched_us: dict[int, float]
    """By the number of sessions."""


class State(NamedTuple):
    """What goes on in a conversation; `echo` is the gain of its loudspeaker in its microphone."""

    talks: bool = False
    plays: bool = False
    echo: float = 0.0
    denoises: bool = False


def front_end_costs(sessions: tuple[int, ...] = SESSIONS) -> list[FrontEndCost]:
    """The costs in the states that a conversation is in most of the time."""
    states = {
        "silent room": State(),
        "the user talks": State(talks=True),
        "the user talks, noise is suppressed": State(talks=True, denoises=True),
        "a reply plays, headphones": State(plays=True),
        "a reply plays, loudspeaker": State(plays=True, echo=0.1),
    }
    return [
        FrontEndCost(when, _plain_us(state), {count: _batched_us(count, state) for count in sessions})
        for when, state in states.items()
    ]


def _session(state: State, seed: int) -> list[list[Operation]]:
    """The operations of one session, chunk by chunk."""
    noise, size = np.random.default_rng(seed), round(CHUNK_SECONDS * WIRE_RATE)
    seconds = (SETTLING_CHUNKS + MEASURED_CHUNKS) * CHUNK_SECONDS
    played = buzz(seconds, WIRE_RATE, seed).samples[0]
    microphone = noise.normal(0.0, ROOM_NOISE, len(played)).astype(np.float32)
    microphone[size:] += np.float32(state.echo) * played[:-size]
    if state.talks:
        microphone += buzz(seconds, WIRE_RATE, seed + 1).samples[0]
    operations: list[list[Operation]] = []
    for number in range(SETTLING_CHUNKS + MEASURED_CHUNKS):
        begin = number * CHUNK_SECONDS
        operations.append([InputChunk(microphone[number * size :][:size], begin + CHUNK_SECONDS)])
        if state.plays and number % round(PLAYED_SECONDS / CHUNK_SECONDS) == 0:
            piece = played[number * size :][: round(PLAYED_SECONDS * WIRE_RATE)]
            operations[-1].insert(0, _play(begin, piece))
    if state.denoises:
        operations[0].insert(0, NoiseChange(1.0))
    return operations


def _play(moment: float, samples: Samples) -> Callable[[OutputTimeline], None]:
    return lambda timeline: timeline.play(moment, samples, moment)


def _plain_us(state: State) -> float:
    session, timeline = _session(state, 0), OutputTimeline(WIRE_RATE, RATE)
    front_end = AudioFrontEnd(WIRE_RATE, voice_activity(), EchoGuard(), timeline.read)

    def step(number: int) -> None:
        for operation in session[number]:
            if isinstance(operation, InputChunk):
                front_end.hear(*operation)
            elif isinstance(operation, NoiseChange):
                front_end.reduce_noise(operation.strength)
            else:
                operation(timeline)
        assert front_end.quiet_ms >= 0

    return _window_us(step, 1)


def _batched_us(count: int, state: State) -> float:
    batch = FrontEndBatch(voice_activity(), EchoGuard())
    sessions = [_session(state, seed) for seed in range(count)]
    streams = [batch.join(WIRE_RATE, WIRE_RATE) for _ in sessions]

    def step(number: int) -> None:
        batch.process([(stream, session[number]) for stream, session in zip(streams, sessions, strict=True)])

    return _window_us(step, count)


def _window_us(step: Callable[[int], None], sessions: int) -> float:
    """The median over chunks: other programs on the machine disturb some."""
    times = []
    for number in range(SETTLING_CHUNKS + MEASURED_CHUNKS):
        started = time.thread_time()
        step(number)
        times.append(time.thread_time() - started)
    median = float(np.median(times[SETTLING_CHUNKS:]))
    return 1e6 * median / sessions * WINDOW_SECONDS / CHUNK_SECONDS
