"""Draft models for speculative decoding with a Whisper: distilled decoders, Medusa heads and a CTC head, all fed by
the encoder of the large model.

The `config.json` of a draft's folder has its kind and the sizes of the model it was trained for; the folder holds only
the weights that the draft does not share.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models import read_config
from vivavoce.models.checkpoint import Checkpoint, load_weights, save_weights
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.model import WhisperDecoder, WhisperLayer
from vivavoce.nn.modules import allocating

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
