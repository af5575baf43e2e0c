"""Word times: cross-attention weights and dynamic time warping, as in openai-whisper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vivavoce.models.whisper.config import SECONDS_PER_TIMESTAMP, WhisperTokens
from vivavoce.models.whisper.model import Whisper, WhisperDecoder, WholeTexts, WindowMemory

MEDIAN_WIDTH = 7
WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
OPENING = "\"'“¿([{-"
CLOSING = "\"'.。,，!！?？:：”)]}、"
REPLACEMENT = "\ufffd"


class AlignmentWeights(WholeTexts):
    """Attention of whole texts, one per window, that records how (layer, head) pairs weigh the window's positions."""

    def __init__(self, memory: WindowMemory, heads: Sequence[tuple[int, int]], positions: int | None = None) -> None:
        super().__init__(memory)
        self.heads, self.positions = heads, positions
        self._by_layer: dict[int, Tensor] = {}

    def to_window(self, layer: int, query: Tensor) -> Tensor:
        """Attend, and record the weights over the first `positions`, or all of them."""
        if any(layer == wanted for wanted, _ in self.heads):
            keys = self.memory.keys[layer][:, :, : self.positions]
            scores = query.transpose(1, 2) * query.shape[-1] ** -0.5 @ keys.transpose(-1, -2)
            self._by_layer[layer] = scores.float().softmax(-1)
        return super().to_window(layer, query)

    @property
    def layers(self) -> int:
        """The number of layers to run for all pairs."""
        return 1 + max(layer for layer, _ in self.heads)

    @property
    def weights(self) -> Tensor:
        """# [row, pair, token, position]"""
        return torch.stack([self._by_layer[layer][:, head] for layer, head in self.heads], dim=1)


def cross_attention_weights(
    decoder: WhisperDecoder,
    tokens: Tensor,
    memory: WindowMemory,
    heads: Sequence[tuple[int, int]],
    positions: int | None = None,
) -> Tensor:
    """Cross-attention weights of (layer, head) pairs over the first `positions` of their windows (None: all).

    # [row, token] → [row, pair, token, position]
    """
    attention = AlignmentWeights(memory, heads, positions)
    decoder.run(decoder.embed(tokens), attention, attention.layers)
    return attention.weights


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
    text_of: Callable[[list[int]], str],
    language: str,
    positions: int | None = None,
) -> list[list[TimedWord]]:
    """The words of consecutive texts of one window, with times relative to its start.

    `positions` is how many of the window's positions are sound. Tokens beyond the decoder's positions are left out.
    """
    prompt = tokens.prompt(language if tokens.is_multilingual else None)
    room = model.config.max_target_positions - len(prompt) - 1
    numbered = _numbered(texts, tokens, text_of, language)
    written = [token for _, ids in numbered for token in ids][:room]
    if not written:
        return [[] for _ in texts]
    sequence = torch.tensor([[*prompt, *written, tokens.endoftext]], device=memory.keys.device)
    attention = AlignmentWeights(memory, heads, positions)
    hidden = model.decoder.run(model.decoder.embed(sequence), attention)[0, len(prompt) - 1 : -1]
    begins = token_times(attention.weights[0, :, len(prompt) - 1 : -1])
    probabilities = model.decoder.logits(hidden)[:, : tokens.endoftext].softmax(-1)
    timed: list[list[TimedWord]] = [[] for _ in texts]
    start = 0
    for index, ids in numbered:
        end = start + len(ids)
        if end > len(written):
            break
        probability = sum(float(probabilities[start + step, token]) for step, token in enumerate(ids)) / len(ids)
        timed[index].append(TimedWord(text_of(ids), float(begins[start]), float(begins[end]), probability))
        start = end
    return [merge_punctuation(words) for words in timed]


def _numbered(
    texts: Sequence[Sequence[int]], tokens: WhisperTokens, text_of: Callable[[list[int]], str], language: str
) -> list[tuple[int, list[int]]]:
    """Every word of every text, as (text number, tokens)."""
    words = []
    for index, text in enumerate(texts):
        written = [token for token in text if token < tokens.endoftext]
        words += [(index, word) for word in split_words(written, text_of, language)]
    return words


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

    An antidiagonal depends only on the two before it, so each is one vector operation. Ties go along the row and sums
    are in 32 bits, as in openai-whisper.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    step_from = np.full((rows + 1, columns + 1), 2, dtype=np.int8)
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        both, down, along = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        way = np.where((both < down) & (both < along), 0, np.where((down < both) & (down < along), 1, 2))
        total[row, column] = cost[row - 1, column - 1] + np.choose(way, [both, down, along])
        step_from[row, column] = way
    step_from[0, :], step_from[:, 0] = 2, 1
    path, row, column = [], rows, columns
    while row > 0 or column > 0:
        path.append((row - 1, column - 1))
        way = step_from[row, column]
        row, column = row - (way != 2), column - (way != 1)
    steps = np.array(path[::-1], dtype=np.int64)
    return steps[:, 0], steps[:, 1]


def split_words(ids: Sequence[int], text_of: Callable[[list[int]], str], language: str) -> list[list[int]]:
    """Tokens grouped into words: at spaces, or, in languages without them, wherever whole characters end."""
    characters: list[list[int]] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        if REPLACEMENT not in text_of(pending):
            characters.append(pending)
            pending = []
    if pending:
        characters.append(pending)
    if language in WITHOUT_SPACES:
        return characters
    words: list[list[int]] = []
    for group in characters:
        text = text_of(group)
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
            previous = merged[-1]
            merged[-1] = TimedWord(previous.text + word.text, previous.start, previous.end, previous.probability)
        else:
            merged.append(word)
    joined: list[TimedWord] = []
    for word in reversed(merged):
        sign = word.text.strip()
        if joined and sign and word.text.startswith(" ") and all(character in OPENING for character in sign):
            following = joined[-1]
            joined[-1] = TimedWord(word.text + following.text, following.start, following.end, following.probability)
        else:
            joined.append(word)
    return joined[::-1]
