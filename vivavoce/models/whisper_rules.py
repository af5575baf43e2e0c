"""What a Whisper may write next, as small rules on logits that compose.

A rule sees the logits of the next token and the tokens sampled so far, and gives the logits back with what is forbidden
at −inf. Rules read nothing but these, so they hold for every position of a draft as for a token at a time.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from vivavoce.models.whisper_tokens import WhisperTokens

FORBIDDEN = float("-inf")


class LogitRule(Protocol):
    """One thing that is forbidden, or pushed."""

    def __call__(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """The logits under this rule.  # [row, vocabulary], [row, token so far] → [row, vocabulary]"""
        ...


class Suppress:
    """Ids that are never written."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = sorted(set(ids))

    def __call__(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """The logits without these ids."""
        return logits.index_fill(-1, torch.tensor(self.ids, dtype=torch.long, device=logits.device), FORBIDDEN)


class SuppressAtStart(Suppress):
    """Ids that are not written first: a blank, and the end of a text that has not begun."""

    def __call__(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """The logits without these ids, if nothing is written yet."""
        return logits if sampled.shape[1] else super().__call__(logits, sampled)


class TimestampRules:
    """Times come in pairs around text, never run back, begin soon, and win together over any single text token."""

    def __init__(self, tokens: WhisperTokens, latest_start: float | None = 1.0) -> None:
        self.tokens = tokens
        self.latest_start = None if latest_start is None else tokens.timestamp(latest_start)

    def __call__(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """The logits under the rules, by what each row has written."""
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return self.preferred(logits.masked_fill(self._forbidden(ids, sampled), FORBIDDEN))

    def _forbidden(self, ids: Tensor, sampled: Tensor) -> Tensor:
        """Which ids each row may not write.  # [vocabulary], [row, token] → [row, vocabulary]"""
        rows, count = sampled.shape
        begin = self.tokens.timestamps
        if count == 0:
            return self.forbidden_first(ids).expand(rows, -1)
        is_time = sampled >= begin
        last = is_time[:, -1]
        before = is_time[:, -2] if count > 1 else torch.ones_like(last)
        position = torch.arange(count, device=ids.device)
        newest = torch.where(is_time, position, -1).amax(-1)
        latest = sampled.gather(1, newest.clamp(min=0)[:, None])[:, 0]
        latest = torch.where(newest < 0, begin - 1, latest)
        return self.forbidden_after(ids, last, before, latest)

    def forbidden_first(self, ids: Tensor) -> Tensor:
        """What no text begins with: anything but a time, and a time later than allowed."""
        forbidden = ids < self.tokens.timestamps
        return forbidden if self.latest_start is None else forbidden | (ids > self.latest_start)

    def forbidden_after(self, ids: Tensor, last: Tensor, before: Tensor, latest: Tensor) -> Tensor:
        """What may not follow, by whether the last token and the one before it are times, and the latest time.

        # each [row]; `latest` is the id before <|0.00|> where there is no time yet → [row, vocabulary]
        """
        is_time = ids >= self.tokens.timestamps
        closes = (last & ~before)[:, None]
        first_free = latest[:, None] + (~closes).long()
        forbidden = (last & before)[:, None] & is_time
        forbidden |= closes & (ids < self.tokens.endoftext)
        forbidden |= is_time & (ids < first_free)
        return forbidden | (ids == self.tokens.notimestamps)

    def preferred(self, logits: Tensor) -> Tensor:
        """Text is left out where all times together are likelier than any one text token."""
        begin = self.tokens.timestamps
        times = logits[:, begin:].float().logsumexp(-1)
        text = logits[:, :begin].float().amax(-1)
        is_text = torch.arange(logits.shape[-1], device=logits.device) < begin
        return logits.masked_fill((times > text)[:, None] & is_text, FORBIDDEN)


class Hotwords:
    """Words that are expected: tokens that begin one, or go on with one begun, are pushed by a bonus."""

    def __init__(self, words: Sequence[Sequence[int]], bonus: float = 2.0) -> None:
        self.words = [list(word) for word in words if word]
        self.bonus = bonus

    def __call__(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """The logits with the next token of every word that fits raised."""
        raised = torch.zeros_like(logits)
        for row, tokens in enumerate(sampled.tolist()):
            for word in self.words:
                begun = max(n for n in range(len(word)) if n == 0 or tokens[-n:] == word[:n])
                raised[row, word[begun]] = self.bonus
        return logits + raised


def apply(rules: Sequence[LogitRule], logits: Tensor, sampled: Tensor) -> Tensor:
    """The logits under all rules, in order."""
    for rule in rules:
        logits = rule(logits, sampled)
    return logits
