"""Loose speech: what espeak-ng tells mbrola to say, each time with other lengths, another melody and other vowels.

A synthesizer says a word always in one way; people do not. The same diphones told otherwise are a speaker's other days,
and vowels that move together within a sentence are an accent.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

Pairs = Sequence[tuple[str, str]]
# Vowels that neighbours in the mouth, or another accent, trade, in the symbols of a database.
AMERICAN = (
    *(("I", "E"), ("I", "i"), ("E", "{"), ("I", "@"), ("A", "O"), ("A", "V"), ("V", "@"), ("U", "u"), ("U", "V")),
    *(("{", "A"), ("@U", "O"), ("EI", "E"), ("EI", "i"), ("AI", "OI"), ("AI", "A"), ("aU", "@U"), ("E", "@")),
)
BRITISH = (
    *(("I", "e"), ("I", "i:"), ("e", "{"), ("I", "@"), ("Q", "O:"), ("Q", "A:"), ("V", "@"), ("U", "u:"), ("U", "V")),
    *(("{", "A:"), ("@U", "O:"), ("eI", "e"), ("eI", "i:"), ("aI", "OI"), ("aI", "A:"), ("aU", "@U"), ("3:", "@")),
)
NEIGHBOURS = {"us1": AMERICAN, "us2": AMERICAN, "us3": AMERICAN, "en1": BRITISH}
SILENCE = "_"


@dataclass(frozen=True)
class Prosody:
    """How loosely a sentence is spoken; all of it is drawn anew for each sentence."""

    tempo: tuple[float, float] = (0.75, 1.3)
    length: float = 0.22  # standard deviation of the logarithm of each sound's length
    pitch: tuple[float, float] = (0.75, 1.35)
    melody: tuple[float, float] = (0.2, 1.6)  # of the pitch's distances from its mean: flat to lively
    accents: tuple[int, ...] = (0, 1, 1, 2, 3)  # pairs of vowels that move together, throughout a sentence
    slips: float = 0.04  # of vowels, each on its own
    faint: float = 0.3  # chance that sounds between vowels are shortened together


def loosened(told: str, database: str, draw: random.Random, manner: Prosody | None = None) -> str:
    """Lines of sound, milliseconds and pitch points, as mbrola reads them, said in another way."""
    manner = manner or Prosody()
    neighbours = NEIGHBOURS.get(database, ())
    lines = [line.split() for line in told.splitlines() if line.strip() and not line.startswith(";")]
    points = [float(value) for line in lines for value in line[3::2]]
    mean = sum(points) / len(points) if points else 0.0
    tempo, pitch, melody = (draw.uniform(*span) for span in (manner.tempo, manner.pitch, manner.melody))
    accent = dict(_pair(neighbours, draw) for _ in range(draw.choice(manner.accents) if neighbours else 0))
    crisp = draw.uniform(0.7, 1.0) if draw.random() < manner.faint else 1.0
    said = []
    for sound, length, *melodies in lines:
        name = accent.get(sound, sound)
        if draw.random() < manner.slips:
            name = _neighbour(name, neighbours, draw)
        factor = 1.0 if sound == SILENCE else tempo * draw.lognormvariate(0.0, manner.length)
        factor *= 1.0 if melodies or sound == SILENCE else crisp
        heights = [f"{max(50.0, pitch * (mean + melody * (float(value) - mean))):.0f}" for value in melodies[1::2]]
        moved = [word for place, height in zip(melodies[::2], heights, strict=True) for word in (place, height)]
        said.append(" ".join([name, f"{max(10.0, float(length) * factor):.0f}", *moved]))
    return "\n".join(said) + "\n"


def _pair(neighbours: Pairs, draw: random.Random) -> tuple[str, str]:
    some, other = draw.choice(neighbours)
    return (some, other) if draw.random() < 0.5 else (other, some)


def _neighbour(sound: str, neighbours: Pairs, draw: random.Random) -> str:
    found = [other for pair in neighbours if sound in pair for other in pair if other != sound]
    return draw.choice(found) if found else sound
