"""A bidirectional LSTM layer, on CPUs by `vivavoce.kernels.cpu`: PyTorch takes a dozen operations for each step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vivavoce.kernels import cpu


class BidirectionalLSTM(nn.LSTM):
    """One layer in both directions over rows of different lengths.  # [batch, time, input] → [batch, time, output]"""

    weight_hh_l0: Tensor
    weight_hh_l0_reverse: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs // 2, batch_first=True, bidirectional=True)
        self._panels: tuple[Tensor, Tensor] | None = None

    def run(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """The outputs; zero behind the end of a row. `lengths` are on the CPU; None: all rows are full."""
        if lengths is None:
            return self._run_compiled(x[0])[None] if self._is_compiled(x) else self(x)[0]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self(packed)[0], batch_first=True, total_length=x.shape[1])
        return output

    def _is_compiled(self, x: Tensor) -> bool:
        if x.device.type != "cpu" or x.dtype != torch.float32 or len(x) != 1 or torch.is_grad_enabled():
            return False
        kernels = cpu.synthesis_library()
        return kernels is not None and 4 * self.hidden_size % kernels.lstm_panel() == 0

    def _run_compiled(self, x: Tensor) -> Tensor:
        """# [time, input] → [time, output]"""
        kernels = cpu.synthesis_library()
        assert kernels is not None
        if self._panels is None:
            size = kernels.lstm_panel()
            self._panels = _panels(self.weight_hh_l0, size), _panels(self.weight_hh_l0_reverse, size)
        (forward_weight, _, *forward_biases), (backward_weight, _, *backward_biases) = self.all_weights
        forward = functional.linear(x, forward_weight, forward_biases[0] + forward_biases[1])
        backward = functional.linear(x, backward_weight, backward_biases[0] + backward_biases[1])
        out, scratch = torch.empty(len(x), 2 * self.hidden_size), torch.empty(12 * self.hidden_size)
        gates = forward.data_ptr(), backward.data_ptr()
        weights = tuple(each.data_ptr() for each in self._panels)
        sizes = len(x), self.hidden_size
        made = out.data_ptr(), scratch.data_ptr()
        kernels.bidirectional_lstm(*gates, *weights, *sizes, *made, torch.get_num_threads())
        return out

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._panels = None
        super()._load_from_state_dict(*args, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._panels = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def _panels(weight: Tensor, size: int) -> Tensor:
    """# [gate, hidden] → [gate / size, hidden, size]"""
    return weight.detach().unflatten(0, (-1, size)).transpose(1, 2).contiguous()
