"""Sentences as the letters that the speech encoder's probe reads: English words, and Mandarin as pinyin with tones."""

import re

from vivavoce.errors import MissingDependencyError
from vivavoce.train.front_desk.answers import normalise
from vivavoce.train.front_desk.languages import HAN

LETTERS = " 'abcdefghijklmnopqrstuvwxyz12345"  # symbol 0 is CTC's blank; digits are tones
SYMBOLS = len(LETTERS) + 1
STEPS = 4  # CTC frames per code: 12.5 a second are too few for letters
WORD = re.compile(r"[a-z']+[1-5]?")


def spelled(text: str) -> str:
    """The letters of a sentence; syllables of Mandarin end with their tone, 5 being the neutral one."""
    parts = re.split(f"({HAN.pattern}+)", text)
    return " ".join(letters for part in parts if (letters := _pinyin(part) if HAN.search(part) else normalise(part)))


def _pinyin(characters: str) -> str:
    try:
        from pypinyin import Style, lazy_pinyin
    except ImportError as error:
        raise MissingDependencyError("spelling Mandarin needs pypinyin: pip install vivavoce[train]") from error
    return "".join(lazy_pinyin(characters, style=Style.TONE3, neutral_tone_with_five=True, tone_sandhi=True))


def words(letters: str) -> list[str]:
    """English words and Mandarin syllables of a spelled sentence."""
    return WORD.findall(letters)


def letter_symbols(text: str) -> list[int]:
    """A sentence as symbols."""
    return [1 + LETTERS.index(letter) for letter in spelled(text) if letter in LETTERS]


def read_symbols(symbols: list[int]) -> str:
    """Greedy CTC decoding of the best symbol of each frame."""
    collapsed = [
        symbol
        for position, symbol in enumerate(symbols)
        if symbol and (position == 0 or symbol != symbols[position - 1])
    ]
    return " ".join("".join(LETTERS[symbol - 1] for symbol in collapsed).split())
