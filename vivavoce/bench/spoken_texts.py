"""Texts as they are spoken, so that what was said and what was heard can be compared."""

import re
from functools import cache
from typing import Any

from vivavoce.bench.recognisers import characters
from vivavoce.errors import MissingDependencyError
from vivavoce.train.front_desk.answers import normalise

NUMERALS = str.maketrans("零一二三四五六七八九两", "01234567892")


def spoken_words(text: str) -> list[str]:
    """The words of an English text as they are spoken."""
    return normalise(text).split()


def spoken_characters(text: str) -> str:
    """The characters of a Mandarin text in simplified script without punctuation, with numerals as digits."""
    return re.sub(r"(?<!\d)10(?!\d)", "十", characters(simplified(text)).translate(NUMERALS))


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
