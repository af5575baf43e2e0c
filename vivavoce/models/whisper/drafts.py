"""Draft models for speculative decoding with a Whisper: distilled decoders, Medusa heads and a CTC head, all fed by
the encoder of the large model, and their TorchScript implementations for CPUs.

The `config.json` of a draft's folder has its kind and the sizes of the model it was trained for; the folder holds only
the weights that the draft does not share.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models import read_config
from vivavoce.models.checkpoint import Checkpoint, load_weights, save_weights
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.cpu import BF16, CpuDecoder, CpuLinear, OptimisedEncoderLayer, StepRows, packed_projection
from vivavoce.models.whisper.model import (
    WhisperDecoder,
    WhisperLayer,
    WindowMemory,
)
from vivavoce.nn.linear import (
    column_major,
    column_major_for_one_row,
)
from vivavoce.nn.modules import allocating, scripted
from vivavoce.nn.quantised import CPU_COLUMN_BLOCK, CPU_ROW_BLOCK
from vivavoce.nn.quantised_weight import quantise

KIND = "decoder"
TYPE = "whisper-draft"
MATCHED = ("d_model", "vocab_size", "max_source_positions", "max_target_positions")


Module = TypeVar("Module", bound=nn.Module)


def write_draft(
    module: nn.Module, folder: str | Path, kind: str, config: WhisperConfig, sizes: Mapping[str, int]
) -> None:
    """Write a draft with its kind and sizes, and the sizes of the model it is for."""
    save_weights(module, folder)
    of = {name: getattr(config, name) for name in MATCHED}
    text = json.dumps({"model_type": TYPE, "kind": kind, "sizes": dict(sizes), "of": of}, indent=2)
    (Path(folder) / "config.json").write_text(text + "\n", encoding="utf8")


def draft_kind(folder: str | Path) -> str | None:
    """The kind of draft in a folder; None for a whole model."""
    values = read_config(Path(folder) / "config.json", "draft")
    return str(values.get("kind")) if values.get("model_type") == TYPE else None


def read_draft(
    folder: str | Path, kind: str, config: WhisperConfig, make: Callable[[Mapping[str, int]], Module]
) -> Module:
    """A draft of this kind that was trained for a model of these sizes."""
    file = Path(folder) / "config.json"
    values = read_config(file, "draft")
    if values.get("model_type") != TYPE or values.get("kind") != kind:
        raise CheckpointError(f"{file} is not of {kind} drafts of a Whisper but of {values.get('model_type')!r}")
    other = [name for name in MATCHED if values.get("of", {}).get(name) != getattr(config, name)]
    if other:
        theirs, ours = values.get("of", {}).get(other[0]), getattr(config, other[0])
        raise CheckpointError(f"{folder} was trained for a model with {other[0]} {theirs}, not {ours}; train another")
    module = make(values.get("sizes", {}))
    with Checkpoint(folder) as checkpoint:
        load_weights(module, checkpoint)
    return module.requires_grad_(False).eval()


class DraftModule(nn.Module):
    """A draft module whose constructor takes the width of the large model and the sizes in its `config.json`."""

    kind: ClassVar[str]

    @classmethod
    def load(
        cls,
        folder: str | Path,
        config: WhisperConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load what `save` wrote for a model of these sizes."""
        with allocating(device, dtype):
            return read_draft(folder, cls.kind, config, lambda sizes: cls(config.d_model, **sizes))


class DraftLayers(nn.Module):
    """The weights that a draft decoder does not share with the large one: its layers and the last norm."""

    def __init__(self, decoder: WhisperDecoder) -> None:
        super().__init__()
        self.layers, self.layer_norm = decoder.layers, decoder.layer_norm


def distilled(decoder: WhisperDecoder, layers: int) -> WhisperDecoder:
    """A decoder with some of the layers of another, evenly spaced, that shares its embeddings.

    The first and the last layer are always among them; a single layer is the last.
    """
    count = len(decoder.stack)
    if not 1 <= layers < count:
        raise InputError(f"a draft of a decoder of {count} layers has 1…{count - 1}, not {layers}")
    chosen = [round(index * (count - 1) / max(1, layers - 1)) for index in range(layers)] if layers > 1 else [count - 1]
    draft = _of_layers(decoder, layers)
    for layer, source in zip(draft.stack, chosen, strict=True):
        layer.load_state_dict(decoder.stack[source].state_dict())
    draft.layer_norm.load_state_dict(decoder.layer_norm.state_dict())
    return draft


def save_decoder(draft: WhisperDecoder, folder: str | Path, config: WhisperConfig) -> None:
    """Write a distilled decoder for a model of these sizes."""
    write_draft(DraftLayers(draft), folder, KIND, config, {"layers": len(draft.stack)})


def load_decoder(folder: str | Path, decoder: WhisperDecoder) -> WhisperDecoder:
    """Load a distilled decoder; it shares the embeddings of the one it was distilled from."""
    drafts: list[WhisperDecoder] = []

    def layers(sizes: Mapping[str, int]) -> DraftLayers:
        drafts.append(_of_layers(decoder, sizes["layers"]))
        return DraftLayers(drafts[0])

    read_draft(folder, KIND, decoder.config, layers)
    return drafts[0].requires_grad_(False).eval()


def _of_layers(decoder: WhisperDecoder, layers: int) -> WhisperDecoder:
    """A decoder with new layers that shares everything else."""
    like = decoder.embed_tokens.weight
    with allocating(like.device, like.dtype):
        draft = WhisperDecoder(replace(decoder.config, decoder_layers=layers, vocab_size=1, max_target_positions=1))
    draft.config = replace(decoder.config, decoder_layers=layers)
    draft.embed_tokens, draft.embed_positions = decoder.embed_tokens, decoder.embed_positions
    return draft


PLACES = 5


CrossAttend = Callable[[Tensor], Tensor]
"""Cross-attention of queries to their windows.  # […, next position, head, head_dim] → the same"""


class WhisperHeads(DraftModule):
    """Medusa heads: a hidden state for each of the next `places` positions, with one more cross-attention."""

    kind = "heads"

    def __init__(self, d_model: int, heads: int, ffn: int, places: int = PLACES) -> None:
        super().__init__()
        if places < 1:
            raise InputError(f"heads predict at least 1 token, not {places}")
        self.heads, self.places = heads, places
        self.start = nn.Parameter(torch.zeros(d_model))
        self.ahead = nn.Embedding(places, d_model)
        self.newest_proj = nn.Linear(d_model, d_model, bias=False)
        self.look_norm = nn.LayerNorm(d_model)
        self.q_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.final_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, ffn)
        self.fc2 = nn.Linear(ffn, d_model)
        self.weight = nn.Parameter(torch.zeros(places, d_model, d_model))
        self.bias = nn.Parameter(torch.zeros(places, d_model))
        for added in (self.ahead, self.newest_proj, self.out_proj, self.fc2):
            for parameter in added.parameters():
                nn.init.zeros_(parameter)

    @classmethod
    def for_decoder(cls, decoder: WhisperDecoder, places: int = PLACES) -> "WhisperHeads":
        """Untrained heads for a decoder, with the cross-attention queries of its last layer."""
        config, last = decoder.config, decoder.stack[-1].encoder_attn
        heads = cls(config.d_model, config.decoder_attention_heads, 2 * config.d_model, places)
        heads.q_proj.load_state_dict(last.q_proj.state_dict())
        return heads.to(last.q_proj.weight.device)

    def forward(self, hidden: Tensor, newest: Tensor, cross_attend: CrossAttend) -> Tensor:
        """Hidden states of the next positions.  # [.., d_model], [.., d_model] → [.., next position, d_model]

        `hidden` is the state from which the newest token was sampled (`start` if it was not sampled); `newest` is the
        embedding of that token.
        """
        x = hidden[..., None, :] + self.ahead.weight + self.newest_proj(newest)[..., None, :]
        query = self.q_proj(self.look_norm(x)).unflatten(-1, (self.heads, -1))
        x = x + self.out_proj(cross_attend(query).flatten(-2))
        x = x + self.fc2(functional.gelu(self.fc1(self.final_norm(x))))
        adapted = [functional.linear(x[..., p, :], self.weight[p], self.bias[p]) for p in range(self.places)]
        return x + functional.silu(torch.stack(adapted, dim=-2))

    def save(self, folder: str | Path, config: WhisperConfig) -> None:
        """Write the heads for a model of these sizes."""
        sizes = {"heads": self.heads, "ffn": self.fc1.out_features, "places": self.places}
        write_draft(self, folder, self.kind, config, sizes)


CTC_BLANK = 0
CTC_POOLING = 2  # encoder states per output: no token is shorter


class PieceGuesser(DraftModule):
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
        x = functional.avg_pool1d(states.transpose(1, 2), CTC_POOLING).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.pieces(x)
        return logits

    @torch.inference_mode()
    def guess(self, states: Tensor) -> list[list[int]]:
        """The text tokens of each window, by the best CTC path.  # [window, position, d_model]"""
        best = self(states).argmax(-1)
        is_new = (best != CTC_BLANK) & (best != functional.pad(best, (1, 0), value=CTC_BLANK)[:, :-1])
        return [(row[new] - CTC_BLANK - 1).tolist() for row, new in zip(best, is_new, strict=True)]

    def save(self, folder: str | Path, config: WhisperConfig) -> None:
        """Write the weights for a model of these sizes."""
        sizes = {"text_ids": self.pieces.out_features - 1, "layers": len(self.layers), "heads": self.heads}
        write_draft(self, folder, self.kind, config, sizes)


def pieces_to_bf16(guesser: PieceGuesser) -> None:
    """Run a `PieceGuesser` that was loaded in bfloat16 in TorchScript."""
    layers = [layer for layer in guesser.layers if isinstance(layer, WhisperLayer)]
    guesser.layers = nn.ModuleList(scripted(OptimisedEncoderLayer(layer, BF16)) for layer in layers)


class Int8DraftLinear(nn.Module):
    """`CpuLinear` with int8 weights, which fit the CPU's caches; drafts need not be exact."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        missing = -weight.shape[0] % CPU_ROW_BLOCK
        rounded = quantise(functional.pad(weight.detach().contiguous(), (0, 0, 0, missing)), "int8")
        assert rounded.scale is not None
        self.weight, self.scale, self.bias = rounded.data, rounded.scale.to(torch.bfloat16), bias.detach()
        self.block = CPU_ROW_BLOCK

    def forward(self, x: Tensor) -> Tensor:
        """# [row, input] → [row, output]"""
        return self.first(x, self.bias)

    def first(self, x: Tensor, bias: Tensor) -> Tensor:
        """The first outputs, as many as `bias` has.  # [row, input], [output] → [row, output]"""
        outputs = bias.size(0)
        whole = (outputs + self.block - 1) // self.block * self.block
        weight, scale = self.weight.narrow(0, 0, whole), self.scale.narrow(0, 0, whole)
        return torch._weight_int8pack_mm(x.to(torch.bfloat16), weight, scale).narrow(1, 0, outputs) + bias


class DraftLimits(NamedTuple):
    """How far a draft goes."""

    max_tokens: int
    min_probability: float
    """The draft ends where the probability that all of its tokens are right falls below this."""
    start_candidates: int
    """If the first token is a timestamp, its probability is the sum over this many of the likeliest timestamps."""
    min_start_probability: float
    """Timestamps less probable than this are not part of that sum."""
    timestamps: int
    """The first id that is a timestamp."""
    end: int
    """The id that ends a text, which is not drafted."""


@dataclass
class CpuDraftText:
    """Self-attention cache of one text; `length` is set back to drop tokens."""

    memory: WindowMemory
    keys: Tensor  # [layer, position, head, head_dim]
    values: Tensor
    length: int = 0


class CpuDraftLayers(CpuDecoder):
    """A `CpuDecoder` of one text, and the loop that drafts with it."""

    def __init__(self, decoder: WhisperDecoder, rounded: bool) -> None:
        # int8 only for the two largest products: for smaller ones it is slower.
        product = Int8DraftLinear if rounded else CpuLinear
        packed = (packed_projection(layer) for layer in decoder.stack)
        super().__init__(
            decoder, [product(column_major_for_one_row(weight), bias) for weight, bias in packed], drafts=True
        )
        self.lm_head = product(self.tokens, self.tokens.new_zeros(len(self.tokens)))
        self.slots = torch.arange(len(self.positions), device=self.tokens.device)

    def newest_state(
        self, ids: Tensor, text: tuple[Tensor, Tensor], first: int, window: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Append tokens at position `first` and return the hidden state of the last one.  # [token] → [1, d_model]"""
        count = ids.size(0)
        written, read = self.slots.narrow(0, first, count), self.slots.narrow(0, 0, first + count)
        positions = [window[0].size(3)]
        none: list[Tensor | None] = [None]
        last = StepRows(written, [read], none, [1], [0], positions, [1])
        rows = last
        if count > 1:
            hidden = torch.full((count, first + count), -torch.inf, dtype=text[0].dtype, device=ids.device)
            bias: list[Tensor | None] = [hidden.triu_(first + 1)]
            rows = StepRows(written, [read], bias, [count], [0], positions, [count])
        return self.forward(ids, written, rows, last, text[0], text[1], window[0], window[1])

    @torch.jit.export
    def draft(
        self,
        ids: Tensor,
        text: tuple[Tensor, Tensor],
        first: int,
        window: tuple[Tensor, Tensor],
        bias_first: Tensor,
        bias_later: Tensor,
        limits: DraftLimits,
    ) -> tuple[list[int], int, Tensor, Tensor]:
        """The loop of `CpuDraftDecoder.draft`."""
        chain: list[int] = []
        unlikely, at_start = torch.empty(0), torch.empty(0)
        total, bias = 1.0, bias_first
        while len(chain) < limits.max_tokens:
            hidden = self.newest_state(ids, text, first, window)
            first += ids.size(0)
            probabilities = self.lm_head.first(hidden, bias).softmax(-1).select(0, 0)
            best, index = probabilities.max(0)
            probability, token = float(best), int(index)
            if len(chain) == 0 and token >= limits.timestamps:
                at_start = probabilities
                likely = probabilities.topk(limits.start_candidates)[0]
                probability = float(likely[likely > limits.min_start_probability].sum())
            total *= probability
            if total < limits.min_probability or token == limits.end:
                unlikely = probabilities
                break
            chain.append(token)
            ids, bias = index.unsqueeze(0), bias_later
        return chain, first, unlikely, at_start


class CpuDraftDecoder:
    """Greedy drafts by a small decoder, equal to `WhisperDecoder.step` up to rounding (more with `rounded` weights)."""

    def __init__(self, decoder: WhisperDecoder, rounded: bool = False) -> None:
        self.config = decoder.config
        self._layers: Any = scripted(
            CpuDraftLayers(decoder, rounded and decoder.config.d_model % CPU_COLUMN_BLOCK == 0)
        )
        self._warm_up()

    def _warm_up(self) -> None:
        """Run a few drafts, because TorchScript optimises in its first calls."""
        config, heads = self.config, self.config.decoder_attention_heads
        weight = self._layers.tokens
        empty = weight.new_zeros(config.decoder_layers, 1, heads, 2, config.d_model // heads)
        bias = torch.zeros(config.vocab_size, device=weight.device)
        limits = DraftLimits(2, 0.0, 1, 0.0, config.vocab_size, -1)
        with torch.inference_mode():
            for tokens in ([0, 0], [0], [0]):
                self.draft(self.begin(WindowMemory(empty, empty)), tokens, bias, bias, limits)

    def begin(self, memory: WindowMemory) -> CpuDraftText:
        """The cache of an empty text of one window."""
        config, heads = self.config, self.config.decoder_attention_heads
        size = (config.decoder_layers, config.max_target_positions, heads, config.d_model // heads)
        return CpuDraftText(memory, memory.keys.new_empty(size), memory.keys.new_empty(size))

    def draft(
        self, text: CpuDraftText, tokens: list[int], bias_first: Tensor, bias_later: Tensor, limits: DraftLimits
    ) -> tuple[list[int], Tensor, Tensor]:
        """Append `tokens` to the text and draft greedily after them; the last drafted token is not in the cache.

        Returns the draft, the probabilities at which it stopped (empty if it reached `max_tokens`), and those of its
        first token if that is a timestamp. Biases are added to the logits of the first and of later drafted tokens;
        ids beyond the end of a bias are excluded.
        """
        ids = torch.tensor(tokens, device=text.keys.device)
        memory = text.memory
        chain, text.length, unlikely, at_start = self._layers.draft(
            ids, (text.keys, text.values), text.length, (memory.keys, memory.values), bias_first, bias_later, limits
        )
        return chain, unlikely, at_start


class CpuDraftHeads(nn.Module):
    """`WhisperHeads` followed by the LM head, for one text."""

    def __init__(self, heads: WhisperHeads, decoder: WhisperDecoder) -> None:
        super().__init__()
        self.newest, self.query, self.out = heads.newest_proj, heads.q_proj, heads.out_proj
        self.look_norm, self.last_norm = heads.look_norm, heads.final_norm
        self.inner, self.outer, self.heads = heads.fc1, heads.fc2, heads.heads
        for part in (self.newest, self.query, self.out, self.inner, self.outer):
            part.weight.data = column_major(part.weight.detach())
        self.start = heads.start.detach()
        self.ahead, self.bias = heads.ahead.weight.detach(), heads.bias.detach()[:, None]
        self.weight = heads.weight.detach().transpose(1, 2).contiguous()
        self.tokens = decoder.embed_tokens.weight.detach()

    def forward(
        self, hidden: Tensor | None, newest: int, keys: Tensor, values: Tensor, bias: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of the next positions and their probabilities; `hidden` is None for an empty text.

        # [d_model], keys [1, head, position, head_dim] → [next position, width] twice
        """
        x = (self.start if hidden is None else hidden) + self.ahead + self.newest(self.tokens[newest])
        query = self.query(self.look_norm(x)).view(1, x.size(0), self.heads, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, keys, values)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.size(0), -1))
        x = x + self.outer(functional.gelu(self.inner(self.last_norm(x))))
        x = x + functional.silu(torch.baddbmm(self.bias, x[:, None], self.weight)[:, 0])
        lm_head = self.tokens.narrow(0, 0, bias.size(0))
        probabilities, ids = (functional.linear(x, lm_head).float() + bias).softmax(-1).topk(width)
        return ids, probabilities


def cpu_heads(heads: WhisperHeads, decoder: WhisperDecoder) -> Any:
    """`CpuDraftHeads` in TorchScript."""
    return scripted(CpuDraftHeads(heads, decoder))
