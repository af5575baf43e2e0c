"""A pre-norm decoder layer: attention, then a gated feed-forward (SwiGLU), each added to the residual stream."""

from torch import Tensor, nn
from torch.nn import functional

from vivavoce.nn import kernels
from vivavoce.nn.attention import PagedAttention
from vivavoce.nn.linear import Linear, PackedLinear
from vivavoce.nn.norm import RMSNorm
from vivavoce.nn.paged import RowBatch
from vivavoce.nn.rope import RotaryTable


class GatedFeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = PackedLinear(hidden, {"gate_proj": inner, "up_proj": inner})
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row by itself."""
        both = self.gate_up_proj(x)
        if kernels.usable(both):
            return self.down_proj(kernels.silu_multiply(both))
        gate, up = both.chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class DecoderLayer(nn.Module):
    """One layer of a Qwen-type decoder. It passes the residual stream on unadded, so that the next norm can add it."""

    def __init__(self, attention: PagedAttention, hidden: int, inner: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = GatedFeedForward(hidden, inner)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotary: RotaryTable, layer: int, batch: RowBatch
    ) -> tuple[Tensor, Tensor]:
        """The layer's contribution and the residual stream it is still to be added to."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotary, layer, batch)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual
