"""Sentences made comparable: lower case, digits and times in words, no punctuation but the apostrophe in a word."""

import re

from vivavoce.train.front_desk.words import listed

ONES = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = listed("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
UNITS = {"$": "dollars", "€": "euros", "£": "pounds", "%": "percent"}
SPELLINGS = {
    **{"wi-fi": "wifi", "wi fi": "wifi", "check-in": "check in", "check-out": "check out", "o clock": "o'clock"},
    **{"icecream": "ice cream", "cheese burger": "cheeseburger", "carpark": "car park"},
}
ORDINALS = {"1st": "first", "2nd": "second", "3rd": "third", "4th": "fourth", "5th": "fifth"}


def number_words(number: int) -> str:
    """A whole number below a million as it is spoken."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    size, word = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = number % size
    return f"{number_words(number // size)} {word}" + (f" {number_words(rest)}" if rest else "")


def clock_words(hour: int, minute: int) -> str:
    """A time of the clock read from left to right: seven thirty, seven o'clock."""
    if minute == 0:
        return f"{number_words(hour)} o'clock"
    return f"{number_words(hour)} {'o ' if minute < 10 else ''}{number_words(minute)}"


def normalise(text: str) -> str:
    """The words of a sentence as they are spoken, for comparing a transcript with what was meant."""
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
