"""The rows of a step as integers: what the device must know of each, in one array that is sent at once."""

import numpy as np

from vivavoce.engine.sampling import NO_ROW
from vivavoce.engine.scheduler import Work
from vivavoce.engine.sequence import Sequence
from vivavoce.models.interface import GenerativeModel, Row


class Packing:
    """Lays works out for a model. Rows that only fill a batch up stand in the slot `filler`."""

    def __init__(self, model: GenerativeModel, filler: int) -> None:
        self.model, self.filler = model, filler
        self.recall: int = getattr(model, "recall", 0)

    def pack(
        self, works: list[Work], slots: list[int], ahead: int = 0, size: int | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """A row of the step as integers: ids, slot, position, mode, rows generated, whether penalties count it.

        Then the last rows of the reply, if the model wants to recall them, and room for `ahead` drafted rows that stand
        before the one to be drawn. Beside all this, where each work ends.
        """
        channels = self.model.channels
        total = size or sum(work.total for work in works)
        packed = np.zeros((total, channels * (1 + self.recall + ahead) + 5), dtype=np.int32)
        packed[:, channels] = self.filler
        packed[:, channels + 4] = 1
        packed[:, channels * (1 + self.recall) + 5 :] = NO_ROW
        end, ends = 0, []
        singles: list[tuple[int, ...]] = []
        places: list[int] = []
        for work, slot in zip(works, slots, strict=True):
            sequence = work.sequence
            begin, end = end, end + work.total
            ends.append(end)
            if work.total == 1 and not self.recall:
                counted = sequence.first_counted <= work.start
                singles.append(
                    (*sequence.rows[work.start], slot, work.start, sequence.mode, sequence.generated + 1, counted)
                )
                places.append(begin)
                continue
            packed[begin:end, :channels] = [*sequence.rows[work.start : work.start + work.count], *work.drafted]
            packed[begin:end, channels] = slot
            packed[begin:end, channels + 1] = range(work.start, work.start + work.total)
            packed[begin:end, channels + 2] = sequence.mode
            packed[begin:end, channels + 3] = sequence.generated + 1
            uncounted = min(max(0, sequence.first_counted - work.start), work.count)
            packed[begin : begin + uncounted, channels + 4] = 0
            if work.samples:
                self._replies(packed[end - 1 - len(work.drafted) : end], work)
        if singles:  # one assignment for all: most steps are nothing else
            packed[places, : channels + 5] = singles
        return packed, ends

    def _replies(self, packed: np.ndarray, work: Work) -> None:
        """What the draw behind the last row must know, and those behind the drafted rows if those are right."""
        channels, sequence = self.model.channels, work.sequence
        recalled = channels + 5 + channels * self.recall
        before: list[tuple[Row, ...]] = [()]
        facts = [(work.start + work.count - 1, sequence.mode, sequence.generated + 1)]
        for row, up in zip(work.drafted, work.drafted.parents, strict=True):
            before.append((*before[1 + up], row))
            position, mode, generated = facts[1 + up]
            facts.append((position + 1, self.model.next_mode(mode, row), generated + 1))
        packed[:, channels + 1 : channels + 4] = facts
        packed[1:, channels + 4] = 0
        for place, so_far in enumerate(before):
            packed[place, recalled : recalled + channels * len(so_far)] = [value for row in so_far for value in row]
            if self.recall:
                packed[place, channels + 5 : recalled] = self.recent(sequence, so_far).reshape(-1)

    def recent(self, sequence: Sequence, drafted: tuple[Row, ...]) -> np.ndarray:
        """The last rows of the reply so far, with NO_ROW before its beginning.  # [row, channel]"""
        recent = np.full((self.recall, self.model.channels), NO_ROW, dtype=np.int32)
        reply = [*sequence.rows[len(sequence) - min(self.recall, sequence.generated) :], *drafted][-self.recall :]
        if reply:
            recent[-len(reply) :] = reply
        return recent
