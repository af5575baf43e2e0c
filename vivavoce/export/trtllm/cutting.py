"""How a weight is cut for tensor parallelism: which rows, columns or heads a rank gets."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from vivavoce.errors import InputError


@dataclass(frozen=True)
class Shard:
    """One rank of so many."""

    rank: int
    tp: int

    def outputs(self, weight: Tensor) -> Tensor:
        """An equal share of the outputs, of a matrix or a bias.  # [out, …] → [out / tp, …]"""
        return weight.chunk(self.tp)[self.rank]

    def inputs(self, weight: Tensor) -> Tensor:
        """An equal share of the inputs.  # [out, in] → [out, in / tp]"""
        return weight.chunk(self.tp, dim=1)[self.rank]

    def key_heads(self, weight: Tensor, heads: int) -> Tensor:
        """A share of the key or value heads; where there are fewer heads than ranks, several ranks have the same one.

        # [heads · head_dim, …] → [max(1, heads / tp) · head_dim, …]
        """
        if heads >= self.tp:
            return self.outputs(weight)
        return weight.chunk(heads)[self.rank * heads // self.tp]

    def vocabulary(self, head: Tensor) -> Tensor:
        """A share of a head's rows, which zeros fill up to a multiple of the ranks.  # [id, hidden]"""
        missing = -head.shape[0] % self.tp
        return self.outputs(functional.pad(head, (0, 0, 0, missing)) if missing else head)


def check_divisible(tp: int, heads: int, key_heads: int, inner: int) -> None:
    """Raise if a model cannot be cut so."""
    for count, what in ((heads, "attention heads"), (inner, "feed-forward channels")):
        if count % tp:
            fits = ", ".join(str(n) for n in (1, 2, 4, 8) if not (heads % n or inner % n))
            raise InputError(f"{count} {what} cannot be cut among {tp} ranks; --tp can be {fits}")
    if key_heads % tp and tp % key_heads:
        raise InputError(f"{key_heads} key heads can neither be cut nor repeated among {tp} ranks; take a smaller --tp")
