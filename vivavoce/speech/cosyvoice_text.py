"""A text as CosyVoice is to read it: markup gone, numbers in words, inline events and phonemes left as they are."""

import re
from collections.abc import Callable, Iterable, Iterator

from vivavoce.errors import InputError, NothingToSayError
from vivavoce.models.cosyvoice_tokens import ADDED, EVENTS
from vivavoce.models.moss_tts_nano_text import CLAUSE_ENDS, SENTENCE_ENDS, Chunk, chunks, has_cjk
from vivavoce.speech.cleaning import cleaned
from vivavoce.speech.numbers import numbers_as_words

MOST_TOKENS = 80  # said in one breath; of Chinese, characters
MARKED = ("<|", "|>")  # who writes the model's own marks wants them read as they are
INLINE = re.compile(r"\[([^\[\]\s()|]{1,20})\](?!\()|</?(?:strong|laughter)>")
NAMED_EVENT = re.compile(r"\[[a-z][a-z_-]{2,}\]")
STAND_IN = re.compile(r"zqx([a-j]+)qz")  # a word that no rule for texts changes
DIGITS = "abcdefghij"
SUPERSCRIPTS = str.maketrans({"²": "平方", "³": "立方", "（": None, "）": None, "【": None, "】": None, "`": None})
POINT = re.compile(r"(?<!\d)\.|\.(?!\d)")
SPACE_IN_CHINESE = re.compile(r"(?<![\x21-\x7e]) +| +(?![\x21-\x7e])")
LONGEST_WAIT = 48  # characters that a growing text may have without a place to cut


def prepared(text: str, version: int, clean: bool = True) -> str:
    """The text as the model gets it; an event or phoneme that this version does not have is refused by name.

    Not cleaned, it is left as it is, and so is a text with the model's own marks.
    """
    if all(mark in text for mark in MARKED):
        return text
    return _around_tokens(text, version, (lambda words: _spelled(cleaned(words))) if clean else str)


def prepared_piece(piece: str, version: int) -> str:
    """A piece of a growing text as the model gets it; the space before it stays."""
    bare = piece.strip()
    if not bare:
        return piece
    return piece[: len(piece) - len(piece.lstrip())] + _around_tokens(bare, version, _spelled)


def _around_tokens(text: str, version: int, change: Callable[[str], str]) -> str:
    """A change of the text that leaves its inline tokens alone."""
    tokens: list[str] = []

    def kept(found: re.Match[str]) -> str:
        if not _is_known(found[0], version):
            return found[0]
        tokens.append(found[0])
        number = "".join(DIGITS[int(digit)] for digit in str(len(tokens) - 1))
        return f"zqx{number}qz"

    changed = change(INLINE.sub(kept, text))
    return STAND_IN.sub(lambda found: tokens[int("".join(str(DIGITS.index(each)) for each in found[1]))], changed)


def _spelled(text: str) -> str:
    return _chinese(text) if has_cjk(text) else numbers_as_words(text)


def _is_known(token: str, version: int) -> bool:
    """Whether a bracketed word is a token; what looks like one but is none of this version is refused."""
    if token in ADDED[version]:
        return True
    if token in ADDED[3]:
        raise InputError(f"CosyVoice {version} has no phonemes, so {token} cannot be said; leave it out")
    if NAMED_EVENT.fullmatch(token):
        events = " ".join(event for event in EVENTS if event.startswith("["))
        raise InputError(f"CosyVoice {version} cannot make {token}; it knows {events}")
    return False


def _chinese(text: str) -> str:
    """Chinese as the published front end leaves it, but for its grammar of numbers."""
    text = text.replace("\n", "").replace(" - ", "，").replace("——", " ").translate(SUPERSCRIPTS)
    text = POINT.sub("。", SPACE_IN_CHINESE.sub("", text))
    return re.sub(r"[，,、]+$", "。", text)


def breaths(text: str, count_tokens: Callable[[str], int]) -> list[Chunk]:
    """A text in parts that are said one after another; Chinese is counted in characters."""
    parts = chunks(text, len if has_cjk(text) else count_tokens, MOST_TOKENS)
    sayable = [part for part in parts if any(character.isalnum() for character in part.text)]
    if not sayable:
        raise NothingToSayError(f"there is nothing to say in {text[:30]!r}; give at least one letter or digit")
    return sayable


def tidied_transcript(text: str) -> str:
    """A reference's words as the model likes them: in sentence case and with an end, or it speaks nonsense."""
    text = " ".join(text.split())
    if text.isupper() and text.isascii():
        text = text.capitalize()
    if text and text[-1] not in SENTENCE_ENDS | CLAUSE_ENDS:
        text += "。" if has_cjk(text[-1]) else "."
    return text


def words_of(pieces: Iterable[str]) -> Iterator[str]:
    """A growing text cut before spaces and after marks, so that tokens are those of the whole text."""
    held = ""
    for piece in pieces:
        held += piece
        cut = max((place for place in range(1, len(held)) if _is_cut(held, place)), default=0)
        if not cut and len(held) > LONGEST_WAIT:
            cut = len(held)
        if cut:
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _is_cut(text: str, place: int) -> bool:
    before, after = text[place - 1], text[place]
    return (after == " " and before != " ") or before in "。！？，、；："
