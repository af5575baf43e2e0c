"""float32 products of CPUs by weights that lie column by column, and what follows them. TorchScript runs all of this.

So a few rows are multiplied in two thirds of the time, and on Arm CPUs many: there oneDNN, which would take weights as
they were, prepares every product and every GELU anew, which costs as much as forty rows do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.device import has_x86_kernels_here


def column_major(weight: Tensor) -> Tensor:
    """The same matrix, on a CPU column by column."""
    return weight.t().contiguous().t() if weight.device.type == "cpu" else weight


def column_major_for_one_row(weight: Tensor) -> Tensor:
    """The same matrix as a CPU multiplies a single row by it soonest: on Arm row by row, else column by column."""
    return column_major(weight) if has_x86_kernels_here() else weight.contiguous()


def column_major_for_many_rows(weight: Tensor) -> Tensor:
    """The same matrix as a CPU multiplies dozens of rows by it soonest: on Arm column by column, else as it lies."""
    return weight if has_x86_kernels_here() else column_major(weight)


def joined_weight(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Projections of the same input as one matrix, laid out, and its bias."""
    biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
    return column_major(torch.cat([part.weight.detach() for part in parts])), torch.cat(biases)


def become_views(parts: Sequence[nn.Linear], weight: Tensor) -> None:
    """Let projections be parts of the matrix they were joined to, so that nothing is kept twice."""
    for part, mine in zip(parts, weight.split([part.out_features for part in parts]), strict=True):
        part.weight.data = mine


def gelu(x: Tensor, by_parts: bool) -> Tensor:
    """The exact GELU; by parts where oneDNN would take longer to prepare it than to compute it."""
    return torch.erf(x * 0.5**0.5).add_(1.0).mul_(x).mul_(0.5) if by_parts else functional.gelu(x)


def onednn_is_slow_here() -> bool:
    """Whether oneDNN takes longer to prepare what it computes of a few rows than others to compute it."""
    return not has_x86_kernels_here()


class ColumnMajorLinear(nn.Module):
    """`x @ weight.T + bias`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.bias = weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
        self.by_parts = onednn_is_slow_here()

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension.  # [.., input] → [.., output]"""
        return functional.linear(x, self.weight, self.bias)


class ColumnMajorLinearGelu(ColumnMajorLinear):
    """The GELU of it."""

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension.  # [.., input] → [.., output]"""
        return gelu(functional.linear(x, self.weight, self.bias), self.by_parts)


class ColumnMajorLinearAdd(ColumnMajorLinear):
    """It and what it is added to."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """Project the last dimension and add.  # [.., input], [.., output] → [.., output]"""
        return functional.linear(x, self.weight, self.bias).add_(residual)


class TableProduct(nn.Module):
    """Rows by a table of embeddings, which is read row by row elsewhere and so is left as it lies."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension.  # [.., input] → [.., output]"""
        product = torch.mm(self.table, x.flatten(0, -2).t()).t()
        return product.contiguous().view([*x.shape[:-1], self.table.shape[0]])
