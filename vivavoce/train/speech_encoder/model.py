"""The speech encoder in training: lattice quantisation, dropout, position offsets, and a probe for letters and mel."""

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import InputError
from vivavoce.models.speech_encoder.model import CONV_STRIDE, SpeechEncoder, SpeechEncoderConfig
from vivavoce.models.whisper.model import WhisperLayer
from vivavoce.nn.attention import sinusoids
from vivavoce.train.front_desk.answers import normalise

OUTER_THRESHOLD = math.atanh(2 / 3)  # threshold between the two outer of four levels, before tanh
POINTS = {
    2: (-1.0, 1.0),
    3: (-2 * math.atanh(1 / 2), 0.0, 2 * math.atanh(1 / 2)),
    4: (-1.5 * OUTER_THRESHOLD, -0.5 * OUTER_THRESHOLD, 0.5 * OUTER_THRESHOLD, 1.5 * OUTER_THRESHOLD),
}


class Lattice:
    """Finite scalar quantisation: codes are products of a few levels per dimension."""

    def __init__(self, levels: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not levels or any(level not in POINTS for level in levels):
            raise InputError(f"a lattice takes 2, 3 or 4 levels a dimension, not {list(levels)}")
        self.levels = tuple(levels)
        self.size = math.prod(levels)
        self.dimensions = len(levels)
        self.spans = torch.tensor([level - 1.0 for level in levels], device=device)
        self.strides = torch.tensor([math.prod(levels[index + 1 :]) for index in range(len(levels))], device=device)

    def bounded(self, features: Tensor) -> Tensor:
        """The bounded dimensions, in −1 to 1.  # [.., d_model] → [.., dimension]"""
        return features[..., : self.dimensions].float().tanh()

    def rounded(self, bounded: Tensor) -> Tensor:
        """The nearest level of each dimension, without gradient."""
        return self._steps(bounded) * 2 / self.spans - 1

    def straight_through(self, bounded: Tensor) -> Tensor:
        """Rounded, with the straight-through gradient."""
        return bounded + (self.rounded(bounded) - bounded).detach()

    def codes(self, features: Tensor) -> Tensor:
        """The code of each feature.  # [.., d_model] → [..]"""
        return (self._steps(self.bounded(features)).long() * self.strides).sum(-1)

    def values(self, codes: Tensor) -> Tensor:
        """The levels of a code.  # [..] → [.., dimension]"""
        steps = codes[..., None] // self.strides % (self.spans.long() + 1)
        return steps * 2 / self.spans - 1

    def codebook(self, d_model: int) -> Tensor:
        """A codebook whose nearest-neighbour search gives `codes`.  # [code, d_model]"""
        points = torch.tensor([POINTS[level] + (0.0,) * (4 - level) for level in self.levels])  # [dimension, step]
        steps = (torch.arange(self.size)[:, None] // self.strides.cpu()) % (self.spans.long().cpu() + 1)
        rows = torch.zeros(self.size, d_model)
        rows[:, : self.dimensions] = points[torch.arange(self.dimensions), steps]
        return rows

    def _steps(self, bounded: Tensor) -> Tensor:
        return ((bounded.detach() + 1) / 2 * self.spans).round()


def new_encoder(config: SpeechEncoderConfig, lattice: Lattice) -> SpeechEncoder:
    """An untrained encoder; sinusoidal positions and the codebook are not trainable."""
    encoder = SpeechEncoder(config)
    depth = 2 * len(encoder.layers)
    with torch.no_grad():
        encoder.embed_positions.weight.copy_(sinusoids(config.max_source_positions, config.d_model))
        # Learned positions would not generalise past the length of training sentences. Small, and zero in the
        # dimensions that are quantised, so that they do not dominate the audio.
        encoder.embed_positions.weight.mul_(0.3)
        encoder.embed_positions.weight[:, : lattice.dimensions] = 0.0
        encoder.codebook.weight.copy_(lattice.codebook(config.d_model))
        for layer in cast(Iterable[WhisperLayer], encoder.layers):
            for projection in (layer.self_attn.out_proj, layer.fc2):
                projection.weight.div_(math.sqrt(depth / 4))
    encoder.embed_positions.requires_grad_(False)
    encoder.codebook.requires_grad_(False)
    return encoder


def features(encoder: SpeechEncoder, mel: Tensor, starts: Tensor, dropout: float) -> Tensor:
    """`encoder.features` with the positions of each row starting at `starts`.  # [batch, code, d_model]"""
    x = functional.gelu(encoder.conv1(mel))
    x = functional.gelu(encoder.conv2(x)).transpose(1, 2)
    places = starts[:, None] + torch.arange(x.shape[1], device=x.device)
    x = x + functional.embedding(places, encoder.embed_positions.weight)
    for layer in encoder.layers:
        assert isinstance(layer, WhisperLayer)
        x = layer_forward(layer, x, dropout, causal=True)
    return x.float().unflatten(1, (-1, encoder.config.frames_per_code // CONV_STRIDE)).mean(2)


def layer_forward(
    layer: WhisperLayer, x: Tensor, dropout: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """A layer with dropout."""
    mixed = layer.self_attn(layer.self_attn_layer_norm(x), mask, causal)
    x = x + functional.dropout(mixed, dropout, training=dropout > 0)
    inner = functional.gelu(layer.fc1(layer.final_layer_norm(x)))
    inner = functional.dropout(inner, dropout, training=dropout > 0)
    out: Tensor = x + functional.dropout(layer.fc2(inner), dropout, training=dropout > 0)
    return out


LETTERS = " 'abcdefghijklmnopqrstuvwxyz"  # symbol 0 is CTC's blank
SYMBOLS = len(LETTERS) + 1
STEPS = 4  # CTC frames per code: 12.5 a second are too few for letters


def spelled(text: str) -> list[int]:
    """A normalised sentence as symbols."""
    return [1 + LETTERS.index(letter) for letter in normalise(text) if letter in LETTERS]


def read(symbols: list[int]) -> str:
    """Greedy CTC decoding of the best symbol of each frame."""
    kept = [
        symbol
        for position, symbol in enumerate(symbols)
        if symbol and (position == 0 or symbol != symbols[position - 1])
    ]
    return " ".join("".join(LETTERS[symbol - 1] for symbol in kept).split())


class Probe(nn.Module):
    """Bidirectional probe from levels to letters at 50 Hz and mel frames at 100 Hz."""

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
        position = torch.arange(STEPS * count, device=levels.device)
        for layer in self.slow:
            assert isinstance(layer, WhisperLayer)
            x = layer_forward(layer, x, dropout, mask=(position[:count] < lengths[:, None])[:, None, None])
        x = self.spread(x).unflatten(-1, (STEPS, -1)).flatten(1, 2) + self.positions[: STEPS * count]
        for layer in self.fast:
            assert isinstance(layer, WhisperLayer)
            x = layer_forward(layer, x, dropout, mask=(position < STEPS * lengths[:, None])[:, None, None])
        x = self.norm(x)
        return self.letters(x), self.mel(x).unflatten(-1, (2, -1)).flatten(1, 2)
