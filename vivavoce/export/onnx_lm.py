"""Small language models as one ONNX graph each: the next rows of a sequence behind its keys and values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.export.onnx_graph import OnnxExport, Stream
from vivavoce.models.interface import GenerativeModel
from vivavoce.nn.paged import CachePiece

MOST_PARAMETERS = 2_000_000_000  # larger ones belong into an engine that batches


@dataclass(frozen=True)
class DynamicPiece(CachePiece):
    """All new rows of the one sequence; its sizes are symbols while a graph is traced."""

    @property
    def length(self) -> Any:
        return self.rows.stop


class DenseRows:
    """What the layers see as a batch of rows: one sequence whose past is two plain tensors."""

    singles = 0
    shared_mode: int | None = None

    def __init__(self, count: int, past_keys: Tensor, past_values: Tensor) -> None:
        before = past_keys.shape[1]
        self.positions = before + torch.arange(count, device=past_keys.device)
        self.pieces = (DynamicPiece(slice(0, count), 0, before),)
        self.past_keys, self.past_values = past_keys, past_values
        self.keys: dict[int, Tensor] = {}  # by layer, in whatever order they are computed
        self.values: dict[int, Tensor] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put the new rows behind the past of a layer.  # each [row, head, head_dim]"""
        self.keys[layer] = torch.cat([self.past_keys[layer], keys])
        self.values[layer] = torch.cat([self.past_values[layer], values])

    def read(self, layer: int, piece: CachePiece, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """All of them, as they are.  # each [context, head, head_dim]"""
        return self.keys[layer], self.values[layer]


class NextRows(nn.Module):
    """Rows and a past to the logits of every channel and the past behind those rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor, past_keys: Tensor, past_values: Tensor) -> tuple[Tensor, ...]:
        """# [row, channel], each past [layer, past, head, head_dim] → [row, id] per head, past + row"""
        batch = DenseRows(rows.shape[0], past_keys, past_values)
        model: Any = self.model
        logits = model.logits(model(rows, batch))
        heads = logits if isinstance(logits, tuple) else (logits,)
        return *heads, *(torch.stack([held[layer] for layer in sorted(held)]) for held in (batch.keys, batch.values))


def lm_graphs(model: nn.Module, heads: tuple[str, ...] = ("logits",)) -> Iterator[OnnxExport]:
    """A model that the engine can run; `heads` names its logits."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        raise InputError(
            f"{count / 1e9:.1f} B parameters are no small model; `viva export trtllm` writes it for an engine"
        )
    generative: GenerativeModel = model  # type: ignore[assignment]
    shape, vocabularies = generative.kv_shape, generative.vocabularies

    def example(rows: int, past: int) -> dict[str, Tensor]:
        given = torch.stack([torch.randint(0, size, (rows,)) for size in vocabularies], dim=1)
        remembered = torch.randn(2, shape.layers, past, shape.heads, shape.head_dim)
        return {"rows": given, "past_keys": remembered[0], "past_values": remembered[1]}

    axes = {"rows": {0: "row"}, "past_keys": {1: "past"}, "past_values": {1: "past"}}
    outputs = (*heads, "keys", "values")
    following = tuple(example(rows, 0) for rows in (1, 2, 1))
    stream = Stream(example(4, 0), following, {"past_keys": "keys", "past_values": "values"})
    yield OnnxExport("lm", NextRows(model), example(5, 7), axes, outputs, (example(1, 12),), stream=stream)
