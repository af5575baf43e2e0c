"""What a two-channel recording of a call says: segments of voice, and how the agent met an interruption.

Everything is decided by the level of the sound, so that any recording can be scored.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.resample import resample
from vivavoce.bench.duplex.interaction import Flags, runs
from vivavoce.bench.duplex.overlap import Segment, joined
from vivavoce.bench.turn_sounds import FRAME, RATE, Samples, voiced

FRAME_SECONDS = FRAME / RATE
WORD_GAP = 0.15
"""Shorter gaps are inside words."""
YIELD_GAP = 0.35
"""The agent has stopped when it is silent for longer."""
SEARCH_SECONDS = 3.0
NEAR_SECONDS = 0.5
"""The agent yields to a caller who speaks at most this long before or after; else it has finished."""


def voiced_segments(samples: Samples, rate: int = RATE, gap: float = WORD_GAP) -> list[Segment]:
    """Segments of voice in seconds, gaps up to `gap` bridged."""
    sound = samples if rate == RATE else resample(samples, rate, RATE)
    found = [(each.begin * FRAME_SECONDS, each.end * FRAME_SECONDS) for each in runs(voiced(sound))]
    return joined(found, gap)


def flags(segments: list[Segment], ticks: int, tick_seconds: float) -> Flags:
    """The ticks that the segments cover, each at least one.  # [tick]"""
    found: NDArray[np.bool_] = np.zeros(ticks, np.bool_)
    for start, end in segments:
        first = round(start / tick_seconds)
        found[first : max(first + 1, round(end / tick_seconds))] = True
    return found


@dataclass(frozen=True)
class BargeIn:
    """How the agent met a caller who began to speak over it."""

    agent_was_speaking: bool
    yielded: bool
    yield_seconds: float | None
    """From the caller's onset until the agent was silent."""
    talk_over_seconds: float
    """Both spoke, from the onset until the agent yielded or for three seconds."""
    response_seconds: float | None
    """From the end of the caller's turn to the agent's next one; None if there is none, or it came before."""


def barge_in(caller: Samples, agent: Samples, rate: int, onset: float | None = None) -> BargeIn:
    """Score one interruption at `onset` seconds, or at the caller's first voice."""
    spoken, heard = voiced_segments(caller, rate), voiced_segments(agent, rate)
    start = onset if onset is not None else (spoken[0][0] if spoken else 0.0)
    stopped = _stop(spoken, joined(heard, YIELD_GAP), start, len(agent) / rate)
    until = start + SEARCH_SECONDS if stopped is None else stopped
    return BargeIn(
        agent_was_speaking=any(begin <= start < end + WORD_GAP for begin, end in heard),
        yielded=stopped is not None,
        yield_seconds=None if stopped is None else max(0.0, stopped - start),
        talk_over_seconds=sum(
            max(0.0, min(one[1], two[1], until) - max(one[0], two[0], start)) for one in spoken for two in heard
        ),
        response_seconds=_response(spoken, heard, start),
    )


def _stop(spoken: list[Segment], heard: list[Segment], onset: float, length: float) -> float | None:
    """When the agent stopped with the caller speaking nearby."""
    for begin, end in heard:
        is_after = begin < onset + SEARCH_SECONDS and onset <= end < onset + SEARCH_SECONDS
        is_silent = length - end >= YIELD_GAP
        is_near = any(one < end + NEAR_SECONDS and end - NEAR_SECONDS < two for one, two in spoken)
        if is_after and is_silent and is_near:
            return end
    return None


def _response(spoken: list[Segment], heard: list[Segment], onset: float) -> float | None:
    turn = next((each for each in joined(spoken, YIELD_GAP) if each[1] > onset), None)
    if turn is None:
        return None
    answer = next((begin for begin, _ in heard if begin > max(onset, turn[0])), None)
    return None if answer is None or answer < turn[1] else answer - turn[1]
