"""The flow decoder's own modules, run so that gradients pass and every row has its own mask and time."""

import math

import torch
from torch import Tensor

from vivavoce.models.flow import FlowDecoder
from vivavoce.nn.chunk_mask import KeySpan
from vivavoce.nn.past import Silence


class Differentiable(Silence):
    """Attention written out: its masks may carry gradients too."""

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Attention to what is given alone."""
        keys, values = keys_values
        scores = query @ keys.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return (scores if bias is None else scores + bias).softmax(dim=-1) @ values


def features(flow: FlowDecoder, codes: Tensor, ends: Tensor, masks: tuple[Tensor, Tensor]) -> Tensor:
    """What the encoder makes of codes, of which the last are look-ahead.  # [row, code] → [row, frame, band]"""
    count, nowhere = codes.shape[1] - flow.config.lookahead, torch.zeros_like(ends)
    span = KeySpan(nowhere, count, nowhere, ends=ends)
    embedded = flow.input_embedding(codes)
    encoded = flow.encoder(embedded, span, *masks, Differentiable(), Differentiable())
    made: Tensor = flow.encoder_proj(encoded)
    return made


def velocity(flow: FlowDecoder, noisy: Tensor, times: Tensor, conditions: Tensor, mask: Tensor) -> Tensor:
    """The estimator with a time for each row.  # conditions [row, frame, 3 · band] → [row, frame, band]"""
    estimator = flow.decoder.estimator
    added = estimator.time_conditions(times).transpose(0, 1)[:, :, None]  # [stage, row, 1, channel]
    return estimator(torch.cat([noisy, conditions], dim=-1), added, mask, Differentiable())
