"""Streamed text cut into pieces for a synthesiser (the first one early, later ones whole sentences), and a filter for
the reasoning of chat models."""

import re
from dataclasses import dataclass

ENDS = ".!?。！？…\n"
PAUSES = ",;:，；：、—"
CLOSERS = "\"')]}”’」』）】"
ABBREVIATIONS = frozenset(
    (
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "st",
        "no",
        "vs",
        "etc",
        "e.g",
        "i.e",
        "a.m",
        "p.m",
        "u.s",
        "inc",
        "ltd",
        "jr",
        "sr",
    )
)


@dataclass(frozen=True)
class SentenceRules:
    """Minimum and maximum length of a piece. Letters of scripts without spaces count three."""

    first_clause: int = 12
    """The first piece may end at a comma once it is this long."""
    max_first: int = 64
    """A longer first piece is cut at its last pause or space: no sound is heard before it is complete."""
    min_weight: int = 4
    max_weight: int = 240
    """A longer piece is cut at its last pause or space."""


class SentenceSplitter:
    """Splits streamed text into pieces as soon as they are complete; joined, they are the text."""

    def __init__(self, rules: SentenceRules | None = None) -> None:
        self.rules = rules or SentenceRules()
        self._waiting = ""
        self._emitted = 0

    def push(self, text: str) -> list[str]:
        """The pieces that this text completes."""
        self._waiting += text
        pieces = []
        while (end := self._end()) is not None:
            pieces.append(self._waiting[:end])
            self._waiting = self._waiting[end:]
            self._emitted += 1
        return pieces

    def flush(self) -> list[str]:
        """The rest, at the end of the text."""
        rest, self._waiting = self._waiting, ""
        return [rest] if rest.strip() else []

    def _end(self) -> int | None:
        """The end of the first complete piece; None: there is none yet."""
        text, rules = self._waiting, self.rules
        for index, letter in enumerate(text):
            ends = letter in ENDS and self._ends_sentence(index)
            pauses = letter in PAUSES and not self._emitted and weight(text[:index]) >= rules.first_clause
            if (ends or pauses) and weight(text[: index + 1]) >= rules.min_weight and self._is_settled(index):
                return self._with_closers(index + 1)
        max_weight = rules.max_weight if self._emitted else rules.max_first
        return self._cut(max_weight) if weight(text) > max_weight else None

    def _ends_sentence(self, index: int) -> bool:
        text = self._waiting
        if text[index] != ".":
            return True
        match = re.search(r"([\w.]+)$", text[:index])
        word = match[1].lower() if match else ""
        if word in ABBREVIATIONS or (len(word) == 1 and word.isalpha()):
            return False
        following = text[index + 1 : index + 2]
        return not (word[-1:].isdigit() and following.isdigit())

    def _is_settled(self, index: int) -> bool:
        """Whether the next character is known: a full stop may be a decimal point or part of an ellipsis."""
        text = self._waiting
        if text[index] in "。！？，；：、\n":
            return True
        following = text[index + 1 : index + 2]
        return bool(following) and (following.isspace() or following in CLOSERS)

    def _with_closers(self, end: int) -> int:
        text = self._waiting
        while end < len(text) and text[end] in CLOSERS + " \n" + ENDS:
            end += 1
        return end

    def _cut(self, max_weight: int) -> int:
        """The last pause or space of the longest start that is not too long."""
        text = self._waiting
        size = next(index for index in range(len(text), 0, -1) if weight(text[:index]) <= max_weight)
        best = max(text[:size].rstrip().rfind(mark) for mark in PAUSES + " ")
        return best + 1 if best > 0 else size


def weight(text: str) -> int:
    """Spoken length of a text: a letter of a script without spaces is a syllable."""
    return sum(3 if ord(letter) >= 0x2E80 else 1 for letter in text.strip())


OPEN_TAG, CLOSE_TAG = "<think>", "</think>"


class ReasoningFilter:
    """Removes reasoning blocks from streamed text; the result does not depend on how the text is chunked.

    A block that never closes hides the rest of the stream. A closing tag without an opening one is removed, and so is
    the white space after a block that a reply begins with.
    """

    def __init__(self) -> None:
        self._held = ""  # possible start of a tag
        self._is_inside = self._skips_space = self._has_text = False

    def push(self, text: str) -> str:
        """The text that this chunk completes; may be empty."""
        rest, passed = self._held + text, ""
        while True:
            if self._skips_space:
                rest = rest.lstrip()
            tags = (CLOSE_TAG,) if self._is_inside else (OPEN_TAG, CLOSE_TAG)
            at, tag = first_tag(rest, tags)
            if not tag:
                at = len(rest) - held_length(rest, tags)
            if not self._is_inside:
                passed += rest[:at]
                self._note(rest[:at])
            if not tag:
                self._held = rest[at:]
                return passed
            rest = rest[at + len(tag) :]
            self._is_inside = tag == OPEN_TAG
            self._skips_space = not self._is_inside and not self._has_text

    def flush(self) -> str:
        """The rest, which was held back as a possible start of a tag."""
        if self._is_inside:
            return ""
        held, self._held = self._held, ""
        self._note(held)
        return held

    def _note(self, passed: str) -> None:
        if passed:
            self._skips_space = False
            self._has_text = self._has_text or not passed.isspace()


def first_tag(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of these tags is, and which one; the text's length and nothing if there is none."""
    found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
    return min(found, default=(len(text), ""))


def held_length(text: str, tags: tuple[str, ...]) -> int:
    """Length of the suffix of a text that may be the start of a tag."""
    start = text.rfind("<", max(0, len(text) - max(map(len, tags))))
    return len(text) - start if start >= 0 and any(tag.startswith(text[start:]) for tag in tags) else 0
