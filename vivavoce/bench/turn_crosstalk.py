"""Whether every session got its own answer: by its words where the server tells them, else by its sound."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vivavoce.bench.turn_scenes import ScriptedCall
from vivavoce.bench.turn_sounds import FRAME, RATE, Samples

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
