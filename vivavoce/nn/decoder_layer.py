"""A pre-norm decoder layer: attention, then a gated feed-forward (SwiGLU), each added to the residual stream."""

from torch import Tensor, nn

from vivavoce.nn.attention import PagedAttention
from vivavoce.nn.few_rows import project
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
        return project(self.down_proj, project(self.gate_up_proj, x, gated=True))


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

    def remember(self, x: Tensor, residual: Tensor | None, rotary: RotaryTable, layer: int, batch: RowBatch) -> None:
        """Keep the rows' keys and values, where nobody asks what the layer makes of them."""
        x, _ = self.input_layernorm.add(x, residual)
        self.self_attn.remember(x, rotary, layer, batch)
