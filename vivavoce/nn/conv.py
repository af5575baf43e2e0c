"""Causal convolution whose streaming state is a value: `forward` is `step` from silence."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class CausalConv1d(nn.Conv1d):
    """A Conv1d that sees only the past: the input is padded with `(kernel - 1) * dilation` zeros on the left.

    In a stream, `step` takes the last inputs as state instead of the zeros, so any split of the input whose pieces are
    multiples of the stride gives the same output.
    """

    @property
    def context(self) -> int:
        """How many past inputs an output needs besides its own."""
        return (self.kernel_size[0] - 1) * self.dilation[0]

    def initial_state(self, batch: int) -> Tensor:
        """The state before the first sample: silence.  # [batch, channel, context]"""
        return torch.zeros(batch, self.in_channels, self.context, dtype=self.weight.dtype, device=self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Whole signal at once.  # [batch, channel, time] → [batch, channel, time / stride]"""
        return super().forward(functional.pad(x, (self.context, 0)))

    def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The next piece of a stream: output and the state to pass with the piece after it."""
        joined = torch.cat([state, x], dim=-1)
        return super().forward(joined), joined[..., joined.shape[-1] - self.context :]
