"""A small decoder, or heads, that guess ahead of texts one by one, without an engine of their own.

On a CPU a small model's step costs less than an engine's planning of it. What the decoder has read of a text is kept,
its own guesses too: of those that were right nothing is read again. It goes on for as long as all it has guessed is
likely enough to be right; where it is not, its few likeliest tokens stand side by side.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from vivavoce.engine.draft_heads import HeadDrafts, likeliest_tree
from vivavoce.engine.engine import Engine
from vivavoce.engine.sequence import Sequence
from vivavoce.engine.speculative import Draft
from vivavoce.models.interface import Row
from vivavoce.models.whisper import WhisperDecoder
from vivavoce.models.whisper_engine import BEGUN, TOKEN, WINDOW, WhisperWriter, WindowHeads
from vivavoce.models.whisper_heads import WhisperHeads
from vivavoce.models.whisper_lean import CpuDraftDecoder, CpuText, CpuTextDecoder, cpu_heads
from vivavoce.models.whisper_rules import FORBIDDEN

SURENESS = 0.3  # the chance of a draft to be right up to a place, below which nothing is guessed beyond that place
LEAST_SURENESS = 0.05  # the same of heads, whose guesses are all made at once
LEAVES = 1  # tokens that are guessed side by side at the last place: a second costs more rows than it saves passes
LEAST_CHANCE = 0.03  # of a token that is guessed there
BEGINNINGS = 4  # times at which a text may begin
OTHER_TIMES = 2  # of them, beside the likeliest, that are tried


@dataclass
class _Read:
    """A text as far as the decoder has read it, guesses included."""

    text: Sequence
    lean: CpuText
    tokens: list[int]


class BarredTokens:
    """What a text may not write whatever it says, as numbers to be added to logits; times have the last ids."""

    def __init__(self, writer: WhisperWriter) -> None:
        like = writer.model.decoder.embed_tokens.weight
        timed = torch.zeros(writer.model.config.vocab_size, device=like.device)
        timed[writer.never] = FORBIDDEN
        plain, first = timed[: writer.tokens.notimestamps].clone(), timed.clone()
        timed[writer.tokens.notimestamps] = FORBIDDEN
        first[: writer.tokens.timestamps] = FORBIDDEN
        self._later, self._first = (plain, timed), (plain, first)  # each for texts without and with times

    def next(self, sequence: Sequence) -> Tensor:
        """For the next token of a text.  # [vocabulary]"""
        return (self._later if sequence.mode & BEGUN else self._first)[sequence.rows[-1][WINDOW] % 2]

    def later(self, sequence: Sequence) -> Tensor:
        """For those behind it."""
        return self._later[sequence.rows[-1][WINDOW] % 2]


class GuessingDecoder:
    """Greedy guesses of a small decoder whose windows lie in the store of a writer of its own."""

    def __init__(self, decoder: WhisperDecoder, writer: WhisperWriter, rounded: bool = False) -> None:
        self.decoder, self.writer = decoder, writer
        self._lean = CpuTextDecoder(decoder, rounded)
        self._read: dict[int, _Read] = {}
        self._barred = BarredTokens(writer)

    @torch.inference_mode()
    def propose(self, sequence: Sequence, most: int) -> Draft:
        """What the small decoder would write next."""
        read = self._read_of(sequence)
        channel = sequence.rows[-1][WINDOW]
        end = self.writer.tokens.endoftext
        most = min(most, self.decoder.config.max_target_positions - len(sequence.rows))
        fresh = [row[TOKEN] for row in sequence.rows[read.lean.length :]]
        how = CpuDraftDecoder(most, SURENESS, BEGINNINGS, LEAST_CHANCE, self.writer.tokens.timestamps, end)
        barred = self._barred.next(sequence), self._barred.later(sequence)
        chain, unsure, begins = self._lean.guess(read.lean, fresh, *barred, how)
        read.tokens += [*fresh, *chain][: read.lean.length - len(read.tokens)]
        leaves = _likely(unsure, end, LEAVES) if len(unsure) else []
        times = _likely(begins, end, BEGINNINGS)[1 : 1 + OTHER_TIMES] if chain and len(begins) else []
        return _draft(chain, leaves, times, channel).first(most)

    def close(self) -> None:
        """Forget all texts."""
        self._read.clear()

    def _read_of(self, sequence: Sequence) -> _Read:
        """What is read of a text and still stands in it, all but its last row, whose state is wanted."""
        for key in [key for key, read in self._read.items() if not read.text.is_open]:
            del self._read[key]
        if sequence.id not in self._read:
            memory = self.writer.store.memory(sequence.rows[-1][WINDOW] // 2)
            self._read[sequence.id] = _Read(sequence, self._lean.begin(memory), [])
        read = self._read[sequence.id]
        pairs = zip(read.tokens, sequence.rows[:-1], strict=False)
        same = next((place for place, (token, row) in enumerate(pairs) if token != row[TOKEN]), None)
        if same is None:
            same = min(len(read.tokens), len(sequence.rows) - 1)
        read.lean.length = same
        del read.tokens[same:]
        return read


class GuessingHeads:
    """Greedy guesses of Medusa heads from the state behind the newest token, as far as they are likely."""

    def __init__(self, heads: WhisperHeads, writer: WhisperWriter, engine: Engine, width: int) -> None:
        self.writer, self.width = writer, width
        self._lean = cpu_heads(heads, writer.model.decoder)
        self._barred = BarredTokens(writer)
        self._drawn = HeadDrafts(WindowHeads(heads, writer), engine, width)
        self._settle()

    @torch.inference_mode()
    def _settle(self) -> None:
        """Guess something, so that nobody waits for what TorchScript does in its first calls."""
        store, like = self.writer.store, self.writer.model.decoder.embed_tokens.weight
        keys, barred = store.keys[-1, :1, :, :2], like.new_zeros(len(like))
        for _ in range(3):
            self._lean(like[0], 0, keys, keys, barred, self.width)

    @torch.inference_mode()
    def propose(self, sequence: Sequence, most: int) -> Many[Row]:
        """What the heads see ahead."""
        if not is_greedy(sequence):
            return self._drawn.propose(sequence, most)
        token, channel = sequence.rows[-1]
        keys, values = self.writer.store.read(-1, channel // 2)
        barred = self._barred.later(sequence)
        ids, chances = self._lean(sequence.hidden, token, keys[None], values[None], barred, self.width)
        guesses = [
            [((token, channel), chance) for token, chance in zip(tokens, likely, strict=True)]
            for tokens, likely in zip(ids.tolist(), chances.tolist(), strict=True)
        ]
        return likeliest_tree(guesses, most, LEAST_SURENESS)


def is_greedy(sequence: Sequence) -> bool:
    """Whether the likeliest token of a text is taken."""
    assert sequence.generation is not None
    return sequence.generation.per_channel(WhisperWriter.channels)[TOKEN].temperature == 0


def _likely(chances: Tensor, end: int, most: int) -> list[int]:
    """The tokens that may well come next, the likeliest first; an end need not be guessed."""
    best = chances.topk(most)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [token for token, chance in pairs if chance > LEAST_CHANCE and token != end]


def _draft(chain: list[int], leaves: list[int], times: list[int], channel: int) -> Draft:
    """Tokens one behind the other, those that may stand behind the last, and the same behind other times.

    What is said hardly depends on the time at which it is said to begin.
    """
    tokens, parents = chain + leaves, [*range(-1, len(chain) - 1), *(len(chain) - 1 for _ in leaves)]
    for time in times:
        parents += [-1, *range(len(tokens), len(tokens) + len(chain) - 1)]
        tokens += [time, *chain[1:]]
    return Draft([(token, channel) for token in tokens], parents)
