"""Decoding that the engine cannot sample: beam search, and texts with hotwords.

Their logit rules need more of the text than the engine's modes hold, or several hypotheses compete. The engine computes
their hidden states in the same batched steps as all other texts, and the next tokens are chosen here.
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
from vivavoce.models.whisper.steps import WriteText
from vivavoce.runtime.async_engine import AsyncEngine
from vivavoce.runtime.reply import BlockingReply

TEXT_SECONDS = 0.5  # deadline of a text


class NoDraft:
    """A draft source without drafts: speculation with it makes the engine keep hidden states."""

    def propose(self, sequence: EngineSequence, max_rows: int) -> list[Row]:
        """Draft nothing."""
        return []


KEEP_STATES = Speculation(NoDraft(), 1, reads_hidden=True)
ONE_ROW = Generation(GREEDY, max_new_rows=1)


class ConstrainedTexts:
    """The candidates for one text: one greedy, several sampled at a temperature, or the beams of a search.

    `sequences` holds their open sequences. All methods must be called between two steps of the engine.
    """

    def __init__(
        self,
        driver: AsyncEngine,
        writer: WhisperWriter,
        window: int,
        request: WriteText,
        rules: Sequence[LogitRule],
        sequences: list[EngineSequence],
    ) -> None:
        self.driver, self.engine, self.writer = driver, driver.engine, writer
        self.window, self.request, self.rules, self.sequences = window, request, rules, sequences
        self.channel = 2 * window + bool(request.options.timestamps)
        self.rows = writer.prompt(window, request.prompt, bool(request.options.timestamps))
        self.left = min(request.max_tokens, self.engine.capacity - len(self.rows))
        self.count = request.best_of if request.temperature > 0 else request.beams
        self.due = time.monotonic() + TEXT_SECONDS
        device = self.engine.runner.device
        self.totals = torch.zeros(1, device=device)
        self.sampled = torch.zeros(1, 0, dtype=torch.long, device=device)
        self.finished: list[Text] = []
        self._generator = torch.Generator(device).manual_seed(request.options.seed) if request.temperature > 0 else None

    def start(self) -> list[BlockingReply]:
        """Compute the prompt; its state is there when the reply has ended."""
        self.sequences.append(self.engine.open(self.rows))
        return [self._compute(self.sequences[0])]

    @torch.inference_mode()
    def advance(self) -> list[BlockingReply]:
        """Choose the next token of every candidate; returns no replies when all candidates are finished."""
        states = torch.stack([text.hidden for text in self.sequences if text.hidden is not None])
        for text in self.sequences:
            self.engine.rewind(text, len(text) - 1)  # drop the row that the engine sampled
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
        """The finished text of highest rank, with its no-speech probability."""
        best = best_text(self.finished)
        timed = bool(self.request.options.timestamps)
        scored = self.writer.score(self.window, self.request.prompt, best.tokens, timed, best.is_ended)
        return replace(best, no_speech=scored.no_speech)

    def _search(self, ruled: Tensor) -> tuple[list[int], Tensor, Tensor] | None:
        """Parents, log-probabilities and tokens of the beams; with one beam this is greedy decoding."""
        end = self.writer.tokens.endoftext
        followed = follow(self.totals, ruled.log_softmax(-1), self.sampled, self.count, end, 0.0, self.finished)
        if followed is None or len(self.finished) >= self.count:
            return None
        parents, totals, sampled = followed
        real = torch.isfinite(totals)  # the others are padding
        going = [parent for parent, is_real in zip(parents, real.tolist(), strict=True) if is_real]
        return going, totals[real], sampled[real]

    def _sample(self, ruled: Tensor) -> tuple[list[int], Tensor, Tensor] | None:
        """Parents, log-probabilities and tokens of the sampled texts that have not ended."""
        parents = list(range(len(self.sequences))) if self.sampled.shape[1] else [0] * self.count
        ruled, totals, sampled = ruled[parents], self.totals[parents], self.sampled[parents]
        taken = take(ruled, self.request.temperature, self._generator)
        totals = totals + ruled.log_softmax(-1).gather(1, taken[:, None])[:, 0]
        ends = taken == self.writer.tokens.endoftext
        over = zip(sampled[ends].tolist(), totals[ends].tolist(), strict=True)
        self.finished += [Text(row, total, True, 0.0) for row, total in over]
        if bool(ends.all()):
            return None
        going = [parent for parent, end in zip(parents, ends.tolist(), strict=True) if not end]
        return going, totals[~ends], torch.cat([sampled, taken[:, None]], dim=1)[~ends]

    def _branch(self, parents: Sequence[int]) -> list[BlockingReply]:
        """Fork or reuse a sequence for each candidate, and compute its newest token."""
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
