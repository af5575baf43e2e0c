"""`viva bench serve --rehearse`: the sessions of `viva bench serve` beside a device that is only a table of times.

Time is virtual: a minute of a hundred sessions takes as long as their events take this machine. With a `slowdown` of 0
the host costs nothing and a rehearsal is the same every time. It says whether a schedule can hold, before a device is
at hand to show that it does. How much what is at once on the device slows was fitted by hand to one run of an H200.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vivavoce.bench.progress import stage
from vivavoce.bench.serve import Script, measure_level
from vivavoce.bench.serve_level import Level
from vivavoce.bench.serve_parts import TINY_PROMPT_CODES, ServeLoad, WordTokenizer
from vivavoce.bench.serve_report import print_level
from vivavoce.bench.stand_in import H200, PassTimes, SimulatedCodec, SimulatedRunner
from vivavoce.bench.virtual_time import VirtualDevice, VirtualExecutor, VirtualLoop
from vivavoce.device import pick
from vivavoce.engine.engine import Engine
from vivavoce.engine.listener import ON_GRAPHS
from vivavoce.engine.step_graphs import BUCKETS
from vivavoce.minis.untrained import CONFIG
from vivavoce.models.flow_state import VoicePrompt
from vivavoce.models.moss_speech import MossSpeech
from vivavoce.models.moss_speech_prompt import MossSpeechPrompt
from vivavoce.pipelines.moss_speech import AS_EARLY_AS_CAN_BE, MossSpeechBackend, MossSpeechOptions

THREADS = 4  # engine, ear, and the voice's two ways
REPLIES_TOGETHER = 32


def run(
    sessions: Sequence[int], script: Script, keep_going: bool = False, slowdown: float = 0.0, out: Path | None = None
) -> dict[str, Any]:
    """Rehearse level by level until a listener hears a gap, print, write `rehearsal.json`, return it."""
    levels: list[dict[str, Any]] = []
    for count in sessions:
        with stage(f"{count} sessions"):
            level, busy = rehearse(count, script, slowdown=slowdown)
        print_level(level)
        levels.append(asdict(level) | {"holds": level.holds, "device_busy": busy})
        if not level.holds and not keep_going:
            break
    result: dict[str, Any] = {
        "what": "sessions at once through the session code beside a table of an H200's times, in virtual time",
        "times": asdict(H200),
        "slowdown": slowdown,
        **{f"{name}_seconds": getattr(script, name) for name in ("question", "reply", "spread")},
        "most_without_a_gap": max((each["sessions"] for each in levels if each["holds"]), default=0),
        "levels": levels,
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rehearsal.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


def rehearse(sessions: int, script: Script, times: PassTimes = H200, slowdown: float = 0.0) -> tuple[Level, float]:
    """What so many sessions would go through, and the share of time in which the device had anything to do."""
    loop = VirtualLoop(slowdown)
    return loop.live(_rehearse(loop, sessions, script, times))


async def _rehearse(loop: VirtualLoop, sessions: int, script: Script, times: PassTimes) -> tuple[Level, float]:
    device = VirtualDevice(loop)
    workers = VirtualExecutor(loop, THREADS, AS_EARLY_AS_CAN_BE, device)
    pipeline = _pipeline(ServeLoad(sessions, script.question, script.reply), times, device, workers)
    pipeline.core.scheduler.now = loop.time
    async with pipeline:
        begun = loop.time()
        level = await measure_level(pipeline, sessions, script)
        return level, device.busy / max(loop.time() - begun, 1e-9)


def _pipeline(load: ServeLoad, times: PassTimes, device: VirtualDevice, workers: VirtualExecutor) -> MossSpeechBackend:
    place, limits = pick("cpu"), load.limits()
    codec = SimulatedCodec(times, device.spend)
    flow = codec.flow.config
    prompt = VoicePrompt(
        torch.arange(TINY_PROMPT_CODES),
        torch.zeros(TINY_PROMPT_CODES * flow.ratio, flow.mel_bands),
        torch.ones(flow.speaker_dim),
    )
    model = MossSpeech.random(CONFIG, place.torch_device, torch.float32)
    core = Engine(model, place, torch.float32, limits, use_graphs=False)
    core.runner = SimulatedRunner(core.runner, core.capacity, limits.sequences_per_step, times, device.spend)
    core.scheduler.rows_beside_sound, core.scheduler.sound = BUCKETS[-1], ON_GRAPHS
    tokenizer = WordTokenizer(CONFIG.pad_token_id)
    options = MossSpeechOptions(
        seed=1,
        voices_together=REPLIES_TOGETHER,
        most_output_tokens=load.reply_rows,
        least_output_tokens=load.reply_rows + 1,
        longest_loop=None,
    )
    voices = {"stand-in": codec.flow.voice(prompt)}
    prompts = MossSpeechPrompt(CONFIG, tokenizer)
    return MossSpeechBackend(core, codec, prompts, tokenizer, voices, options, workers)
