"""Draft sources for speculative decoding; they change the speed of a transcription, never its text.

A draft folder holds a small decoder that shares the model's encoder, a CTC layer that drafts whole texts from the
encoder's states (both by `viva train draft`), or a whole Whisper of the same vocabulary. Medusa heads (`viva train
medusa`) read the model's own states. Lookup repeats n-grams of the text. The previous hypothesis of a live stream is a
draft too.
"""

from collections.abc import Sequence
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
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.cpu import is_bf16, join_cross_kv, use_bf16_cross_kv
from vivavoce.models.whisper.cpu_drafts import CpuDraftDecoder, CpuDraftText, DraftLimits, cpu_heads, pieces_to_bf16
from vivavoce.models.whisper.decoding import FORBIDDEN
from vivavoce.models.whisper.drafts import PieceGuesser, WhisperHeads, draft_kind, load_decoder
from vivavoce.models.whisper.engine import BEGUN, TOKEN, WINDOW, WhisperWriter, WindowHeads
from vivavoce.models.whisper.model import Whisper, WhisperDecoder
from vivavoce.models.whisper.steps import WriteText
from vivavoce.models.whisper.transcriber import WhisperTranscriber

MIN_DRAFT_PROBABILITY = 0.3  # of a whole draft, which ends before it falls below this
MIN_HEAD_PROBABILITY = 0.05  # of a branch of Medusa heads, which draft all positions in one pass
LEAVES = 1  # alternative last tokens of a draft: a second one costs more rows than it saves passes
MIN_TOKEN_PROBABILITY = 0.03  # of such an alternative
BEGINNINGS = 4  # candidates for the first timestamp
OTHER_BEGINNINGS = 2  # candidates that are drafted besides the most probable one


@dataclass
class _DraftState:
    """The draft decoder's state for a text, drafted tokens included."""

    text: EngineSequence
    draft: CpuDraftText
    tokens: list[int]


class BarredTokens:
    """Logit biases that exclude tokens no text may contain; timestamps have the highest ids."""

    def __init__(self, writer: WhisperWriter) -> None:
        like = writer.model.decoder.embed_tokens.weight
        timed = torch.zeros(writer.model.config.vocab_size, device=like.device)
        timed[writer.never] = FORBIDDEN
        plain, first = timed[: writer.tokens.notimestamps].clone(), timed.clone()
        timed[writer.tokens.notimestamps] = FORBIDDEN
        first[: writer.tokens.timestamps] = FORBIDDEN
        self._later, self._first = (plain, timed), (plain, first)  # each for texts without and with timestamps

    def next(self, sequence: EngineSequence) -> Tensor:
        """Biases for the next token of a text.  # [vocabulary]"""
        return (self._later if sequence.mode & BEGUN else self._first)[sequence.rows[-1][WINDOW] % 2]

    def later(self, sequence: EngineSequence) -> Tensor:
        """Biases for the tokens after it.  # [vocabulary]"""
        return self._later[sequence.rows[-1][WINDOW] % 2]


class CpuDraftModel:
    """Greedy drafts of a small decoder on a CPU; its windows are in the store of a separate writer."""

    def __init__(self, decoder: WhisperDecoder, writer: WhisperWriter, rounded: bool = False) -> None:
        self.decoder, self.writer = decoder, writer
        self._decoder = CpuDraftDecoder(decoder, rounded)
        self._states: dict[int, _DraftState] = {}
        self._barred = BarredTokens(writer)

    @torch.inference_mode()
    def propose(self, sequence: EngineSequence, max_rows: int) -> Draft:
        """Draft the next rows of a text."""
        state = self._state_of(sequence)
        channel = sequence.rows[-1][WINDOW]
        end = self.writer.tokens.endoftext
        max_rows = min(max_rows, self.decoder.config.max_target_positions - len(sequence.rows))
        new_tokens = [row[TOKEN] for row in sequence.rows[state.draft.length :]]
        limits = DraftLimits(
            max_rows, MIN_DRAFT_PROBABILITY, BEGINNINGS, MIN_TOKEN_PROBABILITY, self.writer.tokens.timestamps, end
        )
        barred = self._barred.next(sequence), self._barred.later(sequence)
        chain, unlikely, beginnings = self._decoder.draft(state.draft, new_tokens, *barred, limits)
        state.tokens += [*new_tokens, *chain][: state.draft.length - len(state.tokens)]
        leaves = _likely(unlikely, end, LEAVES) if len(unlikely) else []
        times = _likely(beginnings, end, BEGINNINGS)[1 : 1 + OTHER_BEGINNINGS] if chain and len(beginnings) else []
        return _draft(chain, leaves, times, channel).first(max_rows)

    def close(self) -> None:
        """Drop all states."""
        self._states.clear()

    def _state_of(self, sequence: EngineSequence) -> _DraftState:
        """The state of a text, cut to the tokens that agree with it, its last token excluded."""
        for key in [key for key, state in self._states.items() if not state.text.is_open]:
            del self._states[key]
        if sequence.id not in self._states:
            memory = self.writer.store.memory(sequence.rows[-1][WINDOW] // 2)
            self._states[sequence.id] = _DraftState(sequence, self._decoder.begin(memory), [])
        state = self._states[sequence.id]
        pairs = zip(state.tokens, sequence.rows[:-1], strict=False)
        agreed = next((index for index, (token, row) in enumerate(pairs) if token != row[TOKEN]), None)
        if agreed is None:
            agreed = min(len(state.tokens), len(sequence.rows) - 1)
        state.draft.length = agreed
        del state.tokens[agreed:]
        return state


class CpuHeadDrafts:
    """Greedy drafts of Medusa heads on a CPU, from the hidden state of the newest token."""

    def __init__(self, heads: WhisperHeads, writer: WhisperWriter, engine: Engine, width: int) -> None:
        self.writer, self.width = writer, width
        self._decoder = cpu_heads(heads, writer.model.decoder)
        self._barred = BarredTokens(writer)
        self._sampled = HeadDrafts(WindowHeads(heads, writer), engine, width)
        self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Let TorchScript optimise in its first calls, each of which takes as long as many drafts."""
        store, like = self.writer.store, self.writer.model.decoder.embed_tokens.weight
        keys, barred = store.keys[-1, :1, :, :2], like.new_zeros(len(like))
        for _ in range(3):
            self._decoder(like[0], 0, keys, keys, barred, self.width)

    @torch.inference_mode()
    def propose(self, sequence: EngineSequence, max_rows: int) -> Sequence[Row]:
        """Draft the next rows of a text."""
        if not is_greedy(sequence):
            return self._sampled.propose(sequence, max_rows)
        token, channel = sequence.rows[-1]
        keys, values = self.writer.store.read(-1, channel // 2)
        barred = self._barred.later(sequence)
        ids, probabilities = self._decoder(sequence.hidden, token, keys[None], values[None], barred, self.width)
        guesses = [
            [((token, channel), probability) for token, probability in zip(tokens, likely, strict=True)]
            for tokens, likely in zip(ids.tolist(), probabilities.tolist(), strict=True)
        ]
        return likeliest_tree(guesses, max_rows, MIN_HEAD_PROBABILITY)


def is_greedy(sequence: EngineSequence) -> bool:
    """Whether a text is decoded greedily."""
    assert sequence.generation is not None
    return sequence.generation.per_channel(WhisperWriter.channels)[TOKEN].temperature == 0


def _likely(probabilities: Tensor, end: int, max_rows: int) -> list[int]:
    """The most probable next tokens, best first, without the end-of-text token."""
    best = probabilities.topk(max_rows)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [token for token, probability in pairs if probability > MIN_TOKEN_PROBABILITY and token != end]


def _draft(chain: list[int], leaves: list[int], times: list[int], channel: int) -> Draft:
    """A tree: a chain of tokens, alternatives after its last one, and the same chain after other first timestamps.

    The text depends little on its first timestamp.
    """
    tokens, parents = chain + leaves, [*range(-1, len(chain) - 1), *(len(chain) - 1 for _ in leaves)]
    for time in times:
        parents += [-1, *range(len(tokens), len(tokens) + len(chain) - 1)]
        tokens += [time, *chain[1:]]
    return Draft([(token, channel) for token in tokens], parents)


MAX_PIECES = 16  # tokens of a drafted text that are verified in one pass
BRANCHES = 3  # positions at which a text that left its draft may rejoin it


@dataclass(frozen=True)
class DraftChoice:
    """Which drafts are used. If several: whole-text drafts first, then lookup, then heads or a model."""

    draft: str | Path | None = None
    heads: str | Path | None = None
    lookup: bool = False
    max_rows: int = 5
    """Tokens per draft of a model or heads; rows of a tree where heads branch."""
    width: int = 1
    """Candidates of a head at each position; with more than one, drafts are trees."""

    @property
    def is_any(self) -> bool:
        """Whether any draft is used."""
        return self.draft is not None or self.heads is not None or self.lookup


@dataclass(frozen=True)
class SmallWhisper:
    """A draft decoder, and its whole model if it does not share the encoder."""

    config: WhisperConfig
    decoder: WhisperDecoder
    model: Whisper | None = None

    def states(self, mel: Tensor, states: Tensor) -> Tensor:
        """The encoder states of windows, computed again only if the draft has a separate encoder."""
        return states if self.model is None else self.model.encoder(mel)


class Drafter:
    """The draft sources of one engine's texts."""

    def __init__(self, choice: DraftChoice, transcriber: WhisperTranscriber, device: Device) -> None:
        self.choice, self.transcriber, self.device = choice, transcriber, device
        self.pieces: PieceGuesser | None = None
        self.small: SmallWhisper | None = None
        self.heads = None if choice.heads is None else _heads(choice.heads, transcriber.model)
        if choice.draft is not None:
            folder = resolve(str(choice.draft))
            kind = draft_kind(folder)
            if kind == "pieces":
                self.pieces = _pieces(folder, transcriber.model)
            elif kind == "heads":
                raise CheckpointError(f"{folder} holds Medusa heads; pass it as heads, not as draft")
            else:
                self.small = _small(folder, kind, transcriber.model)
        self._guessed: dict[int, list[Row]] = {}
        self._by_heads: HeadDrafts | CpuHeadDrafts | None = None
        self._by_model: DraftModel | CpuDraftModel | None = None
        self._small_writer: WhisperWriter | None = None

    def attach(self, engine: Engine, writer: WhisperWriter) -> None:
        """Create the draft sources for the texts of an engine."""
        dtype = writer.model.decoder.embed_tokens.weight.dtype
        if self.heads is not None and choose_draft_heads(self.device, dtype).cls is CpuHeadDrafts:
            self._by_heads = CpuHeadDrafts(self.heads, writer, engine, self.choice.width)
        elif self.heads is not None:
            self._by_heads = HeadDrafts(WindowHeads(self.heads, writer), engine, self.choice.width)
        if self.small is not None:
            transcriber = self.transcriber
            self._small_writer = WhisperWriter(
                self.small, transcriber.tokens, transcriber.settings, writer.store.windows
            )
            if choose_draft_model(self.device, dtype).cls is CpuDraftModel:
                rounded = is_bf16(transcriber.model)
                self._by_model = CpuDraftModel(self.small.decoder, self._small_writer, rounded)
                return
            limits = EngineLimits(
                cache_rows=engine.limits.cache_rows, sequences_per_step=engine.limits.sequences_per_step
            )
            dtype = self.small.decoder.embed_tokens.weight.dtype
            self._by_model = DraftModel.of(Engine(self._small_writer, self.device, dtype, limits), engine)

    @torch.inference_mode()
    def prepare(self, windows: Sequence[int], mel: Tensor, states: Tensor) -> None:
        """Compute what drafting needs of encoded windows.  # [window, mel, frame], [window, position, d_model]"""
        if self.small is not None and self._small_writer is not None:
            memory = self.small.decoder.cross_kv(self.small.states(mel, states))
            self._small_writer.store.hold(memory, windows)
        if self.pieces is not None:
            given = states.to(torch.bfloat16) if is_bf16(self.transcriber.model) else states
            for window, tokens in zip(windows, self.pieces.guess(given), strict=True):
                self._guessed[window] = [(token, 2 * window) for token in tokens]

    def release(self, window: int) -> None:
        """Drop the drafts of a window."""
        self._guessed.pop(window, None)
        if self._small_writer is not None:
            self._small_writer.store.release(window)

    def speculation(self, window: int, request: WriteText, earlier: Sequence[int] = ()) -> Speculation | None:
        """The speculation for a text of a window; `earlier` are tokens of a previous hypothesis of the same audio."""
        timed = bool(request.options.timestamps)
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
        drafts_texts = bool(earlier) or window in self._guessed or isinstance(self._by_model, CpuDraftModel)
        source = sources[0] if len(sources) == 1 else FirstGuess(sources)
        max_rows = MAX_PIECES if drafts_texts else self.choice.max_rows
        if self.device.kind == "cuda":
            max_rows = min(max_rows, GRAPHED_DRAFT)
        return Speculation(source, max_rows, reads_hidden=self._by_heads is not None)

    def close(self) -> None:
        """Release the draft model's memory."""
        if self._by_model is not None:
            self._by_model.close()

    def _is_text(self, row: Row) -> bool:
        return row[TOKEN] < self.transcriber.tokens.endoftext


@dataclass(frozen=True)
class DraftReport:
    """Passes, tokens and accepted drafts of some texts."""

    passes: int
    tokens: int
    acceptance: Acceptance

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens per pass of the model."""
        return self.tokens / self.passes if self.passes else 0.0

    def line(self) -> str:
        """A one-line summary."""
        checks = self.acceptance.checks
        shares = " ".join(
            f"{length}:{count / checks:.0%}" for length, count in enumerate(self.acceptance.histogram) if count
        )
        tail = f"; {self.acceptance.mean_kept:.2f} tokens of a draft kept (kept:share {shares})" if checks else ""
        return f"{self.tokens} tokens in {self.passes} passes, {self.tokens_per_pass:.2f} per pass{tail}"

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
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
    like, in_bf16 = model.decoder.embed_tokens.weight, is_bf16(model)
    guesser = PieceGuesser.load(folder, model.config, like.device, torch.bfloat16 if in_bf16 else like.dtype)
    if in_bf16:
        pieces_to_bf16(guesser)
    return guesser


def _small(folder: Path, kind: str | None, model: Whisper) -> SmallWhisper:
    """Load a draft decoder that shares the model's encoder, or a whole Whisper of the same vocabulary."""
    if kind == "decoder":
        decoder = load_decoder(folder, model.decoder)
        (use_bf16_cross_kv if is_bf16(model) else join_cross_kv)(decoder)
        return SmallWhisper(decoder.config, decoder)
    like = model.decoder.embed_tokens.weight
    small = Whisper.load(folder, like.device, like.dtype)
    for name in ("vocab_size", "num_mel_bins", "max_source_positions", "max_target_positions"):
        theirs, ours = getattr(small.config, name), getattr(model.config, name)
        if theirs != ours:
            raise CheckpointError(f"{folder} cannot draft for this model: its {name} is {theirs}, not {ours}")
    return SmallWhisper(small.config, small.decoder, small)
