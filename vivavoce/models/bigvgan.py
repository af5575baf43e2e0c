"""BigVGAN-v2 vocoder: log-mel frames to sound through six upsampling stages with anti-aliased periodic activations.

conv → for each stage: transposed convolution → mean of three residual stacks → activation → conv → [-1, 1].

Nothing is causal, so a stream delays frames: a frame's sound depends on `receptive_field` frames before and after it. A
step renders the new frames within exactly that context, so the stream equals the whole.
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
PIECE_FRAMES = 1024  # a whole mel is rendered in pieces of this size to bound memory


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
        """Samples per mel frame."""
        return prod(self.upsample_rates)

    @classmethod
    def from_json(cls, file: str | Path) -> "BigVGANConfig":
        """Read a published `config.json`; version 1 omits the final bias and tanh, which are then on."""
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
    """The exact receptive field: mel frames before and after a frame that its sound depends on."""
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
        """# [batch, channel, time] → [batch, channel, time]"""
        first_activations, second_activations = self.activations[::2], self.activations[1::2]
        for first_activation, dilated, second_activation, plain in zip(
            first_activations, self.convs1, second_activations, self.convs2, strict=True
        ):
            x = x + plain(second_activation(dilated(first_activation(x))))
        return x


def _same_conv(channels: int, kernel: int, dilation: int) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=dilation * (kernel // 2))


@dataclass(frozen=True)
class BigVGANState:
    """State of a stream; an immutable value."""

    mel: Tensor  # [batch, mel, frame]: past context, then frames not rendered yet
    rendered: int  # frames of `mel` that were rendered already
    look_ahead: int  # frames of delay until the final step


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
        """The output of the last convolution, before `bounded`.  # [batch, mel, frame] → [batch, frame * hop]"""
        x = self.conv_pre(mel)
        kernels = len(self.config.resblock_kernel_sizes)
        for stage, up in enumerate(self.ups):
            x = up(x)
            blocks = self.resblocks[stage * kernels : (stage + 1) * kernels]
            x = torch.stack([block(x) for block in blocks]).mean(dim=0)
        out: Tensor = self.conv_post(self.activation_post(x))
        return out.squeeze(1)

    def bounded(self, wave: Tensor) -> Tensor:
        """Map into [-1, 1] as the checkpoint was trained: clamp or tanh."""
        return wave.tanh() if self.config.use_tanh_at_final else wave.clamp(-1.0, 1.0)

    def initial_state(self, batch: int = 1, look_ahead: int | None = None) -> BigVGANState:
        """The state before the first frame. A smaller `look_ahead` lowers latency, but is inexact."""
        look_ahead = self.look_ahead if look_ahead is None else look_ahead
        if look_ahead < 0:
            raise InputError(f"look_ahead is {look_ahead}; it counts mel frames, from 0 to {self.look_ahead}")
        nothing = self.conv_pre.weight.new_empty(batch, self.config.num_mels, 0)
        return BigVGANState(nothing, rendered=0, look_ahead=min(look_ahead, self.look_ahead))

    def step(self, state: BigVGANState, mel: Tensor, final: bool = False) -> tuple[Tensor, BigVGANState]:
        """Sound completed by these frames; with `final` all that remains.  # [batch, mel, frame] → [batch, time]"""
        (pcm,), (new_state,) = self.step_batch([state], [mel], [final])
        return pcm, new_state

    def step_batch(
        self, states: Sequence[BigVGANState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[BigVGANState]]:
        """Step several streams; those with equally long windows run as one batch."""
        sounds, new_states = [], []
        windows = [self._window(state, mel) for state, mel in zip(states, mels, strict=True)]
        delays = [0 if last else state.look_ahead for state, last in zip(states, final, strict=True)]
        ready = [
            max(0, window.shape[-1] - state.rendered - delay)
            for state, window, delay in zip(states, windows, delays, strict=True)
        ]
        rendered = self._rendered({index: windows[index] for index, frames in enumerate(ready) if frames})
        for index, (state, window, frames) in enumerate(zip(states, windows, ready, strict=True)):
            end = state.rendered + frames
            wave = rendered.get(index, window.new_empty(window.shape[0], 0))
            sounds.append(self.bounded(wave[:, state.rendered * self.config.hop : end * self.config.hop]))
            context = min(end, self.left_context)
            new_states.append(BigVGANState(window[..., end - context :], context, state.look_ahead))
        return sounds, new_states

    def _rendered(self, windows: dict[int, Tensor]) -> dict[int, Tensor]:
        """Unbounded sound of each window; windows of equal length run as one batch."""
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
            raise InputError("the mel has NaN or infinite values")
        return torch.cat([state.mel, mel.to(state.mel)], dim=-1)
