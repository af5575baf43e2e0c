"""Audio losses: spectral and harmonic distances, adversarial losses with discriminators, and CTC."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from vivavoce.audio.mel import slaney_filters

RESOLUTIONS = ((64, 6), (128, 12), (256, 24), (512, 48), (1024, 80), (2048, 128))  # window samples, mel bands
HARMONICS = ((1024, 1500.0), (2048, 1000.0))  # window samples, Hz up to which single bins are compared
FLOOR = 2e-5  # of full scale, added to every mel: quieter differences are inaudible

HARMONIC_FLOOR = 2e-4


class SpectralDistance(nn.Module):
    """Multi-resolution log-mel L1 distance in log10: 0.1 is 2 dB."""

    def __init__(self, rate: int) -> None:
        super().__init__()
        for size, bands in RESOLUTIONS:
            filters = slaney_filters(rate, size, bands)
            window = torch.hann_window(size)
            # Both sum to 1, so that a mel is a share of full scale at every resolution.
            self.register_buffer(
                f"filters{size}", filters / filters.sum(-1, keepdim=True).clamp(min=1e-9), persistent=False
            )
            self.register_buffer(f"window{size}", window / window.sum(), persistent=False)

    def forward(self, generated: Tensor, recorded: Tensor) -> Tensor:
        """# [sound, sample] twice → scalar"""
        differences = [
            functional.l1_loss(*self._log_mels(torch.stack([generated, recorded]), size)) for size, _ in RESOLUTIONS
        ]
        return torch.stack(differences).mean()

    def _log_mels(self, sounds: Tensor, size: int) -> Tensor:
        window, filters = (cast(Tensor, getattr(self, f"{name}{size}")) for name in ("window", "filters"))
        spectrum = torch.fft.rfft(sounds.unfold(-1, size, size // 4) * window)
        power = spectrum.real.square() + spectrum.imag.square()
        magnitude = (power + 1e-14).sqrt()  # [2, sound, frame, bin]
        return (functional.linear(magnitude, filters) + FLOOR).log10()


class HarmonicDistance(nn.Module):
    """Log L1 distance of single low bins of long windows: resolves the lowest harmonics, which mels blur."""

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.bins = {size: int(highest / rate * size) for size, highest in HARMONICS}
        for size in self.bins:
            window = torch.hann_window(size)
            self.register_buffer(f"window{size}", window / window.sum(), persistent=False)

    def forward(self, generated: Tensor, recorded: Tensor) -> Tensor:
        """# [sound, sample] twice → scalar"""
        differences = [
            functional.l1_loss(*self._low_bins(torch.stack([generated, recorded]), size)) for size in self.bins
        ]
        return torch.stack(differences).mean()

    def _low_bins(self, sounds: Tensor, size: int) -> Tensor:
        window = cast(Tensor, getattr(self, f"window{size}"))
        spectrum = torch.fft.rfft(sounds.unfold(-1, size, size // 8) * window)[..., 2 : self.bins[size]]
        power = spectrum.real.square() + spectrum.imag.square()
        return ((power + 1e-14).sqrt() + HARMONIC_FLOOR).log10()


PERIODS = (2, 3, 5, 7, 11)
WINDOWS = (2048, 1024, 512)
SLOPE = 0.1


class DiscriminatorOutput(NamedTuple):
    """A discriminator's score and its features."""

    score: Tensor  # [batch, …]: 1 for recorded, 0 for generated
    features: list[Tensor]


def _conv(inputs: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int] = (1, 1)) -> nn.Module:
    return weight_norm(nn.Conv2d(inputs, outputs, kernel, stride, padding=(kernel[0] // 2, kernel[1] // 2)))


class Discriminator(nn.Module):
    """A stack of convolutions over a 2-D view of the audio."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def image(self, sound: Tensor) -> Tensor:
        """# [batch, sample] → [batch, channel, height, width]"""
        raise NotImplementedError

    def forward(self, sound: Tensor) -> DiscriminatorOutput:
        """# [batch, sample]"""
        x, features = self.image(sound), []
        *hidden, last = self.layers
        for layer in hidden:
            x = functional.leaky_relu(layer(x), SLOPE)
            features.append(x)
        return DiscriminatorOutput(last(x), features)


class PeriodDiscriminator(Discriminator):
    """Views audio as rows of one period."""

    def __init__(self, period: int, channels: Sequence[int]) -> None:
        sizes = [1, *channels]
        strides = [*[(3, 1)] * (len(channels) - 1), (1, 1)]
        hidden = [_conv(sizes[i], sizes[i + 1], (5, 1), strides[i]) for i in range(len(channels))]
        super().__init__([*hidden, _conv(sizes[-1], 1, (3, 1))])
        self.period = period

    def image(self, sound: Tensor) -> Tensor:
        missing = -sound.shape[-1] % self.period
        padded = functional.pad(sound[:, None], (0, missing), mode="reflect")
        return padded.unflatten(-1, (-1, self.period))


class SpectrumDiscriminator(Discriminator):
    """Views audio as a complex spectrogram with a hop of a quarter window."""

    def __init__(self, window: int, channels: int) -> None:
        first = _conv(2, channels, (3, 9), (1, 2))  # without the stride this layer would take most of the time
        striding = [_conv(channels, channels, (3, 9), (1, 2)) for _ in range(3)]
        super().__init__([first, *striding, _conv(channels, channels, (3, 3)), _conv(channels, 1, (3, 3))])
        self.window: Tensor
        self.register_buffer("window", torch.hann_window(window) * (6 / window) ** 0.5, persistent=False)

    def image(self, sound: Tensor) -> Tensor:
        size = self.window.shape[0]
        spectrum = torch.fft.rfft(sound.float().unfold(-1, size, size // 4) * self.window)
        return torch.stack([spectrum.real, spectrum.imag], dim=1)


class Discriminators(nn.Module):
    """Multi-period and multi-resolution discriminators. The attribute `judges` is part of run checkpoints."""

    def __init__(self, period_channels: Sequence[int] = (16, 64, 128, 256, 256), spectrum_channels: int = 16) -> None:
        super().__init__()
        periods: list[Discriminator] = [PeriodDiscriminator(period, period_channels) for period in PERIODS]
        spectra: list[Discriminator] = [SpectrumDiscriminator(window, spectrum_channels) for window in WINDOWS]
        self.judges = nn.ModuleList([*periods, *spectra])

    def forward(self, sound: Tensor) -> list[DiscriminatorOutput]:
        """# [batch, sample]"""
        return [discriminator(sound) for discriminator in self.judges]

    def of_pair(
        self, recorded: Tensor, generated: Tensor
    ) -> tuple[list[DiscriminatorOutput], list[DiscriminatorOutput]]:
        """Outputs for two batches, in one pass."""
        both = self(torch.cat([recorded, generated]))
        rows = len(recorded)

        def part(cut: Callable[[Tensor], Tensor]) -> list[DiscriminatorOutput]:
            return [DiscriminatorOutput(cut(one.score), [cut(feature) for feature in one.features]) for one in both]

        return part(lambda x: x[:rows]), part(lambda x: x[rows:])


def discriminator_loss(recorded: Sequence[DiscriminatorOutput], generated: Sequence[DiscriminatorOutput]) -> Tensor:
    """Least-squares GAN loss: 1 for recorded audio, 0 for generated."""
    losses = [
        (1 - real.score.float()).square().mean() + fake.score.float().square().mean()
        for real, fake in zip(recorded, generated, strict=True)
    ]
    return torch.stack(losses).mean()


def generator_loss(generated: Sequence[DiscriminatorOutput]) -> Tensor:
    """Least-squares GAN loss of the generator."""
    return torch.stack([(1 - fake.score.float()).square().mean() for fake in generated]).mean()


def feature_distance(recorded: Sequence[DiscriminatorOutput], generated: Sequence[DiscriminatorOutput]) -> Tensor:
    """Feature matching loss, each layer relative to its own scale."""
    distances = [
        functional.l1_loss(fake_layer.float(), real_layer.detach().float())
        / real_layer.detach().float().abs().mean().clamp(min=1e-4)
        for real, fake in zip(recorded, generated, strict=True)
        for real_layer, fake_layer in zip(real.features, fake.features, strict=True)
    ]
    return torch.stack(distances).mean()


BLANK = 0
LOG_ZERO = -1e30  # a log-probability that stays finite in sums


def ctc_loss(log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """−log p(target) of each row; 0 where a target does not fit its frames. Runs on any device and in CUDA graphs.

    # [batch, frame, symbol], [batch, letter], [batch], [batch] → [batch]
    """
    with torch.autocast(log_probs.device.type, enabled=False):
        loss: Tensor = _Ctc.apply(log_probs.float(), targets, lengths, target_lengths)  # type: ignore[no-untyped-call]
    return loss


class _Ctc(torch.autograd.Function):
    """CTC whose gradient, the negated expected count of each symbol at each frame, is computed in the forward pass."""

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
    is_frame = torch.arange(frames, device=lengths.device) < lengths[:, None]
    is_state = torch.arange(states, device=lengths.device) < ends[:, None]
    possible = (total > LOG_ZERO / 2) & (lengths > 0)
    counted = is_frame[:, :, None] & is_state[:, None] & possible[:, None, None]
    occupied = (forward + backward - emitted - total[:, None, None]).exp().masked_fill(~counted, 0.0)
    of_symbol = (labels[..., None] == torch.arange(symbols, device=labels.device)).to(occupied.dtype)
    return torch.where(possible, -total, 0.0), -(occupied @ of_symbol)


def _paths(emitted: Tensor, skips: Tensor) -> Tensor:
    """Forward variables: log-probability of all prefixes that end in a state.  # [frame, row, state] → the same"""
    frames, rows, states = emitted.shape
    reached = emitted.new_full((frames, rows, states + 2), LOG_ZERO)  # two states of padding before the first
    reached[0, :, 2:4] = emitted[0, :, :2]
    skipped, joined = torch.empty_like(skips), torch.empty_like(skips)
    for frame in range(1, frames):
        previous = reached[frame - 1]
        torch.add(previous[:, :-2], skips, out=skipped)
        torch.logaddexp(previous[:, 2:], previous[:, 1:-1], out=joined)
        torch.logaddexp(joined, skipped, out=joined)
        torch.add(joined, emitted[frame], out=reached[frame, :, 2:])
    return reached[..., 2:]


def _skips(labels: Tensor) -> Tensor:
    """0 where a path may skip a blank: the label differs from the previous one."""
    allowed = labels[:, 2:] != labels[:, :-2]
    allowed = allowed & (labels[:, 2:] != BLANK)
    skips = torch.full(labels.shape, LOG_ZERO, device=labels.device)
    skips[:, 2:].masked_fill_(allowed, 0.0)
    return skips


def _reversed_index(lengths: Tensor, size: int) -> Tensor:
    """Indices that reverse each row without its padding.  # [batch, size]"""
    return (lengths[:, None] - 1 - torch.arange(size, device=lengths.device)).clamp(min=0)


def _pick(values: Tensor, time: Tensor, state: Tensor) -> Tensor:
    """Rows with both axes reordered.  # [batch, frame, state]"""
    values = values.gather(1, time[:, :, None].expand(-1, -1, values.shape[2]))
    return values.gather(2, state[:, None].expand(-1, values.shape[1], -1))
