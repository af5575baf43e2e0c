"""Both HiFTs over a whole mel: every padding spelled out, no state, torch's own transforms."""

import torch
from torch.nn import functional

from vivavoce.models.checkpoint import published_tensors


class PlainHiFT:
    """HiFT of MOSS-Speech and CosyVoice 2: all convolutions look as far ahead as back."""

    f0_sides = ((1, 1), (1, 1))  # of the first layer, and of the others
    first_sides, last_sides = (3, 3), (3, 3)

    def __init__(self, hift):
        self.w = {name: tensor.double() for name, tensor in published_tensors(hift).items()}

    def sides(self, width):
        """What is padded for a convolution that reaches over so many values besides one."""
        return width // 2, width // 2

    def up(self, name, x, factor, kernel):
        weight, bias = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
        return functional.conv_transpose1d(x, weight, bias, factor, padding=(kernel - factor) // 2)

    def down_sides(self, stride):
        return stride // 2, stride // 2

    def conv(self, name, x, sides, stride=1, dilation=1):
        weight, bias = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
        return functional.conv1d(functional.pad(x, sides), weight, bias, stride, dilation=dilation)

    def snake(self, name, x):
        alpha = self.w[f"{name}.alpha"][:, None]
        return x + torch.sin(alpha * x) ** 2 / (alpha + 1e-9)

    def block(self, name, x, kernel):
        for index, dilation in enumerate((1, 3, 5)):
            y = self.snake(f"{name}.activations1.{index}", x)
            y = self.conv(f"{name}.convs1.{index}", y, self.sides((kernel - 1) * dilation), dilation=dilation)
            y = self.snake(f"{name}.activations2.{index}", y)
            x = x + self.conv(f"{name}.convs2.{index}", y, self.sides(kernel - 1))
        return x

    def f0(self, mel):
        x = mel
        for layer in (0, 2, 4, 6, 8):
            x = functional.elu(self.conv(f"f0_predictor.condnet.{layer}", x, self.f0_sides[layer > 0]))
        weight, bias = (self.w[f"f0_predictor.classifier.{kind}"] for kind in ("weight", "bias"))
        return functional.linear(x.transpose(1, 2), weight, bias)[..., 0].abs()

    def decode(self, mel, source):
        window = torch.hann_window(16, dtype=torch.float64)
        spectrum = torch.stft(source, 16, 4, window=window, return_complex=True)
        spectrum = torch.cat([spectrum.real, spectrum.imag], dim=1)
        x = self.conv("conv_pre", mel, self.first_sides)
        for stage, (factor, kernel, stride, source_kernel) in enumerate([(8, 16, 15, 7), (5, 11, 3, 7), (3, 7, 1, 11)]):
            x = self.up(f"ups.{stage}", functional.leaky_relu(x, 0.1), factor, kernel)
            if stage == 2:
                x = functional.pad(x, (1, 0), mode="reflect")
            excited = self.conv(f"source_downs.{stage}", spectrum, self.down_sides(stride), stride)
            x = x + self.block(f"source_resblocks.{stage}", excited, source_kernel)
            mixed = [self.block(f"resblocks.{3 * stage + n}", x, kernel) for n, kernel in enumerate((3, 7, 11))]
            x = sum(mixed) / 3
        magnitude, angle = self.conv("conv_post", functional.leaky_relu(x, 0.01), self.last_sides).chunk(2, dim=1)
        spectrum = torch.polar(magnitude.exp().clamp(max=100), angle.sin())
        return torch.istft(spectrum, 16, 4, window=window)


class PlainCausalHiFT(PlainHiFT):
    """HiFT of CosyVoice 3: convolutions look back, but for the first one and that of f0."""

    f0_sides = ((0, 3), (2, 0))
    first_sides, last_sides = (0, 4), (6, 0)

    def sides(self, width):
        return width, 0

    def up(self, name, x, factor, kernel):
        return self.conv(name, functional.interpolate(x, scale_factor=factor, mode="nearest"), (kernel - 1, 0))

    def down_sides(self, stride):
        return stride - 1, 0
