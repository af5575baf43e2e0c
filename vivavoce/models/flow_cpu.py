"""The flow decoder on a CPU: the same mel in fewer and longer calls.

Convolutions read their taps where they lie, the activation is made of passes the libraries do well, and what depends on
the time alone is computed once. It runs on the weights of a `FlowDecoder` and equals it but for rounding. Where the CPU
multiplies tiles of bfloat16 the estimator computes in that, and what a reply keeps of it takes half the room; the mel
it adds to stays in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.flow import FlowConfig, FlowDecoder
from vivavoce.models.flow_estimator import CausalBlock, FlowEstimator, ResidualBlock, Stage, Transformer
from vivavoce.models.flow_matching import FlowMatching, cosine_times
from vivavoce.models.flow_state import FlowCache, FlowVoice, Pasts, VoicePrompt
from vivavoce.nn.conv import CausalConv1d
from vivavoce.nn.int8_linear import Int8Linear
from vivavoce.nn.past import Past, StreamPast
from vivavoce.nn.quantised_linear import QuantisedLinear
from vivavoce.nn.reordered_linear import ReorderedLinear

LARGEST_EXPONENT = 30.0  # from here on mish is its input
ROWS = 40  # of a chunk of five codes, guided and not

Product = Callable[[Tensor], Tensor]


class Rounded(ReorderedLinear):
    """A product whose rows are made a multiple of `ROWS`: the library makes itself ready for every number of them."""

    def forward(self, x: Tensor) -> Tensor:
        """# [.., input] → [.., output]"""
        rows = x.shape[:-1].numel()
        lacks = -rows % ROWS
        if not lacks:
            return super().forward(x)
        padded = functional.pad(x.reshape(rows, -1), (0, 0, 0, lacks))
        return super().forward(padded)[:rows].view(*x.shape[:-1], -1)


def product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """`x @ weight.T + bias` for an x of this type."""
    if dtype == torch.bfloat16:
        return Rounded(weight, bias)
    return partial(functional.linear, weight=weight, bias=bias)


class FlatPast(StreamPast):
    """A past whose convolutions read their taps where they lie."""

    def __init__(
        self,
        taps: Mapping[CausalConv1d, Product],  # convolutions of what they see, [row, tap · channel]
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
        return self._taps[conv](read.reshape(rows * time, -1)).view(rows, time, -1)


class FlatCausal:
    """A causal convolution, its norm and mish."""

    def __init__(self, block: CausalBlock) -> None:
        self.conv, self.norm = cast(CausalConv1d, block.block["0"]), cast(nn.LayerNorm, block.block["2"])

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        """# [row, time, channel]"""
        return _mish(self.norm(past.convolve(self.conv, x).float())).to(x.dtype)


class FlatTransformer:
    """Attention and feed-forward of norms, added to as they go."""

    def __init__(self, layer: Transformer, dtype: torch.dtype) -> None:
        out, widen = cast(nn.Linear, layer.attn1.to_out[0]), cast(nn.Linear, layer.ff.net["0"]["proj"])  # type: ignore[index]
        narrow = cast(nn.Linear, layer.ff.net["2"])
        self.heads, self.norms = layer.attn1.heads, [deepcopy(norm).to(dtype) for norm in (layer.norm1, layer.norm3)]
        self.packed, self.out = product(layer.attn1.packed.weight, None, dtype), product(out.weight, out.bias, dtype)
        self.widen, self.narrow = product(widen.weight, widen.bias, dtype), product(narrow.weight, narrow.bias, dtype)

    def __call__(self, x: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """# [row, time, dim]"""
        packed = self.packed(self.norms[0](x))
        query_key_value = packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = past.attend(query_key_value[0], query_key_value[1:], bias).transpose(1, 2).flatten(2)
        x = self.out(mixed).add_(x)
        return self.narrow(functional.gelu(self.widen(self.norms[1](x)))).add_(x)


class FlatStage:
    """A residual block and its transformers."""

    def __init__(self, stage: Stage, dtype: torch.dtype) -> None:
        block = cast(ResidualBlock, stage[0])
        self.block1, self.block2 = FlatCausal(block.block1), FlatCausal(block.block2)
        self.beside = product(block.res_conv.weight.squeeze(-1), block.res_conv.bias, dtype)
        self.transformers = [FlatTransformer(layer, dtype) for layer in cast(Sequence[Transformer], stage[1])]

    def __call__(self, x: Tensor, time: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """# [row, time, channel]"""
        x = self.block2(self.block1(x, past).add_(time), past).add_(self.beside(x))
        for transformer in self.transformers:
            x = transformer(x, bias, past)
        return x


class FlatEstimator(nn.Module):
    """An estimator on the weights of another."""

    def __init__(self, estimator: FlowEstimator, times: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._times = dtype, estimator.time_conditions(times).to(dtype)
        self._down, self._up = cast(Stage, estimator.down_blocks[0]), cast(Stage, estimator.up_blocks[0])
        stages = [self._down, *(cast(Stage, stage) for stage in estimator.mid_blocks), self._up]
        self._stages = [FlatStage(stage, dtype) for stage in stages]
        self._final = FlatCausal(estimator.final_block)
        self._mel = product(estimator.final_proj.weight.squeeze(-1), estimator.final_proj.bias, dtype)

    def time_conditions(self, times: Tensor) -> Tensor:
        """All that depends on the time alone.  # [step] → [step, stage, channel]"""
        return self._times

    def forward(self, x: Tensor, time_conditions: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """# x [row, time, in_channels], time_conditions [stage, channel] → [row, time, out_channels]"""
        bias = None if bias is None else bias.to(self._dtype)
        (first, *middle, last), (first_time, *times, last_time) = self._stages, time_conditions
        skip = first(x.to(self._dtype), first_time, bias, past)
        x = self._down.close(skip, past)
        for stage, time in zip(middle, times, strict=True):
            x = stage(x, time, bias, past)
        x = last(torch.cat([x, skip], dim=-1), last_time, bias, past)
        return self._mel(self._final(self._up.close(x, past), past))


class CpuFlow(FlowDecoder):
    """A flow decoder on the weights of another; its estimator computes in `dtype`."""

    def __init__(self, decoder: FlowDecoder, dtype: torch.dtype = torch.float32) -> None:
        nn.Module.__init__(self)
        self._dtype = dtype
        self.config: FlowConfig = decoder.config
        self.input_embedding, self.spk_embed_affine_layer = decoder.input_embedding, decoder.spk_embed_affine_layer
        self.encoder, self.encoder_proj = decoder.encoder, decoder.encoder_proj
        matching, estimator = decoder.decoder, decoder.decoder.estimator
        assert isinstance(estimator, FlowEstimator)
        flat = FlatEstimator(estimator, cosine_times(matching.steps, self.device)[:-1], dtype)
        self.decoder = FlowMatching(flat, matching.steps, matching.guidance)
        self._taps = {
            conv: product(conv.weight.transpose(1, 2).flatten(1).contiguous(), conv.bias, kind)
            for module, kind in ((decoder.encoder, torch.float32), (estimator, dtype))
            for conv in module.modules()
            if isinstance(conv, CausalConv1d)
        }

    @staticmethod
    def suits(decoder: FlowDecoder) -> bool:
        """Whether the weights are float32 ones on a CPU, none of them quantised: those are widened at every look."""
        on_cpu = decoder.device.type == "cpu" and decoder.encoder_proj.weight.dtype == torch.float32
        return on_cpu and not any(isinstance(layer, Int8Linear | QuantisedLinear) for layer in decoder.modules())

    def _blank_voice(self, prompt: VoicePrompt) -> FlowVoice:
        voice = super()._blank_voice(prompt)
        windows, contexts = (kept.to(self._dtype) for kept in (voice.cache.mel_windows, voice.cache.mel_contexts))
        return replace(voice, cache=replace(voice.cache, mel_windows=windows, mel_contexts=contexts))

    def _pasts(self, voices: Sequence[FlowVoice], cache: FlowCache, after: FlowCache) -> Pasts:
        pasts = super()._pasts(voices, cache, after)
        return Pasts(self._flat(pasts.codes), self._flat(pasts.frames), lambda step: self._flat(pasts.mel_at(step)))

    def _flat(self, past: Past) -> Past:
        assert isinstance(past, StreamPast)
        return FlatPast(self._taps, past._prefixes, past._windows, list(past._contexts), past._next_windows)


def _mish(x: Tensor) -> Tensor:
    """x · tanh(softplus(x)) = x · n / (n + 2) with n = eˣ(eˣ + 2): the libraries' own takes three times as long."""
    power = x.clamp(max=LARGEST_EXPONENT).exp_()
    n = (power + 2).mul_(power)
    return n.div_(n + 2).mul_(x)
