"""Whisper on CUDA: a decode step by fused kernels, and the encoder by CUDA graphs.

The arithmetic is that of `model.py`, and tests hold the results equal. What changes: norms, residual adds and cache
writes are fused into the products of a step of single rows. Other rows (prompts, long drafts) take
`WhisperDecoder.run` over the engine's pages.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels
from vivavoce.models.whisper.model import (
    WhisperDecoder,
    WhisperDecoderLayer,
    WhisperEncoder,
)
from vivavoce.nn.cuda_graphs import Graphed
from vivavoce.nn.paged_kv import RowBatch

CrossAttend = Callable[[Tensor, int], Tensor]
"""Cross-attention of rows to their windows, by queries and layer number.  # [row, head, head_dim] → the same"""


def is_single(x: Tensor, batch: RowBatch) -> bool:
    """Whether every row of the batch is a sequence of its own, and the CUDA kernels can be used."""
    return kernels.usable(x) and batch.singles == x.shape[0]


class ResidualStream(Protocol):
    """The residual stream of a step: layers project it and add to it."""

    def text_query(self, layer: int, norm: nn.LayerNorm, weight: Tensor, bias: Tensor) -> Tensor:
        """Project the normed stream to query, key and value; store key and value in the pages, return the query."""
        ...

    def project(self, norm: nn.LayerNorm, linear: nn.Linear, gelu: bool = False) -> Tensor:
        """A projection of the normed stream."""
        ...

    def add(self, linear: nn.Linear, x: Tensor) -> None:
        """Add a projection to the stream."""
        ...

    def normed(self, norm: nn.LayerNorm) -> Tensor:
        """The normed stream."""
        ...


class FusedStream:
    """For few rows (`kernels.takes`): every product is one launch that includes the norm before and the add after it.

    `weights` are the matrices of the step in the order of their products; each launch prefetches the next one.
    """

    def __init__(self, x: Tensor, weights: Sequence[Tensor], batch: RowBatch) -> None:
        self.x, self.batch = x, batch
        self._following = iter([*weights[1:], None])

    def text_query(self, layer: int, norm: nn.LayerNorm, weight: Tensor, bias: Tensor) -> Tensor:
        """The same launch stores keys and values."""
        pages = kernels.Pages(self.batch, layer)
        return kernels.row_linear(self.x, weight, bias, norm=_norm(norm), pages=pages, following=next(self._following))

    def project(self, norm: nn.LayerNorm, linear: nn.Linear, gelu: bool = False) -> Tensor:
        """One launch with the norm and the GELU."""
        following = next(self._following)
        return kernels.row_linear(self.x, linear.weight, linear.bias, _norm(norm), gelu, following=following)

    def add(self, linear: nn.Linear, x: Tensor) -> None:
        """One launch with the residual add."""
        following = next(self._following)
        self.x = kernels.row_linear(x, linear.weight, linear.bias, residual=self.x, following=following)

    def normed(self, norm: nn.LayerNorm) -> Tensor:
        """The norm, without a product."""
        return kernels.add_layer_norm(self.x, None, _norm(norm))[1]


class CublasStream:
    """For more rows: products by cuBLAS, each residual add fused with the norm that follows it."""

    def __init__(self, x: Tensor, weights: Sequence[Tensor], batch: RowBatch) -> None:
        self.x, self.batch = x, batch
        self._added: Tensor | None = None

    def text_query(self, layer: int, norm: nn.LayerNorm, weight: Tensor, bias: Tensor) -> Tensor:
        """A separate launch stores keys and values."""
        projected = functional.linear(self.normed(norm), weight, bias)
        kernels.store_rows(projected, layer, self.batch)
        return projected.unflatten(-1, (3, -1))[:, 0]

    def project(self, norm: nn.LayerNorm, linear: nn.Linear, gelu: bool = False) -> Tensor:
        """Norm, product, GELU."""
        projected: Tensor = linear(self.normed(norm))
        return functional.gelu(projected) if gelu else projected

    def add(self, linear: nn.Linear, x: Tensor) -> None:
        """Deferred to the next norm."""
        self._added = linear(x)

    def normed(self, norm: nn.LayerNorm) -> Tensor:
        """The deferred add and the norm in one launch."""
        self.x, normed = kernels.add_layer_norm(self.x, self._added, _norm(norm))
        return normed


def single_rows_step(
    decoder: WhisperDecoder,
    packed: Sequence[tuple[Tensor, Tensor]],
    x: Tensor,
    batch: RowBatch,
    cross_attend: CrossAttend,
) -> Tensor:
    """`WhisperDecoder.run` for single rows; `packed` are joined q, k, v projections.  # [row, d_model] → the same"""
    weights = [weight for index, layer in enumerate(decoder.stack) for weight in _weights(layer, packed[index])]
    stream_type = FusedStream if kernels.takes(weights, x.shape[0]) else CublasStream
    stream: ResidualStream = stream_type(x.contiguous(), weights, batch)
    for index, layer in enumerate(decoder.stack):
        text, window = layer.self_attn, layer.encoder_attn
        heads = (text.heads, text.head_dim)
        query = stream.text_query(index, layer.self_attn_layer_norm, *packed[index])
        mixed = kernels.page_attention(query.unflatten(-1, heads), index, batch).flatten(-2)
        stream.add(text.out_proj, mixed)
        query = stream.project(layer.encoder_attn_layer_norm, window.q_proj)
        mixed = cross_attend(query.unflatten(-1, heads), index).flatten(-2)
        stream.add(window.out_proj, mixed)
        inner = stream.project(layer.final_layer_norm, layer.fc1, gelu=True)
        stream.add(layer.fc2, inner)
    return stream.normed(decoder.layer_norm)


def _weights(layer: WhisperDecoderLayer, packed: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The matrices of a layer, in the order in which they are multiplied."""
    window = layer.encoder_attn
    linears = layer.self_attn.out_proj, window.q_proj, window.out_proj, layer.fc1, layer.fc2
    return packed[0], *(linear.weight for linear in linears)


def _norm(norm: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return norm.weight, norm.bias, norm.eps


MAX_GRAPHED_WINDOWS = 2
MAX_GRAPHED_LENGTHS = 32  # different lengths of trimmed windows


Size = tuple[int, int]
"""Windows, and the frames of each."""


class WindowEncoder:
    """The encoder, by CUDA graphs on a GPU.  # [window, mel, frame] → [window, frame / 2, d_model]"""

    def __init__(self, encoder: WhisperEncoder) -> None:
        self.encoder = encoder
        self._graphed = Graphed[Size](self._encode)
        self._seen: set[Size] = set()

    def __call__(self, mel: Tensor) -> Tensor:
        mel = mel.to(self.encoder.conv1.weight.dtype)
        size = (mel.shape[0], mel.shape[2])
        if mel.is_cuda and mel.shape[0] <= MAX_GRAPHED_WINDOWS and self._is_captured(size):
            return self._graphed(size, [mel])[0]
        states: Tensor = self.encoder(mel)
        return states

    def _is_captured(self, size: Size) -> bool:
        """Whether windows of a size have a graph or get one: full windows at first use, others at the second."""
        if size[1] == self.encoder.config.window_frames or size in self._graphed:
            return True
        is_repeated = size in self._seen
        self._seen.add(size)
        return is_repeated and self._graphed.captured < MAX_GRAPHED_LENGTHS

    def _encode(self, size: Size, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (self.encoder(tensors[0]),)
