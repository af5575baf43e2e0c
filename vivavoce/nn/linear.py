"""Linear layers and norms: uninitialised and packed layers, norms fused with their neighbours, and CPU variants.

The CPU variants are column-major float32 and oneDNN bfloat16 products, each plain, with a GELU, or with a residual add.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels
from vivavoce.cpu_speed import is_onednn_slow, uses_mkl

_is_postponed = ContextVar("_is_postponed", default=False)


@contextmanager
def postponed() -> Iterator[None]:
    """`Linear`s created inside have no memory (meta device): a quantised checkpoint replaces them."""
    token = _is_postponed.set(True)
    try:
        yield
    finally:
        _is_postponed.reset(token)


class Linear(nn.Module):
    """`x @ weight.T + bias`, uninitialised until a checkpoint is loaded."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        device = "meta" if _is_postponed.get() else None
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, device=device), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return functional.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """Several published projections of the same input as one matrix, e.g. q, k and v, or gate and up."""

    def __init__(self, inputs: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(inputs, sum(parts.values()), bias)
        self.parts = dict(parts)

    def published_tensors(self) -> dict[str, Tensor]:
        """`q_proj.weight` and so on, each a view of its rows in the packed matrix."""
        named: dict[str, Tensor] = {}
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                views = tensor.split(list(self.parts.values()))
                named |= {f"{part}.{kind}": view for part, view in zip(self.parts, views, strict=True)}
        return named


class Embedding(nn.Module):
    """A table of vectors, uninitialised until a checkpoint is loaded."""

    def __init__(self, entries: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(entries, size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors of these ids."""
        return functional.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """Scale by the root mean square, in float32, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The normed input."""
        if kernels.usable(x):
            return kernels.add_rms_norm(x, None, self.weight, self.eps)[0]
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum, which is the new residual stream."""
        if kernels.usable(x):
            return kernels.add_rms_norm(x, residual, self.weight, self.eps)
        total = x if residual is None else x + residual
        return rms_norm(total, self.weight, self.eps), total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Reference of the fused kernel. Statistics in float32 or float64, as in the published models."""
    if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


MAX_FUSED_ROWS = 4096  # beyond which cuBLAS is faster than the fused kernel


def norm_linear(
    x: Tensor,  # [.., inputs]
    weight: Tensor,  # [outputs, inputs]
    bias: Tensor | None = None,
    norm: nn.LayerNorm | None = None,
    gelu: bool = False,
    residual: Tensor | None = None,  # [.., outputs]
) -> Tensor:
    """`gelu(linear(norm(x))) + residual`; all but the linear are optional.  # [.., outputs]"""
    rows = x.numel() // x.shape[-1]
    if norm is not None and not (kernels.usable(x) and rows <= kernels.FUSED_NORM_ROWS):
        x, norm = layer_norm(x, norm), None
    if kernels.usable(x) and rows <= MAX_FUSED_ROWS and (norm is not None or gelu or residual is not None):
        scale_shift_eps = None if norm is None else (norm.weight, norm.bias, norm.eps)
        return kernels.norm_linear(x, weight, bias, scale_shift_eps, gelu, residual)
    y = functional.linear(x, weight, bias)
    if gelu:
        y = functional.gelu(y)
    return y if residual is None else y + residual


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """`norm(x)` over the last dimension."""
    if kernels.usable(x):
        return kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)
    normed: Tensor = norm(x)
    return normed


def norm_mish(x: Tensor, norm: nn.LayerNorm, added: Tensor | None = None) -> Tensor:
    """`mish(norm(x)) + added`.  # [.., channel], [channel]"""
    if kernels.usable(x):
        return kernels.layer_norm(x, norm.weight, norm.bias, norm.eps, mish=True, added=added)
    y = functional.mish(norm(x))
    return y if added is None else y + added


def modulated_norm(
    x: Tensor,  # [.., channel]
    gated: tuple[Tensor, Tensor] | None,  # [channel], [.., channel]
    scale: Tensor,  # [channel]
    shift: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`x + gate * added`, and its layer norm without affine weights, scaled and shifted (adaLN)."""
    if kernels.usable(x):
        return kernels.modulated_norm(x, gated, scale, shift, eps)
    if gated is not None:
        x = torch.addcmul(x, *gated)
    normed = functional.layer_norm(x, x.shape[-1:], eps=eps)
    return x, torch.addcmul(shift, normed, 1 + scale)


def column_major(weight: Tensor) -> Tensor:
    """The matrix in column-major layout if it is on a CPU."""
    return weight.t().contiguous().t() if weight.device.type == "cpu" else weight


def column_major_for_one_row(weight: Tensor) -> Tensor:
    """The fastest layout for products with a single row on this CPU: column-major for MKL, else row-major."""
    return column_major(weight) if uses_mkl() else weight.contiguous()


def column_major_for_many_rows(weight: Tensor) -> Tensor:
    """The fastest layout for products with dozens of rows on this CPU: any for MKL, else column-major."""
    return weight if uses_mkl() else column_major(weight)


def joined_weight(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Projections of the same input as one column-major matrix, and its bias."""
    biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
    return column_major(torch.cat([part.weight.detach() for part in parts])), torch.cat(biases)


def become_views(parts: Sequence[nn.Linear], weight: Tensor) -> None:
    """Make the projections' weights views of the joined matrix, so that nothing is stored twice."""
    for part, view in zip(parts, weight.split([part.out_features for part in parts]), strict=True):
        part.weight.data = view


def gelu(x: Tensor, by_parts: bool) -> Tensor:
    """The exact GELU; `by_parts` from erf and products, where oneDNN takes longer to prepare it than to compute it."""
    return torch.erf(x * 0.5**0.5).add_(1.0).mul_(x).mul_(0.5) if by_parts else functional.gelu(x)


class ColumnMajorLinear(nn.Module):
    """`x @ weight.T + bias`; callers choose the layout of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.bias = weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
        self.by_parts = is_onednn_slow()

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension.  # [.., input] → [.., output]"""
        return functional.linear(x, self.weight, self.bias)


class ColumnMajorLinearGelu(ColumnMajorLinear):
    """Linear followed by a GELU."""

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension.  # [.., input] → [.., output]"""
        return gelu(functional.linear(x, self.weight, self.bias), self.by_parts)


class ColumnMajorLinearAdd(ColumnMajorLinear):
    """Linear followed by a residual add."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """Project the last dimension and add.  # [.., input], [.., output] → [.., output]"""
        return functional.linear(x, self.weight, self.bias).add_(residual)


class TableProduct(nn.Module):
    """Logits from a tied embedding table, which stays row-major for lookups."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension.  # [.., input] → [.., output]"""
        product = torch.mm(self.table, x.flatten(0, -2).t()).t()
        return product.contiguous().view([*x.shape[:-1], self.table.shape[0]])


class MkldnnLinear(nn.Module):
    """`x @ weight.T + bias` by oneDNN in bfloat16, its weight in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        plain = weight.detach().to(torch.bfloat16).contiguous()
        self.mkldnn_weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain)
        self.bias = weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
        self.bias = self.bias.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension.  # [.., input] bfloat16 → [.., output]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.mkldnn_weight, self.bias, "none", [], "")


class MkldnnLinearGelu(MkldnnLinear):
    """Linear followed by a GELU."""

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension.  # [.., input] bfloat16 → [.., output]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.mkldnn_weight, self.bias, "gelu", [], "none")


class MkldnnLinearAdd(MkldnnLinear):
    """Linear followed by a residual add."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """Project the last dimension and add.  # [.., input] bfloat16, [.., output] → [.., output]"""
        return torch.ops.mkldnn._linear_pointwise(x, residual, self.mkldnn_weight, self.bias, "add")


class ConvAsProduct(nn.Module):
    """A convolution as one matrix product over the receptive field of each output."""

    def __init__(self, conv: nn.Conv1d, product: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
        super().__init__()
        self.size, self.stride, self.padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
        self.product = product(conv.weight.permute(0, 2, 1).flatten(1), conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, time, channel] → [batch, output, channel]"""
        padded = functional.pad(x, (0, 0, self.padding, self.padding)).contiguous()
        batch, time, channels = padded.size(0), padded.size(1), padded.size(2)
        outputs = (time - self.size) // self.stride + 1
        steps = (time * channels, self.stride * channels, 1)
        seen = padded.as_strided((batch, outputs, self.size * channels), steps)
        out: Tensor = self.product(seen.contiguous())
        return out
