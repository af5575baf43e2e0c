"""A whole text guessed at once from the encoder's states: a linear layer over pieces of words, read as CTC is.

Nothing of it depends on what was written before, so it costs one small product a window; the decoder then checks the
guess many tokens at a time.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.whisper_config import WhisperConfig
from vivavoce.models.whisper_draft import read_draft, write_draft
from vivavoce.nn.allocation import allocating

KIND = "pieces"
BLANK = 0
POOLED = 2  # encoder states that are read together: pieces of words are no shorter


class PieceGuesser(nn.Module):
    """Chances of every text token, or of none, at every 40 ms of a window."""

    def __init__(self, d_model: int, text_ids: int) -> None:
        super().__init__()
        self.pieces = nn.Linear(d_model, text_ids + 1)

    def forward(self, states: Tensor) -> Tensor:
        """Logits, blank first.  # [window, position, d_model] → [window, position / 2, 1 + text id]"""
        pooled = functional.avg_pool1d(states.transpose(1, 2), POOLED).transpose(1, 2)
        logits: Tensor = self.pieces(pooled)
        return logits

    @torch.inference_mode()
    def guess(self, states: Tensor) -> list[list[int]]:
        """The text tokens of each window, by the likeliest path.  # [window, position, d_model]"""
        best = self(states).argmax(-1)
        is_new = (best != BLANK) & (best != functional.pad(best, (1, 0), value=BLANK)[:, :-1])
        return [(row[new] - BLANK - 1).tolist() for row, new in zip(best, is_new, strict=True)]

    def save(self, folder: str | Path, config: WhisperConfig) -> None:
        """Write weights and sizes, and which model they belong to."""
        write_draft(self, folder, KIND, config, {"text_ids": self.pieces.out_features - 1})

    @classmethod
    def load(
        cls,
        folder: str | Path,
        config: WhisperConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "PieceGuesser":
        """The guesser that `save` wrote for a model of these sizes."""
        with allocating(device, dtype):
            return read_draft(folder, KIND, config, lambda sizes: cls(config.d_model, **sizes))
