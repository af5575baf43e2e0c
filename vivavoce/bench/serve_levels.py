"""The arithmetic of `viva bench serve`: who calls when at a level, and the figures of its calls."""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vivavoce.bench.serve_calls import LEAD_IN_SECONDS, PAUSE_SECONDS
from vivavoce.bench.serve_plans import CallerReport, CallPlan, CallResult, TurnResult
from vivavoce.bench.serve_watch import ServerUse

PERCENTILES = (50, 95, 99)
MAX_TURNS = 2  # of a call in a steady stream: half of the callers ask twice
EXPECTED_ANSWER_SECONDS = 0.3  # until a reply begins, for the mean length of a call
MARGIN_SECONDS = 2.0  # by which calls may be longer than expected
EARLIEST_INTERRUPTION = 1.5  # seconds into the reply
LATEST_INTERRUPTION = 8.0


@dataclass(frozen=True)
class LevelPlan:
    """The calls of one level, and the time over which turns are counted, in seconds from its start."""

    sessions: int
    calls: list[CallPlan]
    counted_from: float = 0.0
    counted_until: float = math.inf
    ends: float | None = None
    """When everybody leaves; None: when all conversations are over."""
    expected_seconds: float = 0.0


@dataclass(frozen=True)
class Behaviour:
    """How callers behave. Seconds."""

    question: float
    """The mean length of a question."""
    reply: float
    questions: int
    """How many different questions there are."""
    interrupt: float = 0.0
    """Share of the callers who interrupt their first reply."""
    seed: int = 1

    @property
    def turn_seconds(self) -> float:
        """Of a question and its reply."""
        return self.question + EXPECTED_ANSWER_SECONDS + self.reply

    @property
    def interruption_range(self) -> tuple[float, float]:
        """The earliest and the latest interruption, in seconds of the reply."""
        latest = max(EARLIEST_INTERRUPTION, min(LATEST_INTERRUPTION, self.reply - EARLIEST_INTERRUPTION))
        return min(EARLIEST_INTERRUPTION, self.reply / 2), min(latest, self.reply * 0.75)

    def call_seconds(self, turns: int, interrupted_after: float | None = None) -> float:
        """The expected length of a call; an interruption adds the part of the reply before it, and a question."""
        length = LEAD_IN_SECONDS + turns * self.turn_seconds + (turns - 1) * PAUSE_SECONDS
        return length if interrupted_after is None else length + interrupted_after + self.turn_seconds - self.reply


def rush(count: int, spread: float, behaviour: Behaviour) -> LevelPlan:
    """`count` callers begin within `spread` seconds and hear one reply each, or two where they interrupt the first."""
    source = random.Random(behaviour.seed)
    calls = [_call(number, number * spread / count, 1, behaviour, source) for number in range(count)]
    return LevelPlan(count, calls, expected_seconds=spread + behaviour.call_seconds(1))


def steady(count: int, seconds: float, behaviour: Behaviour) -> LevelPlan:
    """Poisson arrivals, so that `count` callers are in conversation on average; counted once that is reached."""
    source = random.Random(behaviour.seed)
    earliest, latest = behaviour.interruption_range
    share, after = behaviour.interrupt, (earliest + latest) / 2
    lengths = [
        (1 - share) * behaviour.call_seconds(turns) + share * behaviour.call_seconds(turns, after)
        for turns in range(1, MAX_TURNS + 1)
    ]
    rate = count / (sum(lengths) / len(lengths))
    counted_from = behaviour.call_seconds(MAX_TURNS, latest if share else None) + MARGIN_SECONDS
    counted_until = counted_from + seconds
    ends = counted_until + behaviour.turn_seconds + MARGIN_SECONDS  # the load stays until the counted replies are over
    calls: list[CallPlan] = []
    start = source.expovariate(rate)
    while start < ends:
        calls.append(_call(len(calls), start, source.randint(1, MAX_TURNS), behaviour, source))
        start += source.expovariate(rate)
    return LevelPlan(count, calls, counted_from, counted_until, ends, ends)


def max_at_once(count: int, is_steady: bool) -> int:
    """Sessions that a server must admit at a level: a steady stream varies around its mean."""
    return count + (math.ceil(4 * math.sqrt(count)) if is_steady else 0)


def _call(number: int, start: float, turns: int, behaviour: Behaviour, source: random.Random) -> CallPlan:
    question = source.randrange(behaviour.questions)  # one, as another may be in another voice
    is_interrupting = math.floor((number + 1) * behaviour.interrupt) > math.floor(number * behaviour.interrupt)
    after = source.uniform(*behaviour.interruption_range)
    return CallPlan(number, start, [question] * turns, after if is_interrupting else None)


@dataclass(frozen=True)
class DoorLevel:
    """Figures of one level, over the counted turns. Milliseconds; percentiles are over turns."""

    sessions: int
    calls: int
    mean_sessions: float
    """In conversation at once, over the counted time."""
    first_sound_ms: dict[int, float]
    """From the last speech sample sent to the first sound received, of questions in silence."""
    answers: int
    yield_ms: dict[int, float]
    """From the onset of an interruption to the moment the caller's playback stopped."""
    interruptions: int
    not_yielded: int
    after_interruption_ms: dict[int, float]
    """As `first_sound_ms`, of questions that interrupted a reply."""
    underruns: int
    replies_that_ran_dry: int
    dry_seconds: float
    first_dry_ms: dict[int, float]
    """Into the reply."""
    sound_seconds: float
    never_answered: int
    unfinished: int
    """Replies that began and did not end."""
    cut_in: int
    """Replies that began before the question had ended; not in `first_sound_ms`."""
    refused: int
    refusal_ms: dict[int, float]
    refusals: dict[str, int]
    opening_ms: dict[int, float]
    """From the start of the connection to an open session."""
    false_stops: int
    failed: dict[str, int]
    wall_seconds: float
    callers: list[CallerReport]
    max_lateness_ms: float
    """Callers whose 99th percentile is later than this make the figures worthless."""
    server: ServerUse = field(default_factory=ServerUse)
    watts: float | None = None
    profile: dict[str, Any] | None = None

    @property
    def lateness_ms(self) -> float:
        """The 99th percentile of the latest caller process."""
        return max((report.lateness_ms["p99"] for report in self.callers), default=0.0)

    @property
    def is_valid(self) -> bool:
        """Whether the callers were on time."""
        return self.lateness_ms <= self.max_lateness_ms

    @property
    def admitted_hold(self) -> bool:
        """Whether all who were admitted heard every reply to its end, without a gap."""
        broken = (self.underruns, self.never_answered, self.unfinished, self.not_yielded, self.false_stops, self.failed)
        return self.is_valid and not any(broken)

    @property
    def holds(self) -> bool:
        """Whether all callers were admitted, and heard every reply to its end without a gap."""
        return self.admitted_hold and not self.refused

    def as_json(self) -> dict[str, Any]:
        """All fields; without the figures where the callers were late."""
        from msgspec import to_builtins

        callers = [to_builtins(report) for report in self.callers]
        verdict = {"callers": callers, "lateness_ms": self.lateness_ms, "is_valid": self.is_valid, "holds": self.holds}
        if not self.is_valid:
            server = self.server.as_json()
            return {"sessions": self.sessions, "max_lateness_ms": self.max_lateness_ms, "server": server} | verdict
        return asdict(self) | verdict | {"admitted_hold": self.admitted_hold}


def figures(
    plan: LevelPlan,
    results: Sequence[CallResult],
    callers: Sequence[CallerReport],
    wall: float,
    max_lateness_ms: float,
    server: ServerUse | None = None,
    watts: float | None = None,
) -> DoorLevel:
    """The figures of a level from the results of its calls."""
    turns = [turn for result in results for turn in result.turns if _is_counted(turn, plan)]
    fresh = [turn for turn in turns if not turn.interrupts]
    interrupting = [turn for turn in turns if turn.interrupts]
    stopped = [turn for turn in interrupting if turn.yielded is not None]
    refused = [result for result in results if result.refused is not None]
    return DoorLevel(
        sessions=plan.sessions,
        calls=len(results),
        mean_sessions=_mean_sessions(results, plan, wall),
        first_sound_ms=percentiles(turn.first_sound for turn in fresh if not _is_cut_in(turn)),
        answers=sum(turn.first_sound is not None for turn in turns),
        yield_ms=percentiles(turn.yielded for turn in stopped),
        interruptions=len(interrupting),
        not_yielded=len(interrupting) - len(stopped),
        after_interruption_ms=percentiles(turn.first_sound for turn in interrupting if not _is_cut_in(turn)),
        underruns=sum(turn.underruns for turn in turns),
        replies_that_ran_dry=sum(turn.underruns > 0 for turn in turns),
        dry_seconds=sum(turn.dry_seconds for turn in turns),
        first_dry_ms=percentiles(turn.first_dry_at for turn in turns),
        sound_seconds=sum(turn.sound_seconds for turn in turns),
        never_answered=sum(turn.first_sound is None for turn in (*fresh, *stopped)),
        unfinished=sum(turn.first_sound is not None and not turn.is_over for turn in turns),
        cut_in=sum(map(_is_cut_in, turns)),
        refused=len(refused),
        refusal_ms=percentiles(result.refused for result in refused),
        refusals=dict(Counter(result.refusal for result in refused)),
        opening_ms=percentiles(result.opened for result in results),
        false_stops=sum(result.false_stops for result in results),
        failed=dict(Counter(result.failure for result in results if result.failure)),
        wall_seconds=wall,
        callers=list(callers),
        max_lateness_ms=max_lateness_ms,
        server=server or ServerUse(),
        watts=watts,
    )


def _is_counted(turn: TurnResult, plan: LevelPlan) -> bool:
    return plan.counted_from <= turn.asked_at < plan.counted_until


def _is_cut_in(turn: TurnResult) -> bool:
    return turn.first_sound is not None and turn.first_sound < 0


def _mean_sessions(results: Iterable[CallResult], plan: LevelPlan, wall: float) -> float:
    """Over the counted time; of a rush, over the time of the whole level."""
    begin, end = plan.counted_from, min(plan.counted_until, wall)
    talking = [result for result in results if result.opened is not None]
    overlap = sum(max(0.0, min(end, result.ended) - max(begin, result.started)) for result in talking)
    return overlap / max(1e-9, end - begin)


def percentiles(seconds: Iterable[float | None]) -> dict[int, float]:
    """Milliseconds at the percentiles; empty where nothing is known."""
    known = [each * 1e3 for each in seconds if each is not None]
    return {part: float(np.percentile(known, part)) for part in PERCENTILES} if known else {}
