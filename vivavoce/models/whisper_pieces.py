"""A whole text guessed at once from the encoder's states: chances of pieces of words, read as CTC is.

Nothing of it depends on what was written before, so it costs one small pass a window; the decoder then checks the guess
many tokens at a time. A few layers of its own, which see all of the window, make up for what a decoder knows.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.whisper_config import WhisperConfig
from vivavoce.models.whisper_draft import TrainedBeside, write_draft
from vivavoce.nn.whisper_layer import WhisperLayer

BLANK = 0
POOLED = 2  # encoder states that are read together: pieces of words are no shorter


class PieceGuesser(TrainedBeside):
    """Chances of every text token, or of none, at every 40 ms of a window."""

    kind = "pieces"

    def __init__(self, d_model: int, text_ids: int, layers: int = 0, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        made = [WhisperLayer(d_model, heads, 2 * d_model) for _ in range(layers)]
        for added in (part for layer in made for part in (layer.self_attn.out_proj, layer.fc2)):
            nn.init.zeros_(added.weight)  # a fresh layer changes nothing
            nn.init.zeros_(added.bias)
        self.layers = nn.ModuleList(made)
        self.pieces = nn.Linear(d_model, text_ids + 1)

    def forward(self, states: Tensor) -> Tensor:
        """Logits, blank first.  # [window, position, d_model] → [window, position / 2, 1 + text id]"""
        x = functional.avg_pool1d(states.transpose(1, 2), POOLED).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.pieces(x)
        return logits

    @torch.inference_mode()
    def guess(self, states: Tensor) -> list[list[int]]:
        """The text tokens of each window, by the likeliest path.  # [window, position, d_model]"""
        best = self(states).argmax(-1)
        is_new = (best != BLANK) & (best != functional.pad(best, (1, 0), value=BLANK)[:, :-1])
        return [(row[new] - BLANK - 1).tolist() for row, new in zip(best, is_new, strict=True)]

    def save(self, folder: str | Path, config: WhisperConfig) -> None:
        """Write weights and sizes, and which model they belong to."""
        sizes = {"text_ids": self.pieces.out_features - 1, "layers": len(self.layers), "heads": self.heads}
        write_draft(self, folder, self.kind, config, sizes)
