"""Figures of a call from its recorded times: latency, interruptions, selectivity, and crosstalk between sessions."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vivavoce.bench.turn_caller import CallerUtterance
from vivavoce.bench.turn_client import PlayedReply
from vivavoce.bench.turn_scenes import PlayedExchange, ScriptedCall
from vivavoce.bench.turn_sounds import FRAME, RATE, Samples

WINDOW = 2.0
"""Seconds within which an interruption must stop the reply, and other sounds must not."""
TOO_LATE = 0.5
"""A reply that ends this soon after a sound, without being stopped, is not counted either way."""


@dataclass(frozen=True)
class Outcome:
    """Figures of one exchange. Milliseconds; None where nothing could be measured."""

    scene: str
    session: int
    number: int
    question: str
    is_answered: bool
    response_ms: float | None
    """From the last voiced sample of the question to the first voiced sample played."""
    arrival_ms: float | None
    """From the last voiced sample of the question to the arrival of that sample."""
    cut_in: bool
    """A reply was audible before the question ended."""
    false_end: bool | None
    """Whether a pause was taken for the end of the turn."""
    over: str | None = None
    stopped: bool | None = None
    """Whether a sound over the reply stopped it."""
    stop_ms: float | None = None
    over_answered: bool | None = None
    after_interruption_ms: float | None = None
    """From the last voiced sample of an interruption to the reply to it."""
    stray: str | None = None
    stray_answered: bool | None = None
    self_interruptions: int = 0
    """Replies that the server stopped without caller sound."""
    underruns: int = 0
    dry_ms: float = 0.0
    reply_seconds: float = 0.0
    transcript: str = ""


def outcomes(call: ScriptedCall) -> list[Outcome]:
    """One outcome per question of a call."""
    ends = [each.asked.first for each in call.played[1:]] + [float("inf")]
    return [_outcome(call, number, end) for number, end in enumerate(ends[: len(call.played)])]


def _outcome(call: ScriptedCall, number: int, end: float) -> Outcome:
    played = call.played[number]
    replies = [each for each in call.caller.loudspeaker.replies.values() if played.asked.first <= each.created < end]
    answer = next((each for each in replies if _heard_after(each, played.asked.last)), None)
    response, arrival = (None, None) if answer is None else _latency(answer, played.asked.last)
    over = _disturbance_figures(played, replies)
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
        self_interruptions=sum(_is_self_interruption(each, played) for each in replies),
        underruns=sum(len(each.gaps) for each in replies),
        dry_ms=1e3 * sum(sum(each.gaps) for each in replies),
        reply_seconds=0.0 if answer is None else len(answer.sound) / RATE,
        transcript="" if answer is None else answer.transcript.strip(),
        stray=None if played.stray is None else played.stray.kind,
        stray_answered=None if played.stray is None else _answers(played.stray, replies),
        **over,
    )


def _disturbance_figures(played: PlayedExchange, replies: Sequence[PlayedReply]) -> dict[str, Any]:
    sound, reply, planned = played.over, played.reply, played.exchange.over
    if planned is None:
        return {}
    if sound is None or reply is None:  # no reply, or it ended before the disturbance
        return {"over": planned.kind}
    cut = cut_at(reply)
    stopped: bool | None = cut is not None and cut - sound.first <= WINDOW
    if _heard_until(reply) - sound.first < TOO_LATE if cut is None else cut < sound.first:
        stopped = None
    is_interruption = sound.kind == "interruption"
    following = next((each for each in replies if each is not reply and _heard_after(each, sound.last)), None)
    wanted = following is not None and is_interruption
    return {
        "over": sound.kind,
        "stopped": stopped,
        "stop_ms": 1e3 * (cut - sound.first) if stopped and cut is not None else None,
        "over_answered": _answers(sound, [each for each in replies if each is not reply]),
        "after_interruption_ms": _latency(following, sound.last)[0] if wanted and following else None,
    }


def cut_at(reply: PlayedReply) -> float | None:
    """Time at which the server stopped a reply early; None if it did not."""
    by_server = [moment for moment, reason in reply.dropped if reason != "bench"]
    if any(reason == "bench" for _, reason in reply.dropped):
        return None
    is_cancelled = reply.status == "cancelled" or (reply.status == "incomplete" and reply.reason == "turn_detected")
    if by_server and not any(span.start >= by_server[-1] for span in reply.spans):
        return by_server[-1]
    return _heard_until(reply) if is_cancelled and reply.spans else None


def _heard_until(reply: PlayedReply) -> float:
    return reply.ends_at() if reply.spans else reply.created


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


def _false_end(call: ScriptedCall, played: PlayedExchange, replies: Iterable[PlayedReply]) -> bool | None:
    """Whether the turn was committed or a response created between the start of the pause and the last word."""
    if played.asked.pause is None:
        return None
    begin, end = played.asked.pause[0], played.asked.last
    closed = any(
        begin < moment < end and event["type"] in ("input_audio_buffer.committed", "response.created")
        for moment, event in call.caller.events
    )
    return closed or any(begin < each.created < end for each in replies)


def _is_self_interruption(reply: PlayedReply, played: PlayedExchange) -> bool:
    """Whether a reply was stopped without a caller sound before."""
    cut = cut_at(reply)
    if cut is None or not _heard_after(reply, played.asked.last):
        return False
    sounds = [each for each in (played.over, played.stray) if each is not None]
    return not any(each.first <= cut for each in sounds)


def _answers(sound: CallerUtterance, replies: Iterable[PlayedReply]) -> bool:
    """Whether a reply was created after a sound."""
    return any(reply.created > sound.first and reply.spans for reply in replies)


def summary(found: Sequence[Outcome]) -> dict[str, Any]:
    """Aggregated figures; rates are 0 to 1, None where nothing was measured."""
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
    known = list(values)
    return sum(known) / len(known) if known else None


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"p50": float(np.percentile(known, 50)), "p95": float(np.percentile(known, 95)), "count": len(known)}


MIN_SIMILARITY = 0.6
MARGIN = 0.1
BANDS = 24
LAG_FRAMES = 50

Verdict = Literal["own", "other", "unclear"]


@dataclass(frozen=True)
class SessionAnswer:
    """The answer to a question: transcript, if sent, and audio."""

    question: str
    transcript: str = ""
    sound: Samples = field(default_factory=lambda: np.zeros(0, np.float32), repr=False)


def answers(call: ScriptedCall) -> list[SessionAnswer]:
    """The answers of a call, one per answered question."""
    found = []
    for played in call.played:
        if played.reply is not None:
            reply = played.reply
            found.append(SessionAnswer(played.exchange.question.text, reply.transcript.strip(), reply.sound))
    return found


def classify_answer(answer: SessionAnswer, references: Mapping[str, SessionAnswer]) -> Verdict:
    """Whether an answer matches its own question's reference, another session's, or neither."""
    own = similarity(answer, references[answer.question]) if answer.question in references else 0.0
    others = (similarity(answer, known) for question, known in references.items() if question != answer.question)
    other = max(others, default=0.0)
    if other >= MIN_SIMILARITY and other > own + MARGIN:
        return "other"
    return "own" if own >= MIN_SIMILARITY else "unclear"


def similarity(one: SessionAnswer, two: SessionAnswer) -> float:
    """Similarity from 0 to 1, by words if both have a transcript, else by sound."""
    if one.transcript and two.transcript:
        return SequenceMatcher(None, _words(one.transcript), _words(two.transcript), autojunk=False).ratio()
    return sound_similarity(one.sound, two.sound)


def sound_similarity(one: Samples, two: Samples) -> float:
    """Correlation of band energies at the best lag of up to half a second."""
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
    # Different lengths mean different replies even if they start similarly.
    return best * min(len(first), len(second)) / max(len(first), len(second))


def shared_reply_ids(calls: Iterable[ScriptedCall]) -> list[str]:
    """Response ids received by more than one session."""
    counts = Counter(id for call in calls for id in call.caller.loudspeaker.replies)
    return sorted(id for id, count in counts.items() if count > 1)


def crosstalk(calls: Sequence[ScriptedCall], references: Mapping[str, SessionAnswer]) -> dict[str, Any]:
    """Counts of answers that were the session's own, another's, or unclear."""
    given = [answer for call in calls for answer in answers(call)]
    judged = [(answer, classify_answer(answer, references)) for answer in given]
    verdicts = Counter(verdict for _, verdict in judged)
    by_words = all(answer.transcript for answer in given) and all(known.transcript for known in references.values())
    return {
        "answers": len(given),
        "own": verdicts["own"],
        "other": verdicts["other"],
        "unclear": verdicts["unclear"],
        "shared_reply_ids": shared_reply_ids(calls),
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
    """Mean-free log band energies every 10 ms.  # [frame, band]"""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    if len(frames) == 0:
        return np.zeros((0, BANDS))
    power = np.square(np.abs(np.fft.rfft(frames * np.hanning(FRAME), 2 * FRAME)))
    edges = np.geomspace(150, 7000, BANDS + 1) / RATE * 2 * FRAME
    bands = np.add.reduceat(power, np.maximum(1, np.round(edges)).astype(int), axis=1)[:, :BANDS]
    level = np.log10(bands + 1e-6)
    return np.asarray(level - level.mean(axis=0), np.float64)
