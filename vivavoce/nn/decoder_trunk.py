"""A whole decoder of the Llama family, from ids or embedded rows to normed states, over a paged cache."""

from dataclasses import dataclass

from torch import Tensor, nn

from vivavoce.nn.attention import PagedAttention
from vivavoce.nn.decoder_layer import DecoderLayer
from vivavoce.nn.linear import Embedding
from vivavoce.nn.norm import RMSNorm
from vivavoce.nn.paged import KVShape, RowBatch
from vivavoce.nn.rope import RotaryTable


@dataclass(frozen=True)
class TrunkSizes:
    """What tells one member of the family from another. Qwen2 has biases on q, k and v; Qwen3 has norms on q and k."""

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
        """What a row leaves in the cache."""
        return KVShape(self.num_hidden_layers, self.num_key_value_heads, self.head_dim)


class DecoderTrunk(nn.Module):
    """Embedding, layers and last norm, under the published names."""

    def __init__(self, sizes: TrunkSizes) -> None:
        super().__init__()
        self.embed_tokens = Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(_layer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.rotary = RotaryTable(sizes.head_dim, sizes.max_position_embeddings, sizes.rope_theta)

    def forward(self, x: Tensor, batch: RowBatch) -> Tensor:
        """Normed states of embedded rows.  # [row, hidden]"""
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, self.rotary, index, batch)
        return self.norm.add(x, residual)[0]


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
