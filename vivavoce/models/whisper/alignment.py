"""Alignment of text and sound: word times by cross-attention and time warping, and CTC drafts of whole texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.whisper.config import SECONDS_PER_TIMESTAMP, WhisperConfig, WhisperTokens
from vivavoce.models.whisper.drafts import TrainedBeside, write_draft
from vivavoce.models.whisper.layer import WhisperLayer
from vivavoce.models.whisper.model import AlignmentWeights, Whisper, WindowMemory

MEDIAN_WIDTH = 7
WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
OPENING = "\"'“¿([{-"
CLOSING = "\"'.。,，!！?？:：”)]}、"
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class TimedWord:
    """A word with its time in seconds and the mean probability of its tokens."""

    text: str
    start: float
    end: float
    probability: float


@torch.inference_mode()
def word_times(
    model: Whisper,
    tokens: WhisperTokens,
    memory: WindowMemory,
    texts: Sequence[Sequence[int]],
    heads: Sequence[tuple[int, int]],
    spell: Callable[[list[int]], str],
    language: str,
    positions: int | None = None,
) -> list[list[TimedWord]]:
    """The words of consecutive texts of one window, timed from its beginning.

    `positions` is how much of the window is sound. Tokens beyond the decoder's positions are left out.
    """
    prompt = tokens.prompt(language if tokens.is_multilingual else None)
    room = model.config.max_target_positions - len(prompt) - 1
    numbered = _numbered(texts, tokens, spell, language)
    written = [token for _, ids in numbered for token in ids][:room]
    if not written:
        return [[] for _ in texts]
    sequence = torch.tensor([[*prompt, *written, tokens.endoftext]], device=memory.keys.device)
    attention = AlignmentWeights(memory, heads, positions)
    hidden = model.decoder.run(model.decoder.embed(sequence), attention)[0, len(prompt) - 1 : -1]
    begins = token_times(attention.weights[0, :, len(prompt) - 1 : -1])
    chances = model.decoder.logits(hidden)[:, : tokens.endoftext].softmax(-1)
    timed: list[list[TimedWord]] = [[] for _ in texts]
    start = 0
    for index, ids in numbered:
        end = start + len(ids)
        if end > len(written):
            break
        probability = sum(float(chances[start + step, token]) for step, token in enumerate(ids)) / len(ids)
        timed[index].append(TimedWord(spell(ids), float(begins[start]), float(begins[end]), probability))
        start = end
    return [merge_punctuation(words) for words in timed]


def _numbered(
    texts: Sequence[Sequence[int]], tokens: WhisperTokens, spell: Callable[[list[int]], str], language: str
) -> list[tuple[int, list[int]]]:
    """Every word of every text, as text number and tokens."""
    found = []
    for index, text in enumerate(texts):
        written = [token for token in text if token < tokens.endoftext]
        found += [(index, word) for word in split_words(written, spell, language)]
    return found


def token_times(attention: Tensor) -> NDArray[np.float64]:
    """The start of each token in seconds, and the end of the last.

    # [head, token, position], a row for each token as it is predicted and one for the end → [token + 1]
    """
    deviation, mean = torch.std_mean(attention.float(), dim=-2, keepdim=True, unbiased=False)
    smooth = median_filter((attention - mean) / deviation, MEDIAN_WIDTH).mean(0)
    rows, columns = time_warp(-smooth.double().cpu().numpy())
    is_first = np.diff(rows, prepend=-1) > 0
    begins: NDArray[np.float64] = columns[is_first].astype(np.float64) * SECONDS_PER_TIMESTAMP
    return begins


def median_filter(values: Tensor, width: int) -> Tensor:
    """The median of `width` neighbours along the last axis, mirrored at its ends."""
    reach = width // 2
    if values.shape[-1] <= reach:
        return values
    padded = functional.pad(values, (reach, reach), mode="reflect")
    return padded.unfold(-1, width, 1).sort(-1).values[..., reach]


def time_warp(cost: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Dynamic time warping: the cheapest monotone path through a matrix, as rows and columns.

    An antidiagonal depends only on the two before it, so it is computed at once. Ties go along the row and sums are in
    32 bits, as in openai-whisper.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    came = np.full((rows + 1, columns + 1), 2, dtype=np.int8)
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        both, down, along = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        way = np.where((both < down) & (both < along), 0, np.where((down < both) & (down < along), 1, 2))
        total[row, column] = cost[row - 1, column - 1] + np.choose(way, [both, down, along])
        came[row, column] = way
    came[0, :], came[:, 0] = 2, 1
    path, row, column = [], rows, columns
    while row > 0 or column > 0:
        path.append((row - 1, column - 1))
        way = came[row, column]
        row, column = row - (way != 2), column - (way != 1)
    steps = np.array(path[::-1], dtype=np.int64)
    return steps[:, 0], steps[:, 1]


def split_words(ids: Sequence[int], spell: Callable[[list[int]], str], language: str) -> list[list[int]]:
    """Tokens grouped into words: at spaces, or, in languages without them, wherever whole characters end."""
    characters: list[list[int]] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        if REPLACEMENT not in spell(pending):
            characters.append(pending)
            pending = []
    if pending:
        characters.append(pending)
    if language in WITHOUT_SPACES:
        return characters
    words: list[list[int]] = []
    for group in characters:
        text = spell(group)
        if not words or text.startswith(" ") or not any(character.isalnum() for character in text):
            words.append(list(group))
        else:
            words[-1] += group
    return words


def merge_punctuation(words: list[TimedWord]) -> list[TimedWord]:
    """Join opening punctuation with the word after it, closing punctuation with the word before."""
    merged: list[TimedWord] = []
    for word in words:
        sign = word.text.strip()
        if merged and sign and not word.text.startswith(" ") and all(character in CLOSING for character in sign):
            before = merged[-1]
            merged[-1] = TimedWord(before.text + word.text, before.start, before.end, before.probability)
        else:
            merged.append(word)
    joined: list[TimedWord] = []
    for word in reversed(merged):
        sign = word.text.strip()
        if joined and sign and word.text.startswith(" ") and all(character in OPENING for character in sign):
            after = joined[-1]
            joined[-1] = TimedWord(word.text + after.text, after.start, after.end, after.probability)
        else:
            joined.append(word)
    return joined[::-1]


BLANK = 0
POOLED = 2  # encoder states per output: no token is shorter


class PieceGuesser(TrainedBeside):
    """CTC over the encoder's states: a text token or blank for every 40 ms of a window."""

    kind = "pieces"

    def __init__(self, d_model: int, text_ids: int, layers: int = 0, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        stack = [WhisperLayer(d_model, heads, 2 * d_model) for _ in range(layers)]
        for added in (part for layer in stack for part in (layer.self_attn.out_proj, layer.fc2)):
            nn.init.zeros_(added.weight)  # an untrained layer is the identity
            nn.init.zeros_(added.bias)
        self.layers = nn.ModuleList(stack)
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
        """The text tokens of each window, by the best CTC path.  # [window, position, d_model]"""
        best = self(states).argmax(-1)
        is_new = (best != BLANK) & (best != functional.pad(best, (1, 0), value=BLANK)[:, :-1])
        return [(row[new] - BLANK - 1).tolist() for row, new in zip(best, is_new, strict=True)]

    def save(self, folder: str | Path, config: WhisperConfig) -> None:
        """Write the weights for a model of these sizes."""
        sizes = {"text_ids": self.pieces.out_features - 1, "layers": len(self.layers), "heads": self.heads}
        write_draft(self, folder, self.kind, config, sizes)
