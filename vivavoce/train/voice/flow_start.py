"""Where a flow decoder starts to learn from: an estimator that already hands its noise through."""

from typing import cast

import torch
from torch import Tensor, nn

from vivavoce.models.flow import FlowConfig, FlowDecoder
from vivavoce.models.flow_estimator import EstimatorStage, EstimatorTransformer, FlowEstimator, ResidualBlock
from vivavoce.nn.conv import CausalConv1d
from vivavoce.nn.linear import PackedLinear

QUIET = 0.1  # share of a branch beside the highway that is left
SLOPE = 0.8  # about what norm and Mish leave of a pair of opposite channels


@torch.no_grad()
def untaught(config: FlowConfig, mean_mel: Tensor, seed: int) -> FlowDecoder:
    """A flow decoder ready to learn, which goes from any noise towards the mean of all mels to begin with."""
    torch.manual_seed(seed)
    flow = FlowDecoder(config)
    for module in flow.modules():
        if isinstance(module, PackedLinear):
            torch.nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                module.bias.zero_()
    flow.input_embedding.weight.mul_(0.5)
    flow.encoder_proj.bias.zero_()
    estimator = flow.decoder.estimator
    assert isinstance(estimator, FlowEstimator)
    _hand_noise_through(estimator, config.mel_bands)
    assert estimator.final_proj.bias is not None
    estimator.final_proj.bias.copy_(mean_mel)
    return flow.to(mean_mel.device).requires_grad_(True)


def _hand_noise_through(estimator: FlowEstimator, bands: int) -> None:
    """Most of a velocity is the noise itself, turned around. Let it pass, and learning begins with what is left."""
    for stage in (*estimator.down_blocks, *estimator.mid_blocks, *estimator.up_blocks):
        assert isinstance(stage, EstimatorStage)
        residual, transformers, *closing = stage
        assert isinstance(residual, ResidualBlock)
        _pass_residual(residual, bands)
        for transformer in transformers:  # type: ignore[attr-defined]
            assert isinstance(transformer, EstimatorTransformer)
            for last in (transformer.attn1.to_out[0], transformer.ff.net["2"]):
                _weight(last).mul_(QUIET)
        for conv in closing:
            assert isinstance(conv, CausalConv1d)
            conv.weight.mul_(QUIET)
            conv.weight[:, :, -1] += torch.eye(conv.out_channels)
    _turn_around(estimator, bands)


def _pass_residual(block: ResidualBlock, bands: int) -> None:
    _weight(block.block2.block["2"]).fill_(QUIET)
    weight = block.res_conv.weight[..., 0]
    inputs, outputs = weight.shape[1], weight.shape[0]
    passed = min(outputs, inputs)
    if inputs % outputs:  # the first: noise comes in the first bands, the conditions behind it
        passed = min(bands, outputs)
        weight[:, :passed] = 0
        weight[:passed] = 0
    else:
        weight.zero_()
    weight[:passed, :passed] += torch.eye(passed)


def _weight(module: nn.Module) -> Tensor:
    return cast(Tensor, module.weight)


def _turn_around(estimator: FlowEstimator, bands: int) -> None:
    """Two channels a band, the one the other's opposite, are straight through a Mish that bends each."""
    conv = estimator.final_block.block["0"]
    assert isinstance(conv, CausalConv1d)
    pairs = min(bands, conv.out_channels // 2)
    there, back = slice(0, pairs), slice(pairs, 2 * pairs)
    one = torch.eye(pairs)
    conv.weight.mul_(0.3)
    conv.weight[there, there, -1] += one
    conv.weight[back, there, -1] -= one
    weight = estimator.final_proj.weight[..., 0]
    weight.mul_(0.3)
    weight[there, there] -= SLOPE * one
    weight[there, back] += SLOPE * one
