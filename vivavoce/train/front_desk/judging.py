"""Is a transcript of the desk's speech the right reply? By its nearest reply, and by every value it must carry."""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache

from vivavoce.train.front_desk.answers import Exchange, fixed_replies, slotted_replies
from vivavoce.train.front_desk.normalising import ONES, TENS, normalise
from vivavoce.train.front_desk.words import DAYS, NAMES, NUMBERS, PRICES

FARTHEST = 0.45  # share of the right reply's words that a transcript may have wrong and still mean it
ALIKE = 0.6  # likeness of spelling from which a word heard is the word said
HOMOPHONES = {"for": "four", "fore": "four", "to": "two", "too": "two", "ate": "eight", "won": "one", "sicks": "six"}
HOUR = f"({'|'.join(NUMBERS)})"
CLOCK = {  # how a time is spoken, minutes after the hour named
    rf"(?:a )?quarter past {HOUR}": 15,
    rf"half past {HOUR}": 30,
    rf"(?:a )?quarter to {HOUR}": -15,
    rf"{HOUR} fifteen": 15,
    rf"{HOUR} thirty": 30,
    rf"{HOUR} forty five": 45,
    rf"{HOUR} o'?clock": 0,
}
NAME_WORDS = frozenset(name.lower() for name in NAMES)
DISH_WORDS = frozenset(word for dish in PRICES for word in dish.split()) - {"and"}
DAY_WORDS = frozenset((*DAYS, "today", "tonight", "tomorrow"))
NUMBER_WORDS = frozenset((*ONES, *TENS, "noon"))


def judge(said: str, expected: Exchange) -> bool:
    """Whether a transcript says what the reply should: its intent, and each number, time, name, dish and day in it."""
    heard, meant = spoken_words(said), spoken_words(expected.reply)
    pairs = aligned(meant, heard)
    wrong = errors(pairs)
    if wrong > FARTHEST * len(meant):
        return False
    if any(is_value(word) and not carries(word, other) for word, other in pairs if word):
        return False
    return wrong == 0 or all(wrong <= errors(aligned(reply, heard)) for reply in _every_reply())


def spoken_words(text: str) -> tuple[str, ...]:
    """The words of a sentence, each time of the clock and each number as one of them, however it was written."""
    text = re.sub(r"\ba clock\b", "o'clock", normalise(text))
    text = re.sub(rf"\b({'|'.join(HOMOPHONES)})(?= o'clock\b)", lambda match: HOMOPHONES[match[1]], text)
    for pattern, minutes in CLOCK.items():
        for hour in dict.fromkeys(re.findall(rf"\b{pattern}\b", text)):
            text = re.sub(rf"\b{pattern.replace(HOUR, hour)}\b", _clock(hour, minutes), text)
    text = re.sub(rf"\b({'|'.join(TENS[2:])}) ({'|'.join(ONES[1:10])})\b", r"\1-\2", text)
    return tuple(text.replace("'", "").split())


def aligned(meant: Sequence[str], heard: Sequence[str]) -> list[tuple[str, str]]:
    """Words meant beside words heard at the fewest errors; an empty string stands for a word too few or too many."""
    cost = [[row + column for column in range(len(heard) + 1)] for row in range(len(meant) + 1)]
    for row, word in enumerate(meant, 1):
        for column, other in enumerate(heard, 1):
            swap = cost[row - 1][column - 1] + (not same(word, other))
            cost[row][column] = min(swap, cost[row - 1][column] + 1, cost[row][column - 1] + 1)
    pairs: list[tuple[str, str]] = []
    row, column = len(meant), len(heard)
    while row or column:
        here = cost[row][column]
        if row and column and here == cost[row - 1][column - 1] + (not same(meant[row - 1], heard[column - 1])):
            row, column = row - 1, column - 1
            pairs.append((meant[row], heard[column]))
        elif row and here == cost[row - 1][column] + 1:
            row -= 1
            pairs.append((meant[row], ""))
        else:
            column -= 1
            pairs.append(("", heard[column]))
    return pairs[::-1]


def errors(pairs: Sequence[tuple[str, str]]) -> int:
    """Words swapped, too few and too many."""
    return sum(not same(word, other) for word, other in pairs)


def is_value(word: str) -> bool:
    """Whether a word of a reply is what the guest wanted to know, so that another one would be wrong."""
    return ":" in word or bool({word.partition("-")[0]} & (NUMBER_WORDS | NAME_WORDS | DISH_WORDS | DAY_WORDS))


@cache
def same(word: str, other: str) -> bool:
    """Whether a word heard is the word meant: sound-alikes and small slips of spelling are."""
    if word == other or HOMOPHONES.get(other) == word:
        return True
    if ":" in word:  # "seven" is enough for seven o'clock
        return word == f"{other}:0"
    if not word or not other or word.partition("-")[0] in NUMBER_WORDS:
        return False
    return _likeness(word, other) >= ALIKE


def carries(word: str, other: str) -> bool:
    """Whether a value was heard, and not another of its kind."""
    if not same(word, other):
        return False
    return not any(
        _likeness(rival, other) > _likeness(word, other)
        for kind in (NAME_WORDS, DISH_WORDS, DAY_WORDS)
        if word in kind
        for rival in kind
    )


@cache
def _likeness(word: str, other: str) -> float:
    return SequenceMatcher(None, word, other, autojunk=False).ratio()


def _clock(hour: str, minutes: int) -> str:
    if minutes < 0:
        return f"{NUMBERS[NUMBERS.index(hour) - 1]}:{60 + minutes}"
    return f"{hour}:{minutes}"


@cache
def _every_reply() -> tuple[tuple[str, ...], ...]:
    return tuple(dict.fromkeys(spoken_words(reply) for reply in (*fixed_replies(), *slotted_replies())))
