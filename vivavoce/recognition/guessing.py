"""A small decoder that guesses ahead of texts one by one, without an engine of its own.

On a CPU a small model's step costs less than an engine's planning of it. What the decoder has read of a text is kept,
its own guesses too: of those that were right nothing is read again. It goes on for as long as all it has guessed is
likely enough to be right; where it is not, its few likeliest tokens stand side by side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vivavoce.engine.sequence import Sequence
from vivavoce.engine.speculative import Draft
from vivavoce.models.whisper import WhisperDecoder
from vivavoce.models.whisper_engine import BEGUN, TOKEN, WINDOW, WhisperWriter
from vivavoce.models.whisper_lean import LeanDecoder, LeanText
from vivavoce.models.whisper_rules import FORBIDDEN

SURENESS = 0.1  # the chance of a draft to be right up to a place, below which nothing is guessed beyond that place
LEAVES = 4  # tokens that are guessed side by side at the last place
LEAST_CHANCE = 0.03  # of a token that is guessed there
OTHER_TIMES = 2  # beside the likeliest, at which the same text may begin


@dataclass
class _Read:
    """A text as far as the decoder has read it, guesses included."""

    text: Sequence
    lean: LeanText
    tokens: list[int]


class GuessingDecoder:
    """Greedy guesses of a small decoder whose windows lie in the store of a writer of its own."""

    def __init__(self, decoder: WhisperDecoder, writer: WhisperWriter) -> None:
        self.decoder, self.writer = decoder, writer
        self._lean = LeanDecoder(decoder)
        self._read: dict[int, _Read] = {}
        barred = torch.zeros(decoder.config.vocab_size, device=decoder.embed_tokens.weight.device)
        barred[writer.never] = FORBIDDEN
        plain, first = barred.clone(), barred.clone()
        plain[writer.tokens.notimestamps :] = FORBIDDEN
        barred[writer.tokens.notimestamps] = FORBIDDEN
        first[: writer.tokens.timestamps] = FORBIDDEN
        self._barred = (plain, barred)  # for texts without and with times
        self._barred_first = (plain, first)

    @torch.inference_mode()
    def propose(self, sequence: Sequence, most: int) -> Draft:
        """What the small decoder would write next."""
        read = self._read_of(sequence)
        channel = sequence.rows[-1][WINDOW]
        barred = (self._barred if sequence.mode & BEGUN else self._barred_first)[channel % 2]
        end = self.writer.tokens.endoftext
        most = min(most, self.decoder.config.max_target_positions - len(sequence.rows))
        fresh, sureness = [row[TOKEN] for row in sequence.rows[read.lean.length :]], 1.0
        chain, leaves, times = list[int](), dict[int, float](), dict[int, float]()
        while len(chain) < most:
            hidden = self._lean.read(read.lean, fresh)
            read.tokens += fresh
            chances = (self.decoder.logits(hidden) + barred).softmax(-1)
            best, token = float(chances.max()), int(chances.argmax())
            begins = not chain and self.writer.tokens.is_timestamp(token)
            if begins:
                times = _likely(chances, end)
                best = sum(times.values())
            sureness *= best
            if sureness < SURENESS or token == end:
                leaves, times = _likely(chances, end), {} if begins else times
                break
            chain.append(token)
            fresh, barred = [token], self._barred[channel % 2]
        return _draft(chain, list(leaves), list(times)[1 : 1 + OTHER_TIMES], channel).first(most)

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


def _likely(chances: Tensor, end: int) -> dict[int, float]:
    """The chances of the tokens that may well come next, the likeliest first; an end need not be guessed."""
    best = chances.topk(LEAVES)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return {token: chance for token, chance in pairs if chance > LEAST_CHANCE and token != end}


def _draft(chain: list[int], leaves: list[int], times: list[int], channel: int) -> Draft:
    """Tokens one behind the other, those that may stand behind the last, and the same behind other times.

    What is said hardly depends on the time at which it is said to begin.
    """
    tokens, parents = chain + leaves, [*range(-1, len(chain) - 1), *(len(chain) - 1 for _ in leaves)]
    for time in times:
        parents += [-1, *range(len(tokens), len(tokens) + len(chain) - 1)]
        tokens += [time, *chain[1:]]
    return Draft([(token, channel) for token in tokens], parents)
