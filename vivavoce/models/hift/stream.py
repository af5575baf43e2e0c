"""HiFT hop by hop: sound as mels come, at a cost per hop that does not grow.

`HiFTStream` keeps the mel that the next sound still depends on, the f0 it has already used, and the phase of the
excitation. It holds back `look_right` mel frames. With as many as the network reaches (20), the stream is the offline
sound; with fewer it comes sooner, the frames not yet known being taken to be like the last one. From 5 on f0 is exact.
`PublishedHiFTStream` is CosyVoice 2's own way: hops overlap by 8 frames and are cross-faded; the phase starts anew in
every hop.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.models.flow.cuda import BUCKETS, bucket_of
from vivavoce.models.hift.causal import CausalHiFT, CausalHiFTState, split, stacked
from vivavoce.models.hift.model import HiFT, SampleSpan, reach
from vivavoce.nn.cuda_graphs import Graphed
from vivavoce.nn.vocoder import SourceStart, stacked_starts

PUBLISHED_OVERLAP = 8  # mel frames
MAX_SHAPES = 64  # hops of odd sizes have a shape each
MAX_CAUSAL_SHAPES = 48
FIXED = ("mel", "f0_contexts", "source", "contexts", "spectrum")


@dataclass(frozen=True)
class HiFTState:
    """What a stream carries from hop to hop: never more than the reach of the network."""

    mel: Tensor  # [batch, mel, frame]: past frames that sound to come depends on, then frames still held back
    f0: Tensor  # [batch, frame]: of the past frames among them, as their sound was made
    start: SourceStart  # the excitation at the first frame of `mel`


class _Shape(NamedTuple):
    """What must be equal for hops to run as one batch."""

    frames: int
    guessed: int  # frames to come that the sound depends on but that are not here yet
    emit: SampleSpan
    begins: bool
    noisy: bool


class HiFTStream:
    """A vocoder that takes mel frames in any pieces; `delay_frames` of them are held back until the end."""

    def __init__(self, hift: HiFT, look_right: int | None = 8, graphs: bool = False) -> None:
        """`graphs` replays hops on CUDA: the first hop of each batch size and hop length then takes longer."""
        self.hift = hift
        self.reach = reach(hift.config)
        self._replay = Graphed(self._render) if graphs else None
        self.delay_frames = self.reach.right if look_right is None else min(look_right, self.reach.right)
        if self.delay_frames < 0:
            raise InputError(f"look_right is {look_right}; give 0 to {self.reach.right} mel frames, or None for exact")

    def initial_state(self, seed: int | None = 0, batch: int = 1) -> HiFTState:
        """The state before the first frame; `seed` draws the excitation's noise, None leaves it out."""
        weight = self.hift.conv_pre.weight
        return HiFTState(
            mel=weight.new_empty(batch, self.hift.config.mels, 0),
            f0=weight.new_empty(batch, 0),
            start=self.hift.m_source.start(batch, seed),
        )

    def step(self, state: HiFTState, mel: Tensor, final: bool = False) -> tuple[Tensor, HiFTState]:
        """Sound that is now complete, and the state. After `final`, which takes any number of frames, it begins anew.

        # [batch, mel, frame] → [batch, sample]
        """
        (sound,), (after,) = self.step_batch([state], [mel], [final])
        return sound, after

    def step_batch(
        self, states: Sequence[HiFTState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[HiFTState]]:
        """The next hop of several streams; those of equal shape run together."""
        self._look_at(mels, final)
        joined = [_joined(state.mel, mel) for state, mel in zip(states, mels, strict=True)]
        groups: dict[_Shape, list[int]] = {}
        for index, (state, mel, end) in enumerate(zip(states, joined, final, strict=True)):
            groups.setdefault(self._shape(state, mel, end), []).append(index)
        sounds: dict[int, Tensor] = {}
        after: dict[int, HiFTState] = {}
        for shape, members in groups.items():
            group = _stacked([replace(states[index], mel=joined[index]) for index in members])
            sound, group = self._advance(group, shape)
            first = 0
            for index in members:
                rows = slice(first, first + joined[index].shape[0])
                sounds[index] = sound[rows]
                after[index] = self._renewed(_rows(group, rows)) if final[index] else _rows(group, rows)
                first = rows.stop
        return [sounds[index] for index in range(len(states))], [after[index] for index in range(len(states))]

    def _look_at(self, mels: Sequence[Tensor], final: Sequence[bool]) -> None:
        """Raise if one of them is no mel."""
        _check(self.hift, mels, final)

    def _shape(self, state: HiFTState, mel: Tensor, final: bool) -> _Shape:
        frames, sounded = mel.shape[-1], state.f0.shape[1]
        stop = frames if final else max(sounded, frames - self.delay_frames)
        guessed = 0 if final else self.reach.right - self.delay_frames
        begins, noisy = state.start.cycles is None, state.start.seed is not None
        return _Shape(frames, guessed, SampleSpan(sounded, stop), begins, noisy)

    def _advance(self, state: HiFTState, shape: _Shape) -> tuple[Tensor, HiFTState]:
        emit = shape.emit
        if emit.start == emit.stop:
            return state.f0.new_empty(state.f0.shape[0], 0), state
        render = self._replay if self._replay and self._recurs(shape) else self._render
        start = state.start
        optional = [tensor for tensor in (start.cycles, start.seed) if tensor is not None]
        sound, f0, *cycles = render((shape, state.mel.shape[0]), [state.mel, state.f0, start.frame, *optional])
        passed = self._passed(shape)
        if passed:
            start = SourceStart(cycles[0], start.frame + passed, start.seed)
        return sound, HiFTState(state.mel[..., passed:], f0, start)

    def _recurs(self, shape: _Shape) -> bool:
        """Neither among the first hops nor the last: such a shape comes again and again."""
        full_past = not shape.begins and shape.emit.start == self.reach.left
        return full_past and shape.frames - shape.emit.stop == self.delay_frames

    def _passed(self, shape: _Shape) -> int:
        return max(0, shape.emit.stop - self.reach.left)

    def _render(self, key: tuple[_Shape, int], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (shape, _), (mel, past_f0, frame, *optional) = key, tensors
        start = SourceStart(None if shape.begins else optional[0], frame, optional[-1] if shape.noisy else None)
        mel = torch.cat([mel, mel[..., -1:].expand(-1, -1, shape.guessed)], dim=-1)
        f0 = torch.cat([past_f0, self.hift.f0_predictor(mel)[:, shape.emit.start :]], dim=1)
        source = self.hift.m_source(f0, start)
        sound = self.hift.limit(self.hift.decode(mel, source, shape.emit))
        passed = self._passed(shape)
        after = self.hift.m_source.advance(f0[:, :passed], start).cycles if passed else None
        kept = f0[:, passed : shape.emit.stop]
        return (sound, kept) if after is None else (sound, kept, after)

    def _renewed(self, state: HiFTState) -> HiFTState:
        start = SourceStart(None, torch.zeros_like(state.start.frame), state.start.seed)
        return HiFTState(state.mel[..., :0], state.f0[:, :0], start)


def _check(hift: HiFT, mels: Sequence[Tensor], final: Sequence[bool]) -> None:
    """Raise if one of them is no mel; one look at all that are alike, for each would wait for the device."""
    alike: dict[torch.Size, list[Tensor]] = {}
    for mel, is_last in zip(mels, final, strict=True):
        if not is_last or mel.shape[-1]:
            alike.setdefault(mel.shape, []).append(mel)
    for some in alike.values():
        hift.check(torch.cat(some) if len(some) > 1 else some[0])


def _joined(held: Tensor, mel: Tensor) -> Tensor:
    if mel.shape[0] != held.shape[0]:
        raise InputError(f"mels of {mel.shape[0]} streams were passed with a state of {held.shape[0]}")
    return torch.cat([held, mel.to(held)], dim=-1)


def _stacked(states: Sequence[HiFTState]) -> HiFTState:
    return HiFTState(
        mel=torch.cat([state.mel for state in states]),
        f0=torch.cat([state.f0 for state in states]),
        start=stacked_starts([state.start for state in states]),
    )


def _rows(state: HiFTState, which: slice) -> HiFTState:
    return HiFTState(state.mel[which], state.f0[which], state.start.rows(which))


@dataclass(frozen=True)
class PublishedHiFTState:
    """The last 8 mel frames of the hop before, and the excitation and sound made for them."""

    mel: Tensor  # [batch, mel, frame], then frames that wait for company
    source: Tensor  # [batch, sample]
    sound: Tensor  # [batch, sample]
    start: SourceStart


class PublishedHiFTStream:
    """CosyVoice 2's protocol; it holds back 8 frames and is never the offline sound."""

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
        """Sound that is now complete, and the state. After `final`, which takes any number of frames, it begins anew.

        # [batch, mel, frame] → [batch, sample]
        """
        _check(self.hift, [mel], [final])
        joined = _joined(state.mel, mel)
        hop, frames = self.hift.config.hop, joined.shape[-1]
        if frames * hop == state.sound.shape[1]:
            sound, source = state.sound, state.source
        elif final or frames > PUBLISHED_OVERLAP:
            sound, source = self._faded(state, joined)
        else:
            return state.sound[:, :0], replace(state, mel=joined)
        if final:
            start = SourceStart(None, torch.zeros_like(state.start.frame), state.start.seed)
            return sound, PublishedHiFTState(joined[..., :0], source[:, :0], sound[:, :0], start)
        kept = frames - PUBLISHED_OVERLAP
        start = SourceStart(None, state.start.frame + kept, state.start.seed)
        after = PublishedHiFTState(joined[..., kept:], source[:, kept * hop :], sound[:, kept * hop :], start)
        return sound[:, : kept * hop], after

    def _faded(self, state: PublishedHiFTState, mel: Tensor) -> tuple[Tensor, Tensor]:
        made = self.hift.m_source(self.hift.f0_predictor(mel), state.start)
        source = torch.cat([state.source, made[:, state.source.shape[1] :]], dim=1)
        sound = self.hift.limit(self.hift.decode(mel, source))
        overlap = state.sound.shape[1]
        if overlap:
            mixed = sound[:, :overlap] * self.rising + state.sound * self.falling
            sound = torch.cat([mixed, sound[:, overlap:]], dim=1)
        return sound, source


class GraphedVocoder(HiFTStream):
    """A vocoder stream that replays its hops; until some were captured ahead, all but the last of a reply."""

    def __init__(self, stream: HiFTStream) -> None:
        super().__init__(stream.hift, stream.delay_frames, graphs=True)
        self.eager = stream
        self.buckets: Sequence[int] = BUCKETS
        self.looks = True
        """Whether it looks for numbers that are not finite, for which it waits for the flow; or who reads its sound."""
        self.shapes: set[_Shape] = set()
        """Of the hops that were captured ahead."""
        self._is_learning = False

    def beside(self) -> "GraphedVocoder":
        """The same vocoder with graphs of its own; states go from one to the other."""
        vocoder = GraphedVocoder(self.eager)
        assert self._replay is not None
        assert vocoder._replay is not None
        vocoder._replay.blank, vocoder.looks = self._replay.blank, self.looks
        return vocoder

    def _look_at(self, mels: Sequence[Tensor], final: Sequence[bool]) -> None:
        if self.looks:
            super()._look_at(mels, final)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """The hops that are made meanwhile are those that others will be made of."""
        self.shapes, self._is_learning = set(), True
        try:
            yield
        finally:
            self._is_learning = False

    def step_batch(
        self, states: Sequence[HiFTState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[HiFTState]]:
        """The next hop of several streams, in as many of those that were captured as it takes."""
        if self._is_learning or not self.shapes:
            return super().step_batch(states, mels, final)
        given = list(zip(states, mels, final, strict=True))
        if not any(last or self._hop(state, mel.shape[-1], last) != mel.shape[-1] for state, mel, last in given):
            return super().step_batch(states, mels, final)
        after, left = list(states), list(mels)
        sounds = [[state.f0.new_empty(state.f0.shape[0], 0)] for state in states]
        frames = [state.mel.shape[-1] - state.f0.shape[1] + mel.shape[-1] for state, mel, _ in given]
        for index, (state, mel, is_last) in enumerate(given):
            if is_last and frames[index]:
                left[index] = self._gone_on(state, mel)
        while some := [index for index, mel in enumerate(left) if mel.shape[-1]]:
            hops = [self._hop(after[index], left[index].shape[-1], final[index]) for index in some]
            pieces = [_filled(left[index], hop) for index, hop in zip(some, hops, strict=True)]
            made, moved = super().step_batch([after[index] for index in some], pieces, [False] * len(some))
            for index, hop, sound, state in zip(some, hops, made, moved, strict=True):
                sounds[index].append(sound)
                after[index], left[index] = state, left[index][..., hop:]
        for index, is_last in enumerate(final):
            if is_last:
                after[index] = self._renewed(after[index])
        ends = [count * self.hift.config.hop if last else None for count, last in zip(frames, final, strict=True)]
        return [torch.cat(parts, dim=1)[:, :end] for parts, end in zip(sounds, ends, strict=True)], after

    def _gone_on(self, state: HiFTState, mel: Tensor) -> Tensor:
        """The last mel of a reply, its last frame repeated for as long as the sound waits for frames to come."""
        last = mel[..., -1:] if mel.shape[-1] else state.mel[..., -1:]
        return torch.cat([mel, last.to(mel).expand(-1, -1, self.delay_frames)], dim=-1)

    def _hop(self, state: HiFTState, frames: int, is_last: bool) -> int:
        """How many of these frames to take now; more than there are where the rest is silent anyway."""
        held, start = state.mel.shape[-1], state.start
        alike = (state.f0.shape[1], start.cycles is None, start.seed is not None)
        hops = sorted(
            shape.frames - held for shape in self.shapes if (shape.emit.start, shape.begins, shape.noisy) == alike
        )
        if is_last:
            return next((hop for hop in hops if hop >= frames), hops[-1] if hops else frames)
        return max((hop for hop in hops if hop <= frames), default=frames)

    def _recurs(self, shape: _Shape) -> bool:
        waits = shape.frames - shape.emit.stop == self.delay_frames
        return waits and shape.guessed == self.reach.right - self.delay_frames

    def _advance(self, state: HiFTState, shape: _Shape) -> tuple[Tensor, HiFTState]:
        rows = state.mel.shape[0]
        if rows > self.buckets[-1] or not self._recurs(shape):
            return self.eager._advance(state, shape)
        if self._is_learning:
            self.shapes.add(shape)
        bucket = bucket_of(rows, self.buckets)
        if not self._has_room((shape, bucket)):
            return self.eager._advance(state, shape)
        missing = bucket - rows
        sound, after = super()._advance(_stacked([state, *[_rows(state, slice(1))] * missing]), shape)
        return sound[:rows], _rows(after, slice(rows))

    def _has_room(self, key: tuple[_Shape, int]) -> bool:
        assert self._replay is not None
        if self.shapes:
            return key[0] in self.shapes
        return key in self._replay or self._replay.captured < MAX_SHAPES


def _filled(mel: Tensor, frames: int) -> Tensor:
    """So many of its first frames; where there are fewer, the last one goes on."""
    missing = max(0, frames - mel.shape[-1])
    return torch.cat([mel, mel[..., -1:].expand(-1, -1, missing)], dim=-1) if missing else mel[..., :frames]


class CausalHiFTHop(NamedTuple):
    """What must be equal for two hops to replay the same graph."""

    streams: int
    known: int  # frames before it, as far as they are counted
    frames: int
    noisy: bool


class GraphedCausalHiFT:
    """A causal vocoder that replays hops which come again: first ones, and all once five frames have come."""

    def __init__(self, hift: CausalHiFT) -> None:
        self.hift, self._blank = hift, hift.initial_state()
        self._graphs = Graphed(self._replayed)

    @property
    def delay_frames(self) -> int:
        """Mel frames that a stream holds back."""
        return self.hift.delay_frames

    def initial_state(self, seed: int | None = 0, batch: int = 1) -> CausalHiFTState:
        """The state before the first frame; what is silent in it is shared, for nothing is written in place."""
        if batch > 1:
            return self.hift.initial_state(seed, batch)
        return replace(self._blank, start=self.hift.m_source.start(1, seed))

    def step_batch(
        self, states: Sequence[CausalHiFTState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[CausalHiFTState]]:
        """The next hop of several streams; those of equal shape run together."""
        return self.hift.step_groups(states, mels, final, self._advance)

    def _advance(self, state: CausalHiFTState, mel: Tensor, final: bool) -> tuple[Tensor, CausalHiFTState]:
        hop = self._hop(state, mel, final)
        if hop is None:
            return self.hift.advance(state, mel, final)
        rows = mel.shape[0]
        missing = hop.streams - rows
        filled = stacked([state, *split(state, [1] * rows)[:1] * missing])
        mel = torch.cat([mel, *[mel[:1]] * missing])
        sound, *tensors = self._graphs(hop, [mel, *_tensors(filled)])
        frames = min(hop.known + hop.frames, self.hift.config.look_right + 1)
        after = _state(filled, tensors, has_phase=True, frames=frames)
        return sound[:rows], split(after, [rows, missing])[0]

    def _hop(self, state: CausalHiFTState, mel: Tensor, final: bool) -> CausalHiFTHop | None:
        """The graph for such a hop, if there is one or may be."""
        rows, frames, ahead = mel.shape[0], mel.shape[-1], self.hift.config.look_right
        recurs = state.frames > ahead or (state.frames == 0 and frames > ahead)
        if final or not recurs or rows > BUCKETS[-1]:
            return None
        hop = CausalHiFTHop(bucket_of(rows), state.frames, frames, state.start.seed is not None)
        return hop if hop in self._graphs or self._graphs.captured < MAX_CAUSAL_SHAPES else None

    def _replayed(self, hop: CausalHiFTHop, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mel, *held = tensors
        blank = self.initial_state(0 if hop.noisy else None)
        state = _state(blank, held, has_phase=hop.known > 0, frames=hop.known)
        sound, after = self.hift.advance(state, mel, False)
        return sound, *_tensors(after)


def _tensors(state: CausalHiFTState) -> list[Tensor]:
    start = [tensor for tensor in (state.start.frame, state.start.cycles, state.start.seed) if tensor is not None]
    return [*(getattr(state, name) for name in FIXED), *state.excitations, *start]


def _state(like: CausalHiFTState, tensors: Sequence[Tensor], has_phase: bool, frames: int) -> CausalHiFTState:
    """The state whose tensors these are; `like` says how many there are of each kind."""
    fixed, rest = dict(zip(FIXED, tensors, strict=False)), list(tensors[len(FIXED) :])
    stages = len(like.excitations)
    excitations, (frame, *optional) = tuple(rest[:stages]), rest[stages:]
    cycles = optional[0] if has_phase else None
    start = SourceStart(cycles, frame, optional[-1] if like.start.seed is not None else None)
    return replace(like, frames=frames, start=start, excitations=excitations, **fixed)
