"""Voice activity of many streams at once: the numbers of `SileroActivity`, its matrices read once for all of them."""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vivavoce.audio.rows import FEW, Rows
from vivavoce.audio.vad import Array, SileroActivity, SileroState, VoiceActivity
from vivavoce.nn.modules import scripted

Indices = NDArray[np.intp]
STATE = SileroActivity.CONTEXT + 2 * 128


class BatchedActivity(Protocol):
    """Speech probabilities of many streams; each has a row from `join` to `leave`."""

    def join(self) -> int:
        """The row of a new stream."""
        ...

    def leave(self, row: int) -> None:
        """Release the row of a stream that has ended."""
        ...

    def step(self, rows: Indices, windows: Array) -> Array:
        """The probability of speech in the next window of each row.  # [row], [row, 512] → [row]"""
        ...


def batched_activity(activity: VoiceActivity) -> BatchedActivity:
    """The detector for many streams: one by one where it cannot be batched."""
    return BatchedSilero(activity) if isinstance(activity, SileroActivity) else ActivityOneByOne(activity)


class BatchedSilero:
    """Silero's network for many streams."""

    def __init__(self, activity: SileroActivity) -> None:
        self._activity = activity
        self._kernel: Any = scripted(SileroKernel(activity))
        self._rows = Rows()
        self._states = self._rows.array((STATE,), np.float32, 0.0)  # context, hidden state, cell

    def join(self) -> int:
        """The row of a new stream."""
        return self._rows.take()

    def leave(self, row: int) -> None:
        """Release the row of a stream that has ended."""
        self._rows.release(row)

    def step(self, rows: Indices, windows: Array) -> Array:
        """The probability of speech in the next window of each row.  # [row], [row, 512] → [row]"""
        if len(rows) < FEW:
            return np.array([self._step_one(*each) for each in zip(rows.tolist(), windows, strict=True)], np.float32)
        states = torch.from_numpy(self._states.values)
        probabilities: Array = self._kernel(states, torch.from_numpy(rows), torch.from_numpy(windows)).numpy()
        return probabilities

    def _step_one(self, row: int, window: Array) -> float:
        state = self._states[row]
        context, hidden, cell = np.split(state, [SileroActivity.CONTEXT, STATE - 128])
        probability, after = self._activity.step(SileroState(context, hidden, cell), window)
        state[:] = np.concatenate([after.context, after.hidden, after.cell])
        return probability


class ActivityOneByOne:
    """Any detector, stream by stream."""

    def __init__(self, activity: VoiceActivity) -> None:
        self._activity = activity
        self._rows = Rows()
        self._states: dict[int, Any] = {}

    def join(self) -> int:
        """The row of a new stream."""
        row = self._rows.take()
        self._states[row] = self._activity.initial_state()
        return row

    def leave(self, row: int) -> None:
        """Release the row of a stream that has ended."""
        del self._states[row]
        self._rows.release(row)

    def step(self, rows: Indices, windows: Array) -> Array:
        """The probability of speech in the next window of each row.  # [row], [row, 512] → [row]"""
        probabilities = np.empty(len(rows), np.float32)
        for number, row in enumerate(rows.tolist()):
            probabilities[number], self._states[row] = self._activity.step(self._states[row], windows[number])
        return probabilities


class SileroKernel(nn.Module):
    """The network over a batch; it updates the rows of the states in place."""

    spectrum: Tensor
    cell: Tensor
    cell_bias: Tensor
    final: Tensor

    def __init__(self, activity: SileroActivity) -> None:
        super().__init__()
        self.context: int = activity.CONTEXT
        self.frame: int = activity.N_FFT
        self.hop: int = activity.HOP
        self.register_buffer("spectrum", torch.from_numpy(activity.spectrum))
        self.taps = [torch.from_numpy(taps) for taps, _, _ in activity.convolutions]
        self.biases = [torch.from_numpy(bias) for _, bias, _ in activity.convolutions]
        self.strides = [stride for _, _, stride in activity.convolutions]
        self.register_buffer("cell", torch.from_numpy(activity.cell).t().contiguous())
        self.register_buffer("cell_bias", torch.from_numpy(activity.cell_bias))
        self.register_buffer("final", torch.from_numpy(activity.final))
        self.final_bias: float = activity.final_bias

    def forward(self, states: Tensor, rows: Tensor, windows: Tensor) -> Tensor:
        """# [row, state], [stream], [stream, 512] → [stream]"""
        state = states[rows]
        context, hidden, cell = state[:, : self.context], state[:, self.context : -128], state[:, -128:]
        mirrored = windows[:, -1 - self.hop // 2 : -1].flip(1)
        frames = torch.cat([context, windows, mirrored], 1).unfold(1, self.frame, self.hop)
        parts = torch.matmul(frames, self.spectrum).square_()
        half = parts.size(2) // 2
        x = (parts[:, :, :half] + parts[:, :, half:]).sqrt_()
        for layer in range(len(self.strides)):
            x = self.convolved(x, self.taps[layer], self.biases[layer], self.strides[layer])
        gates = torch.addmm(self.cell_bias, torch.cat([x[:, 0], hidden], 1), self.cell)
        into, forget, new, out = gates.chunk(4, 1)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        hidden = out.sigmoid() * cell.tanh()
        states.index_copy_(0, rows, torch.cat([windows[:, -self.context :], hidden, cell], 1))
        return torch.sigmoid(torch.mv(hidden.relu(), self.final) + self.final_bias)

    def convolved(self, x: Tensor, taps: Tensor, bias: Tensor, stride: int) -> Tensor:
        """A convolution over three frames, zeros around them.  # [stream, frame, in] → [stream, frame / stride, out]"""
        padded = torch.nn.functional.pad(x, [0, 0, 1, 1])
        windows = padded.flatten(1).unfold(1, 3 * x.size(2), stride * x.size(2))
        return torch.matmul(windows, taps).add_(bias).relu_()
