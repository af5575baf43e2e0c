"""CosyVoice 3's vocoder: HiFT with causal convolutions, so that the sound lags the mel by only 4 frames.

Three layers look ahead, in parallel: f0 by 3 mel frames, the first convolution by 4, and the excitation's spectrum by
an eighth of a frame. So a sample needs at most 4 mel frames and 4 samples beyond its own.

There is one implementation: a whole mel is a stream of one final hop. The state of a stream is the last inputs of each
convolution, the phase of the excitation and unused spectra, so nothing is computed twice and the sound does not depend
on the hop sizes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import InputError
from vivavoce.models.hift.model import HiFTConfig, ResBlock, check_mel, load_vocoder, polar_to_rectangular, stage_layers
from vivavoce.nn.vocoder import CausalConv1d, ShortFourier, SineSource, SourceStart, stacked_starts
from vivavoce.nn.vq import uniform_at


@dataclass(frozen=True)
class CausalHiFTConfig(HiFTConfig):
    """The published values."""

    look_right: int = 4  # mel frames, of the first convolution
    f0_look_right: int = 3  # mel frames, of the f0 predictor
    f0_dtype: torch.dtype = torch.float64  # errors of f0 accumulate in the phase


@dataclass(frozen=True)
class CausalHiFTState:
    """State of a stream; immutable, and of constant size after five frames."""

    frames: int  # mel frames so far, counted to `look_right + 1`: from there on all hops are equal
    mel: Tensor  # [batch, mel, ≤ look_right]: the newest frames
    f0_contexts: Tensor  # [batch, value]: last inputs of the f0 predictor's convolutions
    start: SourceStart  # the excitation after the last f0
    source: Tensor  # [batch, sample]: the end of the excitation, less than a whole window
    excitations: tuple[Tensor, ...]  # per stage [batch, 2 · bins, frame]: unused spectrum of the excitation
    contexts: Tensor  # [batch, value]: last inputs of all other convolutions
    spectrum: Tensor  # [batch, 2 · bins, ≤ 3]: the last frames, which overlap with the next ones


Advance = Callable[[CausalHiFTState, Tensor, bool], tuple[Tensor, CausalHiFTState]]


class Contexts:
    """The last inputs of causal convolutions, read and updated in forward order."""

    def __init__(self, values: Tensor) -> None:  # [batch, value]
        self._values, self._read = values, 0
        self._updated: list[Tensor] = []

    def convolve(self, conv: nn.Module, x: Tensor) -> Tensor:
        """Continue the next convolution.  # [batch, channel, time]"""
        assert isinstance(conv, CausalConv1d)
        size = conv.in_channels * conv.context
        context = self._values[:, self._read : self._read + size].unflatten(1, (conv.in_channels, conv.context))
        self._read += size
        y, context = conv.step(context, x)
        self._updated.append(context.flatten(1))
        return y

    def updated(self) -> Tensor:
        """The contexts of the next hop."""
        return torch.cat(self._updated, dim=1)

    @staticmethod
    def initial(convolutions: Iterable[CausalConv1d], batch: int) -> Tensor:
        """The contexts before the first hop."""
        return torch.cat([conv.initial_state(batch).flatten(1) for conv in convolutions], dim=1)


class SteppedSource(SineSource):
    """Harmonics whose phase is constant within a frame, and uniform noise, as these weights were trained."""

    noise_at = staticmethod(uniform_at)

    def _phase(self, f0: Tensor, start_cycles: Tensor | None) -> Tensor:
        sums = self._cycles_per_frame(f0).double().cumsum(-1)
        if start_cycles is not None:
            sums = sums + start_cycles[..., None]
        return sums.frac().to(f0.dtype).repeat_interleave(self.hop, dim=-1)


class CausalF0Predictor(nn.Module):
    """Mel frames → f0 in Hz; the first convolution looks ahead, the others are causal."""

    def __init__(self, config: CausalHiFTConfig) -> None:
        super().__init__()
        width = config.f0_channels
        self.condnet = nn.Sequential(nn.Conv1d(config.mels, width, config.f0_look_right + 1), nn.ELU())
        for _ in range(config.f0_layers - 1):
            self.condnet.extend([CausalConv1d(width, width, config.f0_kernel), nn.ELU()])
        self.classifier = nn.Linear(width, 1)

    def forward(self, mel: Tensor, contexts: Contexts) -> Tensor:
        """f0 of all frames but the last three.  # [batch, mel, frame + 3] → [batch, frame]"""
        x = mel
        for layer in self.condnet:
            x = contexts.convolve(layer, x) if isinstance(layer, CausalConv1d) else layer(x)
        f0: Tensor = self.classifier(x.transpose(1, 2)).squeeze(-1)
        return f0.abs()


class CausalHiFT(nn.Module):
    """Mel → sound in [-0.99, 0.99], in float32 but for f0."""

    def __init__(self, config: CausalHiFTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or CausalHiFTConfig()
        self.m_source = SteppedSource(config.rate, config.hop, config.overtones)
        self.conv_pre = nn.Conv1d(config.mels, config.channels, config.look_right + 1)
        stages = stage_layers(config, self._up, self._down, _causal_conv)
        self.ups, self.source_downs, self.source_resblocks, self.resblocks = stages
        last_width = config.channels >> len(config.rates)
        self.conv_post = CausalConv1d(last_width, config.n_fft + 2, config.outer_kernel)
        self.f0_predictor = CausalF0Predictor(config).to(config.f0_dtype)
        self.fourier = ShortFourier(config.n_fft, config.fft_hop)

    @classmethod
    def load(
        cls, file: str | Path, device: torch.device | str = "cpu", config: CausalHiFTConfig | None = None
    ) -> "CausalHiFT":
        """The published vocoder of `hift.pt`, weight norm folded away."""
        return load_vocoder(lambda: cls(config), file, device)

    def _up(self, stage: int, inputs: int, outputs: int) -> nn.Module:
        return CausalConv1d(inputs, outputs, self.config.upsample_kernels[stage])

    def _down(self, stage: int, inputs: int, outputs: int) -> nn.Module:
        kernel, stride = self.config.source_kernel(stage), self.config.source_stride(stage)
        return nn.Conv1d(inputs, outputs, kernel, stride=stride)

    @property
    def delay_frames(self) -> int:
        """Mel frames of delay, besides `fft_hop` samples."""
        return self.config.look_right

    def forward(self, mel: Tensor, seed: int | None = 0) -> Tensor:
        """Sound of whole mels; `seed` draws the excitation's noise, None omits it.

        # [batch, mel, frame] → [batch, frame · 480]
        """
        check_mel(mel, self.config.mels)
        return self.step(self.initial_state(seed, batch=mel.shape[0]), mel, final=True)[0]

    @torch.no_grad()
    def f0(self, mel: Tensor, final: bool = True) -> Tensor:
        """f0 of whole mels; if they are not final, the last three frames are look-ahead.  # → [batch, frame]"""
        check_mel(mel, self.config.mels)
        return self._f0(self.initial_state(batch=mel.shape[0]), mel, final)[0]

    @torch.no_grad()
    def decode(self, mel: Tensor, source: Tensor, final: bool = True) -> Tensor:
        """Sound of whole mels for a given excitation, not clamped; if not final, the samples that are complete.

        # [batch, mel, frame], [batch, frame · 480] → [batch, sample]
        """
        check_mel(mel, self.config.mels)
        needed = [mel.shape[0], mel.shape[-1] * self.config.hop]
        if list(source.shape) != needed:
            raise InputError(f"the excitation is {list(source.shape)}; a mel {list(mel.shape)} needs {needed}")
        return self._sound(self.initial_state(batch=mel.shape[0]), mel, source, final)[0]

    def initial_state(self, seed: int | None = 0, batch: int = 1) -> CausalHiFTState:
        """The state before the first frame; `seed` draws the excitation's noise, None omits it."""
        nothing = self.conv_pre.weight.new_zeros(batch, 0)
        of_f0 = _convolutions(self.f0_predictor)
        others = [
            conv for name, part in self.named_children() if name != "f0_predictor" for conv in _convolutions(part)
        ]
        bins = self.config.n_fft + 2
        return CausalHiFTState(
            frames=0,
            mel=nothing.new_zeros(batch, self.config.mels, 0),
            f0_contexts=Contexts.initial(of_f0, batch),
            start=self.m_source.start(batch, seed),
            source=nothing,
            excitations=tuple(
                nothing.new_zeros(batch, bins, self.config.source_stride(stage) - 1) for stage in range(len(self.ups))
            ),
            contexts=Contexts.initial(others, batch),
            spectrum=nothing.new_zeros(batch, bins, 0),
        )

    def step(self, state: CausalHiFTState, mel: Tensor, final: bool = False) -> tuple[Tensor, CausalHiFTState]:
        """Sound that is now complete. `final` takes any number of frames and resets the state.

        # [batch, mel, frame] → [batch, sample]
        """
        (sound,), (new_state,) = self.step_batch([state], [mel], [final])
        return sound, new_state

    def step_batch(
        self, states: Sequence[CausalHiFTState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[CausalHiFTState]]:
        """Step several streams; those of equal shape run as one batch."""
        return self.step_groups(states, mels, final, self.advance)

    @torch.no_grad()
    def step_groups(
        self, states: Sequence[CausalHiFTState], mels: Sequence[Tensor], final: Sequence[bool], advance: Advance
    ) -> tuple[list[Tensor], list[CausalHiFTState]]:
        """`step_batch` with another implementation of `advance`."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, (state, mel, end) in enumerate(zip(states, mels, final, strict=True)):
            self._check(state, mel, end)
            groups.setdefault((state.frames, state.start.seed is None, mel.shape[-1], end), []).append(index)
        sounds: dict[int, Tensor] = {}
        new_states: dict[int, CausalHiFTState] = {}
        for members in groups.values():
            batch = stack_states([states[index] for index in members])
            mel = torch.cat([mels[index].to(batch.mel) for index in members])
            sound, batch = advance(batch, mel, final[members[0]])
            sizes = [mels[index].shape[0] for index in members]
            for index, rows, part in zip(members, sound.split(sizes), split_states(batch, sizes), strict=True):
                sounds[index], new_states[index] = rows, part
        return [sounds[index] for index in range(len(states))], [new_states[index] for index in range(len(states))]

    def advance(self, state: CausalHiFTState, mel: Tensor, final: bool) -> tuple[Tensor, CausalHiFTState]:
        """One hop of streams with equal `frames`."""
        if not state.frames and not mel.shape[-1]:
            return mel.new_zeros(mel.shape[0], 0), state
        f0, f0_contexts = self._f0(state, mel, final)
        f0, start = f0.to(mel.dtype), state.start
        source = mel.new_zeros(mel.shape[0], 0)
        if f0.shape[1]:
            source, start = self.m_source(f0, start), self.m_source.advance(f0, start)
        sound, new_state = self._sound(state, mel, source, final)
        sound = sound.clamp(-self.config.audio_limit, self.config.audio_limit)
        if final:
            initial = self.initial_state(batch=mel.shape[0])
            return sound, replace(initial, start=SourceStart(None, torch.zeros_like(start.frame), start.seed))
        return sound, replace(new_state, f0_contexts=f0_contexts, start=start)

    def _f0(self, state: CausalHiFTState, mel: Tensor, final: bool) -> tuple[Tensor, Tensor]:
        """f0 of the frames that are now complete, and the next contexts."""
        lookahead = self.config.f0_look_right
        available = torch.cat([state.mel[..., -lookahead:], mel], dim=-1).to(state.f0_contexts.dtype)
        available = functional.pad(available, (0, lookahead if final else 0))
        if available.shape[-1] <= lookahead:
            return available.new_zeros(available.shape[0], 0), state.f0_contexts
        contexts = Contexts(state.f0_contexts)
        return self.f0_predictor(available, contexts), contexts.updated()

    def _sound(
        self, state: CausalHiFTState, mel: Tensor, source: Tensor, final: bool
    ) -> tuple[Tensor, CausalHiFTState]:
        """The samples completed by the next frames and their excitation."""
        lookahead = self.config.look_right
        excitation, rest = self._analyse_source(state.source, source, final)
        excitations = tuple(torch.cat([cached, excitation], dim=-1) for cached in state.excitations)
        available = torch.cat([state.mel, mel], dim=-1)
        new_state = replace(
            state,
            frames=min(state.frames + mel.shape[-1], lookahead + 1),
            mel=available[..., -lookahead:],
            source=rest,
            excitations=excitations,
        )
        available = functional.pad(available, (0, lookahead if final else 0))
        if available.shape[-1] <= lookahead:
            return source[:, :0], new_state
        contexts = Contexts(state.contexts)
        is_first = state.frames <= lookahead
        spectrum, excitations = self._spectrum(self.conv_pre(available), excitations, contexts, is_first)
        sound, spectrum = self._synthesise(state.spectrum, spectrum, final)
        return sound, replace(new_state, excitations=excitations, contexts=contexts.updated(), spectrum=spectrum)

    def _analyse_source(self, cached: Tensor, source: Tensor, final: bool) -> tuple[Tensor, Tensor]:
        """The excitation's spectrum of all full windows, and the remaining samples; the edges are reflected."""
        half, hop = self.config.n_fft // 2, self.config.fft_hop
        signal = torch.cat([cached, source], dim=1)
        if not cached.shape[1] and source.shape[1]:
            signal = torch.cat([source[:, 1 : half + 1].flip(1), signal], dim=1)
        if final:
            signal = torch.cat([signal, source[:, -half - 1 : -1].flip(1)], dim=1)
        if signal.shape[1] < self.config.n_fft:
            return signal.new_zeros(signal.shape[0], self.config.n_fft + 2, 0), signal
        spectrum = functional.conv1d(signal[:, None], self.fourier.analysis, stride=hop)
        return spectrum, signal[:, spectrum.shape[-1] * hop :]

    def _spectrum(
        self, x: Tensor, excitations: tuple[Tensor, ...], contexts: Contexts, is_first: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The next frames of the final spectrum, and the unused spectrum of the excitation."""
        blocks = list(cast(Iterable[ResBlock], self.resblocks))
        per_stage, last, unused = len(self.config.resblock_kernels), len(self.ups) - 1, []
        for stage, (factor, excitation) in enumerate(zip(self.config.upsample_rates, excitations, strict=True)):
            repeated = functional.leaky_relu(x, self.config.slope).repeat_interleave(factor, dim=-1)
            x = contexts.convolve(self.ups[stage], repeated)
            if stage == last and is_first:
                x = functional.pad(x, (1, 0), mode="reflect")
            down = self.source_downs[stage]
            assert isinstance(down, nn.Conv1d)
            used = x.shape[-1] * down.stride[0]
            excited = down(excitation[..., : used - down.stride[0] + down.kernel_size[0]])
            unused.append(excitation[..., used:])
            x = x + _res_block(cast(ResBlock, self.source_resblocks[stage]), excited, contexts)
            mixed = [_res_block(block, x, contexts) for block in blocks[stage * per_stage : (stage + 1) * per_stage]]
            x = torch.stack(mixed).mean(0)
        return contexts.convolve(self.conv_post, functional.leaky_relu(x)), tuple(unused)

    def _synthesise(self, cached: Tensor, spectrum: Tensor, final: bool) -> tuple[Tensor, Tensor]:
        """The samples whose overlapping frames are complete, and the frames that the next samples need."""
        frames = torch.cat([cached, polar_to_rectangular(spectrum)], dim=-1)
        hop, n_fft = self.config.fft_hop, self.config.n_fft
        first = cached.shape[-1] * hop if cached.shape[-1] else n_fft // 2
        stop = frames.shape[-1] * hop + (n_fft // 2 - hop if final else 0)
        return self.fourier.inverse(frames)[:, first:stop], frames[..., 1 - n_fft // hop :]

    def _check(self, state: CausalHiFTState, mel: Tensor, final: bool) -> None:
        if not final or mel.shape[-1] or mel.ndim != 3:
            check_mel(mel, self.config.mels)
        if mel.shape[0] != state.mel.shape[0]:
            raise InputError(f"mels of {mel.shape[0]} streams were passed with a state of {state.mel.shape[0]}")


def _causal_conv(inputs: int, outputs: int, kernel: int, dilation: int) -> nn.Conv1d:
    return CausalConv1d(inputs, outputs, kernel, dilation=dilation)


def _res_block(block: ResBlock, x: Tensor, contexts: Contexts) -> Tensor:
    """A residual block with streaming convolutions.  # [batch, channel, time]"""
    for snake1, conv1, snake2, conv2 in zip(
        block.activations1, block.convs1, block.activations2, block.convs2, strict=True
    ):
        x = x + contexts.convolve(conv2, snake2(contexts.convolve(conv1, snake1(x))))
    return x


def _convolutions(module: nn.Module) -> list[CausalConv1d]:
    return [part for part in module.modules() if isinstance(part, CausalConv1d)]


def stack_states(states: Sequence[CausalHiFTState]) -> CausalHiFTState:
    """One batched state of several streams."""
    if len(states) == 1:
        return states[0]
    joined: dict[str, Any] = {}
    for name in _TENSORS:
        joined[name] = torch.cat([getattr(state, name) for state in states])
    excitations = tuple(torch.cat(stage) for stage in zip(*(state.excitations for state in states), strict=True))
    start = stacked_starts([state.start for state in states])
    return replace(states[0], start=start, excitations=excitations, **joined)


def split_states(state: CausalHiFTState, sizes: Sequence[int]) -> list[CausalHiFTState]:
    """The inverse of `stack_states`, for these batch sizes."""
    parts, first = [], 0
    for size in sizes:
        rows = slice(first, first + size)
        tensors = {name: getattr(state, name)[rows] for name in _TENSORS}
        excitations = tuple(excitation[rows] for excitation in state.excitations)
        parts.append(replace(state, start=state.start.rows(rows), excitations=excitations, **tensors))
        first += size
    return parts


_TENSORS = [field.name for field in fields(CausalHiFTState) if field.type is Tensor]
