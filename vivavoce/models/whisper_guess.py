"""A small decoder that guesses ahead of texts one by one, without an engine of its own.

On a CPU a small model's step costs less than an engine's planning of it. What the decoder has read of a text is kept;
tokens that were accepted since are read together, and then as many are guessed as are wanted.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vivavoce.models.interface import Row
from vivavoce.models.whisper import DecoderState, WhisperDecoder
from vivavoce.models.whisper_engine import TOKEN, WINDOW, WhisperWriter
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
    """A text as far as the decoder has read it: its rows, what is remembered of them, and the last one's state."""

    text: TextUnderWay
    length: int
    state: DecoderState
    hidden: Tensor  # [d_model]


class GuessingDecoder:
    """Greedy guesses of a small decoder whose windows lie in the store of a writer of its own."""

    def __init__(self, decoder: WhisperDecoder, writer: WhisperWriter) -> None:
        self.decoder, self.writer = decoder, writer
        self._read: dict[int, _Read] = {}
        barred = torch.zeros(decoder.config.vocab_size, device=decoder.embed_tokens.weight.device)
        barred[writer.never] = FORBIDDEN
        plain = barred.clone()
        plain[writer.tokens.notimestamps :] = FORBIDDEN
        self._barred = (plain, barred)  # for texts without and with times

    @torch.inference_mode()
    def propose(self, sequence: TextUnderWay, most: int) -> list[Row]:
        """What the small decoder would write next."""
        before = self._read.get(sequence.id)
        if before is not None:  # no farther ahead than guesses were right of late
            most = min(most, max(1, len(sequence.rows) - before.length - 1) + EAGERNESS)
        read = self._caught_up(sequence)
        channel = sequence.rows[-1][WINDOW]
        barred, end = self._barred[channel % 2], self.writer.tokens.endoftext
        most = min(most, self.decoder.config.max_target_positions - len(sequence.rows))
        hidden, state = read.hidden, read.state
        guessed: list[Row] = []
        while len(guessed) < most:
            token = int((self.decoder.logits(hidden) + barred).argmax())
            if token == end:
                break
            guessed.append((token, channel))
            if len(guessed) < most:
                states, state = self.decoder.step(state, torch.tensor([[token]], device=barred.device))
                hidden = states[0, -1]
        return guessed

    def close(self) -> None:
        """Forget all texts."""
        self._read.clear()

    def _caught_up(self, sequence: TextUnderWay) -> _Read:
        """The text read to its last row; a text that was rewound is read anew."""
        for key in [key for key, read in self._read.items() if not read.text.is_open]:
            del self._read[key]
        rows, known = sequence.rows, self._read.get(sequence.id)
        if known is None or known.length >= len(rows):
            memory = self.writer.store.memory(rows[-1][WINDOW] // 2)
            known = _Read(sequence, 0, self.decoder.initial_state(memory), torch.empty(0))
        fresh = torch.tensor([[row[TOKEN] for row in rows[known.length :]]], device=self._barred[0].device)
        states, state = self.decoder.step(known.state, fresh)
        self._read[sequence.id] = _Read(sequence, len(rows), state, states[0, -1])
        return self._read[sequence.id]
