"""Text → phonemes in Kokoro's alphabet: English by hibari's or misaki's phonemiser, Mandarin by misaki's.

Both are optional packages (`vivavoce[kokoro]`). Words keep their place, so that captions can be timed.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.models.moss_tts_nano.prompt import CLOSERS, has_cjk
from vivavoce.tts.mandarin_numbers import spoken_numbers

LANGUAGES = {
    "a": "American English", "b": "British English", "z": "Mandarin", "e": "Spanish", "f": "French", "h": "Hindi",
    "i": "Italian", "j": "Japanese", "p": "Portuguese",
}  # fmt: skip
SPOKEN = ("a", "b", "z")
TITLES = frozenset(
    ("Mr", "Mrs", "Ms", "Dr", "Prof", "St", "Sr", "Jr", "vs", "No", "Mt", "Gen", "Col", "Lt", "Capt", "Rev")
)
SENTENCE_END = re.compile(rf"(?<=[.!?…])[{re.escape(''.join(sorted(CLOSERS)))}]*\s+|(?<=[。！？])")
CLAUSE_END = re.compile(r"(?<=[,;:—.!?]) ")
HAN = r"\u3400-\u9fff"
FOREIGN_WORD = rf"[^\W\d_{HAN}](?:[-'’.&+]?[^\W_{HAN}])*"
WIFI = re.compile(r"\bwifi\b", re.IGNORECASE)
FOREIGN_WORDS = re.compile(rf"({FOREIGN_WORD}(?: +{FOREIGN_WORD})*)")  # of a Mandarin text; the rest is Mandarin
SPACE_BEFORE_MARK = re.compile(r"\s+(?=[,.!?;:…)”])")
Phonemiser = Callable[[str], str]


@dataclass(frozen=True)
class Word:
    """A written word and the places of its phonemes."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Phonemes:
    """The phonemes of a part of a text, one character each, and its words."""

    text: str
    words: tuple[Word, ...]


def sentences(text: str) -> list[str]:
    """The sentences of a text; a full stop behind a title or an initial ends none."""
    found, start = list[str](), 0
    for match in SENTENCE_END.finditer(text):
        before = text[start : match.start()]
        last = before.rstrip(".").rsplit(" ", 1)[-1]
        if before.endswith(".") and (last in TITLES or (len(last) == 1 and last.isupper())):
            continue
        found.append(text[start : match.end()])
        start = match.end()
    return [part.strip() for part in [*found, text[start:]] if any(character.isalnum() for character in part)]


def phonemes(text: str, accent: str, known: Callable[[str], bool]) -> Phonemes:
    """The phonemes of one sentence; `accent` is the first letter of a voice, `known` tells the model's alphabet."""
    if accent not in SPOKEN and not has_cjk(text):
        raise InputError(
            f"this voice speaks {LANGUAGES.get(accent, accent)}, for which there are no phonemes here; "
            "take an English voice (af_, am_, bf_, bm_) or a Mandarin one (zf_, zm_)"
        )
    speak = phonemiser_of(text, accent)
    joined = speak(text)
    spoken = "".join(character for character in joined if known(character))
    spoken = re.sub(r"\s+", " ", spoken).strip()
    return Phonemes(spoken, tuple(_words(text, spoken, speak)))


def phonemiser_of(text: str, accent: str) -> Phonemiser:
    """The phonemiser of a text and its words, by its script."""
    return mixed_phonemiser(accent) if has_cjk(text) else english(accent == "b")


def mixed_phonemiser(accent: str) -> Phonemiser:
    """A phonemiser of Mandarin texts, whose foreign words are spoken as English ones."""

    def speak(text: str) -> str:
        parts = FOREIGN_WORDS.split(spoken_numbers(text))  # Mandarin and foreign in turn
        spoken = " ".join(
            english(accent == "b")(part) if index % 2 else mandarin()(part) for index, part in enumerate(parts)
        )
        return SPACE_BEFORE_MARK.sub("", spoken)

    return speak


def split_long(spoken: Phonemes, max_phonemes: int) -> Iterator[Phonemes]:
    """Parts of at most so many phonemes, cut behind punctuation, else between words."""
    while len(spoken.text) > max_phonemes:
        head = spoken.text[: max_phonemes + 1]
        ends = [match.start() for match in CLAUSE_END.finditer(head)] or [head.rfind(" ")]
        cut = ends[-1] if ends[-1] > 0 else max_phonemes
        yield Phonemes(spoken.text[:cut], tuple(word for word in spoken.words if word.start < cut))
        rest = spoken.text[cut:]
        skipped = cut + len(rest) - len(rest.lstrip())
        later = (word for word in spoken.words if word.start >= skipped)
        words = tuple(Word(word.text, word.start - skipped, word.end - skipped) for word in later)
        spoken = Phonemes(rest.strip(), words)
    if spoken.text:
        yield spoken


@lru_cache(maxsize=2)
def english(is_british: bool) -> Phonemiser:
    """hibari's phonemiser, or misaki's with spaCy."""
    try:
        from hibari.g2p import G2P

        return _as_spoken(_string(G2P(british=is_british)))
    except ImportError:
        pass
    try:
        from misaki.en import G2P as MisakiG2P

        return _as_spoken(_first(MisakiG2P(trf=False, british=is_british, fallback=None)))
    except ImportError as error:
        raise MissingDependencyError("English phonemes need hibari-tts: pip install 'vivavoce[kokoro]'") from error


def _as_spoken(speak: Phonemiser) -> Phonemiser:
    """A phonemiser that gets words in the spelling by which it knows how they are said."""
    return lambda text: speak(WIFI.sub("Wi-Fi", text))


@lru_cache(maxsize=1)
def mandarin() -> Phonemiser:
    """misaki's Mandarin phonemiser: words by jieba, tones by pypinyin, numbers by cn2an."""
    try:
        import jieba
        from misaki.zh import ZHG2P
    except ImportError as error:
        raise MissingDependencyError("Mandarin phonemes need misaki: pip install 'vivavoce[kokoro]'") from error
    jieba.setLogLevel("WARNING")
    return _first(ZHG2P())


def _string(phonemise: Any) -> Phonemiser:
    return lambda text: str(phonemise(text) or "")


def _first(phonemise: Any) -> Phonemiser:
    return lambda text: str(phonemise(text)[0] or "")


def _words(text: str, spoken: str, speak: Phonemiser) -> Iterator[Word]:
    """The written words with the groups of phonemes that they share out in order."""
    written = _written_words(text)
    groups = [match.span() for match in re.finditer(r"\S+", spoken) if any(map(str.isalpha, match[0]))]
    if not written or not groups:
        return
    counts = [1] * len(written)
    if len(groups) != len(written):
        counts = [len([group for group in speak(word).split() if any(map(str.isalpha, group))]) for word in written]
    shares = [sum(counts[:index]) / max(1, sum(counts)) * len(groups) for index in range(len(written) + 1)]
    for word, begin, end in zip(written, shares, shares[1:], strict=False):
        first, last = min(round(begin), len(groups) - 1), min(max(round(end), round(begin) + 1), len(groups)) - 1
        yield Word(word, groups[first][0], groups[max(first, last)][1])


def _written_words(text: str) -> list[str]:
    if not has_cjk(text):
        return [word for word in text.split() if any(map(str.isalnum, word))]
    import jieba

    return [word for word in jieba.lcut(text) if any(map(str.isalnum, word))]
