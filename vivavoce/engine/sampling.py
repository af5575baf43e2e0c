"""Sampling: settings per sequence and channel, and batch-invariant draws with counter-based noise.

The draw is Gumbel-max, and the noise of a token is a hash of (seed, row position, channel, token id). So the tokens of
a sequence do not depend on the rest of the batch, on how prompts were split, or on whether the sequence was evicted and
recomputed, forked or rewound.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from vivavoce import kernels
from vivavoce.engine.constraints import Grammar
from vivavoce.errors import InputError
from vivavoce.nn.cuda_graphs import is_compiling_ahead
from vivavoce.nn.vq import mixed

NO_ROW = -1  # padding where a reply has no row yet
SECOND_DRAW = 64  # added to the channel for the noise of a second draw
ALL_ALLOWED = -1  # a word of `SamplingTables.allowed` with all its bits
MAX_BIASES = 4  # ids of a reply whose logits are changed
MAX_TOP_K = 64  # a step whose sequences all have a top_k within it needs no full sort of the vocabulary


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a channel. Temperature 0 is greedy; top_k 0 and top_p 1 mean no limit."""

    temperature: float = 0.7
    top_k: int = 20
    top_p: float = 0.95
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be 0 or more, not {self.temperature}")
        if self.top_k < 0:
            raise InputError(f"top_k must be 0 (no limit) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise InputError(f"repetition_penalty must be above 0, not {self.repetition_penalty}")

    @property
    def fits_top_k_kernel(self) -> bool:
        """Whether every id that can be drawn is among the `MAX_TOP_K` best, which is all the kernels look at."""
        return self.temperature == 0 or 1 <= self.top_k <= MAX_TOP_K


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Generation:
    """Settings of one reply. `sampling` is one for all channels, or one per channel."""

    sampling: Sampling | tuple[Sampling, ...] = field(default_factory=Sampling)
    max_new_rows: int = 1000
    min_new_rows: int = 0
    seed: int = 0
    penalise_prompt: bool = True
    """Whether repetition penalties count the prompt, or only the reply."""
    grammar: Grammar | None = None
    """What the ids of the first channel may be; None: anything."""
    biases: tuple[tuple[int, float], ...] = ()
    """Ids of the first channel, and what is added to their logits; of replies with a grammar only."""
    lone_mode: int | None = None
    """The only mode in which rows are ever drawn from the sequence or a fork of it: its model may leave out what other
    modes read. None: any mode."""

    def __post_init__(self) -> None:
        if self.biases and self.grammar is None:
            raise InputError("biases are for replies with a grammar")
        if len(self.biases) > MAX_BIASES:
            raise InputError(f"{len(self.biases)} biases were given; the limit is {MAX_BIASES}")
        if self.max_new_rows < 1:
            raise InputError(f"max_new_rows must be at least 1, not {self.max_new_rows}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed must be in 0…2**63-1, not {self.seed}")

    @cached_property
    def fits_top_k_kernel(self) -> bool:
        """As `Sampling.fits_top_k_kernel`, for every channel."""
        return all(sampling.fits_top_k_kernel for sampling in self._samplings)

    @cached_property
    def is_greedy(self) -> bool:
        """Whether every channel is greedy."""
        return all(sampling.temperature == 0 for sampling in self._samplings)

    @cached_property
    def penalises(self) -> bool:
        """Whether some channel has a repetition penalty."""
        return any(sampling.repetition_penalty != 1 for sampling in self._samplings)

    @property
    def _samplings(self) -> tuple[Sampling, ...]:
        return (self.sampling,) if isinstance(self.sampling, Sampling) else self.sampling

    def per_channel(self, channels: int) -> tuple[Sampling, ...]:
        """The settings of each channel."""
        if isinstance(self.sampling, Sampling):
            return (self.sampling,) * channels
        if len(self.sampling) != channels:
            raise InputError(f"{len(self.sampling)} samplings were given for a model of {channels} channels")
        return self.sampling


@dataclass
class SamplingTables:
    """Settings and history of every slot, kept on the device."""

    floats: Tensor  # [slot, channel, (temperature, top_p, repetition penalty)]
    top_k: Tensor  # [slot, channel] int64; 0 = no limit
    seeds: Tensor  # [slot] int64
    min_rows: Tensor  # [slot] int32: min_new_rows
    seen: list[Tensor]  # per channel [slot, vocabulary] bool: ids in the counted rows of the sequence
    allowed: Tensor  # [slot, word] int32: bits of the ids of the first channel that may be drawn
    biased: Tensor  # [slot, MAX_BIASES] int64: ids of the first channel
    biases: Tensor  # [slot, MAX_BIASES]: what is added to their logits

    @classmethod
    def allocate(cls, slots: int, vocabularies: tuple[int, ...], device: torch.device) -> "SamplingTables":
        """Tables of this many slots, all greedy."""
        channels = len(vocabularies)
        floats = torch.ones(slots, channels, 3, device=device)
        floats[..., 0] = 0.0
        return cls(
            floats,
            torch.zeros(slots, channels, dtype=torch.int64, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            [torch.zeros(slots, size, dtype=torch.bool, device=device) for size in vocabularies],
            torch.full((slots, -(-vocabularies[0] // 32)), ALL_ALLOWED, dtype=torch.int32, device=device),
            torch.zeros(slots, MAX_BIASES, dtype=torch.int64, device=device),
            torch.zeros(slots, MAX_BIASES, device=device),
        )

    def settle(self, slot: int, generation: Generation) -> None:
        """Write a sequence's settings to its slot."""
        samplings = generation.per_channel(self.floats.shape[1])
        values = [[s.temperature, s.top_p, s.repetition_penalty] for s in samplings]
        self.floats[slot] = torch.tensor(values, device=self.floats.device)
        self.top_k[slot] = torch.tensor([s.top_k for s in samplings], device=self.top_k.device)
        self.seeds[slot] = generation.seed
        self.min_rows[slot] = generation.min_new_rows
        unused = [(0, 0.0)] * (MAX_BIASES - len(generation.biases))
        ids, biases = zip(*generation.biases, *unused, strict=True)
        self.biased[slot] = torch.tensor(ids, device=self.biased.device)
        self.biases[slot] = torch.tensor(biases, device=self.biases.device)

    def store_rows(self, slot: int, rows: Tensor) -> None:
        """Replace a slot's history by these rows.  # [row, channel] int64"""
        for channel, seen in enumerate(self.seen):
            seen[slot] = False
            seen[slot, rows[:, channel]] = True

    def note(self, slots: Tensor, rows: Tensor) -> None:
        """Add the rows of a step to their slots' histories.  # [row], [row, channel]"""
        for channel, seen in enumerate(self.seen):
            seen.view(-1).index_fill_(0, slots.long() * seen.shape[1] + rows[:, channel].long(), True)


@dataclass
class SamplingRequest:
    """Ids to take instead of the drawn ones if they are likely enough (typical acceptance); NO_ROW: none."""

    ids: Tensor  # [sequence, channel] int64
    max_probability: Tensor  # [sequence]: a probability above this is enough
    share: Tensor  # [sequence]: so is one above this share of exp(−entropy)

    def or_drawn(self, channel: int, scaled: Tensor, drawn: Tensor) -> Tensor:
        """# [sequence, vocabulary], [sequence] → [sequence]"""
        requested = self.ids[:, channel]
        probabilities = scaled.softmax(-1)
        entropy = torch.special.entr(probabilities).sum(-1)
        threshold = torch.minimum(self.max_probability, self.share * torch.exp(-entropy))
        probability = probabilities.gather(-1, requested.clamp(0, scaled.shape[-1] - 1)[:, None])[:, 0]
        is_valid = (requested >= 0) & (requested < scaled.shape[-1])
        return torch.where(is_valid & (probability > threshold), requested, drawn)


@dataclass
class SlotDraw:
    """The `Draw` of a step: each sequence is sampled with its slot's settings, entirely on the device."""

    tables: SamplingTables
    slots: Tensor  # [sequence] int64
    positions: Tensor  # [sequence]: of the row to be drawn
    modes: Tensor
    generated: Tensor
    fits_top_k_kernel: bool
    recent: Tensor | None = None  # [sequence, row, channel]: the last rows of each reply
    drafted: Tensor | None = None  # [sequence, row, channel]: drafted rows before the one to be drawn, or NO_ROW
    sampling_request: SamplingRequest | None = None
    plain: bool = False
    """Whether every draw is greedy and without penalties: an argmax."""
    shared_mode: int | None = None
    """The mode of all these sequences, where the host knows it."""
    masked: bool = False
    """Whether some sequence has a grammar."""

    @property
    def min_rows(self) -> Tensor:
        """`min_new_rows` of each sequence."""
        return self.tables.min_rows[self.slots]

    def sample(self, channel: int, logits: Tensor) -> Tensor:
        """One id per sequence.  # [sequence, vocabulary] float → [sequence] int64"""
        if self.masked and channel == 0:
            logits = logits.masked_fill(~self._allowed(logits.shape[-1]), float("-inf"))
            logits.scatter_add_(-1, self.tables.biased[self.slots], self.tables.biases[self.slots].to(logits.dtype))
        if self.plain:
            return self._accept_requested(channel, logits, logits.argmax(-1))
        if self._is_for_kernels(logits) and self.drafted is None and self.sampling_request is None:
            return self._draw_by_kernel(channel, logits, self.tables.seen[channel])
        penalty = self.tables.floats[self.slots, channel, 2:].to(logits.dtype)
        logits = penalise(logits, self._seen(channel)[:, : logits.shape[-1]], penalty)
        return self._accept_requested(channel, logits, self.choose(channel, logits))

    def sample_unrepeated(self, channel: int, logits: Tensor, share: float) -> Tensor:
        """One id per sequence by repetition-aware sampling.  # [sequence, vocabulary] float → [sequence] int64"""
        assert self.recent is not None, "the model must set `recall` to the number of rows it looks back"
        if self.plain:
            return self._accept_requested(channel, logits, logits.argmax(-1))
        temperature = self.tables.floats[self.slots, channel, :1].to(logits.dtype)
        greedy = temperature == 0
        drawn = self.choose(channel, logits, top_p_of_all=True)[:, None]
        times = (self.recent[..., channel] == drawn).sum(-1, keepdim=True)
        ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
        noise = gumbel_noise(self.tables.seeds[self.slots], self.positions, channel + SECOND_DRAW, ids)
        noisy = logits / temperature.masked_fill(greedy, 1.0) + noise.to(logits.dtype)
        again = noisy.scatter(-1, drawn, float("-inf")).argmax(-1, keepdim=True)
        repeated = times >= share * self.recent.shape[1]
        return self._accept_requested(channel, logits, torch.where(repeated & ~greedy, again, drawn)[:, 0])

    def choose(self, channel: int, logits: Tensor, top_p_of_all: bool = False) -> Tensor:
        """One column per sequence, without repetition penalty.  # [sequence, column] float → [sequence] int64"""
        if self.plain:
            return logits.argmax(-1)
        if self._is_for_kernels(logits) and not top_p_of_all:
            return self._draw_by_kernel(channel, logits, None)
        settings = self.tables.floats[self.slots, channel].to(logits.dtype)
        temperature, top_p = settings[:, :1], settings[:, 1:2]
        greedy = temperature == 0
        scaled = logits / temperature.masked_fill(greedy, 1.0)
        total = scaled.logsumexp(-1, keepdim=True) if top_p_of_all else None
        if self._is_for_kernels(logits):
            return self._draw_by_kernel(channel, logits, None, total)
        candidates = min(MAX_TOP_K, logits.shape[-1]) if self.fits_top_k_kernel else logits.shape[-1]
        scores, ids = scaled.topk(candidates, dim=-1)
        is_candidate = keep_likely(scores, self.tables.top_k[self.slots, channel][:, None], top_p, total)
        noise = gumbel_noise(self.tables.seeds[self.slots], self.positions, channel, ids).to(scores.dtype)
        drawn = (scores + noise).masked_fill(~is_candidate, float("-inf")).argmax(-1, keepdim=True)
        best = ids.masked_fill(scores < scores[:, :1], torch.iinfo(ids.dtype).max).amin(-1, keepdim=True)
        return torch.where(greedy, best, ids.gather(-1, drawn))[:, 0]

    def _is_for_kernels(self, logits: Tensor) -> bool:
        return self.fits_top_k_kernel and kernels.usable(logits) and logits.dtype != torch.float64

    def _draw_by_kernel(self, channel: int, logits: Tensor, seen: Tensor | None, total: Tensor | None = None) -> Tensor:
        tables, logits = self.tables, logits.float()
        settings = (tables.floats, tables.top_k, tables.seeds)
        if total is None and logits.shape[-1] <= kernels.MAX_DRAW_COLUMNS:
            drawn = kernels.small_vocabulary_draw(logits, *settings, seen, self.slots, self.positions, channel)
        else:
            drawn = kernels.draw(logits, *settings, seen, self.slots, self.positions, channel, total)
        # While kernels are only compiled, outputs are uninitialised and must not be used as indices.
        return torch.zeros_like(drawn) if is_compiling_ahead() else drawn

    def _allowed(self, columns: int) -> Tensor:
        """Which ids the grammars allow.  # [sequence, vocabulary] bool"""
        words = self.tables.allowed[self.slots]
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
        return (bits & 1).flatten(1)[:, :columns].bool()

    def _seen(self, channel: int) -> Tensor:
        """Ids in the rows before the one to be drawn.  # [sequence, vocabulary] bool, a copy"""
        seen = self.tables.seen[channel][self.slots]
        if self.drafted is not None:
            ids = self.drafted[..., channel].long()
            first = seen[:, 0] | (ids == 0).any(-1)
            seen.scatter_(-1, ids.clamp(min=0), True)  # NO_ROW sets id 0, which is restored
            seen[:, 0] = first
        return seen

    def _accept_requested(self, channel: int, logits: Tensor, drawn: Tensor) -> Tensor:
        if self.sampling_request is None:
            return drawn
        temperature = self.tables.floats[self.slots, channel, :1].to(logits.dtype)
        return self.sampling_request.or_drawn(channel, logits / temperature.masked_fill(temperature == 0, 1.0), drawn)


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Repetition penalty: positive logits of seen ids are divided by it, negative ones multiplied."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_likely(scores: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor | None = None) -> Tensor:
    """Which of the descending scores pass top-k, then top-p over the rest.  # bool like scores

    With `total`, the logsumexp of all scores, top-p is taken over all of them instead.
    """
    rank = torch.arange(scores.shape[-1], device=scores.device)
    within = (rank < top_k) | (top_k == 0)
    limited = scores.masked_fill(~within, float("-inf"))
    probabilities = limited.softmax(-1) if total is None else (limited - total).exp()
    cumulative = probabilities.cumsum(-1) - probabilities  # of the better ones
    return within & ((cumulative < top_p) | (rank == 0))


def gumbel_noise(seeds: Tensor, positions: Tensor, channel: int, ids: Tensor) -> Tensor:
    """Gumbel noise of each candidate id, a hash of seed, position, channel and id.

    # seeds and positions [sequence], ids [sequence, candidate] → [sequence, candidate]
    """
    if kernels.usable(ids):
        return kernels.gumbel_noise(seeds, positions, channel, ids)
    state = mixed(seeds)
    state = mixed(state ^ (seeds >> 32))
    state = mixed(state + positions.long() * 0x9E3779B9)
    state = mixed(state + (channel + 1) * 0x85EBCA77)
    bits = mixed(mixed(state[:, None] + ids * 0xC2B2AE3D) ^ state[:, None])
    uniform = ((bits >> 8).double() + 0.5) / 2**24
    return -torch.log(-torch.log(uniform))
