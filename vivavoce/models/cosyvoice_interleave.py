"""Speaking while the text still comes: five tokens of it, fifteen codes of speech, and so on until the text is over.

The published model writes a mark after every fifteen codes and is then given text. Here the mark is not drawn but
known: it is asked for just the codes that are left until then. The mark itself is no part of what the model reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vivavoce.errors import InputError
from vivavoce.models.cosyvoice_lm import MOST_CODES, NO_CODE, CosyVoiceLMConfig
from vivavoce.models.cosyvoice_prompt import PromptPrefix
from vivavoce.models.interface import Row

TEXT_TOKENS, SPEECH_CODES = 5, 15  # of one round


@dataclass(frozen=True)
class InterleaveRequest:
    """What the model reads next, and how many codes it makes then; None: as many as it likes, up to `most`."""

    rows: tuple[Row, ...]
    codes: int | None
    most: int


class Interleave:
    """The rounds of one reply. Text is given as it comes; `ask` says what to do with it."""

    def __init__(self, config: CosyVoiceLMConfig, before: PromptPrefix) -> None:
        self._config = config
        opening = 0
        if config.version == 3:  # what stands before the transcript is read at once
            opening = len(before.text) - tuple(reversed(before.text)).index(config.end_of_prompt)
        self._rows: list[Row] = [config.start, *self._written(before.text[:opening])]
        self._text = list(before.text[opening:])
        self._reference = list(before.codes)
        self._due = -len(before.codes) % SPEECH_CODES  # codes that the reference leaves its last round short of
        self._given = self._made = 0
        self._is_ended = self._is_over = False

    def give(self, text: Sequence[int]) -> None:
        """More of the text."""
        if self._is_ended:
            raise InputError("the text was ended; begin a new one")
        if any(not 0 <= token < self._config.vocab_size for token in text):
            raise InputError(
                f"text ids go from {min(text)} to {max(text)}; this model has 0…{self._config.vocab_size - 1}"
            )
        self._text += text
        self._given += len(text)

    def end(self) -> None:
        """There is no more text."""
        if not self._given:
            raise InputError("there is no text to say; give at least one token")
        self._is_ended = True

    def ask(self) -> InterleaveRequest | None:
        """The next round; None: more text is needed first, or everything was asked for."""
        if self._is_over:
            return None
        while self._reference and len(self._text) >= TEXT_TOKENS:
            self._read_round()
        if self._reference and not self._is_ended:
            return None
        if not self._reference and self._due == 0 and len(self._text) >= TEXT_TOKENS:
            self._read_round()
            self._due = SPEECH_CODES
        if self._due and not self._reference:
            return self._asked(self._due)
        return self._last() if self._is_ended else None

    def _last(self) -> InterleaveRequest:
        self._is_over = True
        self._rows += [*self._written(self._text), self._config.task, *self._spoken(self._reference)]
        self._text, self._reference = [], []
        return self._asked(None)

    def _asked(self, codes: int | None) -> InterleaveRequest:
        rows, self._rows, self._due = tuple(self._rows), [], 0
        most = max(1, MOST_CODES * self._given - self._made)
        self._made += codes or 0
        return InterleaveRequest(rows, codes, most)

    def _read_round(self) -> None:
        """Five tokens of text, and the reference's codes of the same round if there are any."""
        self._rows += [*self._written(self._text[:TEXT_TOKENS]), *self._spoken(self._reference[:SPEECH_CODES])]
        del self._text[:TEXT_TOKENS], self._reference[:SPEECH_CODES]

    def _written(self, text: Sequence[int]) -> list[Row]:
        return [(token, NO_CODE) for token in text]

    def _spoken(self, codes: Sequence[int]) -> list[Row]:
        return [(self._config.speech_mark, code) for code in codes]
