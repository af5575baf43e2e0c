"""Judges of sound for adversarial training: by folded periods (HiFi-GAN) and by spectra of several resolutions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

PERIODS = (2, 3, 5, 7, 11)
WINDOWS = (2048, 1024, 512)
SLOPE = 0.1


class DiscriminatorOutput(NamedTuple):
    """What a judge says, and what it saw on the way."""

    score: Tensor  # [batch, …]: 1 for recorded, 0 for made
    features: list[Tensor]


def _conv(inputs: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int] = (1, 1)) -> nn.Module:
    return weight_norm(nn.Conv2d(inputs, outputs, kernel, stride, padding=(kernel[0] // 2, kernel[1] // 2)))


class Judge(nn.Module):
    """A stack of convolutions over a picture of the sound."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def picture(self, sound: Tensor) -> Tensor:
        """# [batch, sample] → [batch, channel, height, width]"""
        raise NotImplementedError

    def forward(self, sound: Tensor) -> DiscriminatorOutput:
        """Its judgement of a batch.  # [batch, sample]"""
        x, features = self.picture(sound), []
        *hidden, last = self.layers
        for layer in hidden:
            x = functional.leaky_relu(layer(x), SLOPE)
            features.append(x)
        return DiscriminatorOutput(last(x), features)


class PeriodJudge(Judge):
    """Sees every `period`-th sample as one column."""

    def __init__(self, period: int, channels: Sequence[int]) -> None:
        sizes = [1, *channels]
        strides = [*[(3, 1)] * (len(channels) - 1), (1, 1)]
        hidden = [_conv(sizes[i], sizes[i + 1], (5, 1), strides[i]) for i in range(len(channels))]
        super().__init__([*hidden, _conv(sizes[-1], 1, (3, 1))])
        self.period = period

    def picture(self, sound: Tensor) -> Tensor:
        """Rows of one period."""
        missing = -sound.shape[-1] % self.period
        padded = functional.pad(sound[:, None], (0, missing), mode="reflect")
        return padded.unflatten(-1, (-1, self.period))


class SpectrumJudge(Judge):
    """Sees the complex spectrum, a quarter of a window apart."""

    def __init__(self, window: int, channels: int) -> None:
        first = _conv(2, channels, (3, 9), (1, 2))  # twice the bins would take three quarters of all judging
        striding = [_conv(channels, channels, (3, 9), (1, 2)) for _ in range(3)]
        super().__init__([first, *striding, _conv(channels, channels, (3, 3)), _conv(channels, 1, (3, 3))])
        self.window: Tensor
        self.register_buffer("window", torch.hann_window(window) * (6 / window) ** 0.5, persistent=False)

    def picture(self, sound: Tensor) -> Tensor:
        """Real and imaginary parts, by frame and bin."""
        size = self.window.shape[0]
        spectrum = torch.fft.rfft(sound.float().unfold(-1, size, size // 4) * self.window)
        return torch.stack([spectrum.real, spectrum.imag], dim=1)


class Discriminators(nn.Module):
    """All judges together."""

    def __init__(self, period_channels: Sequence[int] = (16, 64, 128, 256, 256), spectrum_channels: int = 16) -> None:
        super().__init__()
        periods: list[Judge] = [PeriodJudge(period, period_channels) for period in PERIODS]
        spectra: list[Judge] = [SpectrumJudge(window, spectrum_channels) for window in WINDOWS]
        self.judges = nn.ModuleList([*periods, *spectra])

    def forward(self, sound: Tensor) -> list[DiscriminatorOutput]:
        """What each says of a batch.  # [batch, sample]"""
        return [judge(sound) for judge in self.judges]

    def of_pair(self, recorded: Tensor, made: Tensor) -> tuple[list[DiscriminatorOutput], list[DiscriminatorOutput]]:
        """What each says of two batches, judged in one pass."""
        both = self(torch.cat([recorded, made]))
        rows = len(recorded)

        def part(cut: Callable[[Tensor], Tensor]) -> list[DiscriminatorOutput]:
            return [DiscriminatorOutput(cut(one.score), [cut(feature) for feature in one.features]) for one in both]

        return part(lambda x: x[:rows]), part(lambda x: x[rows:])


def judging_loss(recorded: Sequence[DiscriminatorOutput], made: Sequence[DiscriminatorOutput]) -> Tensor:
    """What the judges minimise: least squares to 1 for recorded sound and to 0 for made sound."""
    losses = [
        (1 - real.score.float()).square().mean() + fake.score.float().square().mean()
        for real, fake in zip(recorded, made, strict=True)
    ]
    return torch.stack(losses).mean()


def deceiving_loss(made: Sequence[DiscriminatorOutput]) -> Tensor:
    """What a generator minimises: least squares to 1 for made sound."""
    return torch.stack([(1 - fake.score.float()).square().mean() for fake in made]).mean()


def feature_distance(recorded: Sequence[DiscriminatorOutput], made: Sequence[DiscriminatorOutput]) -> Tensor:
    """How differently the judges see two sounds, each layer on the scale of its own features."""
    distances = [
        functional.l1_loss(fake_layer.float(), real_layer.detach().float())
        / real_layer.detach().float().abs().mean().clamp(min=1e-4)
        for real, fake in zip(recorded, made, strict=True)
        for real_layer, fake_layer in zip(real.features, fake.features, strict=True)
    ]
    return torch.stack(distances).mean()
