"""What the codes must hold, asked by a small model: the letters that were said, and how the reply voice said them."""

import torch
from torch import Tensor, nn

from vivavoce.nn.sinusoids import sinusoids
from vivavoce.nn.whisper_layer import WhisperLayer
from vivavoce.train.front_desk.normalising import normalise
from vivavoce.train.hearing.forward import layer_forward

LETTERS = " 'abcdefghijklmnopqrstuvwxyz"  # symbol 0 is CTC's blank
SYMBOLS = len(LETTERS) + 1
STEPS = 4  # CTC frames a code: 12.5 a second are too few for letters


def spelled(text: str) -> list[int]:
    """A sentence as symbols."""
    return [1 + LETTERS.index(letter) for letter in normalise(text) if letter in LETTERS]


def read(symbols: list[int]) -> str:
    """The most likely symbol of each frame as the sentence that it spells."""
    kept = [symbol for place, symbol in enumerate(symbols) if symbol and (place == 0 or symbol != symbols[place - 1])]
    return " ".join("".join(LETTERS[symbol - 1] for symbol in kept).split())


class Probe(nn.Module):
    """Rounded levels of a whole sentence, seen from both sides, to letters at 50 Hz and mel frames at 100 Hz."""

    def __init__(self, dimensions: int, d_model: int, heads: int, slow: int, fast: int, bins: int) -> None:
        super().__init__()
        self.enter = nn.Linear(dimensions, d_model)
        self.slow = nn.ModuleList(WhisperLayer(d_model, heads, 4 * d_model) for _ in range(slow))
        self.spread = nn.Linear(d_model, STEPS * d_model)
        self.fast = nn.ModuleList(WhisperLayer(d_model, heads, 4 * d_model) for _ in range(fast))
        self.norm = nn.LayerNorm(d_model)
        self.letters = nn.Linear(d_model, SYMBOLS)
        self.mel = nn.Linear(d_model, 2 * bins)
        self.positions: Tensor
        self.register_buffer("positions", sinusoids(2000, d_model), persistent=False)

    def forward(self, levels: Tensor, lengths: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
        """Letter logits and mel.

        # [batch, code, dimension], [batch] → [batch, 4 code, symbol], [batch, 8 code, bin]
        """
        count = levels.shape[1]
        x = self.enter(levels) + self.positions[:count]
        place = torch.arange(STEPS * count, device=levels.device)
        for layer in self.slow:
            assert isinstance(layer, WhisperLayer)
            x = layer_forward(layer, x, dropout, mask=(place[:count] < lengths[:, None])[:, None, None])
        x = self.spread(x).unflatten(-1, (STEPS, -1)).flatten(1, 2) + self.positions[: STEPS * count]
        for layer in self.fast:
            assert isinstance(layer, WhisperLayer)
            x = layer_forward(layer, x, dropout, mask=(place < STEPS * lengths[:, None])[:, None, None])
        x = self.norm(x)
        return self.letters(x), self.mel(x).unflatten(-1, (2, -1)).flatten(1, 2)
