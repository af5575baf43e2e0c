"""Kokoro's sound side: features, pitch and loudness → features at two per frame → sound by iSTFTNet."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.hift.model import centred_conv
from vivavoce.models.kokoro.config import RATE, GeneratorConfig, KokoroConfig
from vivavoce.models.kokoro.layers import AdaptiveNorm, RunningStatistics, StyledResBlock, masked
from vivavoce.nn.vocoder import ShortFourier, SineSource, SourceStart

UPSAMPLE_SLOPE = 0.1
LAST_SLOPE = 0.01
MIN_ENVELOPE = 1e-11
REAL = 1e-5  # a number whose imaginary part is smaller beside its real part is real


class GeneratorBlock(nn.Module):
    """x + conv(snake(norm(conv(snake(norm(x)))))) once per dilation."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...], style: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(centred_conv(channels, channels, kernel, dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(centred_conv(channels, channels, kernel) for _ in dilations)
        self.adain1 = nn.ModuleList(AdaptiveNorm(style, channels) for _ in dilations)
        self.adain2 = nn.ModuleList(AdaptiveNorm(style, channels) for _ in dilations)
        self.alpha1 = nn.ParameterList(torch.ones(1, channels, 1) for _ in dilations)
        self.alpha2 = nn.ParameterList(torch.ones(1, channels, 1) for _ in dilations)

    def forward(self, x: Tensor, style: Tensor, mask: Tensor | None, running: RunningStatistics) -> Tensor:
        """# [batch, channel, time]"""
        firsts = zip(self.adain1, self.alpha1, self.convs1, strict=True)
        seconds = zip(self.adain2, self.alpha2, self.convs2, strict=True)
        for (norm1, alpha1, conv1), (norm2, alpha2, conv2) in zip(firsts, seconds, strict=True):
            inner = conv1(masked(snake(norm1(x, style, mask, running), alpha1), mask))
            inner = conv2(masked(snake(norm2(inner, style, mask, running), alpha2), mask))
            x = x + inner
        return x


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    """x + sin²(αx) / α"""
    return x + torch.sin(alpha * x).square() / alpha


class Generator(nn.Module):
    """iSTFTNet with adaptive norms: each stage upsamples, adds the excitation's spectrum and applies three blocks."""

    def __init__(self, config: GeneratorConfig, style: int) -> None:
        super().__init__()
        self.config = config
        self.m_source = SineSource(RATE, config.hop)
        self.ups, self.noise_convs = nn.ModuleList(), nn.ModuleList()
        self.noise_res, self.resblocks = nn.ModuleList(), nn.ModuleList()
        width, remaining = config.channels, config.hop // config.fft_hop
        for rate, kernel, source_kernel in zip(
            config.upsample_rates, config.upsample_kernels, config.source_kernels, strict=True
        ):
            self.ups.append(nn.ConvTranspose1d(width, width // 2, kernel, rate, padding=(kernel - rate) // 2))
            width, remaining = width // 2, remaining // rate
            spectrum, stride = config.n_fft + 2, remaining
            self.noise_convs.append(
                nn.Conv1d(spectrum, width, 1)
                if stride == 1
                else nn.Conv1d(spectrum, width, 2 * stride, stride, padding=(stride + 1) // 2)
            )
            self.noise_res.append(GeneratorBlock(width, source_kernel, config.dilations, style))
            self.resblocks.extend(
                GeneratorBlock(width, kernel, config.dilations, style) for kernel in config.resblock_kernels
            )
        self.conv_post = centred_conv(width, config.n_fft + 2, 7)
        self.fourier = ShortFourier(config.n_fft, config.fft_hop)

    def source_spectrum(self, f0: Tensor, seed: Tensor | None, lengths: Tensor | None = None) -> Tensor:
        """Magnitudes and angles of the excitation; `seed` draws its noise for each row, None omits it.

        # [batch, time] Hz, zero behind the end of a row → [batch, 2 · bin, time · 60 + 1]
        """
        frame = torch.zeros(len(f0), dtype=torch.int64, device=f0.device)
        excitation = self.m_source(f0, SourceStart(None, frame, seed))
        if lengths is not None:
            excitation = _reflected(excitation, lengths * self.config.hop)
        real, imaginary = self.fourier(excitation).chunk(2, dim=1)
        # A rounding error decides between the angles π and -π of a negative real number, as at the reflected start.
        imaginary = torch.where(imaginary.abs() <= REAL * real.abs(), 0.0, imaginary)
        imaginary[:, 0] = imaginary[:, -1] = 0.0
        angle = torch.atan2(imaginary, real)
        spectrum = torch.cat([torch.sqrt(real.square() + imaginary.square()), angle], dim=1)
        return masked(spectrum, self._spectrum_mask(lengths, spectrum.shape[-1]))

    def forward(
        self, x: Tensor, style: Tensor, spectrum: Tensor, lengths: Tensor | None, running: RunningStatistics
    ) -> Tensor:
        """Features and the excitation's spectrum → sound.

        # [batch, channel, time], [batch, 2 · bin, time · 60 + 1] → [batch, time · 300]; lengths [batch]: of features
        """
        blocks = list(cast(Iterable[GeneratorBlock], self.resblocks))
        per_stage, last, rate = len(self.config.resblock_kernels), len(self.ups) - 1, 1
        for stage, up in enumerate(self.ups):
            x = up(functional.leaky_relu(x, UPSAMPLE_SLOPE))
            if stage == last:
                x = functional.pad(x, (1, 0), mode="reflect")
            rate *= self.config.upsample_rates[stage]
            mask = None if lengths is None else time_mask(lengths * rate + int(stage == last), x.shape[-1])
            source = self.noise_res[stage](masked(self.noise_convs[stage](spectrum), mask), style, mask, running)
            x = masked(x + source, mask)
            stage_blocks = blocks[stage * per_stage : (stage + 1) * per_stage]
            x = masked(torch.stack([block(x, style, mask, running) for block in stage_blocks]).mean(0), mask)
        x = self.conv_post(functional.leaky_relu(x, LAST_SLOPE))
        return self.waves(x, self._spectrum_mask(lengths, x.shape[-1]))

    def waves(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log magnitudes and angles → sound.  # [batch, 2 · bin, frame] → [batch, (frame - 1) · hop]"""
        magnitude, angle = x.chunk(2, dim=1)
        magnitude, angle = masked(magnitude.exp(), mask), angle.sin()
        spectrum = torch.cat([magnitude * angle.cos(), magnitude * angle.sin()], dim=1)
        counted = torch.ones_like(x[:1, :1]) if mask is None else mask
        signal = functional.conv_transpose1d(spectrum, self.fourier.synthesis, stride=self.config.fft_hop)
        squares = self.fourier.window.square()[None, None]
        envelope = functional.conv_transpose1d(counted, squares, stride=self.config.fft_hop)
        half = self.config.n_fft // 2
        return (signal / envelope.clamp_min(MIN_ENVELOPE))[:, 0, half : signal.shape[-1] - half]

    def _spectrum_mask(self, lengths: Tensor | None, frames: int) -> Tensor | None:
        rate = self.config.hop // self.config.fft_hop
        return None if lengths is None else time_mask(lengths * rate + 1, frames)


def _reflected(signal: Tensor, lengths: Tensor) -> Tensor:
    """Each row continued behind its end by its reflection, as the transform pads a row that ends there."""
    position = torch.arange(signal.shape[1], device=signal.device).expand_as(signal)
    mirrored = (2 * lengths[:, None] - 2 - position).clamp_min(0)
    return signal.gather(1, torch.where(position < lengths[:, None], position, mirrored))


def time_mask(lengths: Tensor, time: int) -> Tensor:
    """1 inside each row and 0 behind its end.  # [batch] → [batch, 1, time] float"""
    return (torch.arange(time, device=lengths.device) < lengths[:, None]).float()[:, None]


class KokoroDecoder(nn.Module):
    """Text features, pitch and loudness → generator → sound."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        width, style = config.decoder_channels, config.style
        beside = config.text_residual + 2
        self.encode = StyledResBlock(config.hidden + 2, width, style)
        self.decode = nn.ModuleList(StyledResBlock(width + beside, width, style) for _ in range(3))
        self.decode.append(StyledResBlock(width + beside, config.generator.channels, style, upsamples=True))
        self.F0_conv = nn.Conv1d(1, 1, 3, stride=2, padding=1)
        self.N_conv = nn.Conv1d(1, 1, 3, stride=2, padding=1)
        self.asr_res = nn.Sequential(nn.Conv1d(config.hidden, config.text_residual, 1))
        self.generator = Generator(config.generator, style)

    def features(self, text: Tensor, f0: Tensor, loudness: Tensor, style: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the generator reads.  # [batch, hidden, frame], [batch, 2 · frame] → [batch, channel, 2 · frame]"""
        pitch, energy = self.F0_conv(f0[:, None]), self.N_conv(loudness[:, None])
        residual = self.asr_res(text)
        x = self.encode(masked(torch.cat([text, pitch, energy], dim=1), mask), style, mask)
        for block in self.decode:
            x = block(masked(torch.cat([x, residual, pitch, energy], dim=1), mask), style, mask)
        return x
