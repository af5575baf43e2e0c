"""The pre-LN transformer layer of Whisper, over whole inputs or continued from a cache."""

from torch import Tensor, nn
from torch.nn import functional

from vivavoce.nn.streaming import Extension, StreamCache, extend


class PackedProjection(nn.Module):
    """Query, key and value projection as one matrix, which the published three are views of. Not in checkpoints."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """# [.., d_model] → [.., 3 × d_model]"""
        return functional.linear(x, self.weight, self.bias)


class WhisperAttention(nn.Module):
    """Multi-head self-attention with the published names; the key projection has no bias."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = d_model // heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.packed: nn.Module | None = None
        """Query, key and value projection as one product: int8, or plain weights that the three are views of."""

    @property
    def projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The query, key and value projections."""
        return self.q_proj, self.k_proj, self.v_proj

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """All positions at once; `mask` is True (or 0.0) where a query may look, [.., query, key]."""
        query, key, value = self._project(x)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        return self._output(mixed)

    def step(self, streams: Extension, layer: int, x: Tensor) -> Tensor:
        """The next positions of streams, as layer number `layer` of their caches."""
        return self._output(streams.attend(layer, *self._project(x)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value.  # [.., d_model] → [.., head, head_dim] each"""
        if self.packed is not None:
            query, key, value = self.packed(x).unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)
            return query, key, value
        query, key, value = (project(x).unflatten(-1, (self.heads, self.head_dim)) for project in self.projections)
        return query, key, value

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`project` with time behind the heads.  # [batch, time, d_model] → [batch, head, time, head_dim] each"""
        query, key, value = (part.transpose(1, 2) for part in self.project(x))
        return query, key, value

    def _output(self, mixed: Tensor) -> Tensor:
        projected: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class WhisperLayer(nn.Module):
    """x + attention(norm(x)), then x + fc2(gelu(fc1(norm(x))))."""

    def __init__(self, d_model: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.self_attn = WhisperAttention(d_model, heads)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, ffn)
        self.fc2 = nn.Linear(ffn, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)

    def initial_state(self, batch: int = 1, layers: int = 1) -> StreamCache:
        """The cache of a stack of such layers before the first position."""
        attention = self.self_attn
        return StreamCache.empty(layers, attention.heads, attention.head_dim, batch, attention.k_proj.weight)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """All positions at once.  # [batch, time, d_model] → the same; give `mask` or `causal`, not both"""
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask, causal)
        return self._feed_forward(x)

    def step(self, state: StreamCache, x: Tensor) -> tuple[Tensor, StreamCache]:
        """The next positions of a stream through this layer alone.  # [batch, time, d_model]"""
        streams = extend([state], x.shape[1])
        return self.step_in_stack(streams, 0, x), streams.after[0]

    def step_in_stack(self, streams: Extension, layer: int, x: Tensor) -> Tensor:
        """The next positions of streams through this layer, number `layer` of a stack; rows in the streams' order."""
        x = x + self.self_attn.step(streams, layer, self.self_attn_layer_norm(x))
        return self._feed_forward(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x))))
        return out
