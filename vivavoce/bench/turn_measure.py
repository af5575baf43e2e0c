"""Figures of a call, from what was said and heard and when. Pure arithmetic on times; nothing here waits."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vivavoce.bench.turn_caller import CallerUtterance
from vivavoce.bench.turn_player import PlayedReply
from vivavoce.bench.turn_scenes import Played, ScriptedCall
from vivavoce.bench.turn_sounds import FRAME, RATE, Samples

WINDOW = 2.0
"""Seconds from its beginning in which an interruption must have stopped the reply, and in which nothing else may."""
TOO_LATE = 0.5
"""A reply that ends by itself so soon after a sound says nothing about whether it would have yielded."""


@dataclass(frozen=True)
class Outcome:
    """What became of one exchange. Milliseconds; None: there was nothing to measure."""

    scene: str
    session: int
    number: int
    question: str
    is_answered: bool
    response_ms: float | None
    """From the last voiced sample of the question to the first voiced sample of the reply that is heard."""
    arrival_ms: float | None
    """The same, to the arrival of that sample."""
    cut_in: bool
    """The machine spoke while the question was still being asked."""
    false_end: bool | None
    """Whether a hesitation was taken for the end."""
    over: str | None = None
    stopped: bool | None = None
    """Whether the sound over it stopped the reply."""
    stop_ms: float | None = None
    over_answered: bool | None = None
    after_interruption_ms: float | None = None
    """From the last voiced sample of an interruption to the reply to it."""
    stray: str | None = None
    stray_answered: bool | None = None
    self_interruptions: int = 0
    """Replies that the server stopped though the caller made no sound."""
    underruns: int = 0
    dry_ms: float = 0.0
    reply_seconds: float = 0.0
    transcript: str = ""


def outcomes(call: ScriptedCall) -> list[Outcome]:
    """One for every question of a call."""
    ends = [each.asked.first for each in call.played[1:]] + [float("inf")]
    return [_outcome(call, number, end) for number, end in enumerate(ends[: len(call.played)])]


def _outcome(call: ScriptedCall, number: int, end: float) -> Outcome:
    played = call.played[number]
    replies = [each for each in call.caller.loudspeaker.replies.values() if played.asked.first <= each.created < end]
    answer = next((each for each in replies if _heard_after(each, played.asked.last)), None)
    response, arrival = (None, None) if answer is None else _latency(answer, played.asked.last)
    over = _over(played, replies)
    return Outcome(
        scene=call.scene.name,
        session=call.number,
        number=number,
        question=played.exchange.question.text,
        is_answered=answer is not None,
        response_ms=response,
        arrival_ms=arrival,
        cut_in=any(_heard_before(each, played.asked.last) for each in replies),
        false_end=_false_end(call, played, replies),
        self_interruptions=sum(_stopped_itself(each, played) for each in replies),
        underruns=sum(len(each.gaps) for each in replies),
        dry_ms=1e3 * sum(sum(each.gaps) for each in replies),
        reply_seconds=0.0 if answer is None else len(answer.sound) / RATE,
        transcript="" if answer is None else answer.transcript.strip(),
        stray=None if played.stray is None else played.stray.kind,
        stray_answered=None if played.stray is None else _answers(played.stray, replies),
        **over,
    )


def _over(played: Played, replies: Sequence[PlayedReply]) -> dict[str, Any]:
    made, reply, planned = played.over, played.reply, played.exchange.over
    if planned is None:
        return {}
    if made is None or reply is None:  # there was no reply, or it was over too soon
        return {"over": planned.kind}
    cut = cut_at(reply)
    stopped: bool | None = cut is not None and cut - made.first <= WINDOW
    if _heard_until(reply) - made.first < TOO_LATE if cut is None else cut < made.first:
        stopped = None
    is_interruption = made.kind == "interruption"
    following = next((each for each in replies if each is not reply and _heard_after(each, made.last)), None)
    wanted = following is not None and is_interruption
    return {
        "over": made.kind,
        "stopped": stopped,
        "stop_ms": 1e3 * (cut - made.first) if stopped and cut is not None else None,
        "over_answered": _answers(made, [each for each in replies if each is not reply]),
        "after_interruption_ms": _latency(following, made.last)[0] if wanted and following else None,
    }


def cut_at(reply: PlayedReply) -> float | None:
    """When the server stopped a reply before its end; None if it did not."""
    by_server = [moment for moment, reason in reply.dropped if reason != "bench"]
    if any(reason == "bench" for _, reason in reply.dropped):
        return None
    is_cancelled = reply.status == "cancelled" or (reply.status == "incomplete" and reply.reason == "turn_detected")
    if by_server and not any(span.start >= by_server[-1] for span in reply.spans):
        return by_server[-1]
    return _heard_until(reply) if is_cancelled and reply.spans else None


def _heard_until(reply: PlayedReply) -> float:
    return reply.ends() if reply.spans else reply.created


def _latency(reply: PlayedReply, since: float) -> tuple[float | None, float | None]:
    first = reply.first_voiced()
    if first is None:
        return None, None
    heard, arrived = reply.heard_at(first), reply.arrived_at(first)
    return (None if heard is None else 1e3 * (heard - since)), (None if arrived is None else 1e3 * (arrived - since))


def _heard_after(reply: PlayedReply, moment: float) -> bool:
    spans = reply.voiced_spans()
    return bool(spans) and spans[0][0] >= moment


def _heard_before(reply: PlayedReply, moment: float) -> bool:
    spans = reply.voiced_spans()
    return bool(spans) and spans[0][0] < moment


def _false_end(call: ScriptedCall, played: Played, replies: Iterable[PlayedReply]) -> bool | None:
    """Whether the turn was closed, or a reply begun, between the beginning of the pause and the last word."""
    if played.asked.pause is None:
        return None
    begin, end = played.asked.pause[0], played.asked.last
    closed = any(
        begin < moment < end and event["type"] in ("input_audio_buffer.committed", "response.created")
        for moment, event in call.caller.events
    )
    return closed or any(begin < each.created < end for each in replies)


def _stopped_itself(reply: PlayedReply, played: Played) -> bool:
    """Whether a reply was stopped that nobody had spoken over."""
    cut = cut_at(reply)
    if cut is None or not _heard_after(reply, played.asked.last):
        return False
    sounds = [each for each in (played.over, played.stray) if each is not None]
    return not any(each.first <= cut for each in sounds)


def _answers(sound: CallerUtterance, replies: Iterable[PlayedReply]) -> bool:
    """Whether a reply was begun because of a sound."""
    return any(reply.created > sound.first and reply.spans for reply in replies)


def summary(found: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of a scene, or of all of them; shares are 0 to 1, None where there was nothing to measure."""
    overs = [each for each in found if each.over is not None and each.stopped is not None]
    interrupted = [each for each in overs if each.over == "interruption"]
    strays = [each for each in found if each.stray is not None]
    return {
        "questions": len(found),
        "response_rate": _share(each.is_answered for each in found),
        "response_ms": _spread(each.response_ms for each in found),
        "arrival_ms": _spread(each.arrival_ms for each in found),
        "cut_in_rate": _share(each.cut_in for each in found),
        "false_end_rate": _share(each.false_end for each in found if each.false_end is not None),
        "interruptions": len(interrupted),
        "yield_rate": _share(bool(each.stopped) for each in interrupted),
        "yield_ms": _spread(each.stop_ms for each in interrupted),
        "after_interruption_ms": _spread(each.after_interruption_ms for each in found),
        **{
            f"{kind.replace(' ', '_')}_selectivity": _share(not each.stopped for each in overs if each.over == kind)
            for kind in ("backchannel", "cough", "knock", "side talk")
        },
        "disturbances": len(overs) - len(interrupted),
        "stray_selectivity": _share(not each.stray_answered for each in strays),
        "self_interruptions": sum(each.self_interruptions for each in found),
        "underruns": sum(each.underruns for each in found),
        "dry_ms": sum(each.dry_ms for each in found),
        "not_measured": sum(each.over is not None and each.stopped is None for each in found),
    }


def _share(values: Iterable[bool]) -> float | None:
    kept = list(values)
    return sum(kept) / len(kept) if kept else None


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    kept = [value for value in values if value is not None]
    if not kept:
        return None
    return {"p50": float(np.percentile(kept, 50)), "p95": float(np.percentile(kept, 95)), "count": len(kept)}


ALIKE = 0.6
MARGIN = 0.1
BANDS = 24
LAG_FRAMES = 50

Verdict = Literal["own", "other", "unclear"]


@dataclass(frozen=True)
class SessionAnswer:
    """What came back for a question: its words, if they were told, and its sound."""

    question: str
    transcript: str = ""
    sound: Samples = field(default_factory=lambda: np.zeros(0, np.float32), repr=False)


def answers(call: ScriptedCall) -> list[SessionAnswer]:
    """Those of a call, one for every question that was answered."""
    found = []
    for played in call.played:
        if played.reply is not None:
            reply = played.reply
            found.append(SessionAnswer(played.exchange.question.text, reply.transcript.strip(), reply.sound))
    return found


def judge(answer: SessionAnswer, references: Mapping[str, SessionAnswer]) -> Verdict:
    """Whether an answer is that to its own question, that to another session's, or like neither."""
    own = similarity(answer, references[answer.question]) if answer.question in references else 0.0
    others = (similarity(answer, known) for question, known in references.items() if question != answer.question)
    other = max(others, default=0.0)
    if other >= ALIKE and other > own + MARGIN:
        return "other"
    return "own" if own >= ALIKE else "unclear"


def similarity(one: SessionAnswer, two: SessionAnswer) -> float:
    """0 to 1."""
    if one.transcript and two.transcript:
        return SequenceMatcher(None, _words(one.transcript), _words(two.transcript), autojunk=False).ratio()
    return sound_similarity(one.sound, two.sound)


def sound_similarity(one: Samples, two: Samples) -> float:
    """How well the colours of two sounds follow one another, at the best shift of up to half a second."""
    first, second = _fingerprint(one), _fingerprint(two)
    if min(len(first), len(second)) < LAG_FRAMES // 2:
        return 0.0
    best = 0.0
    for lag in range(-LAG_FRAMES, LAG_FRAMES + 1):
        left, right = first[max(0, lag) :], second[max(0, -lag) :]
        size = min(len(left), len(right))
        if size < min(len(first), len(second)) // 2:
            continue
        norms = np.linalg.norm(left[:size]) * np.linalg.norm(right[:size])
        best = max(best, float((left[:size] * right[:size]).sum() / max(norms, 1e-9)))
    # A reply of another length is another reply, however it begins.
    return best * min(len(first), len(second)) / max(len(first), len(second))


def shared_ids(calls: Iterable[ScriptedCall]) -> list[str]:
    """Replies that reached more than one session."""
    counts = Counter(id for call in calls for id in call.caller.loudspeaker.replies)
    return sorted(id for id, count in counts.items() if count > 1)


def crosstalk(calls: Sequence[ScriptedCall], references: Mapping[str, SessionAnswer]) -> dict[str, Any]:
    """How many answers were their session's own."""
    given = [answer for call in calls for answer in answers(call)]
    judged = [(answer, judge(answer, references)) for answer in given]
    verdicts = Counter(verdict for _, verdict in judged)
    by_words = all(answer.transcript for answer in given) and all(known.transcript for known in references.values())
    return {
        "answers": len(given),
        "own": verdicts["own"],
        "other": verdicts["other"],
        "unclear": verdicts["unclear"],
        "shared_reply_ids": shared_ids(calls),
        "compared_by": "words" if by_words else "sound",
        "strange": [
            {"asked": answer.question, "said": answer.transcript, "alone": references[answer.question].transcript}
            for answer, verdict in judged
            if verdict != "own" and answer.question in references
        ],
    }


def _words(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())


def _fingerprint(samples: Samples) -> NDArray[np.float64]:
    """Log energy in bands every 10 ms, without its mean.  # [frame, band]"""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    if len(frames) == 0:
        return np.zeros((0, BANDS))
    power = np.square(np.abs(np.fft.rfft(frames * np.hanning(FRAME), 2 * FRAME)))
    edges = np.geomspace(150, 7000, BANDS + 1) / RATE * 2 * FRAME
    bands = np.add.reduceat(power, np.maximum(1, np.round(edges)).astype(int), axis=1)[:, :BANDS]
    level = np.log10(bands + 1e-6)
    return np.asarray(level - level.mean(axis=0), np.float64)
