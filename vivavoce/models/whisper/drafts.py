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


class TrainedBeside(nn.Module):
    """A draft module built from the width of a model and some sizes of its own."""

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
    """The weights of a draft decoder that it does not share: layers and the last norm."""

    def __init__(self, decoder: WhisperDecoder) -> None:
        super().__init__()
        self.layers, self.layer_norm = decoder.layers, decoder.layer_norm


def distilled(decoder: WhisperDecoder, layers: int) -> WhisperDecoder:
    """A decoder of fewer layers, taken from the given one at even distances, that shares its embeddings.

    The first and the last layer are taken; of one layer, the last.
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
    """A distilled decoder beside the one it was distilled from."""
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


Look = Callable[[Tensor], Tensor]
"""Cross-attention of queries to their windows.  # […, place, head, head_dim] → the same"""


class WhisperHeads(TrainedBeside):
    """Medusa heads: a hidden state for each of the next positions, which attend to the window once more."""

    kind = "heads"

    def __init__(self, d_model: int, heads: int, ffn: int, places: int = PLACES) -> None:
        super().__init__()
        if places < 1:
            raise InputError(f"heads look at least 1 token ahead, not {places}")
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
    def beside(cls, decoder: WhisperDecoder, places: int = PLACES) -> "WhisperHeads":
        """Untrained heads for a decoder, with the cross-attention queries of its last layer."""
        config, last = decoder.config, decoder.stack[-1].encoder_attn
        heads = cls(config.d_model, config.decoder_attention_heads, 2 * config.d_model, places)
        heads.q_proj.load_state_dict(last.q_proj.state_dict())
        return heads.to(last.q_proj.weight.device)

    def forward(self, hidden: Tensor, newest: Tensor, look: Look) -> Tensor:
        """Hidden states of the next positions.  # [.., d_model], [.., d_model] → [.., place, d_model]

        `hidden` is the state the newest token was drawn from, or `start` where it was not drawn; `newest` is that
        token's embedding.
        """
        x = hidden[..., None, :] + self.ahead.weight + self.newest_proj(newest)[..., None, :]
        query = self.q_proj(self.look_norm(x)).unflatten(-1, (self.heads, -1))
        x = x + self.out_proj(look(query).flatten(-2))
        x = x + self.fc2(functional.gelu(self.fc1(self.final_norm(x))))
        changed = [functional.linear(x[..., p, :], self.weight[p], self.bias[p]) for p in range(self.places)]
        return x + functional.silu(torch.stack(changed, dim=-2))

    def save(self, folder: str | Path, config: WhisperConfig) -> None:
        """Write the heads for a model of these sizes."""
        sizes = {"heads": self.heads, "ffn": self.fc1.out_features, "places": self.places}
        write_draft(self, folder, self.kind, config, sizes)


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


def pieces_to_bf16(guesser: PieceGuesser) -> None:
    """Run a `PieceGuesser` that was loaded in bfloat16 in TorchScript."""
    layers = [layer for layer in guesser.layers if isinstance(layer, WhisperLayer)]
    guesser.layers = nn.ModuleList(scripted(OptimisedEncoderLayer(layer, BF16)) for layer in layers)


class Int8DraftLinear(nn.Module):
    """`CpuLinear` with int8 weights: a draft need not be exact, and its weights then stay in the nearest cache."""

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
    min_chance: float
    """The draft ends where the chance that all of it is right falls below this."""
    beginnings: int
    """A first token that is a timestamp counts as likely as this many timestamps together."""
    min_beginning: float
    """The chance from which on a timestamp counts among them."""
    timestamps: int
    """The first id that is a timestamp."""
    end: int
    """The id that ends a text, which is not drafted."""


@dataclass
class CpuDraftText:
    """Keys and values of a text's first tokens; going back to an earlier token is a matter of `length`."""

    memory: WindowMemory
    keys: Tensor  # [layer, place, head, head_dim]
    values: Tensor
    length: int = 0


class CpuDraftLayers(CpuDecoder):
    """A `CpuDecoder` of one text, and the loop that drafts with it."""

    def __init__(self, decoder: WhisperDecoder, rounded: bool) -> None:
        # int8 for the two largest products only: it takes longer to multiply, and nothing more is gained.
        product = Int8DraftLinear if rounded else CpuLinear
        packed = (packed_projection(layer) for layer in decoder.stack)
        super().__init__(
            decoder, [product(column_major_for_one_row(weight), bias) for weight, bias in packed], drafts=True
        )
        self.lm_head = product(self.tokens, self.tokens.new_zeros(len(self.tokens)))
        self.places = torch.arange(len(self.positions), device=self.tokens.device)

    def newest_state(
        self, ids: Tensor, text: tuple[Tensor, Tensor], first: int, window: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The state behind the last of the next tokens.  # [token] → [1, d_model]"""
        count = ids.size(0)
        written, read = self.places.narrow(0, first, count), self.places.narrow(0, 0, first + count)
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
        """The likeliest tokens behind the next ones, one after another: see `CpuDraftDecoder.draft`."""
        chain: list[int] = []
        unlikely, beginnings = torch.empty(0), torch.empty(0)
        total, bias = 1.0, bias_first
        while len(chain) < limits.max_tokens:
            hidden = self.newest_state(ids, text, first, window)
            first += ids.size(0)
            chances = self.lm_head.first(hidden, bias).softmax(-1).select(0, 0)
            best, index = chances.max(0)
            chance, token = float(best), int(index)
            if len(chain) == 0 and token >= limits.timestamps:
                beginnings = chances
                likely = chances.topk(limits.beginnings)[0]
                chance = float(likely[likely > limits.min_beginning].sum())
            total *= chance
            if total < limits.min_chance or token == limits.end:
                unlikely = chances
                break
            chain.append(token)
            ids, bias = index.unsqueeze(0), bias_later
        return chain, first, unlikely, beginnings


class CpuDraftDecoder:
    """Drafts the likeliest tokens by what `WhisperDecoder.step` gives, or nearly so."""

    def __init__(self, decoder: WhisperDecoder, rounded: bool = False) -> None:
        self.config = decoder.config
        self._layers: Any = scripted(
            CpuDraftLayers(decoder, rounded and decoder.config.d_model % CPU_COLUMN_BLOCK == 0)
        )
        self._warm_up()

    def _warm_up(self) -> None:
        """Draft something: TorchScript optimises in its first calls, which takes as long as many drafts."""
        config, heads = self.config, self.config.decoder_attention_heads
        weight = self._layers.tokens
        empty = weight.new_zeros(config.decoder_layers, 1, heads, 2, config.d_model // heads)
        bias = torch.zeros(config.vocab_size, device=weight.device)
        limits = DraftLimits(2, 0.0, 1, 0.0, config.vocab_size, -1)
        with torch.inference_mode():
            for tokens in ([0, 0], [0], [0]):
                self.draft(self.begin(WindowMemory(empty, empty)), tokens, bias, bias, limits)

    def begin(self, memory: WindowMemory) -> CpuDraftText:
        """An empty text of one window."""
        config, heads = self.config, self.config.decoder_attention_heads
        size = (config.decoder_layers, config.max_target_positions, heads, config.d_model // heads)
        return CpuDraftText(memory, memory.keys.new_empty(size), memory.keys.new_empty(size))

    def draft(
        self, text: CpuDraftText, tokens: list[int], bias_first: Tensor, bias_later: Tensor, limits: DraftLimits
    ) -> tuple[list[int], Tensor, Tensor]:
        """Greedy tokens behind the next `tokens`; all of them are then in `text` but the last drafted one.

        Then the chances of what would follow, where they were too low to go on (else empty), and those of the first
        drafted token, where it is a timestamp. Biases are added to the logits of the first and of later drafted tokens;
        ids behind their ends are not considered.
        """
        ids = torch.tensor(tokens, device=text.keys.device)
        memory = text.memory
        chain, text.length, unlikely, beginnings = self._layers.draft(
            ids, (text.keys, text.values), text.length, (memory.keys, memory.values), bias_first, bias_later, limits
        )
        return chain, unlikely, beginnings


class CpuDraftHeads(nn.Module):
    """`WhisperHeads` and the LM head behind them, for one text."""

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
        """The likeliest tokens of the places ahead, and their chances; `hidden` is None where a text has no state yet.

        # [d_model], keys [1, head, position, head_dim] → [place, width] twice
        """
        x = (self.start if hidden is None else hidden) + self.ahead + self.newest(self.tokens[newest])
        query = self.query(self.look_norm(x)).view(1, x.size(0), self.heads, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, keys, values)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.size(0), -1))
        x = x + self.outer(functional.gelu(self.inner(self.last_norm(x))))
        x = x + functional.silu(torch.baddbmm(self.bias, x[:, None], self.weight)[:, 0])
        lm_head = self.tokens.narrow(0, 0, bias.size(0))
        chances, ids = (functional.linear(x, lm_head).float() + bias).softmax(-1).topk(width)
        return ids, chances


def cpu_heads(heads: WhisperHeads, decoder: WhisperDecoder) -> Any:
    """`CpuDraftHeads` in TorchScript."""
    return scripted(CpuDraftHeads(heads, decoder))
