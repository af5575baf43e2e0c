"""CTC whose lengths stay on the device, so that a step which uses it can be captured as a graph.

The forward and the backward recursion are one: the backward one is the forward one of the reversed row. Both run side
by side, four small operations a frame.
"""

from typing import Any

import torch
from torch import Tensor

BLANK = 0
NEVER = -1e30  # a log-probability that stays finite when added up


def ctc_loss(log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """−log p(target) of each row; 0 where a target does not fit into its frames.

    # [batch, frame, symbol], [batch, letter], [batch], [batch] → [batch]
    """
    with torch.autocast(log_probs.device.type, enabled=False):
        loss: Tensor = _Ctc.apply(log_probs.float(), targets, lengths, target_lengths)  # type: ignore[no-untyped-call]
    return loss


class _Ctc(torch.autograd.Function):
    """The loss, and with it the expected count of every symbol at every frame: its negated gradient."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor) -> Tensor:
        loss, gradient = _loss_and_gradient(log_probs, targets, lengths, target_lengths)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0][:, None, None], None, None, None


def _loss_and_gradient(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    batch, frames, symbols = log_probs.shape
    labels = torch.full((batch, 2 * targets.shape[1] + 1), BLANK, dtype=torch.int64, device=targets.device)
    labels[:, 1::2] = targets
    states, ends = labels.shape[1], 2 * target_lengths + 1  # [batch]
    back_time = _reversed_index(lengths, frames)
    back_state = _reversed_index(ends, states)
    emitted = log_probs.gather(2, labels[:, None].expand(-1, frames, -1))  # [batch, frame, state]
    emitted_back = _pick(emitted, back_time, back_state)
    both = torch.cat([emitted, emitted_back]).transpose(0, 1).contiguous()  # [frame, 2 batch, state]
    paths = _paths(both, torch.cat([_skips(labels), _skips(labels.gather(1, back_state))]))
    forward, backward = paths.transpose(0, 1).split(batch)
    backward = _pick(backward, back_time, back_state)
    last = forward.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, states))[:, 0]
    ending = torch.stack([ends - 1, (ends - 2).clamp(min=0)], dim=1)
    total = last.gather(1, ending).logsumexp(1)
    there = torch.arange(frames, device=lengths.device) < lengths[:, None]
    inside = torch.arange(states, device=lengths.device) < ends[:, None]
    possible = (total > NEVER / 2) & (lengths > 0)
    known = there[:, :, None] & inside[:, None] & possible[:, None, None]
    occupied = (forward + backward - emitted - total[:, None, None]).exp().masked_fill(~known, 0.0)
    of_symbol = (labels[..., None] == torch.arange(symbols, device=labels.device)).to(occupied.dtype)
    return torch.where(possible, -total, 0.0), -(occupied @ of_symbol)


def _paths(emitted: Tensor, skips: Tensor) -> Tensor:
    """Log-probability of all beginnings that end in a state at a frame.  # [frame, row, state] → the same"""
    frames, rows, states = emitted.shape
    reached = emitted.new_full((frames, rows, states + 2), NEVER)  # two states before the first spare every shift's pad
    reached[0, :, 2:4] = emitted[0, :, :2]
    skipped, joined = torch.empty_like(skips), torch.empty_like(skips)
    for frame in range(1, frames):
        before = reached[frame - 1]
        torch.add(before[:, :-2], skips, out=skipped)
        torch.logaddexp(before[:, 2:], before[:, 1:-1], out=joined)
        torch.logaddexp(joined, skipped, out=joined)
        torch.add(joined, emitted[frame], out=reached[frame, :, 2:])
    return reached[..., 2:]


def _skips(labels: Tensor) -> Tensor:
    """0 where a path may come from two states before: a letter that is not the letter before it."""
    allowed = labels[:, 2:] != labels[:, :-2]
    allowed = allowed & (labels[:, 2:] != BLANK)
    skips = torch.full(labels.shape, NEVER, device=labels.device)
    skips[:, 2:].masked_fill_(allowed, 0.0)
    return skips


def _reversed_index(lengths: Tensor, size: int) -> Tensor:
    """Where each place of a row stands when the row, not its padding, is reversed.  # [batch, size]"""
    return (lengths[:, None] - 1 - torch.arange(size, device=lengths.device)).clamp(min=0)


def _pick(values: Tensor, time: Tensor, state: Tensor) -> Tensor:
    """Rows with both axes reordered.  # [batch, frame, state]"""
    values = values.gather(1, time[:, :, None].expand(-1, -1, values.shape[2]))
    return values.gather(2, state[:, None].expand(-1, values.shape[1], -1))
