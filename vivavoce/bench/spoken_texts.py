"""Texts as they are spoken, so that what was said and what was heard can be compared."""

import re
import unicodedata
from functools import cache
from typing import Any

from vivavoce.bench.recognisers import characters
from vivavoce.errors import MissingDependencyError
from vivavoce.train.front_desk.answers import normalise
from vivavoce.train.front_desk.mandarin_values import DIGITS, number_words

NUMBER = re.compile(r"(\d+)(?:\.(\d+))?(%?)(年?)")
YEAR_DIGITS = 4
MAX_NUMBER = 99_999  # longer ones, years and numbers that begin with zero are compared digit by digit


def spoken_words(text: str) -> list[str]:
    """The words of an English text as they are spoken."""
    return normalise(text).split()


def spoken_characters(text: str) -> str:
    """The characters of a Mandarin text in simplified script without punctuation, with its numbers in words."""
    return characters(simplified(NUMBER.sub(_number_words, unicodedata.normalize("NFKC", text)))).replace("两", "二")


def _number_words(match: re.Match[str]) -> str:
    whole, decimals, percent, year = match.groups()
    is_year = bool(year) and len(whole) == YEAR_DIGITS
    has_words = not is_year and int(whole) <= MAX_NUMBER and (whole == "0" or not whole.startswith("0"))
    words = number_words(int(whole)) if has_words else _digit_words(whole)
    return ("百分之" if percent else "") + words + (f"点{_digit_words(decimals)}" if decimals else "") + year


def _digit_words(digits: str) -> str:
    return "".join(DIGITS[int(digit)] for digit in digits)


def simplified(text: str) -> str:
    """A Mandarin text in simplified script: the other script says the same."""
    return str(_converter().convert(text))


@cache
def _converter() -> Any:
    try:
        from opencc import OpenCC
    except ImportError as error:
        raise MissingDependencyError(
            "Mandarin is compared in one script by opencc: pip install 'vivavoce[judge]'"
        ) from error
    return OpenCC("t2s")
