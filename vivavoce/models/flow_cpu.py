"""The flow decoder on a CPU: the same mel in fewer and longer calls.

Convolutions read their taps where they lie, the activation is made of passes the libraries do well, and what depends on
the time alone is computed once. It runs on the weights of a `FlowDecoder` and equals it but for rounding.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.flow import FlowConfig, FlowDecoder
from vivavoce.models.flow_estimator import CausalBlock, FlowEstimator, ResidualBlock, Stage, Transformer
from vivavoce.models.flow_matching import FlowMatching, cosine_times
from vivavoce.models.flow_state import FlowCache, FlowVoice, Pasts
from vivavoce.nn.conv import CausalConv1d
from vivavoce.nn.int8_linear import Int8Linear
from vivavoce.nn.past import Past, StreamPast
from vivavoce.nn.quantised_linear import QuantisedLinear

LARGEST_EXPONENT = 30.0  # from here on mish is its input


class FlatPast(StreamPast):
    """A past whose convolutions read their taps where they lie."""

    def __init__(
        self,
        taps: Mapping[CausalConv1d, Tensor],  # the weights of convolutions, [output, tap · channel]
        prefixes: Sequence[Tensor],
        windows: Tensor,
        contexts: Sequence[Tensor],
        next_windows: Tensor | None = None,
    ) -> None:
        super().__init__(prefixes, windows, contexts, next_windows)
        self._taps = taps

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The convolution continued; its context moves on."""
        context = next(self._contexts)
        joined = torch.cat([context, x], dim=1)  # [row, context + time, channel]
        context.copy_(joined[:, x.shape[1] :])
        rows, time, channels = x.shape
        read = joined.as_strided((rows, time, (conv.context + 1) * channels), (joined.stride(0), channels, 1))
        # As one matrix: libraries make a product a row of what does not lie in one piece.
        return functional.linear(read.reshape(rows * time, -1), self._taps[conv], conv.bias).view(rows, time, -1)


class FlatEstimator(nn.Module):
    """An estimator on the weights of another."""

    def __init__(self, estimator: FlowEstimator, times: Tensor) -> None:
        super().__init__()
        self._whole = estimator
        self._times = estimator.time_conditions(times)
        self._down, self._up = cast(Stage, estimator.down_blocks[0]), cast(Stage, estimator.up_blocks[0])
        self._middle = [cast(Stage, stage) for stage in estimator.mid_blocks]
        self._final = estimator.final_proj

    def time_conditions(self, times: Tensor) -> Tensor:
        """All that depends on the time alone.  # [step] → [step, stage, channel]"""
        return self._times

    def forward(self, x: Tensor, time_conditions: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """# x [row, time, in_channels], time_conditions [stage, channel] → [row, time, out_channels]"""
        first, *middle, last = time_conditions
        skip = _stage(self._down, x, first, bias, past)
        x = self._down.close(skip, past)
        for stage, time in zip(self._middle, middle, strict=True):
            x = _stage(stage, x, time, bias, past)
        x = _stage(self._up, torch.cat([x, skip], dim=-1), last, bias, past)
        x = _causal(self._whole.final_block, self._up.close(x, past), past)
        return functional.linear(x, self._final.weight.squeeze(-1), self._final.bias)


class CpuFlow(FlowDecoder):
    """A flow decoder on the weights of another."""

    def __init__(self, decoder: FlowDecoder) -> None:
        nn.Module.__init__(self)
        self.config: FlowConfig = decoder.config
        self.input_embedding, self.spk_embed_affine_layer = decoder.input_embedding, decoder.spk_embed_affine_layer
        self.encoder, self.encoder_proj = decoder.encoder, decoder.encoder_proj
        matching, estimator = decoder.decoder, decoder.decoder.estimator
        assert isinstance(estimator, FlowEstimator)
        flat = FlatEstimator(estimator, cosine_times(matching.steps, self.device)[:-1])
        self.decoder = FlowMatching(flat, matching.steps, matching.guidance)
        convolutions = [module for module in decoder.modules() if isinstance(module, CausalConv1d)]
        self._taps = {conv: conv.weight.transpose(1, 2).flatten(1).contiguous() for conv in convolutions}

    @staticmethod
    def suits(decoder: FlowDecoder) -> bool:
        """Whether the weights are float32 ones on a CPU, none of them quantised: those are widened at every look."""
        on_cpu = decoder.device.type == "cpu" and decoder.encoder_proj.weight.dtype == torch.float32
        return on_cpu and not any(isinstance(layer, Int8Linear | QuantisedLinear) for layer in decoder.modules())

    def _pasts(self, voices: Sequence[FlowVoice], cache: FlowCache, after: FlowCache) -> Pasts:
        pasts = super()._pasts(voices, cache, after)
        return Pasts(self._flat(pasts.codes), self._flat(pasts.frames), lambda step: self._flat(pasts.mel_at(step)))

    def _flat(self, past: Past) -> Past:
        assert isinstance(past, StreamPast)
        return FlatPast(self._taps, past._prefixes, past._windows, list(past._contexts), past._next_windows)


def _stage(stage: Stage, x: Tensor, time: Tensor, bias: Tensor | None, past: Past) -> Tensor:
    x = _residual(cast(ResidualBlock, stage[0]), x, time, past)
    for transformer in cast(Sequence[Transformer], stage[1]):
        x = _transformer(transformer, x, bias, past)
    return x


def _residual(block: ResidualBlock, x: Tensor, time: Tensor, past: Past) -> Tensor:
    h = _causal(block.block2, _causal(block.block1, x, past).add_(time), past)
    return h.add_(functional.linear(x, block.res_conv.weight.squeeze(-1), block.res_conv.bias))


def _causal(block: CausalBlock, x: Tensor, past: Past) -> Tensor:
    conv, norm = cast(CausalConv1d, block.block["0"]), cast(nn.LayerNorm, block.block["2"])
    return _mish(norm(past.convolve(conv, x)))


def _transformer(layer: Transformer, x: Tensor, bias: Tensor | None, past: Past) -> Tensor:
    attention, out = layer.attn1, cast(nn.Linear, layer.attn1.to_out[0])
    packed = functional.linear(layer.norm1(x), attention.packed.weight)
    query_key_value = packed.unflatten(-1, (3, attention.heads, -1)).permute(2, 0, 3, 1, 4)
    mixed = past.attend(query_key_value[0], query_key_value[1:], bias).transpose(1, 2).flatten(2)
    x = functional.linear(mixed, out.weight, out.bias).add_(x)
    widen, narrow = cast(nn.Linear, layer.ff.net["0"]["proj"]), cast(nn.Linear, layer.ff.net["2"])  # type: ignore[index]
    hidden = functional.gelu(functional.linear(layer.norm3(x), widen.weight, widen.bias))
    return functional.linear(hidden, narrow.weight, narrow.bias).add_(x)


def _mish(x: Tensor) -> Tensor:
    """x · tanh(softplus(x)) = x · n / (n + 2) with n = eˣ(eˣ + 2): the libraries' own takes three times as long."""
    power = x.clamp(max=LARGEST_EXPONENT).exp_()
    n = (power + 2).mul_(power)
    return n.div_(n + 2).mul_(x)
