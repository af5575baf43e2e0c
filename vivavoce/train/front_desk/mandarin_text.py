"""Mandarin texts compared by their sound: numbers, times and days as values, all else as syllables without tones."""

import re
import unicodedata
from functools import cache

from vivavoce.errors import MissingDependencyError
from vivavoce.train.front_desk.mandarin_values import DISHES, FOREIGN_NAMES, NAMES, number_value
from vivavoce.train.front_desk.scripts import simplified

NUMBER = "[0-9]+|[零〇一二三四五六七八九十百千万两]+"
MINUTES = rf"(?:(半)|([一三])刻|({NUMBER})(?:分|(?!\d))(?!钟))"
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
TIME = re.compile(rf"(?<![<\d])(\d{{1,2}})(?::|\.(?=\d\d分))(\d{{2}})分?|({NUMBER})点(?:钟|整)?{MINUTES}?")
BEFORE = re.compile(rf"差一刻({NUMBER})点")
DAY = re.compile(r"(?:星期|礼拜|周)([一二三四五六日天])")
TOKENS = re.compile(rf"<[^>]*>|{NUMBER}|[a-z']+|[㐀-鿿]")
SOUND_ALIKES = (("zh", "z"), ("ch", "c"), ("sh", "s"), ("ng", "n"))  # told apart by few speakers in the south
VALUES = (
    *(ways[0] for ways in (*NAMES.values(), *DISHES.values())),
    *FOREIGN_NAMES.values(),
    *("今天", "今晚", "明天", "明晚"),
)
POLITE = re.compile(r"[請嗎呢啊吧喔]|麻煩|謝謝|不好意思|一下|們|[^\w{}]")


def plain_words(phrasing: str) -> tuple[str, ...]:
    """Characters and slots of a phrasing without politeness, in one script."""
    plain = simplified(POLITE.sub("", phrasing.replace("您", "你")))
    return tuple(re.findall(r"\{\w+\}|[a-z']+|.", plain.lower()))


def spoken_words(text: str) -> tuple[str, ...]:
    """Syllables of a text in either script; a number, a time, a day, a name and a dish are one word each."""
    text = THOUSANDS.sub("", simplified(unicodedata.normalize("NFKC", text).lower()))
    text = DAY.sub(lambda match: f"<day {match[1].replace('天', '日')}>", text)
    text = BEFORE.sub(lambda match: f"<{(number_value(match[1]) - 2) % 12 + 1}:45>", text)
    text = TIME.sub(_time, text)
    words = [_word(token) for token in TOKENS.findall(text)]
    return tuple(_merged(words))


def _time(match: re.Match[str]) -> str:
    if match[1]:
        return f"<{(int(match[1]) - 1) % 12 + 1}:{int(match[2]):02}>"
    minute = 30 if match[4] else 15 * number_value(match[5]) if match[5] else number_value(match[6]) if match[6] else 0
    return f"<{number_value(match[3])}:{minute:02}>"


def _word(token: str) -> str:
    if token.startswith("<"):
        return token
    if re.fullmatch(NUMBER, token):
        return f"<{number_value(token)}>"
    return token if token.isascii() else _syllable(token)


@cache
def _syllable(character: str) -> str:
    try:
        from pypinyin import lazy_pinyin
    except ImportError as error:
        raise MissingDependencyError("judging Mandarin needs pypinyin: pip install vivavoce[train]") from error
    syllable = lazy_pinyin(character)[0]
    for sound, alike in SOUND_ALIKES:
        syllable = syllable.replace(sound, alike)
    return syllable


@cache
def _known_values() -> dict[tuple[str, ...], str]:
    spoken = {value: tuple(_word(token) for token in TOKENS.findall(simplified(value))) for value in VALUES}
    return {syllables: f"<{' '.join(syllables)}>" for syllables in spoken.values()}


def _merged(words: list[str]) -> list[str]:
    """Names, dishes and days of several syllables as one word; those with more syllables first."""
    known = _known_values()
    max_syllables = max(len(syllables) for syllables in known)
    merged, position = [], 0
    while position < len(words):
        sizes = range(min(max_syllables, len(words) - position), 0, -1)
        size = next((size for size in sizes if tuple(words[position : position + size]) in known), 0)
        merged.append(known[tuple(words[position : position + size])] if size else words[position])
        position += size or 1
    return merged


def is_value(word: str) -> bool:
    """Whether a word is a value: number, time, name, dish or day."""
    return word.startswith("<")


def same_word(word: str, other: str) -> bool:
    """Whether two words sound the same."""
    return word == other
