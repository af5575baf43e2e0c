"""A device that computes nothing and takes the time that another was measured to take: for rehearsing on any machine.

The session code, the engine's scheduler, the gathering of passes and the pages of the cache are the real ones. What the
language model writes is always the same sound, and the voice says it.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from vivavoce.bench.plan_figures import Curve
from vivavoce.engine.runner import Drawn, Runner
from vivavoce.engine.scheduler import Work
from vivavoce.minis.untrained import CONFIG, untrained_codec
from vivavoce.models.flow_state import FlowVoice
from vivavoce.models.moss_speech_codec import SpokenState
from vivavoce.models.moss_speech_codec_graphs import GraphedCodec
from vivavoce.pipelines.codec_here import longest_quick

Spend = Callable[[float, float], None]  # seconds on the device alone, and how much of it is filled meanwhile
STEP_FILLS = 0.9  # of the device: a step reads memory as fast as it can
LOUD = 0.1
FRAME_SAMPLES = 480


@dataclass(frozen=True)
class PassTimes:
    """Milliseconds of passes, by how many are in them."""

    step: Curve
    """Of the language model, by rows."""
    hops: dict[int, Curve]
    """Of the voice by codes, then by replies; a batch is filled up to the next measured one."""
    ear: Curve
    """Of 80 ms of sound, by turns."""


H200 = PassTimes(
    step=Curve(((1, 4.35), (8, 4.8), (32, 6.5), (64, 11.0), (128, 14.0), (256, 25.0))),
    hops={
        5: Curve(((1, 22.7), (4, 28.7), (8, 36.8), (16, 53.1), (32, 76.8))),
        10: Curve(((1, 23.5), (4, 40.0), (8, 47.6), (16, 62.7), (32, 99.6))),
        20: Curve(((1, 28.6), (4, 49.7), (8, 63.1), (16, 90.0), (32, 149.0))),
    },
    ear=Curve(((1, 2.2), (4, 2.6), (16, 4.2), (32, 4.8))),
)
"""Steps by `viva bench lm`, hops by `viva bench serve`, each by itself; passes of 8 replies lie between others.

The ear's are 0.8 of what they take by themselves: fitted, with `HINDERED`, to how 64 and 128 sessions went together.
"""


class SimulatedRunner(Runner):
    """Writes the same code for ever."""

    def __init__(self, runner: Runner, context: int, slots: int, times: PassTimes, spend: Spend) -> None:
        super().__init__(runner.model, runner.cache, context, slots, use_graphs=False)
        self._times, self._spend = times, spend

    def run(self, works: list[Work]) -> list[Drawn]:
        """A row for each work that samples."""
        self._spend(self._times.step(sum(work.total for work in works)) / 1e3, STEP_FILLS)
        row = (CONFIG.modality_pad_token_id, 7)
        return [Drawn([row]) for work in works if work.samples]


class SimulatedEncoder:
    """Hears a code every 80 ms. A turn's state is the samples that came."""

    def __init__(self, ear: Any, times: PassTimes, spend: Spend) -> None:
        self.device, self.samples_per_code = ear.device, ear.samples_per_code
        self._times, self._spend = times, spend

    def initial_state(self) -> int:
        """Nothing came."""
        return 0

    def step_batch(
        self, states: Sequence[int], samples: Sequence[Tensor], final: Sequence[bool] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        """The codes that these samples complete."""
        after = [state + len(each) for state, each in zip(states, samples, strict=True)]
        whole = [
            new // self.samples_per_code - old // self.samples_per_code for old, new in zip(states, after, strict=True)
        ]
        self._spend(self._times.ear(len(states)) * max(1, *whole) / 1e3, fills(self._times.ear, len(states)))
        return [torch.full((count,), 3) for count in whole], after


class SimulatedCodec(GraphedCodec):
    """Says every code as 80 ms of the same loudness. A reply's state is how many codes it was given."""

    def __init__(self, times: PassTimes, spend: Spend) -> None:
        super().__init__(untrained_codec())
        self._times, self._spend = times, spend
        self.ear = cast(Any, SimulatedEncoder(self.ear, times, spend))

    def beside(self) -> "SimulatedCodec":
        """The same, with short hops only."""
        short = {size: curve for size, curve in self._times.hops.items() if size <= longest_quick(self)}
        beside = copy.copy(self)
        beside._times = replace(self._times, hops=short)
        return beside

    def give_back(self, used: Sequence[SpokenState], after: Sequence[SpokenState]) -> None:
        """Nothing is kept."""

    def start(self, voice: FlowVoice, left_chunks: int | None = None, seed: int = 0) -> SpokenState:
        """No code was given."""
        return SpokenState(cast(Any, 0), None)

    def step_batch(
        self, states: Sequence[SpokenState], codes: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[SpokenState]]:
        """Sound of whole chunks, as late as flow and vocoder let it out."""
        given = [cast(int, state.flow) + len(new) for state, new in zip(states, codes, strict=True)]
        frames = [
            self._frames(new, is_last) - self._frames(cast(int, state.flow), False)
            for state, new, is_last in zip(states, given, final, strict=True)
        ]
        curve, count, hops = self._pass(len(states), max(frames))
        self._spend(hops * curve(count) / 1e3, fills(curve, count))
        after = [SpokenState(cast(Any, new), None) for new in given]
        return [torch.full((count * FRAME_SAMPLES,), LOUD) for count in frames], after

    def _frames(self, codes: int, is_last: bool) -> int:
        """Of sound that so many codes have become."""
        config = self.flow.config
        if is_last:
            return codes * config.ratio
        whole = max(0, (codes - config.lookahead) // config.chunk * config.chunk)
        return max(0, whole * config.ratio - self.vocoder.delay_frames)

    def _pass(self, replies: int, frames: int) -> tuple[Curve, float, int]:
        """What a hop costs by replies, the batch that serves so many, and how many hops it takes."""
        sizes = sorted(self._times.hops)
        codes = -(-frames // self.flow.config.ratio)
        size = sizes[min(bisect_left(sizes, codes), len(sizes) - 1)]
        curve = self._times.hops[size]
        return curve, next((count for count, _ in curve.points if count >= replies), replies), max(1, -(-codes // size))


def fills(curve: Curve, count: float) -> float:
    """How much of the device a pass fills: what one more costs where it is full, for each in it, is all there is to do.

    The rest is waiting, for launches and for one kernel after another, in which others can compute. Reckoned.
    """
    (before, low), (last, high) = curve.points[-2:]
    return min(1.0, count * (high - low) / (last - before) / curve(count))
