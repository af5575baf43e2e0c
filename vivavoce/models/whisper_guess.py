"""A small decoder that guesses ahead of texts one by one, without an engine of its own.

On a CPU a small model's step costs less than an engine's planning of it. What the decoder has read of a text is kept,
its own guesses too: of those that were right nothing is read again.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from vivavoce.models.interface import Row
from vivavoce.models.whisper import WhisperDecoder
from vivavoce.models.whisper_engine import TOKEN, WINDOW, WhisperWriter
from vivavoce.models.whisper_lean import LeanDecoder, LeanText
from vivavoce.models.whisper_rules import FORBIDDEN

EAGERNESS = 2  # guesses beyond as many as were right the last time


class TextUnderWay(Protocol):
    """What is asked of a sequence."""

    @property
    def id(self) -> int:
        """Which text it is."""
        ...

    @property
    def rows(self) -> list[Row]:
        """Its rows so far."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether it goes on."""
        ...


@dataclass
class _Read:
    """A text as far as the decoder has read it, guesses included, and how many rows it had when it was last asked."""

    text: TextUnderWay
    lean: LeanText
    tokens: list[int]
    length: int = 0


class GuessingDecoder:
    """Greedy guesses of a small decoder whose windows lie in the store of a writer of its own."""

    def __init__(self, decoder: WhisperDecoder, writer: WhisperWriter) -> None:
        self.decoder, self.writer = decoder, writer
        self._lean = LeanDecoder(decoder)
        self._read: dict[int, _Read] = {}
        barred = torch.zeros(decoder.config.vocab_size, device=decoder.embed_tokens.weight.device)
        barred[writer.never] = FORBIDDEN
        plain = barred.clone()
        plain[writer.tokens.notimestamps :] = FORBIDDEN
        self._barred = (plain, barred)  # for texts without and with times

    @torch.inference_mode()
    def propose(self, sequence: TextUnderWay, most: int) -> list[Row]:
        """What the small decoder would write next."""
        read = self._read_of(sequence)
        if read.length:  # no farther ahead than guesses were right of late
            most = min(most, max(1, len(sequence.rows) - read.length - 1) + EAGERNESS)
        read.length = len(sequence.rows)
        channel = sequence.rows[-1][WINDOW]
        barred, end = self._barred[channel % 2], self.writer.tokens.endoftext
        most = min(most, self.decoder.config.max_target_positions - len(sequence.rows))
        fresh, guessed = [row[TOKEN] for row in sequence.rows[read.lean.length :]], list[Row]()
        while len(guessed) < most:
            hidden = self._lean.read(read.lean, fresh)
            read.tokens += fresh
            token = int((self.decoder.logits(hidden) + barred).argmax())
            if token == end:
                break
            guessed.append((token, channel))
            fresh = [token]
        return guessed

    def close(self) -> None:
        """Forget all texts."""
        self._read.clear()

    def _read_of(self, sequence: TextUnderWay) -> _Read:
        """What is read of a text and still stands in it, all but its last row, whose state is wanted."""
        for key in [key for key, read in self._read.items() if not read.text.is_open]:
            del self._read[key]
        if sequence.id not in self._read:
            memory = self.writer.store.memory(sequence.rows[-1][WINDOW] // 2)
            self._read[sequence.id] = _Read(sequence, self._lean.begin(memory), [])
        read = self._read[sequence.id]
        pairs = zip(read.tokens, sequence.rows[:-1], strict=False)
        same = next((place for place, (token, row) in enumerate(pairs) if token != row[TOKEN]), None)
        if same is None:
            same = min(len(read.tokens), len(sequence.rows) - 1)
        read.lean.length = same
        del read.tokens[same:]
        return read
