"""Who speaks when: speech is embedded in overlapping windows, and the windows are clustered by voice.

One voice at a time is assumed. Speakers have the names that are given with samples of their voices, else letters in the
order in which they are first heard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_uppercase

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.vad import RATE, VoiceActivity, speech_probabilities
from vivavoce.audio.vad import WINDOW as VAD_WINDOW
from vivavoce.audio.voiced import IS_SPEECH

Array = NDArray[np.float32]
Embed = Callable[[Array], Array]
MAX_SPEAKERS = 4
WINDOW, HOP = round(1.5 * RATE), round(0.5 * RATE)
MIN_WINDOW = round(0.3 * RATE)
SURE_WINDOW = RATE  # from which on a window may be the first of a speaker
MERGED_FROM = 0.37
"""The mean cosine of the windows of two clusters, from which on they are one speaker: of the six people of the Free
Spoken Digit Dataset no two are above 0.33, and each is above 0.55 with themself."""
KNOWN_FROM = 0.42
"""The cosine with a known voice, from which on a cluster is that speaker."""
MAX_CLUSTERED = 240  # windows; those of longer recordings are assigned to the clusters of a part
MIN_SHARE = 0.04  # of the clustered windows; smaller clusters are no speakers
PAUSE = 0.6  # seconds that end a turn of one speaker
GAP = 0.2  # within speech
MARGIN = 0.12  # seconds of sound around a turn


@dataclass(frozen=True)
class SpeakerTurn:
    """Speech of one speaker, in seconds."""

    speaker: str
    start: float
    end: float


@dataclass(frozen=True)
class KnownSpeaker:
    """A speaker's name and the embedding of their voice."""

    name: str
    vector: Array


class SpeakerLabels:
    """Names of voices: those of the known speakers, then letters in the order of appearance, four in all."""

    def __init__(self, known: Sequence[KnownSpeaker] = ()) -> None:
        self._voices: list[tuple[str, Array]] = [(each.name, each.vector) for each in known]
        self._letters = iter(letter for letter in ascii_uppercase if letter not in {each.name for each in known})

    def name(self, vectors: Sequence[Array]) -> list[str]:
        """The names of different voices: of those that are known, and of the others the next letters.

        When there are four already, a new voice has the name of the nearest. Voices learn from what they are given.
        """
        names: dict[int, str] = {}
        scores = np.array([[float(vector @ voice) for _, voice in self._voices] for vector in vectors])
        while scores.size and scores.max() >= KNOWN_FROM:  # the best pairs first; no voice is two of them
            one, known = divmod(int(scores.argmax()), scores.shape[1])
            name, voice = self._voices[known]
            names[one], self._voices[known] = name, (name, _unit(3 * voice + vectors[one]))
            scores[one], scores[:, known] = -1.0, -1.0
        for index, vector in enumerate(vectors):
            if index not in names and len(self._voices) < MAX_SPEAKERS:
                self._voices.append((next(self._letters), vector))
                names[index] = self._voices[-1][0]
            elif index not in names:
                names[index] = max(self._voices, key=lambda known: float(known[1] @ vector))[0]
        return [names[index] for index in range(len(vectors))]


def diarize(
    samples: Array, embed: Embed, detector: VoiceActivity, labels: SpeakerLabels | None = None
) -> list[SpeakerTurn]:
    """The turns of up to four speakers in a recording at 16 kHz, in order.  # [time]

    `labels` that were given to one recording know its speakers in the next.
    """
    speech = _speech(speech_probabilities(detector, samples))
    windows = [window for start, end in speech for window in _windows(start, end)]
    if not windows:
        return []
    vectors = np.stack([embed(samples[start:end]) for start, end in windows])
    is_sure = np.array([end - start >= SURE_WINDOW for start, end in windows])
    clusters = _clusters(vectors[is_sure] if is_sure.any() else vectors)
    scores = vectors @ clusters.T
    order = list(dict.fromkeys(int(each) for each in scores.argmax(1)))  # of appearance
    labels = labels or SpeakerLabels()
    names = dict(zip(order, labels.name([clusters[cluster] for cluster in order]), strict=True))
    return _turns(speech, windows, scores, names)


def _speech(probabilities: Array) -> list[tuple[int, int]]:
    """Ranges of samples with speech; short gaps belong to it."""
    found: list[tuple[int, int]] = []
    for index in np.flatnonzero(probabilities >= IS_SPEECH):
        start, end = int(index) * VAD_WINDOW, (int(index) + 1) * VAD_WINDOW
        if found and start - found[-1][1] <= GAP * RATE:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return [(start, end) for start, end in found if end - start >= MIN_WINDOW]


def _windows(start: int, end: int) -> list[tuple[int, int]]:
    """Overlapping windows of a range; a shorter one is one window."""
    count = max(0, -(-(end - start - WINDOW) // HOP))
    starts = [start + round(index * (end - start - WINDOW) / max(1, count)) for index in range(count + 1)]
    return [(each, min(each + WINDOW, end)) for each in starts]


def _clusters(vectors: Array) -> Array:
    """The mean voices of the speakers, by agglomeration with the mean cosine.  # [window, dim] → [speaker, dim]"""
    chosen = vectors[np.linspace(0, len(vectors) - 1, min(len(vectors), MAX_CLUSTERED)).round().astype(int)]
    groups = [[index] for index in range(len(chosen))]
    between = (chosen @ chosen.T).astype(np.float64)  # sums of cosines between groups
    sizes = np.ones(len(groups))
    while len(groups) > 1:
        means = between / np.outer(sizes, sizes)
        np.fill_diagonal(means, -2.0)
        one, two = sorted(divmod(int(means.argmax()), len(groups)))
        if means[one, two] < MERGED_FROM and len(_speakers(groups, len(chosen))) <= MAX_SPEAKERS:
            break
        groups[one] += groups.pop(two)
        between[one] += between[two]
        between[:, one] += between[:, two]
        between = np.delete(np.delete(between, two, 0), two, 1)
        sizes[one] += sizes[two]
        sizes = np.delete(sizes, two)
    return np.stack([_unit(chosen[group].sum(0)) for group in _speakers(groups, len(chosen))])


def _speakers(groups: list[list[int]], count: int) -> list[list[int]]:
    """The groups that are large enough for a speaker; the largest in any case."""
    largest = max(groups, key=len)
    return [group for group in groups if group is largest or len(group) >= max(2.0, MIN_SHARE * count)]


def _turns(
    speech: list[tuple[int, int]], windows: list[tuple[int, int]], scores: Array, names: dict[int, str]
) -> list[SpeakerTurn]:
    """Turns from the scores of windows: every piece of HOP is of the speaker its windows are nearest to."""
    found: list[SpeakerTurn] = []
    for start, end in speech:
        inside = [index for index, (first, last) in enumerate(windows) if start <= first and last <= end]
        edges = np.linspace(start, end, max(1, round((end - start) / HOP)) + 1).round().astype(int).tolist()
        middles = [(begin + finish) / 2 for begin, finish in pairwise(edges)]
        speakers = _without_islands([names[_nearest(middle, inside, windows, scores)] for middle in middles])
        for name, (begin, finish) in zip(speakers, pairwise(edges), strict=True):
            if found and found[-1].speaker == name and begin / RATE - found[-1].end < PAUSE:
                found[-1] = SpeakerTurn(name, found[-1].start, finish / RATE)
            else:
                found.append(SpeakerTurn(name, begin / RATE, finish / RATE))
    return found


def _nearest(middle: float, inside: list[int], windows: list[tuple[int, int]], scores: Array) -> int:
    """The cluster that the windows around a place are nearest to."""
    covering = [index for index in inside if windows[index][0] <= middle < windows[index][1]] or inside
    weights = np.array([_nearness(windows[index], middle) for index in covering])
    return int((weights[:, None] * scores[covering]).sum(0).argmax())


def _without_islands(speakers: list[str]) -> list[str]:
    """The speakers of pieces; a single piece between two of one speaker is that speaker's too."""
    inner = [
        before if before == after else name
        for before, name, after in zip(speakers, speakers[1:], speakers[2:], strict=False)
    ]
    return [*speakers[:1], *inner, *speakers[-1:]] if len(speakers) > 2 else speakers


def _nearness(window: tuple[int, int], middle: float) -> float:
    """The weight of a window for a place in it: most in its middle."""
    return max(0.05, 1.0 - abs((window[0] + window[1]) / 2 - middle) / WINDOW * 2)


def with_margin(samples: Array, turn: SpeakerTurn) -> tuple[Array, float]:
    """The sound of a turn with a little around it, and where it begins in seconds."""
    start = max(0.0, turn.start - MARGIN)
    return samples[round(start * RATE) : round((turn.end + MARGIN) * RATE)], start


def _unit(vector: Array) -> Array:
    unit: Array = (vector / max(float(np.linalg.norm(vector)), 1e-9)).astype(np.float32)
    return unit
