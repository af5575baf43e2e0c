"""The flow's encoder: codes see three codes ahead, pass a causal conformer and are upsampled to mel rate.

Upsampling conformer of CosyVoice 2 (arXiv 2412.10117): relative-position attention without macaron or convolution
module; six layers at code rate, nearest-neighbour upsampling and a causal convolution, four layers at mel rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.nn.chunk_mask import KeySpan
from vivavoce.nn.conv import CausalConv1d
from vivavoce.nn.past import Past
from vivavoce.nn.relative_attention import RelativeAttention, distance_encoding, segment_distances

LAYER_NORM_EPS = 1e-12


@dataclass(frozen=True)
class FlowEncoderConfig:
    """Sizes of the encoder; the published ones are the same for all models of the family."""

    ratio: int  # mel frames per code
    dim: int = 512
    heads: int = 8
    feed_forward: int = 2048
    code_layers: int = 6
    frame_layers: int = 4
    lookahead: int = 3

    @property
    def contexts(self) -> tuple[int, ...]:
        """How many past inputs each causal convolution needs, in forward order."""
        return 2, 2 * self.ratio


class InputLayer(nn.Module):
    """Linear, norm and the scale that goes with relative positions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim, eps=1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """# [row, time, dim]"""
        return self.out(x) * math.sqrt(x.shape[-1])


class LookaheadLayer(nn.Module):
    """A look at the next codes, smoothed over the last three, added to the input."""

    def __init__(self, dim: int, lookahead: int, channels: int | None = None) -> None:
        """`channels` is the width between the two convolutions, if it is not `dim`."""
        super().__init__()
        self.conv1 = nn.Conv1d(dim, channels or dim, lookahead + 1)
        self.conv2 = CausalConv1d(channels or dim, dim, 3)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """The look-ahead itself gives no output.  # [row, time + lookahead, dim] → [row, time, dim]"""
        ahead = functional.leaky_relu(self.conv1(x.transpose(1, 2))).transpose(1, 2)
        y = past.convolve(self.conv2, ahead)
        return y + x[:, : y.shape[1]]


def silent_after_the_end(x: Tensor, span: KeySpan, lookahead: int) -> Tensor:
    """Embedded codes with as many zeros behind them as the look-ahead lacks, and zeros where they only fill up.

    # [row, time (+ lookahead), dim] → [row, time + lookahead, dim]
    """
    x = functional.pad(x, (0, 0, 0, span.time + lookahead - x.shape[1]))
    if span.ends is None:
        return x
    positions = span.starts[:, None] + torch.arange(x.shape[1], device=x.device)
    return x.masked_fill((positions >= span.ends[:, None])[..., None], 0.0)


class Upsampler(nn.Module):
    """Every frame `ratio` times, then a causal convolution over two codes and one frame."""

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.conv = CausalConv1d(dim, dim, 2 * ratio + 1)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """# [row, time, dim] → [row, time × ratio, dim]"""
        return past.convolve(self.conv, x.repeat_interleave(self.ratio, dim=1))


class ConformerFeedForward(nn.Module):
    """Two linears with a swish between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(dim, hidden)
        self.w_2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """# [row, time, dim]"""
        y: Tensor = self.w_2(functional.silu(self.w_1(x)))
        return y


class ConformerLayer(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: FlowEncoderConfig) -> None:
        super().__init__()
        self.self_attn = RelativeAttention(config.dim, config.heads)
        self.feed_forward = ConformerFeedForward(config.dim, config.feed_forward)
        self.norm_mha = nn.LayerNorm(config.dim, eps=LAYER_NORM_EPS)
        self.norm_ff = nn.LayerNorm(config.dim, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor, encodings: Sequence[Tensor], bias: Tensor | None, past: Past) -> Tensor:
        """# [row, time, dim]"""
        x = x + self.self_attn(self.norm_mha(x), encodings, bias, past)
        return x + self.feed_forward(self.norm_ff(x))


class FlowEncoder(nn.Module):
    """Embedded codes → features at mel rate."""

    def __init__(self, config: FlowEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = InputLayer(config.dim)
        self.pre_lookahead_layer = LookaheadLayer(config.dim, config.lookahead)
        self.encoders = nn.ModuleList(ConformerLayer(config) for _ in range(config.code_layers))
        self.up_layer = Upsampler(config.dim, config.ratio)
        self.up_embed = InputLayer(config.dim)
        self.up_encoders = nn.ModuleList(ConformerLayer(config) for _ in range(config.frame_layers))
        self.after_norm = nn.LayerNorm(config.dim, eps=1e-5)

    def forward(
        self,
        codes: Tensor,  # embedded: [row, time (+ lookahead), dim]
        span: KeySpan,  # positions of the codes
        code_bias: Tensor | None,  # [row, 1, time, key]; None: everything is visible
        frame_bias: Tensor | None,
        code_past: Past,
        frame_past: Past,
    ) -> Tensor:
        """Features at mel rate; where no look-ahead is given or the reply has ended, zeros stand for it.

        # → [row, time × ratio, dim]
        """
        x = self.pre_lookahead_layer(silent_after_the_end(self.embed(codes), span, self.config.lookahead), code_past)
        encodings = self._encodings(span, x.dtype)
        for layer in self.encoders:
            x = layer(x, encodings, code_bias, code_past)
        x = self.up_embed(self.up_layer(x, frame_past))
        encodings = self._encodings(span.scaled(self.config.ratio), x.dtype)
        for layer in self.up_encoders:
            x = layer(x, encodings, frame_bias, frame_past)
        normed: Tensor = self.after_norm(x)
        return normed

    def _encodings(self, span: KeySpan, dtype: torch.dtype) -> list[Tensor]:
        """Distances to the prefix, which starts at position 0, and to the window with what is new behind it."""
        to_window = torch.full((1,), span.window_slots, device=span.starts.device)
        distances = [segment_distances(to_window, span.time, span.window_slots + span.time)]
        if span.prefix_slots:
            distances.insert(0, segment_distances(span.starts, span.time, span.prefix_slots))
        return [distance_encoding(run, self.config.dim).to(dtype) for run in distances]
