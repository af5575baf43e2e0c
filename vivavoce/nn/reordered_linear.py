"""bfloat16 products of CPUs that multiply tiles of it, by weights that lie as the product reads them.

Left as they are, weights are brought into that order by every call anew, which costs as much as a hundred rows do. What
follows a product is done while its result is still at hand. TorchScript runs all of this without Python.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class MkldnnLinear(nn.Module):
    """`x @ weight.T + bias` in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        narrow = weight.detach().to(torch.bfloat16).contiguous()
        self.reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(narrow)
        self.bias = weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
        self.bias = self.bias.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension.  # [.., input] bfloat16 → [.., output]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.reordered, self.bias, "none", [], "")


class MkldnnLinearGelu(MkldnnLinear):
    """The GELU of it."""

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension.  # [.., input] bfloat16 → [.., output]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.reordered, self.bias, "gelu", [], "none")


class MkldnnLinearAdd(MkldnnLinear):
    """It and what it is added to."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """Project the last dimension and add.  # [.., input] bfloat16, [.., output] → [.., output]"""
        return torch.ops.mkldnn._linear_pointwise(x, residual, self.reordered, self.bias, "add")


class ConvAsProduct(nn.Module):
    """A convolution as one product of all that each of its places sees."""

    def __init__(self, conv: nn.Conv1d, product: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
        super().__init__()
        self.size, self.stride, self.padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
        self.product = product(conv.weight.permute(0, 2, 1).flatten(1), conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, time, channel] → [batch, place, channel]"""
        padded = functional.pad(x, (0, 0, self.padding, self.padding)).contiguous()
        batch, time, channels = padded.size(0), padded.size(1), padded.size(2)
        places = (time - self.size) // self.stride + 1
        steps = (time * channels, self.stride * channels, 1)
        seen = padded.as_strided((batch, places, self.size * channels), steps)
        out: Tensor = self.product(seen.contiguous())
        return out
