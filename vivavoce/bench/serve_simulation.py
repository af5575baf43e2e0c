"""`viva bench serve --rehearse`: the sessions of `viva bench serve` on a simulated device, a table of batch times.

Time is virtual, so a minute of a hundred sessions takes only as long as processing their events. With a `slowdown` of 0
host time is not counted and a simulation is deterministic. It shows whether a schedule can hold before a GPU is
available. The contention between concurrent work was fitted by hand to one run on an H200.
"""

import copy
import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vivavoce.bench.serve import Script, measure_level
from vivavoce.bench.serve_parts import TINY_PROMPT_CODES, Level, ServeLoad, WordTokenizer, print_level
from vivavoce.bench.simulation import VirtualDevice, VirtualExecutor, VirtualLoop
from vivavoce.device import pick
from vivavoce.engine.cuda_graphs import BUCKETS
from vivavoce.engine.engine import Engine
from vivavoce.engine.runner import Drawn, Runner
from vivavoce.engine.scheduler import Work
from vivavoce.engine.sequence import ON_GRAPHS
from vivavoce.evaluation.machine import stage
from vivavoce.minis.untrained import CONFIG, untrained_codec
from vivavoce.models.flow.state import FlowVoice, VoicePrompt
from vivavoce.models.moss_speech.codec import GraphedCodec, SpokenState
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt
from vivavoce.plan.figures import Curve
from vivavoce.runtime.executor import AS_EARLY_AS_POSSIBLE
from vivavoce.s2s.local_codec import max_quick_codes
from vivavoce.s2s.moss_speech import MossSpeechBackend
from vivavoce.s2s.options import MossSpeechOptions

Spend = Callable[[float, float], None]  # seconds on the idle device, and the share of it that is occupied
STEP_FILLS = 0.9  # share of the device: a step is bandwidth-bound
LOUD = 0.1
FRAME_SAMPLES = 480


@dataclass(frozen=True)
class PassTimes:
    """Milliseconds of a batch, by batch size."""

    step: Curve
    """Language model step, by rows."""
    hops: dict[int, Curve]
    """Vocoder hop by codes, then by replies; batches are padded to the next measured size."""
    encoder: Curve
    """Speech encoder step of 80 ms, by streams."""


H200 = PassTimes(
    step=Curve(((1, 4.35), (8, 4.8), (32, 6.5), (64, 11.0), (128, 14.0), (256, 25.0))),
    hops={
        5: Curve(((1, 18.3), (4, 26.8), (8, 35.3), (16, 41.4), (32, 57.4))),
        10: Curve(((1, 19.3), (4, 31.2), (8, 31.5), (16, 44.3), (32, 63.6))),
        20: Curve(((1, 22.0), (4, 36.0), (8, 45.0), (16, 65.0), (32, 106.7))),
    },
    encoder=Curve(((1, 2.2), (4, 2.6), (16, 4.2), (32, 4.8))),
)
"""Steps from `viva bench lm`, hops timed in isolation; those of 20 codes with fewer than 32 replies are interpolated.

Encoder times are 0.8 of the isolated ones: fitted, with `CONTENTION_FACTOR`, to runs of 64 and 128 sessions.
"""


class SimulatedRunner(Runner):
    """A runner that always samples the same code."""

    def __init__(self, runner: Runner, context: int, slots: int, times: PassTimes, spend: Spend) -> None:
        super().__init__(runner.model, runner.cache, context, slots, use_graphs=False)
        self._times, self._spend = times, spend

    def run(self, works: list[Work]) -> list[Drawn]:
        """One row for each work item that samples."""
        self._spend(self._times.step(sum(work.total for work in works)) / 1e3, STEP_FILLS)
        row = (CONFIG.modality_pad_token_id, 7)
        return [Drawn([row]) for work in works if work.samples]


class SimulatedEncoder:
    """Emits a code every 80 ms. The state is the number of samples so far."""

    def __init__(self, encoder: Any, times: PassTimes, spend: Spend) -> None:
        self.device, self.samples_per_code = encoder.device, encoder.samples_per_code
        self._times, self._spend = times, spend

    def initial_state(self) -> int:
        return 0

    def step_batch(
        self, states: Sequence[int], samples: Sequence[Tensor], final: Sequence[bool] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        """Codes completed by these samples."""
        counts = [state + len(each) for state, each in zip(states, samples, strict=True)]
        whole = [
            new // self.samples_per_code - old // self.samples_per_code for old, new in zip(states, counts, strict=True)
        ]
        self._spend(self._times.encoder(len(states)) * max(1, *whole) / 1e3, fills(self._times.encoder, len(states)))
        return [torch.full((count,), 3) for count in whole], counts


class SimulatedCodec(GraphedCodec):
    """Decodes every code to 80 ms of constant amplitude. The state is the number of codes so far."""

    def __init__(self, times: PassTimes, spend: Spend) -> None:
        super().__init__(untrained_codec())
        self._times, self._spend = times, spend
        self.speech_encoder = cast(Any, SimulatedEncoder(self.speech_encoder, times, spend))

    def with_own_graphs(self) -> "SimulatedCodec":
        """A view of this codec with short hops only."""
        short = {size: curve for size, curve in self._times.hops.items() if size <= max_quick_codes(self)}
        codec = copy.copy(self)
        codec._times = replace(self._times, hops=short)
        return codec

    def release_windows(self, used: Sequence[SpokenState], after: Sequence[SpokenState]) -> None:
        """No buffers to return."""

    def start(self, voice: FlowVoice, left_chunks: int | None = None, seed: int = 0) -> SpokenState:
        return SpokenState(cast(Any, 0), None)

    def step_batch(
        self, states: Sequence[SpokenState], codes: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[SpokenState]]:
        """Audio of whole chunks, with the delay of flow and vocoder."""
        totals = [cast(int, state.flow) + len(new) for state, new in zip(states, codes, strict=True)]
        frames = [
            self._frames(new, is_last) - self._frames(cast(int, state.flow), False)
            for state, new, is_last in zip(states, totals, final, strict=True)
        ]
        curve, count, hops = self._pass(len(states), max(frames))
        self._spend(hops * curve(count) / 1e3, fills(curve, count))
        next_states = [SpokenState(cast(Any, new), None) for new in totals]
        return [torch.full((count * FRAME_SAMPLES,), LOUD) for count in frames], next_states

    def _frames(self, codes: int, is_last: bool) -> int:
        """Mel frames emitted after this many codes."""
        config = self.flow.config
        if is_last:
            return codes * config.ratio
        whole = max(0, (codes - config.lookahead) // config.chunk * config.chunk)
        return max(0, whole * config.ratio - self.vocoder.delay_frames)

    def _pass(self, replies: int, frames: int) -> tuple[Curve, float, int]:
        """Cost curve of a hop, the padded batch size, and the number of hops."""
        sizes = sorted(self._times.hops)
        codes = -(-frames // self.flow.config.ratio)
        size = sizes[min(bisect_left(sizes, codes), len(sizes) - 1)]
        curve = self._times.hops[size]
        return curve, next((count for count, _ in curve.points if count >= replies), replies), max(1, -(-codes // size))


def fills(curve: Curve, count: float) -> float:
    """Share of the device that a batch occupies: the marginal cost of an item at the largest batch, for each item.

    The rest is latency (launches, dependent kernels) in which other work can run. An estimate.
    """
    (previous, low), (last, high) = curve.points[-2:]
    return min(1.0, count * (high - low) / (last - previous) / curve(count))


THREADS = 4  # engine, encoder, and the two vocoder batchers
MAX_VOCODER_BATCH = 32


def run(
    sessions: Sequence[int], script: Script, keep_going: bool = False, slowdown: float = 0.0, out: Path | None = None
) -> dict[str, Any]:
    """Simulate level by level until a reply underruns; print, write `rehearsal.json`, return the figures."""
    levels: list[dict[str, Any]] = []
    for count in sessions:
        with stage(f"{count} sessions"):
            level, busy = simulate(count, script, slowdown=slowdown)
        print_level(level)
        levels.append(level.as_json() | {"device_busy": busy})
        if not level.holds and not keep_going:
            break
    result: dict[str, Any] = {
        "what": "sessions at once through the session code beside a table of an H200's times, in virtual time",
        "times": {"step": asdict(H200.step), "hops": _curves(H200.hops), "encoder": asdict(H200.encoder)},
        "slowdown": slowdown,
        **{f"{name}_seconds": getattr(script, name) for name in ("question", "reply", "spread")},
        "most_without_a_gap": max((each["sessions"] for each in levels if each["holds"]), default=0),
        "levels": levels,
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rehearsal.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


def _curves(by_size: dict[int, Curve]) -> dict[int, dict[str, Any]]:
    return {size: asdict(curve) for size, curve in by_size.items()}


def simulate(sessions: int, script: Script, times: PassTimes = H200, slowdown: float = 0.0) -> tuple[Level, float]:
    """Figures of `sessions` concurrent sessions, and the share of time in which the device was busy."""
    loop = VirtualLoop(slowdown)
    return loop.run_main(_simulate(loop, sessions, script, times))


async def _simulate(loop: VirtualLoop, sessions: int, script: Script, times: PassTimes) -> tuple[Level, float]:
    device = VirtualDevice(loop)
    executor = VirtualExecutor(loop, THREADS, AS_EARLY_AS_POSSIBLE, device)
    executor.start()
    pipeline = _pipeline(ServeLoad(sessions, script.question, script.reply), times, device, executor)
    pipeline.core.scheduler.now = loop.time
    async with pipeline:
        started = loop.time()
        level = await measure_level(pipeline, sessions, script)
        return level, device.busy / max(loop.time() - started, 1e-9)


def _pipeline(load: ServeLoad, times: PassTimes, device: VirtualDevice, executor: VirtualExecutor) -> MossSpeechBackend:
    target, limits = pick("cpu"), load.limits()
    codec = SimulatedCodec(times, device.spend)
    flow = codec.flow.config
    prompt = VoicePrompt(
        torch.arange(TINY_PROMPT_CODES),
        torch.zeros(TINY_PROMPT_CODES * flow.ratio, flow.mel_bands),
        torch.ones(flow.speaker_dim),
    )
    model = MossSpeech.random(CONFIG, target.torch_device, torch.float32)
    core = Engine(model, target, torch.float32, limits, use_graphs=False)
    core.runner = SimulatedRunner(core.runner, core.capacity, limits.sequences_per_step, times, device.spend)
    core.scheduler.rows_beside_sound, core.scheduler.sound = BUCKETS[-1], ON_GRAPHS
    tokenizer = WordTokenizer(CONFIG.pad_token_id)
    options = MossSpeechOptions(
        seed=1,
        voices_together=MAX_VOCODER_BATCH,
        max_output_tokens=load.reply_rows,
        min_output_tokens=load.reply_rows + 1,
        max_loop=None,
    )
    voices = {"simulated": codec.flow.voice(prompt)}
    prompts = MossSpeechPrompt(CONFIG, tokenizer)
    return MossSpeechBackend(core, codec, prompts, tokenizer, voices, options, executor)
