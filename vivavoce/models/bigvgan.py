"""BigVGAN-v2: log-mel frames to sound through six upsampling stages with anti-aliased periodic activations.

conv → for each stage: transposed convolution → mean of three residual stacks → activation → conv → [-1, 1].

Nothing in it is causal, so a stream holds frames back: a frame's sound depends on `receptive_field` frames before and
after it. A step renders the new frames within exactly that context, which makes the stream equal to the whole.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models import read_config
from vivavoce.models.checkpoint import Checkpoint, fold_weight_norm, load_weights
from vivavoce.nn.vocoder import REACH, AntiAliased, SnakeBeta

WEIGHTS_NAME = "bigvgan_generator.pt"
EDGE_KERNEL = 7
PIECE_FRAMES = 1024  # a whole mel is rendered in pieces of this size, so that memory does not grow with its length


@dataclass(frozen=True)
class BigVGANConfig:
    """Sizes as `config.json` names them; the defaults are bigvgan_v2_24khz_100band_256x."""

    sampling_rate: int = 24_000
    num_mels: int = 100
    upsample_rates: tuple[int, ...] = (4, 4, 2, 2, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (8, 8, 4, 4, 4, 4)
    upsample_initial_channel: int = 1536
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    snake_logscale: bool = True
    use_bias_at_final: bool = False
    use_tanh_at_final: bool = False
    n_fft: int = 1024
    fmax: float | None = None

    @property
    def hop(self) -> int:
        """Samples of one mel frame."""
        return prod(self.upsample_rates)

    @classmethod
    def from_json(cls, file: str | Path) -> "BigVGANConfig":
        """Read a published `config.json`, of version 1 too (whose final bias and tanh are not spelled out)."""
        values = read_config(file, "BigVGAN")
        for name, wanted in (("resblock", "1"), ("activation", "snakebeta")):
            if values.get(name, wanted) != wanted:
                raise CheckpointError(f"{file} has {name} = {values[name]!r}; only {wanted!r} is supported")
        values = {"use_bias_at_final": True, "use_tanh_at_final": True} | values
        return cls(**{field.name: _frozen(values[field.name]) for field in fields(cls) if field.name in values})


BIGVGAN_V2_24KHZ_100BAND_256X = BigVGANConfig()
BIGVGAN_V2_22KHZ_80BAND_256X = BigVGANConfig(sampling_rate=22_050, num_mels=80)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def receptive_field(config: BigVGANConfig) -> tuple[int, int]:
    """How many mel frames before and after a frame its sound depends on: exactly, for the stage sizes of `config`."""
    tail = EDGE_KERNEL // 2 + REACH
    first, last = -tail, config.hop - 1 + tail
    stages = zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True)
    for rate, kernel in reversed(list(stages)):
        reach = max(
            sum(2 * REACH + size // 2 * (dilation + 1) for dilation in dilations)
            for size, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
        )
        crop = (kernel - rate) // 2
        first = -((kernel - 1 - crop - (first - reach)) // rate)
        last = (last + reach + crop) // rate
    return EDGE_KERNEL // 2 - first, last + EDGE_KERNEL // 2


class AmpBlock(nn.Module):
    """Residual stack of one kernel size: for each dilation, x + conv(act(dilated conv(act(x))))."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...], log_scale: bool) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(_same_conv(channels, kernel, dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(_same_conv(channels, kernel, 1) for _ in dilations)
        self.activations = nn.ModuleList(AntiAliased(SnakeBeta(channels, log_scale)) for _ in range(2 * len(dilations)))

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, channel, time] → the same"""
        befores, betweens = self.activations[::2], self.activations[1::2]
        for before, dilated, between, plain in zip(befores, self.convs1, betweens, self.convs2, strict=True):
            x = x + plain(between(dilated(before(x))))
        return x


def _same_conv(channels: int, kernel: int, dilation: int) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=dilation * (kernel // 2))


@dataclass(frozen=True)
class BigVGANState:
    """Where a stream stands. Steps make new states and leave old ones as they are."""

    mel: Tensor  # [batch, mel, frame]: frames already heard that still colour the next ones, then frames not yet heard
    heard: int  # how many of them were heard
    look_ahead: int  # frames held back until the end of the stream


class BigVGAN(nn.Module):
    """Log-mel frames to sound in [-1, 1]."""

    def __init__(self, config: BigVGANConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.upsample_initial_channel
        self.conv_pre = nn.Conv1d(config.num_mels, channels, EDGE_KERNEL, padding=EDGE_KERNEL // 2)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
            up = nn.ConvTranspose1d(channels, channels // 2, kernel, rate, padding=(kernel - rate) // 2)
            self.ups.append(nn.Sequential(up))
            channels //= 2
            for size, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True):
                self.resblocks.append(AmpBlock(channels, size, dilations, config.snake_logscale))
        self.activation_post = AntiAliased(SnakeBeta(channels, config.snake_logscale))
        self.conv_post = nn.Conv1d(channels, 1, EDGE_KERNEL, padding=EDGE_KERNEL // 2, bias=config.use_bias_at_final)
        self.left_context, self.look_ahead = receptive_field(config)

    @classmethod
    def load(
        cls, folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> "BigVGAN":
        """The published model of a folder with `config.json` and `bigvgan_generator.pt` (or safetensors)."""
        config = BigVGANConfig.from_json(Path(folder) / "config.json")
        with torch.device("meta"):
            vocoder = cls(config)
        vocoder = vocoder.to(dtype).to_empty(device=device).eval().requires_grad_(False)
        pickled = Path(folder) / WEIGHTS_NAME
        with fold_weight_norm(Checkpoint(pickled if pickled.is_file() else folder)) as checkpoint:
            load_weights(vocoder, checkpoint)
        return vocoder

    def forward(self, mel: Tensor) -> Tensor:
        """Sound of a whole mel.  # [batch, mel, frame] → [batch, frame * hop]"""
        if mel.ndim == 3 and mel.shape[-1] == 0:
            raise InputError("the mel has no frames; give at least one")
        state, pieces = self.initial_state(mel.shape[0]), []
        for start in range(0, mel.shape[-1], PIECE_FRAMES):
            final = start + PIECE_FRAMES >= mel.shape[-1]
            pcm, state = self.step(state, mel[..., start : start + PIECE_FRAMES], final)
            pieces.append(pcm)
        return torch.cat(pieces, dim=-1)

    def render(self, mel: Tensor) -> Tensor:
        """What the last convolution gives, not yet bounded.  # [batch, mel, frame] → [batch, frame * hop]"""
        x = self.conv_pre(mel)
        kernels = len(self.config.resblock_kernel_sizes)
        for stage, up in enumerate(self.ups):
            x = up(x)
            blocks = self.resblocks[stage * kernels : (stage + 1) * kernels]
            x = torch.stack([block(x) for block in blocks]).mean(dim=0)
        out: Tensor = self.conv_post(self.activation_post(x))
        return out.squeeze(1)

    def bounded(self, wave: Tensor) -> Tensor:
        """Into [-1, 1] the way the checkpoint was trained: cut off, or through tanh."""
        return wave.tanh() if self.config.use_tanh_at_final else wave.clamp(-1.0, 1.0)

    def initial_state(self, batch: int = 1, look_ahead: int | None = None) -> BigVGANState:
        """The state before the first frame. Less than `self.look_ahead` answers sooner, but not exactly."""
        look_ahead = self.look_ahead if look_ahead is None else look_ahead
        if look_ahead < 0:
            raise InputError(f"look_ahead is {look_ahead}; it counts mel frames, from 0 to {self.look_ahead}")
        nothing = self.conv_pre.weight.new_empty(batch, self.config.num_mels, 0)
        return BigVGANState(nothing, heard=0, look_ahead=min(look_ahead, self.look_ahead))

    def step(self, state: BigVGANState, mel: Tensor, final: bool = False) -> tuple[Tensor, BigVGANState]:
        """The sound these frames complete; with `final` all that is left.  # [batch, mel, frame] → [batch, time]"""
        (pcm,), (after,) = self.step_batch([state], [mel], [final])
        return pcm, after

    def step_batch(
        self, states: Sequence[BigVGANState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[BigVGANState]]:
        """A step of several streams; those whose windows are equally wide run as one batch."""
        sounds, afters = [], []
        windows = [self._window(state, mel) for state, mel in zip(states, mels, strict=True)]
        held_back = [0 if last else state.look_ahead for state, last in zip(states, final, strict=True)]
        ready = [
            max(0, window.shape[-1] - state.heard - held)
            for state, window, held in zip(states, windows, held_back, strict=True)
        ]
        rendered = self._rendered({index: windows[index] for index, frames in enumerate(ready) if frames})
        for index, (state, window, frames) in enumerate(zip(states, windows, ready, strict=True)):
            heard = state.heard + frames
            wave = rendered.get(index, window.new_empty(window.shape[0], 0))
            sounds.append(self.bounded(wave[:, state.heard * self.config.hop : heard * self.config.hop]))
            context = min(heard, self.left_context)
            afters.append(BigVGANState(window[..., heard - context :], context, state.look_ahead))
        return sounds, afters

    def _rendered(self, windows: dict[int, Tensor]) -> dict[int, Tensor]:
        """Unbounded sound of each window, computed together where the widths agree."""
        by_width: dict[int, list[int]] = defaultdict(list)
        for index, window in windows.items():
            by_width[window.shape[-1]].append(index)
        rendered: dict[int, Tensor] = {}
        for indices in by_width.values():
            waves = self.render(torch.cat([windows[index] for index in indices]))
            rows = [windows[index].shape[0] for index in indices]
            rendered |= dict(zip(indices, torch.split_with_sizes(waves, rows), strict=True))
        return rendered

    def _window(self, state: BigVGANState, mel: Tensor) -> Tensor:
        batch, bands = state.mel.shape[:2]
        if mel.ndim != 3 or mel.shape[:2] != (batch, bands):
            raise InputError(f"the mel is {list(mel.shape)}; this stream takes [{batch}, {bands}, frames]")
        if not torch.isfinite(mel).all():
            raise InputError("the mel holds NaN or infinity; nothing can be heard of it")
        return torch.cat([state.mel, mel.to(state.mel)], dim=-1)
