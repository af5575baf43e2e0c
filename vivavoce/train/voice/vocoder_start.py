"""Where a vocoder starts to learn from: quiet, at a man's height, and with an excitation that is heard."""

import torch
from torch import nn

from vivavoce.models.hift import HiFT, ResBlock
from vivavoce.models.hift_geometry import HiFTConfig

QUIET = 0.1  # share of a branch beside the excitation's way that is left
LOUDNESS = 0.2  # of the excitation, before anything is learned


@torch.no_grad()
def untaught(config: HiFTConfig, device: torch.device | str, seed: int) -> HiFT:
    """A vocoder ready to learn."""
    torch.manual_seed(seed)
    hift = HiFT(config)
    assert hift.conv_post.bias is not None
    hift.f0_predictor.classifier.weight.mul_(50.0)
    hift.f0_predictor.classifier.bias.fill_(60.0)
    hift.conv_post.weight.mul_(QUIET)
    if config.plain_spectrum:
        hand_excitation_through(hift)
    else:
        hift.conv_post.bias[: len(hift.conv_post.bias) // 2] = -4.0
    hift.to(device).requires_grad_(True)
    keep_excited(hift)
    return hift


@torch.no_grad()
def keep_excited(hift: HiFT) -> None:
    """Mix all harmonics alike, for good: a mixture that learns dies before the network has learned to use it."""
    mixture = hift.m_source.l_linear.requires_grad_(False)
    mixture.weight.fill_(1.0)
    mixture.bias.zero_()


@torch.no_grad()
def hand_excitation_through(hift: HiFT) -> None:
    """Let the low bins of the excitation's spectrum pass to the sound's, so that its harmonics stay what they are.

    What is left to learn is how loud which of them is. Two channels of the last stage carry a value, the one the
    other's opposite, so that it is straight behind a rectifier that bends each.
    """
    down, up, post = hift.source_downs[-1], hift.ups[-1], hift.conv_post
    assert isinstance(down, nn.Conv1d)
    assert isinstance(up, nn.ConvTranspose1d)
    assert down.bias is not None
    assert up.bias is not None
    assert post.bias is not None
    bins, highest = hift.config.n_fft // 2 + 1, max(0, (down.out_channels // 4 - 1) // 2)
    values = [*range(highest + 1), *range(bins + 1, bins + highest + 1)]  # real parts, and imaginary from bin 1
    used = slice(0, 2 * len(values))
    nn.init.normal_(down.weight, 0.0, 0.05)
    down.bias.zero_()
    nn.init.normal_(post.weight, 0.0, 0.01)
    post.bias.zero_()
    down.weight[used] = 0
    up.weight[:, used] *= QUIET
    up.bias[used] *= QUIET
    for place, value in enumerate(values):
        for channel, sign in ((2 * place, 1.0), (2 * place + 1, -1.0)):
            down.weight[channel, value, 0] = sign
            post.weight[value, channel, post.kernel_size[0] // 2] += LOUDNESS * sign
    mixing = list(hift.resblocks)[-len(hift.config.resblock_kernels) :]
    for block in (hift.source_resblocks[-1], *mixing):
        assert isinstance(block, ResBlock)
        for conv in block.convs2:
            assert isinstance(conv, nn.Conv1d)
            assert conv.bias is not None
            conv.weight.mul_(QUIET)
            conv.bias.zero_()
