"""Texts whose tokens the engine cannot draw by itself: beam search, and texts with expected words.

Which tokens may follow depends on more of a text than the engine's modes hold, or several texts compete. So the engine
computes the states of these texts in the same steps as all others, and their next tokens are chosen here.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.engine.sequence import Sequence as EngineSequence
from vivavoce.engine.speculative import Speculation
from vivavoce.models.interface import Row
from vivavoce.models.whisper.decoding import LogitRule, Text, apply, best_text, follow, take
from vivavoce.models.whisper.engine import WhisperWriter
from vivavoce.models.whisper.transcriber import WriteText
from vivavoce.runtime.async_engine import AsyncEngine
from vivavoce.runtime.reply import BlockingReply

TEXT_SECONDS = 0.5  # after which a text is due


class NoDraft:
    """Has the engine keep hidden states, and drafts nothing."""

    def propose(self, sequence: EngineSequence, max_rows: int) -> list[Row]:
        """No rows."""
        return []


KEEP_STATES = Speculation(NoDraft(), 1, reads_hidden=True)
ONE_ROW = Generation(GREEDY, max_new_rows=1)


class ConstrainedTexts:
    """The candidates for one text: a greedy one, some sampled at a temperature, or the beams of a search.

    `sequences` is where those that are open are kept. All methods run between two steps of the engine.
    """

    def __init__(
        self,
        driver: AsyncEngine,
        writer: WhisperWriter,
        window: int,
        asked: WriteText,
        rules: Sequence[LogitRule],
        sequences: list[EngineSequence],
    ) -> None:
        self.driver, self.engine, self.writer = driver, driver.engine, writer
        self.window, self.asked, self.rules, self.sequences = window, asked, rules, sequences
        self.channel = 2 * window + bool(asked.options.timestamps)
        self.rows = writer.prompt(window, asked.prompt, bool(asked.options.timestamps))
        self.left = min(asked.max_tokens, self.engine.capacity - len(self.rows))
        self.count = asked.best_of if asked.temperature > 0 else asked.beams
        self.due = time.monotonic() + TEXT_SECONDS
        device = self.engine.runner.device
        self.totals = torch.zeros(1, device=device)
        self.sampled = torch.zeros(1, 0, dtype=torch.long, device=device)
        self.finished: list[Text] = []
        self._generator = torch.Generator(device).manual_seed(asked.options.seed) if asked.temperature > 0 else None

    def start(self) -> list[BlockingReply]:
        """Compute the prompt; the replies are over when all states are there."""
        self.sequences.append(self.engine.open(self.rows))
        return [self._compute(self.sequences[0])]

    @torch.inference_mode()
    def advance(self) -> list[BlockingReply]:
        """Choose the next token of every text, once all states are there; nothing where there is none to go on with."""
        states = torch.stack([text.hidden for text in self.sequences if text.hidden is not None])
        for text in self.sequences:
            self.engine.rewind(text, len(text) - 1)  # the row that the engine drew is not used
        ruled = apply(self.rules, self.writer.logits(states), self.sampled)
        self.left -= 1
        followed = self._sample(ruled) if self._generator is not None else self._search(ruled)
        if followed is not None:
            parents, self.totals, self.sampled = followed
            if self.left > 0:
                return self._branch(parents)
            if len(self.finished) < self.count:
                unfinished = zip(self.sampled.tolist(), self.totals.tolist(), strict=True)
                self.finished += [Text(row, total, False, 0.0) for row, total in unfinished]
        for text in self.sequences:
            self.engine.close(text)
        self.sequences.clear()
        return []

    def best(self) -> Text:
        """The finished text of highest rank, with the chance that there is no speech."""
        best = best_text(self.finished)
        timed = bool(self.asked.options.timestamps)
        scored = self.writer.score(self.window, self.asked.prompt, best.tokens, timed, best.is_ended)
        return replace(best, no_speech=scored.no_speech)

    def _search(self, ruled: Tensor) -> tuple[list[int], Tensor, Tensor] | None:
        """Parents, totals and tokens of the beams to follow; with one beam, that is the greedy text."""
        end = self.writer.tokens.endoftext
        followed = follow(self.totals, ruled.log_softmax(-1), self.sampled, self.count, end, 0.0, self.finished)
        if followed is None or len(self.finished) >= self.count:
            return None
        parents, totals, sampled = followed
        real = torch.isfinite(totals)  # the others only fill up
        going = [parent for parent, is_real in zip(parents, real.tolist(), strict=True) if is_real]
        return going, totals[real], sampled[real]

    def _sample(self, ruled: Tensor) -> tuple[list[int], Tensor, Tensor] | None:
        """Parents, totals and tokens of sampled texts, each going on until it ends."""
        parents = list(range(len(self.sequences))) if self.sampled.shape[1] else [0] * self.count
        ruled, totals, sampled = ruled[parents], self.totals[parents], self.sampled[parents]
        taken = take(ruled, self.asked.temperature, self._generator)
        totals = totals + ruled.log_softmax(-1).gather(1, taken[:, None])[:, 0]
        ends = taken == self.writer.tokens.endoftext
        over = zip(sampled[ends].tolist(), totals[ends].tolist(), strict=True)
        self.finished += [Text(row, total, True, 0.0) for row, total in over]
        if bool(ends.all()):
            return None
        going = [parent for parent, end in zip(parents, ends.tolist(), strict=True) if not end]
        return going, totals[~ends], torch.cat([sampled, taken[:, None]], dim=1)[~ends]

    def _branch(self, parents: Sequence[int]) -> list[BlockingReply]:
        """A sequence for each text that goes on, with its newest token to be computed."""
        old = list(self.sequences)
        self.sequences[:] = [
            old[parent] if parents.index(parent) == index else self.engine.fork(old[parent])
            for index, parent in enumerate(parents)
        ]
        for index, text in enumerate(old):
            if index not in parents:
                self.engine.close(text)
        replies = []
        for text, token in zip(self.sequences, self.sampled[:, -1].tolist(), strict=True):
            self.engine.append(text, [(token, self.channel)])
            replies.append(self._compute(text))
        return replies

    def _compute(self, text: EngineSequence) -> BlockingReply:
        reply = self.driver.stream(text, ONE_ROW, speculation=KEEP_STATES)
        self.driver.due_by(text, self.due)
        return reply
