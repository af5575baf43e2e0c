"""Mandarin that is no question to the front desk: random strings of frequent words, which have all its syllables."""

import logging
import random
from functools import cache

from vivavoce.errors import MissingDependencyError
from vivavoce.train.front_desk.languages import HAN

FREQUENT = 8_000
MAX_CHARACTERS = 3
LENGTHS = (1, 1, 2, 3, 4, 5)  # words of a string


@cache
def frequent_words() -> tuple[str, ...]:
    """The most frequent words of jieba's dictionary, in Simplified script."""
    try:
        import jieba
    except ImportError as error:
        raise MissingDependencyError("Mandarin words need jieba: pip install vivavoce[kokoro]") from error
    jieba.setLogLevel(logging.WARNING)
    jieba.initialize()
    counts = jieba.dt.FREQ
    words = [word for word in counts if len(word) <= MAX_CHARACTERS and all(map(HAN.fullmatch, word))]
    return tuple(sorted(words, key=lambda word: (-counts[word], word))[:FREQUENT])


def mandarin_word_strings(count: int, seed: int) -> list[str]:
    """Distinct strings of one to five words."""
    source, words = random.Random(f"mandarin words {seed}"), frequent_words()
    strings: dict[str, None] = {}
    while len(strings) < count:
        strings.setdefault("".join(source.choices(words, k=source.choice(LENGTHS))) + "。")
    return list(strings)
