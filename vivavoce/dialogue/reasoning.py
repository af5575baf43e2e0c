"""Reasoning blocks of chat models (`<think>…</think>`), removed from a stream of text."""

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"


class ReasoningFilter:
    """Passes on what stands outside reasoning blocks; the result does not depend on how the text is chunked.

    A block that never closes hides the rest of the stream. A closing tag without an opening one is removed, and so is
    the white space after a block that a reply begins with.
    """

    def __init__(self) -> None:
        self._held = ""  # may turn out to be the beginning of a tag
        self._is_inside = self._skips_space = self._has_text = False

    def push(self, text: str) -> str:
        """What can be passed on after this chunk; may be empty."""
        rest, passed = self._held + text, ""
        while True:
            if self._skips_space:
                rest = rest.lstrip()
            at, tag = _first_tag(rest, (CLOSE_TAG,) if self._is_inside else (OPEN_TAG, CLOSE_TAG))
            if not tag:
                at = len(rest) - _held_length(rest, self._is_inside)
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
        """What was held back outside a block because it could have been the beginning of a tag."""
        if self._is_inside:
            return ""
        held, self._held = self._held, ""
        self._note(held)
        return held

    def _note(self, passed: str) -> None:
        if passed:
            self._skips_space = False
            self._has_text = self._has_text or not passed.isspace()


def _first_tag(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
    return min(found, default=(len(text), ""))


def _held_length(text: str, is_inside: bool) -> int:
    """Length of the longest end of a text that a tag may begin with."""
    tags = (CLOSE_TAG,) if is_inside else (OPEN_TAG, CLOSE_TAG)
    start = text.rfind("<", max(0, len(text) - len(CLOSE_TAG)))
    return len(text) - start if start >= 0 and any(tag.startswith(text[start:]) for tag in tags) else 0
