"""English texts compared: canonical phrasings, normalised transcripts, and words that count as the same."""

import re
from difflib import SequenceMatcher
from functools import cache

from vivavoce.train.front_desk.english_values import DAYS, NAMES, NUMBERS, ONES, PRICES, TENS, number_words

CANONICAL_WORDS = {  # words treated as equal when comparing phrasings
    **dict.fromkeys(("could", "may", "would", "will"), "can"),
    **{"we": "i", "us": "me", "our": "my", "we'd": "i'd", "i'll": "i can", "we'll": "i can", "i'd": "i can"},
    **{
        "what's": "what is",
        "where's": "where is",
        "name's": "name is",
        "i'm": "i am",
        "it's": "it is",
        "we're": "i am",
    },
    **{"can't": "cannot", "don't": "do not", "didn't": "did not"},
}
POLITE = frozenset(("please", "um", "uh", "sorry", "hello", "hi", "well", "okay", "so", "oh", "and"))


def plain_words(phrasing: str) -> tuple[str, ...]:
    """Canonical words of a phrasing: without politeness, with synonyms merged."""
    words = re.sub(r"[^\w'{} ]", " ", phrasing.lower()).split()
    plain = " ".join(CANONICAL_WORDS.get(word, word) for word in words if word not in POLITE)
    return tuple(plain.replace("{number}", "{people}").split())


UNITS = {"$": "dollars", "€": "euros", "£": "pounds", "%": "percent"}
SPELLINGS = {
    **{"wi-fi": "wifi", "wi fi": "wifi", "check-in": "check in", "check-out": "check out", "o clock": "o'clock"},
    **{"icecream": "ice cream", "cheese burger": "cheeseburger", "carpark": "car park"},
}
ORDINALS = {"1st": "first", "2nd": "second", "3rd": "third", "4th": "fourth", "5th": "fifth"}


def clock_words(hour: int, minute: int) -> str:
    """A clock time in words: seven thirty, seven o'clock."""
    if minute == 0:
        return f"{number_words(hour)} o'clock"
    return f"{number_words(hour)} {'o ' if minute < 10 else ''}{number_words(minute)}"


def normalise(text: str) -> str:
    """Lower-case spoken words of a text, for comparing transcripts."""
    text = text.lower().replace("’", "'").replace("-", " ")
    text = re.sub(r"(\d),(\d{3})\b", r"\1\2", text)
    text = re.sub(r"\b(\d{1,2})[:.](\d{2})\b", lambda match: clock_words(int(match[1]), int(match[2])), text)
    text = re.sub(r"([$€£])\s*(\d+)", lambda match: f"{match[2]} {UNITS[match[1]]}", text)
    text = text.replace("%", " percent").replace("€", " euros").replace("&", " and ")
    text = re.sub(r"\b\d(?:st|nd|rd|th)\b", lambda match: ORDINALS.get(match[0], match[0]), text)
    text = re.sub(r"\d+", lambda match: f" {_digits(match[0])} ", text)
    text = re.sub(r"[^\w' ]|_", " ", text)
    text = " ".join(word.strip("'") for word in text.split())
    for written, spoken in SPELLINGS.items():
        text = re.sub(rf"\b{re.escape(written)}\b", spoken, text)
    return " ".join(text.split())


def _digits(digits: str) -> str:
    if len(digits) < 7 and (digits == "0" or not digits.startswith("0")):
        return number_words(int(digits))
    return " ".join(ONES[int(digit)] for digit in digits)


MIN_SIMILARITY = 0.6  # spelling similarity from which two words are the same
HOMOPHONES = {"for": "four", "fore": "four", "to": "two", "too": "two", "ate": "eight", "won": "one", "sicks": "six"}
HOUR = f"({'|'.join(NUMBERS)})"
CLOCK = {  # pattern: minutes after the hour in it
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


def spoken_words(text: str) -> tuple[str, ...]:
    """Normalised words, with each clock time and number as one word."""
    text = re.sub(r"\ba clock\b", "o'clock", normalise(text))
    text = re.sub(rf"\b({'|'.join(HOMOPHONES)})(?= o'clock\b)", lambda match: HOMOPHONES[match[1]], text)
    for pattern, minutes in CLOCK.items():
        for hour in dict.fromkeys(re.findall(rf"\b{pattern}\b", text)):
            text = re.sub(rf"\b{pattern.replace(HOUR, hour)}\b", _clock(hour, minutes), text)
    text = re.sub(rf"\b({'|'.join(TENS[2:])}) ({'|'.join(ONES[1:10])})\b", r"\1-\2", text)
    return tuple(text.replace("'", "").split())


def is_value(word: str) -> bool:
    """Whether a word is a value: number, time, name, dish or day."""
    return ":" in word or bool({word.partition("-")[0]} & (NUMBER_WORDS | NAME_WORDS | DISH_WORDS | DAY_WORDS))


@cache
def same_word(word: str, other: str) -> bool:
    """Whether two words count as the same: homophones and small spelling differences do."""
    if word == other or HOMOPHONES.get(other) == word:
        return True
    if ":" in word:  # "seven" matches seven o'clock
        return word == f"{other}:0"
    if not word or not other or word.partition("-")[0] in NUMBER_WORDS:
        return False
    return _similarity(word, other) >= MIN_SIMILARITY


def is_recognised_value(word: str, other: str) -> bool:
    """Whether a value was recognised and not confused with another of its kind."""
    if not same_word(word, other):
        return False
    return not any(
        _similarity(rival, other) > _similarity(word, other)
        for kind in (NAME_WORDS, DISH_WORDS, DAY_WORDS)
        if word in kind
        for rival in kind
    )


@cache
def _similarity(word: str, other: str) -> float:
    return SequenceMatcher(None, word, other, autojunk=False).ratio()


def _clock(hour: str, minutes: int) -> str:
    if minutes < 0:
        return f"{NUMBERS[NUMBERS.index(hour) - 1]}:{60 + minutes}"
    return f"{hour}:{minutes}"
