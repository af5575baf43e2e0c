"""Text cut into chunks that MOSS-TTS-Nano can say in one breath.

A mark between two letters or digits (3.14, 12:30) is no place to cut. Markup and symbols are left as they are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vivavoce.errors import InputError

SENTENCE_ENDS = frozenset(".!?。！？；;")
CLAUSE_ENDS = frozenset(",，、；;：:")
CLOSERS = frozenset("\"'”’)]}）】》」』")
LOOK_BACK = 25  # characters in which a forced cut looks for a better place
MAX_CHUNK_TOKENS = 75
LONGEST_TEXT = 100_000  # characters; hours of speech


@dataclass(frozen=True)
class Chunk:
    """A part of a text that is said at once, and the silence after it in seconds."""

    text: str
    pause: float


def chunks(text: str, count_tokens: Callable[[str], int], most: int = MAX_CHUNK_TOKENS) -> list[Chunk]:
    """A text in parts of at most `most` tokens, cut at sentences, else at clauses, else where it must be.

    `most` 0 or less leaves the text whole.
    """
    text = text.strip()
    if not text:
        raise InputError("there is no text to say; give at least one letter")
    if len(text) > LONGEST_TEXT:
        raise InputError(f"the text has {len(text)} characters; give at most {LONGEST_TEXT} at a time")
    parts = list(_packed(_sayable(_prepared(text), count_tokens, most), count_tokens, most)) if most > 0 else []
    if len(parts) <= 1:
        return [Chunk(text, 0.0)]
    return [Chunk(part, _pause(part)) for part in parts[:-1]] + [Chunk(parts[-1], 0.0)]


def _pause(text: str) -> float:
    """Upstream's pause after a chunk: longer after a short one."""
    return 0.40 if len(text.split()) <= 4 else 0.24


def _prepared(text: str) -> str:
    """A text that will be cut: on one line, with a capital and a full stop."""
    text = " ".join(text.split())
    if has_cjk(text):
        return text if text[-1] in SENTENCE_ENDS else text + "。"
    text = text[0].upper() + text[1:]
    return text + "." if text[-1].isalnum() else text


def _sayable(text: str, count_tokens: Callable[[str], int], most: int) -> Iterator[str]:
    """Sentences, clauses or pieces within the budget."""
    for sentence in _cut_after(text, SENTENCE_ENDS):
        if count_tokens(sentence) <= most:
            yield sentence
            continue
        for clause in _cut_after(sentence, CLAUSE_ENDS):
            yield from _pieces(clause, count_tokens, most)


def _cut_after(text: str, marks: frozenset[str]) -> Iterator[str]:
    """The text cut after marks, quotes that close there included."""
    start = place = 0
    while place < len(text):
        place += 1
        if text[place - 1] not in marks or _is_inside_word(text, place - 1):
            continue
        while place < len(text) and text[place] in CLOSERS:
            place += 1
        if part := text[start:place].strip():
            yield part
        start = place
    if part := text[start:].strip():
        yield part


def _is_inside_word(text: str, place: int) -> bool:
    """Whether an ASCII mark has letters or digits of a spaced script at both sides."""
    around = text[place - 1 : place] + text[place + 1 : place + 2]
    return text[place].isascii() and len(around) == 2 and around.isalnum() and not has_cjk(around)


def _pieces(text: str, count_tokens: Callable[[str], int], most: int) -> Iterator[str]:
    """A text cut by force, at a mark or a space where one is near."""
    while text:
        end = _longest_within(text, count_tokens, most)
        if end < len(text):
            back = next((at for at in range(end, max(0, end - LOOK_BACK), -1) if _is_boundary(text[at - 1])), None)
            end = back or end
        if piece := text[:end].strip():
            yield piece
        text = text[end:].strip()


def _longest_within(text: str, count_tokens: Callable[[str], int], most: int) -> int:
    """The most characters from the start that stay within the budget, at least one."""
    fits, too_long = 1, max(2, most)
    while too_long <= len(text) and count_tokens(text[:too_long]) <= most:
        fits, too_long = too_long, 2 * too_long
    if too_long > len(text):
        if count_tokens(text) <= most:
            return len(text)
        too_long = len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if count_tokens(text[:middle]) <= most:
            fits = middle
        else:
            too_long = middle
    return fits


def _is_boundary(character: str) -> bool:
    return character == " " or character in SENTENCE_ENDS or character in CLAUSE_ENDS


def _packed(parts: Iterator[str], count_tokens: Callable[[str], int], most: int) -> Iterator[str]:
    """Neighbours joined while they stay within the budget."""
    current, held = "", 0
    for part in parts:
        tokens = count_tokens(part)
        joined = current + part if has_cjk(current + part) or not current else f"{current} {part}"
        if current and (held + tokens > most or count_tokens(joined) > most):
            yield current
            current, held = part, tokens
        else:
            current, held = joined, count_tokens(joined)
    if current:
        yield current


def has_cjk(text: str) -> bool:
    """Whether there are Han characters, kana or hangul in a text."""
    return any(
        "\u4e00" <= each <= "\u9fff"
        or "\u3400" <= each <= "\u4dbf"
        or "\u3040" <= each <= "\u30ff"
        or "\uac00" <= each <= "\ud7af"
        for each in text
    )
