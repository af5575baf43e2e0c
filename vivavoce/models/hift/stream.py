"""Streaming HiFT: sound hop by hop at constant cost.

The state of `HiFTStream` is the mel in the receptive field of the next sound, its f0, and the phase of the excitation.
The sound is delayed by `look_right` mel frames. With the whole receptive field (20) the stream equals the offline
sound; with fewer frames the delay is shorter and missing frames repeat the last one. From 5 on f0 is exact.
`PublishedHiFTStream` is the protocol of CosyVoice 2: hops overlap by 8 frames and are cross-faded; the phase restarts
in every hop. `cuda.py` replays hops as CUDA graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.models.hift.model import HiFT, SampleSpan, reach
from vivavoce.nn.cuda_graphs import Graphed
from vivavoce.nn.vocoder import SourceStart, stacked_starts

PUBLISHED_OVERLAP = 8  # mel frames


@dataclass(frozen=True)
class HiFTState:
    """State of a stream: bounded by the receptive field of the network."""

    mel: Tensor  # [batch, mel, frame]: past frames that the next sound depends on, then delayed frames
    f0: Tensor  # [batch, frame]: of the past frames in `mel`, as used for their sound
    start: SourceStart  # the excitation at the first frame of `mel`


class HopShape(NamedTuple):
    """The batch key and graph key of a hop."""

    frames: int
    extrapolated: int  # future frames in the receptive field, filled with the last one
    emit: SampleSpan
    is_first: bool
    has_noise: bool


class HiFTStream:
    """A vocoder for mel pieces of any size; the sound lags `delay_frames` mel frames until the final step."""

    def __init__(self, hift: HiFT, look_right: int | None = 8, graphs: bool = False) -> None:
        """`graphs` replays recurring hops as CUDA graphs, captured at their first use."""
        self.hift = hift
        self.reach = reach(hift.config)
        self._replay = Graphed(self._render) if graphs else None
        self.delay_frames = self.reach.right if look_right is None else min(look_right, self.reach.right)
        if self.delay_frames < 0:
            raise InputError(f"look_right is {look_right}; give 0 to {self.reach.right} mel frames, or None for exact")

    def initial_state(self, seed: int | None = 0, batch: int = 1) -> HiFTState:
        """The state before the first frame; `seed` draws the excitation's noise, None omits it."""
        weight = self.hift.conv_pre.weight
        return HiFTState(
            mel=weight.new_empty(batch, self.hift.config.mels, 0),
            f0=weight.new_empty(batch, 0),
            start=self.hift.m_source.start(batch, seed),
        )

    def step(self, state: HiFTState, mel: Tensor, final: bool = False) -> tuple[Tensor, HiFTState]:
        """Sound that is now complete. `final` takes any number of frames and resets the state.

        # [batch, mel, frame] → [batch, sample]
        """
        (sound,), (new_state,) = self.step_batch([state], [mel], [final])
        return sound, new_state

    def step_batch(
        self, states: Sequence[HiFTState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[HiFTState]]:
        """Step several streams; those of equal shape run as one batch."""
        self._check_mels(mels, final)
        joined = [_append(state.mel, mel) for state, mel in zip(states, mels, strict=True)]
        groups: dict[HopShape, list[int]] = {}
        for index, (state, mel, end) in enumerate(zip(states, joined, final, strict=True)):
            groups.setdefault(self._shape(state, mel, end), []).append(index)
        sounds: dict[int, Tensor] = {}
        new_states: dict[int, HiFTState] = {}
        for shape, members in groups.items():
            group = stack_stream_states([replace(states[index], mel=joined[index]) for index in members])
            sound, group = self._advance(group, shape)
            first = 0
            for index in members:
                rows = slice(first, first + joined[index].shape[0])
                sounds[index] = sound[rows]
                new_states[index] = self._reset(select_rows(group, rows)) if final[index] else select_rows(group, rows)
                first = rows.stop
        return [sounds[index] for index in range(len(states))], [new_states[index] for index in range(len(states))]

    def _check_mels(self, mels: Sequence[Tensor], final: Sequence[bool]) -> None:
        """Raise `InputError` unless all are finite mels."""
        _check(self.hift, mels, final)

    def _shape(self, state: HiFTState, mel: Tensor, final: bool) -> HopShape:
        frames, emitted = mel.shape[-1], state.f0.shape[1]
        stop = frames if final else max(emitted, frames - self.delay_frames)
        extrapolated = 0 if final else self.reach.right - self.delay_frames
        is_first, has_noise = state.start.cycles is None, state.start.seed is not None
        return HopShape(frames, extrapolated, SampleSpan(emitted, stop), is_first, has_noise)

    def _advance(self, state: HiFTState, shape: HopShape) -> tuple[Tensor, HiFTState]:
        emit = shape.emit
        if emit.start == emit.stop:
            return state.f0.new_empty(state.f0.shape[0], 0), state
        render = self._replay if self._replay and self._recurs(shape) else self._render
        start = state.start
        optional = [tensor for tensor in (start.cycles, start.seed) if tensor is not None]
        sound, f0, *cycles = render((shape, state.mel.shape[0]), [state.mel, state.f0, start.frame, *optional])
        dropped = self._dropped(shape)
        if dropped:
            start = SourceStart(cycles[0], start.frame + dropped, start.seed)
        return sound, HiFTState(state.mel[..., dropped:], f0, start)

    def _recurs(self, shape: HopShape) -> bool:
        """Whether this is neither a first nor a last hop, so that its shape recurs."""
        full_past = not shape.is_first and shape.emit.start == self.reach.left
        return full_past and shape.frames - shape.emit.stop == self.delay_frames

    def _dropped(self, shape: HopShape) -> int:
        return max(0, shape.emit.stop - self.reach.left)

    def _render(self, key: tuple[HopShape, int], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (shape, _), (mel, past_f0, frame, *optional) = key, tensors
        start = SourceStart(None if shape.is_first else optional[0], frame, optional[-1] if shape.has_noise else None)
        mel = torch.cat([mel, mel[..., -1:].expand(-1, -1, shape.extrapolated)], dim=-1)
        f0 = torch.cat([past_f0, self.hift.f0_predictor(mel)[:, shape.emit.start :]], dim=1)
        source = self.hift.m_source(f0, start)
        sound = self.hift.limit(self.hift.decode(mel, source, shape.emit))
        dropped = self._dropped(shape)
        cycles = self.hift.m_source.advance(f0[:, :dropped], start).cycles if dropped else None
        remaining = f0[:, dropped : shape.emit.stop]
        return (sound, remaining) if cycles is None else (sound, remaining, cycles)

    def _reset(self, state: HiFTState) -> HiFTState:
        start = SourceStart(None, torch.zeros_like(state.start.frame), state.start.seed)
        return HiFTState(state.mel[..., :0], state.f0[:, :0], start)


def _check(hift: HiFT, mels: Sequence[Tensor], final: Sequence[bool]) -> None:
    """Raise `InputError` unless all are finite mels; one check per shape, since each synchronises with the device."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for mel, is_last in zip(mels, final, strict=True):
        if not is_last or mel.shape[-1]:
            by_shape.setdefault(mel.shape, []).append(mel)
    for group in by_shape.values():
        hift.check(torch.cat(group) if len(group) > 1 else group[0])


def _append(held: Tensor, mel: Tensor) -> Tensor:
    if mel.shape[0] != held.shape[0]:
        raise InputError(f"mels of {mel.shape[0]} streams were passed with a state of {held.shape[0]}")
    return torch.cat([held, mel.to(held)], dim=-1)


def stack_stream_states(states: Sequence[HiFTState]) -> HiFTState:
    return HiFTState(
        mel=torch.cat([state.mel for state in states]),
        f0=torch.cat([state.f0 for state in states]),
        start=stacked_starts([state.start for state in states]),
    )


def select_rows(state: HiFTState, which: slice) -> HiFTState:
    return HiFTState(state.mel[which], state.f0[which], state.start.rows(which))


@dataclass(frozen=True)
class PublishedHiFTState:
    """The last 8 mel frames of the previous hop, with their excitation and sound."""

    mel: Tensor  # [batch, mel, frame], then frames too few for a hop
    source: Tensor  # [batch, sample]
    sound: Tensor  # [batch, sample]
    start: SourceStart


class PublishedHiFTStream:
    """CosyVoice 2's protocol: a delay of 8 frames and cross-fades, so that the sound differs from the offline one."""

    delay_frames = PUBLISHED_OVERLAP

    def __init__(self, hift: HiFT) -> None:
        self.hift = hift
        samples = PUBLISHED_OVERLAP * hift.config.hop
        window = torch.hamming_window(2 * samples, periodic=False, device=hift.conv_pre.weight.device)
        self.rising, self.falling = window[:samples], window[samples:]

    def initial_state(self, seed: int | None = 0, batch: int = 1) -> PublishedHiFTState:
        """The state before the first frame."""
        weight = self.hift.conv_pre.weight
        nothing = weight.new_empty(batch, 0)
        mel = weight.new_empty(batch, self.hift.config.mels, 0)
        return PublishedHiFTState(mel, nothing, nothing, self.hift.m_source.start(batch, seed))

    def step(self, state: PublishedHiFTState, mel: Tensor, final: bool = False) -> tuple[Tensor, PublishedHiFTState]:
        """Sound that is now complete. `final` takes any number of frames and resets the state.

        # [batch, mel, frame] → [batch, sample]
        """
        _check(self.hift, [mel], [final])
        joined = _append(state.mel, mel)
        hop, frames = self.hift.config.hop, joined.shape[-1]
        if frames * hop == state.sound.shape[1]:
            sound, source = state.sound, state.source
        elif final or frames > PUBLISHED_OVERLAP:
            sound, source = self._cross_fade(state, joined)
        else:
            return state.sound[:, :0], replace(state, mel=joined)
        if final:
            start = SourceStart(None, torch.zeros_like(state.start.frame), state.start.seed)
            return sound, PublishedHiFTState(joined[..., :0], source[:, :0], sound[:, :0], start)
        complete = frames - PUBLISHED_OVERLAP
        start = SourceStart(None, state.start.frame + complete, state.start.seed)
        new_state = PublishedHiFTState(
            joined[..., complete:], source[:, complete * hop :], sound[:, complete * hop :], start
        )
        return sound[:, : complete * hop], new_state

    def _cross_fade(self, state: PublishedHiFTState, mel: Tensor) -> tuple[Tensor, Tensor]:
        rendered = self.hift.m_source(self.hift.f0_predictor(mel), state.start)
        source = torch.cat([state.source, rendered[:, state.source.shape[1] :]], dim=1)
        sound = self.hift.limit(self.hift.decode(mel, source))
        overlap = state.sound.shape[1]
        if overlap:
            mixed = sound[:, :overlap] * self.rising + state.sound * self.falling
            sound = torch.cat([mixed, sound[:, overlap:]], dim=1)
        return sound, source
