"""How a sound differs from another that should be the same: ViSQOL, PESQ, STOI, and whether the voice is the same one.

All from other projects' packages, none of which fetches anything: `visqol-python` with its own speech model, `pesq`,
`pystoi` and `resemblyzer`. What is not installed gives None.
"""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.sound import Sound

logger = logging.getLogger(__name__)

RATE = 16_000
SHORTEST = 0.6  # seconds; less is too little for any of them
PACKAGES = {"visqol": "visqol", "pesq": "pesq", "stoi": "pystoi", "speaker": "resemblyzer"}


@dataclass(frozen=True)
class Likeness:
    """Scores of a pair; None where the judge is not installed or could not judge."""

    visqol: float | None
    pesq: float | None
    stoi: float | None
    speaker: float | None


class AudioMetrics:
    """The judges that are here, each made once."""

    def __init__(self, wanted: Collection[str] = tuple(PACKAGES)) -> None:
        makers: dict[str, Callable[[], Callable[[Any, Any], float]]] = {
            "visqol": _visqol,
            "pesq": _pesq,
            "stoi": _stoi,
            "speaker": _speaker,
        }
        here = [name for name in wanted if importlib.util.find_spec(PACKAGES[name]) is not None]
        self.judges = {name: makers[name]() for name in here}
        self.absent = sorted(set(wanted) - set(here))

    def compare(self, exact: Sound, other: Sound) -> Likeness:
        """How near a sound is to the one it should be; both are cut to the shorter."""
        one, two = (sound.mono().resampled(RATE).samples[0].astype(np.float64) for sound in (exact, other))
        length = min(len(one), len(two))
        scores: dict[str, float | None] = dict.fromkeys(PACKAGES)
        if length >= SHORTEST * RATE:
            scores |= {name: _judged(judge, one[:length], two[:length]) for name, judge in self.judges.items()}
        return Likeness(**scores)


def _judged(judge: Callable[[Any, Any], float], one: NDArray[np.float64], two: NDArray[np.float64]) -> float | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(judge(one, two))
    except Exception:  # each of them fails in its own way on silence and on very short sounds
        logger.debug("a metric failed", exc_info=True)
        return None


def _visqol() -> Callable[[Any, Any], float]:
    api: Any = import_module("visqol").VisqolApi()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        api.create(mode="speech")
    return lambda one, two: api.measure_from_arrays(one, two, RATE).moslqo


def _pesq() -> Callable[[Any, Any], float]:
    pesq: Any = import_module("pesq").pesq
    return lambda one, two: pesq(RATE, one, two, "wb")


def _stoi() -> Callable[[Any, Any], float]:
    stoi: Any = import_module("pystoi").stoi
    return lambda one, two: stoi(one, two, RATE)


def _speaker() -> Callable[[Any, Any], float]:
    encoder: Any = import_module("resemblyzer").VoiceEncoder("cpu", verbose=False)

    def similarity(one: Any, two: Any) -> float:
        first, second = (encoder.embed_utterance(each.astype(np.float32)) for each in (one, two))
        return float(first @ second)

    return similarity
