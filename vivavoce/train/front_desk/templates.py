"""Phrasing templates: `(a/b)` is a choice, `[a]` an optional part, `{slot}` a value; one file per language."""

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MIN_WORDS = 5  # phrasings of at least this many words that differ in one word are near duplicates


def read(kind: str, code: str) -> dict[str, Any]:
    """The TOML file of a kind (`templates` or `words`) and a language."""
    return tomllib.loads((FOLDER / f"{kind}.{code}.toml").read_text(encoding="utf8"))


def phrasings(text: str) -> list[str]:
    """Split a text of templates at the bars."""
    return [" ".join(template.split()) for template in text.split("|")]


def by_name(section: dict[str, str]) -> dict[str, list[str]]:
    """The templates of a section of a file, by the name of their intent, kind or slot."""
    return {name: phrasings(text) for name, text in section.items()}


def expanded(template: str) -> Iterator[str]:
    """All expansions of a template's choices and optional parts."""
    match = re.search(r"(\s*)\[([^\]]*)\]|\(([^)]*)\)", template)
    if match is None:
        yield " ".join(template.split()).replace(" ,", ",")
        return
    ways = match[3].split("/") if match[3] is not None else ("", match[1] + match[2])
    for way in ways:
        yield from expanded(template[: match.start()] + way + template[match.end() :])


class NearDuplicates:
    """Membership test for near duplicates of a list of templates."""

    def __init__(self, templates: list[str], plain_words: Callable[[str], tuple[str, ...]]) -> None:
        """`plain_words`: the canonical words of a phrasing in the language of the templates."""
        every = {plain_words(way) for template in templates for way in expanded(template)}
        self._plain_words = plain_words
        self._exact = every
        self._shorter = {short for words in every if len(words) > MIN_WORDS for short in _without_one_word(words)}
        self._gapped = {gapped for words in every if len(words) >= MIN_WORDS for gapped in _with_one_gap(words)}

    def __contains__(self, phrasing: str) -> bool:
        words = self._plain_words(phrasing)
        if words in self._exact or words in self._shorter:
            return True
        if len(words) < MIN_WORDS:
            return False
        return any(gapped in self._gapped for gapped in _with_one_gap(words)) or any(
            len(short) >= MIN_WORDS and short in self._exact for short in _without_one_word(words)
        )


def _without_one_word(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [words[:index] + words[index + 1 :] for index in range(len(words))]


def _with_one_gap(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [(*words[:index], "", *words[index + 1 :]) for index in range(len(words))]
