"""CPU implementation of the flow decoder, on the weights of a `FlowDecoder`; tests hold the two equal up to rounding.

What changes: TorchScript runs the estimator, convolutions are one matrix product over strided views, Mish is computed
from fast primitives, and the time conditions are precomputed. On CPUs with bfloat16 tiles the estimator computes in
bfloat16, which halves its cache; the mel stays in float32.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.flow.estimator import (
    CausalBlock,
    EstimatorStage,
    EstimatorTransformer,
    FlowEstimator,
    FlowMatching,
    ResidualBlock,
    cosine_times,
)
from vivavoce.models.flow.model import FlowConfig, FlowDecoder
from vivavoce.models.flow.state import FlowCache, FlowVoice, Pasts, VoicePrompt
from vivavoce.nn.linear import ColumnMajorLinear, MkldnnLinear, column_major_for_many_rows
from vivavoce.nn.modules import scripted
from vivavoce.nn.quantised import Int8Linear, QuantisedLinear
from vivavoce.nn.streaming import Past, StreamPast
from vivavoce.nn.vocoder import CausalConv1d

MAX_EXPONENT = 30.0  # mish(x) = x beyond it
ROWS = 40  # a chunk of five codes (20 frames), conditional and unconditional


class PaddedRowsLinear(MkldnnLinear):
    """bfloat16 linear with rows padded to a multiple of `ROWS`: oneDNN prepares a primitive for every new shape."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.rows = ROWS

    def forward(self, x: Tensor) -> Tensor:
        """# [.., input] bfloat16 → [.., output]"""
        rows = x.numel() // x.size(-1)
        matrix = x.reshape(rows, x.size(-1))
        if rows % self.rows:
            matrix = functional.pad(matrix, (0, 0, 0, self.rows - rows % self.rows))
        out = torch.ops.mkldnn._linear_pointwise(matrix, self.mkldnn_weight, self.bias, "none", [], "")
        return out[:rows].unflatten(0, x.size()[:-1])


def cpu_linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
    """`x @ weight.T + bias` for inputs of this dtype."""
    if dtype == torch.bfloat16:
        return PaddedRowsLinear(weight, bias)
    return ColumnMajorLinear(column_major_for_many_rows(weight.detach()), bias)


class TapConv(nn.Module):
    """A causal convolution as one matrix product over a strided view of its input."""

    def __init__(self, conv: CausalConv1d, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = conv.context + 1
        self.linear = cpu_linear(conv.weight.transpose(1, 2).flatten(1).contiguous(), conv.bias, dtype)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Continue the convolution; `context` is updated in place.  # [row, time, channel], [row, context, channel]"""
        rows, time, channels = x.size(0), x.size(1), x.size(2)
        joined = torch.cat([context, x], dim=1)
        context.copy_(joined[:, time:])
        read = joined.as_strided([rows, time, self.width * channels], [joined.stride(0), channels, 1])
        # Reshaped to one matrix: a strided 3-D input would be multiplied row by row.
        out: Tensor = self.linear(read.reshape(rows * time, self.width * channels))
        return out.view(rows, time, -1)


class CpuStreamPast(StreamPast):
    """A `StreamPast` whose convolutions are `TapConv`."""

    def __init__(
        self,
        taps: Mapping[CausalConv1d, TapConv],
        prefixes: Sequence[Tensor],
        windows: Tensor,
        contexts: Sequence[Tensor],
        next_windows: Tensor | None = None,
    ) -> None:
        super().__init__(prefixes, windows, contexts, next_windows)
        self._taps = taps

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """Continue the convolution; its context is updated in place."""
        out: Tensor = self._taps[conv](x, next(self._contexts))
        return out

    def parts(self) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
        """Prefixes per layer, windows, next windows, contexts per convolution."""
        prefixes = [self._prefix(layer) for layer in range(self._windows.shape[0])]
        return prefixes, self._windows, self._next_windows, list(self._contexts)


class CpuCausalBlock(nn.Module):
    """A causal convolution, its norm and mish."""

    def __init__(self, block: CausalBlock, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = TapConv(cast(CausalConv1d, block.block["0"]), dtype)
        self.norm = cast(nn.LayerNorm, block.block["2"])
        self.max_exponent = MAX_EXPONENT

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """# [row, time, channel]

        Mish is x · tanh(softplus(x)) = x · n / (n + 2) with n = eˣ(eˣ + 2), which is three times as fast as PyTorch's.
        """
        y: Tensor = self.norm(self.conv(x, context).float())
        power = y.clamp(max=self.max_exponent).exp_()
        n = (power + 2).mul_(power)
        return n.div_(n + 2).mul_(y).to(x.dtype)


class CpuEstimatorTransformer(nn.Module):
    """Pre-norm attention and feed-forward with in-place residual adds."""

    def __init__(self, layer: EstimatorTransformer, dtype: torch.dtype) -> None:
        super().__init__()
        out, up = cast(nn.Linear, layer.attn1.to_out[0]), cast(nn.Linear, layer.ff.net["0"]["proj"])  # type: ignore[index]
        down = cast(nn.Linear, layer.ff.net["2"])
        self.heads = layer.attn1.heads
        self.norm1, self.norm2 = (deepcopy(norm).to(dtype) for norm in (layer.norm1, layer.norm3))
        self.packed, self.out = (
            cpu_linear(layer.attn1.packed.weight, None, dtype),
            cpu_linear(out.weight, out.bias, dtype),
        )
        self.up, self.down = cpu_linear(up.weight, up.bias, dtype), cpu_linear(down.weight, down.bias, dtype)

    def forward(self, x: Tensor, bias: Tensor | None, prefix: Tensor, window: Tensor, next_window: Tensor) -> Tensor:
        """# x [row, time, dim]; prefix, window and next_window as in `StreamPast`"""
        rows, time = x.size(0), x.size(1)
        projected = self.packed(self.norm1(x)).view(rows, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        new = projected[1:].unflatten(1, [window.size(1), window.size(2)])
        joined = torch.cat([prefix, window, new], dim=-2)
        next_window.copy_(joined[..., joined.size(-2) - next_window.size(-2) :, :])
        attended = joined.flatten(1, 2)
        mixed = functional.scaled_dot_product_attention(projected[0], attended[0], attended[1], attn_mask=bias)
        x = self.out(mixed.transpose(1, 2).flatten(2)).add_(x)
        out: Tensor = self.down(functional.gelu(self.up(self.norm2(x)))).add_(x)
        return out


class CpuEstimatorStage(nn.Module):
    """A residual block, its transformers and, at the ends of the UNet, a causal convolution."""

    def __init__(self, stage: EstimatorStage, dtype: torch.dtype) -> None:
        super().__init__()
        block = cast(ResidualBlock, stage[0])
        self.block1, self.block2 = CpuCausalBlock(block.block1, dtype), CpuCausalBlock(block.block2, dtype)
        self.res_conv = cpu_linear(block.res_conv.weight.squeeze(-1), block.res_conv.bias, dtype)
        layers = cast(Sequence[EstimatorTransformer], stage[1])
        self.transformers = nn.ModuleList(CpuEstimatorTransformer(layer, dtype) for layer in layers)

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        bias: Tensor | None,
        past: tuple[list[Tensor], Tensor, Tensor, list[Tensor]],
        layer: int,
        conv: int,
    ) -> Tensor:
        """`layer` and `conv` are the first indices into the past.  # [row, time, channel]"""
        prefixes, windows, next_windows, contexts = past
        h = self.block1(x, contexts[conv]).add_(time)
        x = self.block2(h, contexts[conv + 1]).add_(self.res_conv(x))
        for transformer in self.transformers:
            x = transformer(x, bias, prefixes[layer], windows[layer], next_windows[layer])
            layer += 1
        return x


class CpuUNet(nn.Module):
    """The whole estimator over the past of streams, run by TorchScript without the GIL."""

    def __init__(self, estimator: FlowEstimator, dtype: torch.dtype) -> None:
        super().__init__()
        down, up = cast(EstimatorStage, estimator.down_blocks[0]), cast(EstimatorStage, estimator.up_blocks[0])
        self.down, self.up = CpuEstimatorStage(down, dtype), CpuEstimatorStage(up, dtype)
        self.layers = len(self.down.transformers)  # of a stage
        self.middle = nn.ModuleList(
            CpuEstimatorStage(cast(EstimatorStage, stage), dtype) for stage in estimator.mid_blocks
        )
        self.down_conv, self.up_conv = (
            TapConv(cast(CausalConv1d, down[2]), dtype),
            TapConv(cast(CausalConv1d, up[2]), dtype),
        )
        self.final = CpuCausalBlock(estimator.final_block, dtype)
        self.mel = cpu_linear(estimator.final_proj.weight.squeeze(-1), estimator.final_proj.bias, dtype)

    def forward(
        self, x: Tensor, times: Tensor, bias: Tensor | None, past: tuple[list[Tensor], Tensor, Tensor, list[Tensor]]
    ) -> Tensor:
        """# [row, time, in_channels], [stage, channel] → [row, time, out_channels]"""
        contexts = past[3]
        skip = self.down(x, times[0], bias, past, 0, 0)
        x = self.down_conv(skip, contexts[2])
        conv, stage = 3, 1
        for each in self.middle:
            x = each(x, times[stage], bias, past, stage * self.layers, conv)
            conv, stage = conv + 2, stage + 1
        x = self.up(torch.cat([x, skip], dim=-1), times[stage], bias, past, stage * self.layers, conv)
        x = self.final(self.up_conv(x, contexts[conv + 2]), contexts[conv + 3])
        mel: Tensor = self.mel(x)
        return mel


class CpuEstimator(nn.Module):
    """CPU implementation of `FlowEstimator` on its weights."""

    def __init__(self, estimator: FlowEstimator, times: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self._reference, self._dtype = estimator, dtype
        self._times = estimator.time_conditions(times)
        self._steps = scripted(CpuUNet(estimator, dtype))

    def time_conditions(self, times: Tensor) -> Tensor:
        """Precomputed conditions of the fixed schedule.  # [step] → [step, stage, channel]"""
        return self._times

    def forward(self, x: Tensor, time_conditions: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """# x [row, time, in_channels], time_conditions [stage, channel] → [row, time, out_channels]"""
        if not isinstance(past, CpuStreamPast):
            whole: Tensor = self._reference(x, time_conditions, bias, past)
            return whole
        bias = None if bias is None else bias.to(self._dtype)
        steps: Tensor = self._steps(x.to(self._dtype), time_conditions.to(self._dtype), bias, past.parts())
        return steps


class CpuFlow(FlowDecoder):
    """CPU implementation of `FlowDecoder` on its weights; the estimator computes in `dtype`."""

    def __init__(self, decoder: FlowDecoder, dtype: torch.dtype = torch.float32) -> None:
        nn.Module.__init__(self)
        self._dtype = dtype
        self.config: FlowConfig = decoder.config
        self.input_embedding, self.spk_embed_affine_layer = decoder.input_embedding, decoder.spk_embed_affine_layer
        self.encoder, self.encoder_proj = decoder.encoder, decoder.encoder_proj
        matching, estimator = decoder.decoder, decoder.decoder.estimator
        assert isinstance(estimator, FlowEstimator)
        cpu_estimator = CpuEstimator(estimator, cosine_times(matching.steps, self.device)[:-1], dtype)
        self.decoder = FlowMatching(cpu_estimator, matching.steps, matching.guidance)
        self._taps = {
            conv: TapConv(conv, torch.float32) for conv in decoder.encoder.modules() if isinstance(conv, CausalConv1d)
        }

    @staticmethod
    def suits(decoder: FlowDecoder) -> bool:
        """Whether the weights are unquantised float32 ones on a CPU; quantised ones are dequantised at every access."""
        on_cpu = decoder.device.type == "cpu" and decoder.encoder_proj.weight.dtype == torch.float32
        return on_cpu and not any(isinstance(layer, Int8Linear | QuantisedLinear) for layer in decoder.modules())

    def _blank_voice(self, prompt: VoicePrompt) -> FlowVoice:
        voice = super()._blank_voice(prompt)
        windows, contexts = (tensor.to(self._dtype) for tensor in (voice.cache.mel_windows, voice.cache.mel_contexts))
        return replace(voice, cache=replace(voice.cache, mel_windows=windows, mel_contexts=contexts))

    def _pasts(self, voices: Sequence[FlowVoice], cache: FlowCache, next_cache: FlowCache) -> Pasts:
        pasts = super()._pasts(voices, cache, next_cache)
        return Pasts(
            self._cpu_past(pasts.codes), self._cpu_past(pasts.frames), lambda step: self._cpu_past(pasts.mel_at(step))
        )

    def _cpu_past(self, past: Past) -> Past:
        assert isinstance(past, StreamPast)
        return CpuStreamPast(self._taps, past._prefixes, past._windows, list(past._contexts), past._next_windows)
