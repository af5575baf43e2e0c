"""The τ-voice interaction measures, from who speaks when on a grid of ticks.

Definitions of the τ-voice leaderboard (sierra-research/tau2-bench, docs/interaction-metrics.md), in seconds:

| measure | meaning |
|---|---|
| R_R, L_R | share of user turns that are answered before the user speaks again, and mean time to the answer |
| R_Y, L_Y | share of interruptions at which the agent stops within 2 s, and mean time until it does |
| I_A | agent turns that begin while the user speaks, per user turn |
| S_BC, S_VT, S_ND | share of backchannels, vocal tics and speech to others that neither stop nor start the agent |
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from vivavoce.errors import InputError

TICK_SECONDS = 0.2  # of the published trajectories
YIELD_SECONDS = 2.0
KEEP_SECONDS = 1.0
"""An agent that stops this soon after a backchannel, tic or speech to others was stopped by it."""
IGNORE_SECONDS = 2.0
"""An agent that starts this soon after a tic or speech to others in silence has answered it."""

Flags = NDArray[np.bool_]


class UserSound(IntEnum):
    """What a tick of the user is, besides a turn."""

    turn = 0
    backchannel = 1
    vocal_tic = 2
    non_directed = 3


SELECTIVITY = {UserSound.backchannel: "S_BC", UserSound.vocal_tic: "S_VT", UserSound.non_directed: "S_ND"}


@dataclass(frozen=True)
class Timeline:
    """One conversation in ticks. A tic or speech to others outside `user` is a sound between turns."""

    user: Flags
    agent: Flags
    sound: NDArray[np.int8]
    """`UserSound` of each tick."""
    tick_seconds: float = TICK_SECONDS

    def __post_init__(self) -> None:
        if not len(self.user) == len(self.agent) == len(self.sound):
            raise InputError("the two sides of a timeline must be equally long")


@dataclass(frozen=True)
class Run:
    """Ticks `begin` to `end` (exclusive) without a gap."""

    begin: int
    end: int


@dataclass
class Events:
    """Events of any number of conversations; times in seconds."""

    response_seconds: list[float] = field(default_factory=list)
    unanswered: int = 0
    yield_seconds: list[float] = field(default_factory=list)
    not_yielded: int = 0
    agent_interruptions: int = 0
    kept: dict[UserSound, list[bool]] = field(default_factory=lambda: {kind: [] for kind in SELECTIVITY})
    """Whether the agent ignored each sound that it should ignore."""

    def add(self, other: "Events") -> None:
        self.response_seconds += other.response_seconds
        self.unanswered += other.unanswered
        self.yield_seconds += other.yield_seconds
        self.not_yielded += other.not_yielded
        self.agent_interruptions += other.agent_interruptions
        for kind, values in other.kept.items():
            self.kept[kind] += values

    def measures(self) -> dict[str, float | None]:
        """The eight figures; None where there was no event. `L_…_p50` are medians."""
        turns = len(self.response_seconds) + self.unanswered
        interruptions = len(self.yield_seconds) + self.not_yielded
        return {
            "R_R": _ratio(len(self.response_seconds), turns),
            "L_R": _mean(self.response_seconds),
            "L_R_p50": _median(self.response_seconds),
            "R_Y": _ratio(len(self.yield_seconds), interruptions),
            "L_Y": _mean(self.yield_seconds),
            "L_Y_p50": _median(self.yield_seconds),
            "I_A": _ratio(self.agent_interruptions, turns),
            **{name: _ratio(sum(self.kept[kind]), len(self.kept[kind])) for kind, name in SELECTIVITY.items()},
        }

    def counts(self) -> dict[str, int]:
        """Number of events behind each rate."""
        return {
            "R_R": len(self.response_seconds) + self.unanswered,
            "R_Y": len(self.yield_seconds) + self.not_yielded,
            "I_A": self.agent_interruptions,
            **{name: len(self.kept[kind]) for kind, name in SELECTIVITY.items()},
        }


def events_of(timelines: Iterable[Timeline]) -> Events:
    """The events of several conversations together."""
    total = Events()
    for timeline in timelines:
        total.add(_events(_without_last_tick(timeline)))
    return total


def runs(flags: Flags) -> list[Run]:
    """The stretches where the flag is set."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [Run(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def _without_last_tick(timeline: Timeline) -> Timeline:
    """A single user tick at the very end is the end of the call, not a turn."""
    if len(timeline.user) < 2 or not timeline.user[-1] or timeline.user[-2]:
        return timeline
    return Timeline(timeline.user[:-1], timeline.agent[:-1], timeline.sound[:-1], timeline.tick_seconds)


def _events(timeline: Timeline) -> Events:
    found = Events()
    user, agent = runs(timeline.user), runs(timeline.agent)
    _add_responses(found, timeline, user, agent)
    found.agent_interruptions = sum(bool(timeline.user[each.begin]) for each in agent)
    for each in user:
        _add_user_run(found, timeline, each, agent)
    for kind in (UserSound.vocal_tic, UserSound.non_directed):
        for each in runs(~timeline.user & (timeline.sound == kind)):
            _add_sound_between_turns(found, timeline, kind, each, agent)
    return found


def _add_responses(found: Events, timeline: Timeline, user: Sequence[Run], agent: Sequence[Run]) -> None:
    turns = [
        each
        for each in user
        if timeline.sound[each.begin] != UserSound.backchannel and not _is_set(timeline.agent, each.end)
    ]
    for turn, following in zip(turns, [*turns[1:], None], strict=False):
        answer = next((each.begin for each in agent if each.begin >= turn.end), None)
        if answer is not None and (following is None or answer <= following.begin):
            found.response_seconds.append((answer - turn.end) * timeline.tick_seconds)
        elif following is not None:
            found.unanswered += 1


def _add_user_run(found: Events, timeline: Timeline, spoken: Run, agent: Sequence[Run]) -> None:
    kind = _kind(timeline, spoken)
    if not timeline.agent[spoken.begin]:
        if kind in (UserSound.vocal_tic, UserSound.non_directed):
            found.kept[kind].append(not _starts(agent, spoken, timeline))
        return
    window = _ticks(YIELD_SECONDS if kind == UserSound.turn else KEEP_SECONDS, timeline)
    stopped = np.flatnonzero(~timeline.agent[spoken.begin : spoken.begin + window])
    if kind != UserSound.turn:
        found.kept[kind].append(not stopped.size)
    elif stopped.size:
        found.yield_seconds.append(int(stopped[0]) * timeline.tick_seconds)
    else:
        found.not_yielded += 1


def _add_sound_between_turns(
    found: Events, timeline: Timeline, kind: UserSound, sound: Run, agent: Sequence[Run]
) -> None:
    """As published, such a sound over the agent's speech counts only where it stopped the agent."""
    over = next((each for each in agent if each.begin <= sound.begin < each.end), None)
    if over is None:
        found.kept[kind].append(not _starts(agent, sound, timeline))
    elif (over.end - sound.begin) * timeline.tick_seconds <= KEEP_SECONDS:
        found.kept[kind].append(False)


def _kind(timeline: Timeline, spoken: Run) -> UserSound:
    """The kind of a stretch of user speech: a backchannel by its first tick, others by any."""
    inside = timeline.sound[spoken.begin : spoken.end]
    if inside[0] == UserSound.backchannel:
        return UserSound.backchannel
    return next(
        (kind for kind in (UserSound.vocal_tic, UserSound.non_directed) if (inside == kind).any()), UserSound.turn
    )


def _starts(agent: Sequence[Run], sound: Run, timeline: Timeline) -> bool:
    last = sound.end + _ticks(IGNORE_SECONDS, timeline)
    return any(sound.begin <= each.begin <= last for each in agent)


def _ticks(seconds: float, timeline: Timeline) -> int:
    return int(seconds / timeline.tick_seconds)


def _is_set(flags: Flags, tick: int) -> bool:
    return tick < len(flags) and bool(flags[tick])


def _ratio(count: int, total: int) -> float | None:
    return count / total if total else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
