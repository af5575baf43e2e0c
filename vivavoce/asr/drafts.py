"""What guesses ahead while texts are written, chosen by the caller; the texts are those of plain decoding.

A draft folder may hold a small decoder that shares the model's encoder, a layer that guesses whole texts from the
encoder's states (both by `viva train draft`), or a whole Whisper of the same vocabulary. Heads (`viva train medusa`)
read the model's own states. Lookup goes on as the text did before. The previous hypothesis of a stream is a draft too.
"""

from collections.abc import Sequence
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vivavoce.device import Device
from vivavoce.engine.drafts import DraftModel, EarlierHypothesis, FirstGuess, HeadDrafts, NgramLookup, likeliest_tree
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sequence import Sequence as EngineSequence
from vivavoce.engine.speculative import Acceptance, Draft, DraftSource, Speculation
from vivavoce.engine.step import GRAPHED_DRAFT
from vivavoce.errors import CheckpointError
from vivavoce.hub import resolve
from vivavoce.implementations import choose_draft_heads, choose_draft_model
from vivavoce.models.interface import Row
from vivavoce.models.whisper.alignment import PieceGuesser
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.cpu import CpuDraftDecoder, CpuDraftText, DraftLimits, cpu_heads
from vivavoce.models.whisper.decoding import FORBIDDEN
from vivavoce.models.whisper.drafts import WhisperHeads, draft_kind, load_decoder
from vivavoce.models.whisper.encoder import is_narrow, narrow_pieces, remember_narrowly, remember_together
from vivavoce.models.whisper.engine import BEGUN, TOKEN, WINDOW, WhisperWriter, WindowHeads
from vivavoce.models.whisper.model import Whisper, WhisperDecoder
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.models.whisper.windows import WriteText

SURENESS = 0.3  # the chance of a draft to be right up to a place, below which nothing is guessed beyond that place
LEAST_SURENESS = 0.05  # the same of heads, whose guesses are all made at once
LEAVES = 1  # tokens that are guessed side by side at the last place: a second costs more rows than it saves passes
LEAST_CHANCE = 0.03  # of a token that is guessed there
BEGINNINGS = 4  # times at which a text may begin
OTHER_TIMES = 2  # of them, beside the likeliest, that are tried


@dataclass
class _Read:
    """A text as far as the decoder has read it, guesses included."""

    text: EngineSequence
    lean: CpuDraftText
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

    def next(self, sequence: EngineSequence) -> Tensor:
        """For the next token of a text.  # [vocabulary]"""
        return (self._later if sequence.mode & BEGUN else self._first)[sequence.rows[-1][WINDOW] % 2]

    def later(self, sequence: EngineSequence) -> Tensor:
        """For those behind it."""
        return self._later[sequence.rows[-1][WINDOW] % 2]


class GuessingDecoder:
    """Greedy guesses of a small decoder whose windows lie in the store of a writer of its own."""

    def __init__(self, decoder: WhisperDecoder, writer: WhisperWriter, rounded: bool = False) -> None:
        self.decoder, self.writer = decoder, writer
        self._lean = CpuDraftDecoder(decoder, rounded)
        self._read: dict[int, _Read] = {}
        self._barred = BarredTokens(writer)

    @torch.inference_mode()
    def propose(self, sequence: EngineSequence, most: int) -> Draft:
        """What the small decoder would write next."""
        read = self._read_of(sequence)
        channel = sequence.rows[-1][WINDOW]
        end = self.writer.tokens.endoftext
        most = min(most, self.decoder.config.max_target_positions - len(sequence.rows))
        fresh = [row[TOKEN] for row in sequence.rows[read.lean.length :]]
        how = DraftLimits(most, SURENESS, BEGINNINGS, LEAST_CHANCE, self.writer.tokens.timestamps, end)
        barred = self._barred.next(sequence), self._barred.later(sequence)
        chain, unsure, begins = self._lean.draft(read.lean, fresh, *barred, how)
        read.tokens += [*fresh, *chain][: read.lean.length - len(read.tokens)]
        leaves = _likely(unsure, end, LEAVES) if len(unsure) else []
        times = _likely(begins, end, BEGINNINGS)[1 : 1 + OTHER_TIMES] if chain and len(begins) else []
        return _draft(chain, leaves, times, channel).first(most)

    def close(self) -> None:
        """Forget all texts."""
        self._read.clear()

    def _read_of(self, sequence: EngineSequence) -> _Read:
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
    def propose(self, sequence: EngineSequence, most: int) -> Many[Row]:
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


def is_greedy(sequence: EngineSequence) -> bool:
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


MOST_PIECES = 16  # tokens of a guessed text that are checked in one pass
BRANCHES = 3  # places where a text that departed from the guess may stand in it


@dataclass(frozen=True)
class DraftChoice:
    """Who guesses. Several may: a whole text is followed first, then what was said before, then heads or a model."""

    draft: str | Path | None = None
    heads: str | Path | None = None
    lookup: bool = False
    most: int = 5
    """Tokens that a model or heads guess at once; rows of a tree, where heads branch."""
    width: int = 1
    """Guesses of a head at each place; with more than one, drafts branch."""

    @property
    def is_any(self) -> bool:
        """Whether anybody guesses."""
        return self.draft is not None or self.heads is not None or self.lookup


@dataclass(frozen=True)
class SmallWhisper:
    """A draft's decoder, and the encoder it hears through if it has one of its own."""

    config: WhisperConfig
    decoder: WhisperDecoder
    model: Whisper | None = None

    def states(self, mel: Tensor, states: Tensor) -> Tensor:
        """The encoder's states of windows, computed anew only where the draft has its own encoder."""
        return states if self.model is None else self.model.encoder(mel)


class Drafter:
    """The draft sources of one engine's texts."""

    def __init__(self, choice: DraftChoice, listener: WhisperTranscriber, device: Device) -> None:
        self.choice, self.listener, self.device = choice, listener, device
        self.pieces: PieceGuesser | None = None
        self.small: SmallWhisper | None = None
        self.heads = None if choice.heads is None else _heads(choice.heads, listener.model)
        if choice.draft is not None:
            folder = resolve(str(choice.draft))
            kind = draft_kind(folder)
            if kind == "pieces":
                self.pieces = _pieces(folder, listener.model)
            elif kind == "heads":
                raise CheckpointError(f"{folder} holds heads; name it with heads, not with draft")
            else:
                self.small = _small(folder, kind, listener.model)
        self._guessed: dict[int, list[Row]] = {}
        self._by_heads: HeadDrafts | GuessingHeads | None = None
        self._by_model: DraftModel | GuessingDecoder | None = None
        self._small_writer: WhisperWriter | None = None

    def join(self, engine: Engine, writer: WhisperWriter) -> None:
        """Guess for the texts of this engine from now on."""
        dtype = writer.model.decoder.embed_tokens.weight.dtype
        if self.heads is not None and choose_draft_heads(self.device, dtype).cls is GuessingHeads:
            self._by_heads = GuessingHeads(self.heads, writer, engine, self.choice.width)
        elif self.heads is not None:
            self._by_heads = HeadDrafts(WindowHeads(self.heads, writer), engine, self.choice.width)
        if self.small is not None:
            listener = self.listener
            self._small_writer = WhisperWriter(self.small, listener.tokens, listener.settings, writer.store.windows)
            if choose_draft_model(self.device, dtype).cls is GuessingDecoder:
                rounded = is_narrow(listener.model)
                self._by_model = GuessingDecoder(self.small.decoder, self._small_writer, rounded)
                return
            limits = EngineLimits(
                cache_rows=engine.limits.cache_rows, sequences_per_step=engine.limits.sequences_per_step
            )
            dtype = self.small.decoder.embed_tokens.weight.dtype
            self._by_model = DraftModel.of(Engine(self._small_writer, self.device, dtype, limits), engine)

    @torch.inference_mode()
    def hear(self, windows: Sequence[int], mel: Tensor, states: Tensor) -> None:
        """Windows that were encoded and are held under these numbers.  # [window, mel, frame], [window, position, d]"""
        if self.small is not None and self._small_writer is not None:
            memory = self.small.decoder.remember(self.small.states(mel, states))
            self._small_writer.store.hold(memory, windows)
        if self.pieces is not None:
            given = states.to(torch.bfloat16) if is_narrow(self.listener.model) else states
            for window, tokens in zip(windows, self.pieces.guess(given), strict=True):
                self._guessed[window] = [(token, 2 * window) for token in tokens]

    def leave(self, window: int) -> None:
        """A window is done with."""
        self._guessed.pop(window, None)
        if self._small_writer is not None:
            self._small_writer.store.release(window)

    def speculation(self, window: int, asked: WriteText, earlier: Sequence[int] = ()) -> Speculation | None:
        """How a text of a window is to be sped up; `earlier` is what a previous hypothesis wrote of the same sound."""
        timed = bool(asked.options.timestamps)
        sources: list[DraftSource] = []
        if earlier:
            sources.append(EarlierHypothesis([(token, 2 * window + timed) for token in earlier]))
        if window in self._guessed:
            rows = [(token, channel + timed) for token, channel in self._guessed[window]]
            sources.append(EarlierHypothesis(rows, resume=1, counts=self._is_text, presumes=True, branches=BRANCHES))
        if self.choice.lookup:
            sources.append(NgramLookup())
        sources += [source for source in (self._by_heads, self._by_model) if source is not None]
        if not sources:
            return None
        guesses_texts = bool(earlier) or window in self._guessed or isinstance(self._by_model, GuessingDecoder)
        source = sources[0] if len(sources) == 1 else FirstGuess(sources)
        most = MOST_PIECES if guesses_texts else self.choice.most
        if self.device.kind == "cuda":
            most = min(most, GRAPHED_DRAFT)
        return Speculation(source, most, reads_hidden=self._by_heads is not None)

    def close(self) -> None:
        """Give back what guesses hold."""
        if self._by_model is not None:
            self._by_model.close()

    def _is_text(self, row: Row) -> bool:
        return row[TOKEN] < self.listener.tokens.endoftext


@dataclass(frozen=True)
class DraftReport:
    """How drafts fared over some texts."""

    passes: int
    tokens: int
    acceptance: Acceptance

    @property
    def tokens_per_pass(self) -> float:
        """Tokens written in a pass of the model."""
        return self.tokens / self.passes if self.passes else 0.0

    def line(self) -> str:
        """The figures in a line."""
        checks = self.acceptance.checks
        shares = " ".join(
            f"{kept}:{count / checks:.0%}" for kept, count in enumerate(self.acceptance.histogram) if count
        )
        tail = f"; {self.acceptance.mean_kept:.2f} of a draft kept (kept:share {shares})" if checks else ""
        return f"{self.tokens} tokens in {self.passes} passes, {self.tokens_per_pass:.2f} a pass{tail}"

    def as_dict(self) -> dict[str, object]:
        """The figures as JSON."""
        return {
            "tokens": self.tokens,
            "passes": self.passes,
            "tokens_per_pass": round(self.tokens_per_pass, 3),
            "drafts": self.acceptance.checks,
            "mean_kept": round(self.acceptance.mean_kept, 3),
            "kept_histogram": self.acceptance.histogram,
        }


def _heads(source: str | Path, model: Whisper) -> WhisperHeads:
    like = model.decoder.embed_tokens.weight
    return WhisperHeads.load(resolve(str(source)), model.config, like.device, like.dtype)


def _pieces(folder: Path, model: Whisper) -> PieceGuesser:
    like, narrows = model.decoder.embed_tokens.weight, is_narrow(model)
    made = PieceGuesser.load(folder, model.config, like.device, torch.bfloat16 if narrows else like.dtype)
    if narrows:
        narrow_pieces(made)
    return made


def _small(folder: Path, kind: str | None, model: Whisper) -> SmallWhisper:
    """A draft decoder beside the model's encoder, or a whole small model that fits it."""
    if kind == "decoder":
        decoder = load_decoder(folder, model.decoder)
        (remember_narrowly if is_narrow(model) else remember_together)(decoder)
        return SmallWhisper(decoder.config, decoder)
    like = model.decoder.embed_tokens.weight
    small = Whisper.load(folder, like.device, like.dtype)
    for name in ("vocab_size", "num_mel_bins", "max_source_positions", "max_target_positions"):
        theirs, ours = getattr(small.config, name), getattr(model.config, name)
        if theirs != ours:
            raise CheckpointError(f"{folder} cannot draft for this model: its {name} is {theirs}, not {ours}")
    return SmallWhisper(small.config, small.decoder, small)
