"""The languages of the front desk, and its editions.

Edition 1 has the hand-written templates; in English these are the ones the bundled miniatures were trained with.
Edition 2 adds corrections ("no, four people") and the phrasings of a language model, from `phrasings.CODE.jsonl`.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from vivavoce.errors import InputError
from vivavoce.train.front_desk.english import ENGLISH
from vivavoce.train.front_desk.language import SpokenLanguage
from vivavoce.train.front_desk.mandarin import MANDARIN
from vivavoce.train.front_desk.templates import FOLDER

LANGUAGES = {language.code: language for language in (ENGLISH, MANDARIN)}
EDITIONS = (1, 2)
HAN = re.compile(r"[\u3400-\u9fff]")


def language_of(text: str) -> SpokenLanguage:
    """Mandarin if a text has a Chinese character, else English."""
    return MANDARIN if HAN.search(text) else ENGLISH


@cache
def language(code: str, edition: int = 1) -> SpokenLanguage:
    """A language of the desk in an edition."""
    if code not in LANGUAGES or edition not in EDITIONS:
        raise InputError(
            f"no desk in {code!r}, edition {edition}; languages: {', '.join(LANGUAGES)}; editions: {EDITIONS}"
        )
    if edition == 1:
        return LANGUAGES[code]
    added: dict[str, dict[str, list[str]]] = {}
    for line in (FOLDER / f"phrasings.{code}.jsonl").read_text(encoding="utf8").splitlines():
        phrasing = json.loads(line)
        added.setdefault(phrasing["split"], {}).setdefault(phrasing["intent"], []).append(phrasing["text"])
    return replace(LANGUAGES[code], edition=edition, added=added)


def languages(codes: Sequence[str], edition: int = 1) -> tuple[SpokenLanguage, ...]:
    """Several languages of one edition."""
    return tuple(language(code, edition) for code in codes)
