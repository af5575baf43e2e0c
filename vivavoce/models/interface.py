"""The one interface between models that generate and the engine that runs them.

A model sees **rows**: one id per channel (MOSS-Speech: text and audio; Whisper: one token; a codec LM: text and
sixteen codes). It turns a flat batch of rows into hidden states, and the hidden state of a sequence's last row into the
next row. It keeps nothing between calls: the past is in the pages of the `RowBatch`, and what else it must remember of
a sequence is a small integer, its *mode*.
"""

from typing import Protocol

from torch import Tensor

from vivavoce.nn.paged_kv import KVShape, RowBatch

Row = tuple[int, ...]


class Draw(Protocol):
    """What a model may ask while it makes the next rows. All tensors have one entry per sequence being sampled."""

    @property
    def modes(self) -> Tensor:
        """Each sequence's mode, for the row to be made."""
        ...

    @property
    def shared_mode(self) -> int | None:
        """The mode of all of them, if it is known beforehand and the model names it in `lone_modes`."""
        ...

    @property
    def generated(self) -> Tensor:
        """How many rows of this reply exist once the row being made is counted (1 for the first)."""
        ...

    @property
    def least(self) -> Tensor:
        """How many rows the caller wants at least."""
        ...

    def sample(self, channel: int, logits: Tensor) -> Tensor:
        """Draw one id per sequence, by that sequence's own settings and seed.  # [sequence, vocabulary] → [sequence]

        Logits that end before the vocabulary does leave its last ids out.
        """
        ...

    def sample_unrepeated(self, channel: int, logits: Tensor, share: float) -> Tensor:
        """`sample` without penalties but by the repetition-aware rule of VALL-E 2, for models that say in `recall` how
        many rows it looks back.  # [sequence, vocabulary] → [sequence]

        An id that is this share of those rows is drawn again, from all ids but itself and without limits. top-p counts
        over all ids, not over what top-k left. Temperature 0 takes the likeliest id, repeated or not.
        """
        ...

    def choose(self, channel: int, logits: Tensor) -> Tensor:
        """One of a few ways to go on, by the channel's settings but no penalty.  # [sequence, way] → [sequence]"""
        ...


class GenerativeModel(Protocol):
    """A model the engine can run."""

    channels: int
    vocabularies: tuple[int, ...]
    kv_shape: KVShape
    context_limit: int

    def forward(self, rows: Tensor, batch: RowBatch) -> Tensor:
        """Hidden states of a flat batch of rows; writes their keys and values.  # [row, channel] → [row, …]"""
        ...

    def next_rows(self, hidden: Tensor, draw: Draw) -> Tensor:
        """The row that follows each of these hidden states, without leaving the device.  # [sequence, channel]"""
        ...

    def start_mode(self, last: Row) -> int:
        """The mode in which a reply that follows this row begins."""
        ...

    def next_mode(self, mode: int, row: Row) -> int:
        """The mode after a generated row."""
        ...

    def ends(self, row: Row) -> bool:
        """Whether this generated row ends the reply."""
        ...
