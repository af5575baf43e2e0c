"""Texts that the engine cannot draw by itself, in its steps all the same: beams, and words that are expected.

What may be written depends on more of a text than the engine's modes hold, or several texts compete. So the engine
computes the states of these texts beside those of everybody else, and here their next tokens are taken.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vivavoce.engine.engine import Engine
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.engine.sequence import Sequence as Rows
from vivavoce.engine.speculative import Speculation
from vivavoce.models.interface import Row
from vivavoce.models.whisper.decoding import LogitRule, Text, apply, best_text, follow, take
from vivavoce.models.whisper.engine import WhisperWriter
from vivavoce.models.whisper.windows import WriteText


class NoGuess:
    """Reads states and guesses nothing."""

    def propose(self, sequence: Rows, most: int) -> list[Row]:
        """Nothing."""
        return []


STATES = Speculation(NoGuess(), 1, reads_hidden=True)
ONE_ROW = Generation(GREEDY, max_new_rows=1)


class FollowedTexts:
    """One question's texts: the greedy one, some drawn at a temperature, or those that a beam search follows."""

    def __init__(
        self, engine: Engine, writer: WhisperWriter, window: int, asked: WriteText, rules: Sequence[LogitRule]
    ) -> None:
        self.engine, self.writer, self.window, self.asked, self.rules = engine, writer, window, asked, rules
        self.channel = 2 * window + bool(asked.wish.timestamps)
        rows = writer.prompt(window, asked.prompt, bool(asked.wish.timestamps))
        self.left = min(asked.most, engine.capacity - len(rows))
        self.count = asked.best_of if asked.temperature > 0 else asked.beams
        device = engine.runner.device
        self.totals = torch.zeros(1, device=device)
        self.sampled = torch.zeros(1, 0, dtype=torch.long, device=device)
        self.finished: list[Text] = []
        self._generator = torch.Generator(device).manual_seed(asked.wish.seed) if asked.temperature > 0 else None
        self.texts = [engine.open(rows)]
        self._compute(self.texts[0])

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to follow."""
        return not self.texts

    @property
    def is_computed(self) -> bool:
        """Whether the engine has made the states of all texts."""
        return not any(text.is_generating for text in self.texts)

    @torch.inference_mode()
    def advance(self) -> None:
        """Take the next token of every text; to be called when all are computed."""
        states = torch.stack([text.hidden for text in self.texts if text.hidden is not None])
        for text in self.texts:
            self.engine.rewind(text, len(text) - 1)  # what the engine drew counts for nothing
        ruled = apply(self.rules, self.writer.logits(states), self.sampled)
        self.left -= 1
        followed = self._draws(ruled) if self._generator is not None else self._beams(ruled)
        if followed is not None:
            parents, self.totals, self.sampled = followed
        if followed is None or self.left == 0:
            unfinished = zip(self.sampled.tolist(), self.totals.tolist(), strict=True) if followed is not None else ()
            if len(self.finished) < self.count:
                self.finished += [Text(row, total, False, 0.0) for row, total in unfinished]
            self.close()
        else:
            self._branch(parents)

    def best(self) -> Text:
        """The likeliest of the finished texts, and whether anybody speaks at all."""
        best = best_text(self.finished)
        timed = bool(self.asked.wish.timestamps)
        judged = self.writer.judge(self.window, self.asked.prompt, best.tokens, timed, best.is_ended)
        return replace(best, no_speech=judged.no_speech)

    def close(self) -> None:
        """Give back what is held of the engine."""
        for text in self.texts:
            self.engine.close(text)
        self.texts = []

    def _beams(self, ruled: Tensor) -> tuple[list[int], Tensor, Tensor] | None:
        """Parents, totals and tokens of the texts to follow; with one beam, that is the greedy text."""
        end = self.writer.tokens.endoftext
        followed = follow(self.totals, ruled.log_softmax(-1), self.sampled, self.count, end, 0.0, self.finished)
        if followed is None or len(self.finished) >= self.count:
            return None
        parents, totals, sampled = followed
        real = torch.isfinite(totals)  # the others only fill up
        going = [parent for parent, is_real in zip(parents, real.tolist(), strict=True) if is_real]
        return going, totals[real], sampled[real]

    def _draws(self, ruled: Tensor) -> tuple[list[int], Tensor, Tensor] | None:
        """The same of texts that are drawn, each for itself, until it ends."""
        parents = list(range(len(self.texts))) if self.sampled.shape[1] else [0] * self.count
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

    def _branch(self, parents: Sequence[int]) -> None:
        """The texts that go on, each a sequence of its own with its newest token to be computed."""
        old = self.texts
        self.texts = [
            old[parent] if parents.index(parent) == place else self.engine.fork(old[parent])
            for place, parent in enumerate(parents)
        ]
        for place, text in enumerate(old):
            if place not in parents:
                self.engine.close(text)
        for text, token in zip(self.texts, self.sampled[:, -1].tolist(), strict=True):
            self.engine.append(text, [(token, self.channel)])
            self._compute(text)

    def _compute(self, text: Rows) -> None:
        self.engine.generate(text, ONE_ROW, speculation=STATES)
