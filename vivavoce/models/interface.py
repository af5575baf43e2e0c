"""The one interface between models that generate and the engine that runs them.

A model works on **rows**: one id per channel (MOSS-Speech: text and audio; Whisper: one token; a codec LM: text and
sixteen codes). It turns a flat batch of rows into hidden states, and the hidden state of a sequence's last row into the
next row. It is stateless between calls: the past is in the KV pages of the `RowBatch`, and all other state of a
sequence is a small integer, its *mode*.
"""

from typing import Protocol

from torch import Tensor

from vivavoce.nn.paged_kv import KVShape, RowBatch

Row = tuple[int, ...]


class Draw(Protocol):
    """Sampling context of `next_rows`. All tensors have one entry per sequence being sampled."""

    @property
    def modes(self) -> Tensor:
        """Each sequence's mode for the next row."""
        ...

    @property
    def shared_mode(self) -> int | None:
        """The mode of all sequences, if they share one that is listed in the model's `lone_modes`."""
        ...

    @property
    def generated(self) -> Tensor:
        """Rows of this reply including the one being sampled (1 for the first)."""
        ...

    @property
    def min_rows(self) -> Tensor:
        """Minimum rows of the reply."""
        ...

    def sample(self, channel: int, logits: Tensor) -> Tensor:
        """Draw one id per sequence by the settings and seed of the sequence.  # [sequence, vocabulary] → [sequence]

        Logits shorter than the vocabulary exclude its last ids.
        """
        ...

    def sample_unrepeated(self, channel: int, logits: Tensor, share: float) -> Tensor:
        """`sample` by the repetition-aware rule of VALL-E 2 instead of penalties; the model's `recall` is its window in
        rows.  # [sequence, vocabulary] → [sequence]

        An id that makes up this share of the window is drawn again, from all other ids and without top-k or top-p.
        top-p is computed over all ids, not those left by top-k. Temperature 0 takes the likeliest id, repeated or not.
        """
        ...

    def choose(self, channel: int, logits: Tensor) -> Tensor:
        """One of a few choices, by the channel's settings without penalty.  # [sequence, choice] → [sequence]"""
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
        """The row after each of these hidden states, computed on the device.  # [sequence, channel]"""
        ...

    def start_mode(self, last: Row) -> int:
        """The mode of a reply that follows this row."""
        ...

    def next_mode(self, mode: int, row: Row) -> int:
        """The mode after a generated row."""
        ...

    def ends(self, row: Row) -> bool:
        """Whether this generated row ends the reply."""
        ...
