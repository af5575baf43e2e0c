"""The pre-norm decoder of the Llama and Qwen families: attention, then a gated feed-forward (SwiGLU)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vivavoce.nn import packed_decoder
from vivavoce.nn.attention import PagedAttention, RotaryTable
from vivavoce.nn.linear import Embedding, Linear, PackedLinear, RMSNorm
from vivavoce.nn.paged_kv import KVShape, RowBatch
from vivavoce.nn.quantised import project


class GatedFeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = PackedLinear(hidden, {"gate_proj": inner, "up_proj": inner})
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row."""
        return project(self.down_proj, project(self.gate_up_proj, x, gated=True))


class DecoderLayer(nn.Module):
    """One layer of a Qwen-type decoder. The residual add is left to the next norm, which is fused with it."""

    def __init__(self, attention: PagedAttention, hidden: int, inner: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = GatedFeedForward(hidden, inner)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotary: RotaryTable, layer: int, batch: RowBatch
    ) -> tuple[Tensor, Tensor]:
        """The layer's output and the residual stream that it is to be added to."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotary, layer, batch)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual

    def store_kv(self, x: Tensor, residual: Tensor | None, rotary: RotaryTable, layer: int, batch: RowBatch) -> None:
        """Store the rows' keys and values without computing the layer's output."""
        x, _ = self.input_layernorm.add(x, residual)
        self.self_attn.store_kv(x, rotary, layer, batch)


@dataclass(frozen=True)
class TrunkSizes:
    """Sizes of a Llama or Qwen decoder. Qwen2 has biases on q, k and v; Qwen3 has norms on q and k."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool = False
    qk_norm: bool = False

    @property
    def kv_shape(self) -> KVShape:
        """Shape of a row in the cache."""
        return KVShape(self.num_hidden_layers, self.num_key_value_heads, self.head_dim)


class DecoderTrunk(nn.Module):
    """Embedding, layers and final norm, under the published names."""

    def __init__(self, sizes: TrunkSizes) -> None:
        super().__init__()
        self.embed_tokens = Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(_layer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.rotary = RotaryTable(sizes.head_dim, sizes.max_position_embeddings, sizes.rope_theta)
        self._packed_step = packed_decoder.PackedDecoderStep()

    def forward(self, x: Tensor, batch: RowBatch) -> Tensor:
        """Normed states of embedded rows.  # [row, hidden]"""
        if self._packed_step.takes(self, x, batch):
            normed: Tensor = self.norm(self._packed_step(self, x, batch))
            return normed
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, self.rotary, index, batch)
        return self.norm.add(x, residual)[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._packed_step.forget()  # it has the addresses of the weights
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def _layer(sizes: TrunkSizes) -> DecoderLayer:
    attention = PagedAttention(
        sizes.hidden_size,
        sizes.num_attention_heads,
        sizes.num_key_value_heads,
        sizes.head_dim,
        sizes.rms_norm_eps,
        bias=sizes.attention_bias,
        qk_norm=sizes.qk_norm,
    )
    return DecoderLayer(attention, sizes.hidden_size, sizes.intermediate_size, sizes.rms_norm_eps)
