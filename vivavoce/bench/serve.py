"""`viva bench serve`: how many can talk with one device at once, through the session code that serves them, no sockets.

Each session hears a question in real time, its frames prefilled as they come; when the turn ends it replies, and a
simulated player plays the reply as it arrives. Sessions begin one after another and all speak at once; then further
ones come, one at a time, to see what a newcomer waits for beside them. Real time passes: a level takes about as long as
its replies.
"""

import asyncio
import functools
import gc
import platform
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vivavoce.audio.level import buzz
from vivavoce.audio.player import SimulatedPlayer
from vivavoce.bench.serve_parts import Level, ServeLoad, Talked, build, stages
from vivavoce.bench.serve_report import print_level, print_result, print_stages, save
from vivavoce.device import Device, pick
from vivavoce.dialogue.events import ConversationSettings, ReplyAudio, ReplyDone, Samples, TurnSettings
from vivavoce.dialogue.reply import GuardLimits, SpeakingOptions
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.errors import InputError, VivaError
from vivavoce.evaluation.machine import HostWatch, PowerMeter, stage
from vivavoce.models.moss_speech.codec import EAR_RATE
from vivavoce.nn.process_settings import frozen_heap
from vivavoce.runtime.batcher import DynamicBatcher
from vivavoce.s2s.local_codec import EAR
from vivavoce.s2s.moss_speech import MossSpeechBackend, MossSpeechOptions

PACKET_SECONDS = 0.08
PROBE_SECONDS = 1.6  # of a newcomer's reply
AUDIBLE = 0.01
BATCHES = (1, 4, 16, 32)  # few, so that warming up does not take longer than measuring
PERCENTILES = (50, 95, 99)
ENDLESS = GuardLimits(None, None, stuck_seconds=None)  # random weights say strange things


class AlwaysSpeech:
    """A `VoiceActivity` for turns that end by command: nobody asks it."""

    def initial_state(self) -> None:
        """Nothing."""

    def step(self, state: None, samples: Samples) -> tuple[float, None]:
        """Speech."""
        return 1.0, None


def run(
    device: str = "auto",
    dtype: str = "auto",
    shape: str = "true",
    sessions: Sequence[int] = (1, 8, 32, 64, 128),
    seconds: float = 60.0,
    question: float = 2.0,
    spread: float = 4.0,
    newcomers: int = 8,
    left_chunks: int = 8,
    keep_going: bool = False,
    out: Path | None = None,
    batches: Sequence[int] = BATCHES,
    passes: bool = True,
) -> dict[str, Any]:
    """Measure level by level until a listener hears a gap, print, write `serve.json` and `serve.png`, return it.

    `batches` of the voice are captured; with `passes` they are measured by themselves first.
    """
    if not sessions or min(sessions) < 1:
        raise InputError(f"sessions are 1 or more at each level, not {list(sessions)}")
    place = pick(device)
    load = ServeLoad(max(sessions), question, seconds)
    warm = [batch for batch in batches if batch < 2 * load.sessions]
    options = MossSpeechOptions(seed=1, left_chunks=left_chunks, voices_together=warm[-1], warm_batches=tuple(warm))
    with stage(f"building {shape} for {load.sessions} sessions"):
        pipeline = build(shape, place, dtype, load, options)
    about = {
        "what": "speech-to-speech sessions at once through the session code, simulated players, no sockets",
        "shape": shape,
        "device": place.name,
        "dtype": str(pipeline.core.runner.cache.keys.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "question_seconds": question,
        "reply_seconds": seconds,
        "spread_seconds": spread,
        "left_chunks": left_chunks,
        "how": "real time; TTFA from the last sample of the question to the first of the reply",
    }
    result: dict[str, Any] = {}

    def keep(costs: dict[str, Any], levels: list[Level]) -> None:
        """What is known so far: a level takes minutes, and whoever stops the next one keeps this."""
        held = [level.sessions for level in levels if level.holds]
        told = [asdict(level) | {"holds": level.holds} for level in levels]
        result.update(about | {"most_without_a_gap": max(held, default=0), "stages": costs, "levels": told})
        if out is not None:
            save(result, out)

    script = Script(question, seconds, spread, newcomers)
    asyncio.run(_measure(pipeline, place, sessions, script, keep_going, passes, keep))
    print_result(result)
    return result


@dataclass(frozen=True)
class Script:
    """What every session does."""

    question: float
    reply: float
    spread: float
    newcomers: int


async def _measure(
    pipeline: MossSpeechBackend,
    place: Device,
    counts: Sequence[int],
    script: Script,
    keep_going: bool,
    passes: bool,
    keep: Callable[[dict[str, Any], list[Level]], None],
) -> None:
    levels: list[Level] = []
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pipeline)
        with stage("warming up"):
            await pipeline.warm_up()
        stack.enter_context(frozen_heap())
        costs: dict[str, Any] = {}
        if passes:
            with stage("passes by themselves"):
                costs = stages(pipeline, place, pipeline.options.warm_batches)
                print_stages(costs)
        for count in counts:
            with stage(f"{count} sessions"):
                levels.append(await measure_level(pipeline, count, script))
            print_level(levels[-1])
            keep(costs, levels)
            if not levels[-1].holds and not keep_going:
                break


async def measure_level(pipeline: MossSpeechBackend, count: int, script: Script) -> Level:
    """So many sessions at once, and newcomers beside them."""
    gc.collect()
    loop, is_cuda = asyncio.get_running_loop(), pipeline.core.runner.device.type == "cuda"
    before = _Counters.of(pipeline)
    pipeline.core.slack.begin_anew()
    pipeline.first_sounds.clear()
    begun = loop.time()
    async with HostWatch() as host, PowerMeter() as power:
        gap = script.spread / count
        crowd = [
            asyncio.create_task(_talk(pipeline, script.question, script.reply, begun + number * gap))
            for number in range(count)
        ]
        newcomers = await _newcomers(pipeline, script, begun + script.spread + script.question + 1.0)
        talked = await asyncio.gather(*crowd)
    wall, spent = loop.time() - begun, _Counters.of(pipeline).since(before)
    slack = pipeline.core.slack
    return Level(
        sessions=count,
        ttfa_ms=_percentiles([each.ttfa for each in talked]),
        newcomer_ttfa_ms=_percentiles([each.ttfa for each in newcomers]),
        v2v_ms=_percentiles([each.v2v for each in talked]),
        underruns=sum(each.underruns for each in [*talked, *newcomers]),
        sessions_that_ran_dry=sum(each.underruns > 0 for each in [*talked, *newcomers]),
        dry_seconds=sum(each.dry_seconds for each in [*talked, *newcomers]),
        sound_seconds=sum(each.sound_seconds for each in talked),
        wall_seconds=wall,
        engine_busy=spent.busy / wall,
        step_ms=spent.busy / max(1, spent.steps) * 1e3,
        longest_step_ms=slack.longest_ever * 1e3,
        least_slack_ms=None if slack.least_ever is None else slack.least_ever * 1e3,
        passes=spent.passes,
        replies_a_pass=spent.jobs / max(1, spent.passes),
        ways={name: way.told(wall) for name, way in spent.ways.items()},
        first_sound_parts_ms=_parts(pipeline),
        loop_lag_ms=host.lag * 1e3,
        threads=host.threads,
        memory_bytes=torch.cuda.max_memory_allocated() if is_cuda else None,
        reserved_bytes=torch.cuda.memory_reserved() if is_cuda else None,
        watts=power.mean,
        failed=sorted({each.reason for each in [*talked, *newcomers] if each.reason}),
    )


async def _newcomers(pipeline: MossSpeechBackend, script: Script, begins: float) -> list[Talked]:
    """Sessions that come one at a time while all the others speak."""
    loop, ends, talked = asyncio.get_running_loop(), begins + script.reply - script.spread - 1.0, []
    for _ in range(script.newcomers):
        if loop.time() > ends:
            break
        start = max(begins, loop.time())
        talked.append(await _talk(pipeline, min(script.question, 0.4), PROBE_SECONDS, start))
    return talked


async def _talk(pipeline: MossSpeechBackend, question: float, reply: float, begins: float) -> Talked:
    """One session, from its first packet to the end of the reply."""
    settings = ConversationSettings(
        turn=TurnSettings(detector="none"), most_output_tokens=max(1, round(reply / PACKET_SECONDS))
    )
    options = DialogueOptions(speaking=SpeakingOptions(guards=ENDLESS), activity=AlwaysSpeech(), echo=None)
    conversation = LiveConversation(pipeline, settings, options, input_rate=EAR_RATE)
    try:
        ended = await _ask(conversation, question, begins)
        return await _listen(conversation, ended)
    except VivaError as error:
        return Talked(reason=str(error))
    finally:
        await conversation.close()


async def _ask(conversation: LiveConversation, question: float, begins: float) -> float:
    """Speak the question as a microphone would bring it; when it was over."""
    loop, sound = asyncio.get_running_loop(), _question(question)
    size = round(PACKET_SECONDS * EAR_RATE)
    for start in range(0, len(sound), size):
        packet = sound[start : start + size]
        await asyncio.sleep(max(0.0, begins + (start + len(packet)) / EAR_RATE - loop.time()))
        conversation.hear(packet)
    ended = loop.time()
    conversation.commit()
    conversation.reply()
    return ended


@functools.cache
def _question(seconds: float) -> Samples:
    """What everybody asks; made once, for making it takes as long as much of what is measured."""
    return buzz(seconds, EAR_RATE).samples[0]


async def _listen(conversation: LiveConversation, ended: float) -> Talked:
    loop, player, talked = asyncio.get_running_loop(), SimulatedPlayer(), Talked()
    async for event in conversation.events():
        now = loop.time()
        match event:
            case ReplyAudio(samples=samples):
                if talked.ttfa is None:
                    talked.ttfa = now - ended
                if talked.v2v is None and np.abs(samples).max(initial=0.0) > AUDIBLE:
                    offset = talked.sound_seconds + int(np.argmax(np.abs(samples) > AUDIBLE)) / conversation.output_rate
                    talked.v2v = talked.ttfa + offset
                talked.sound_seconds += len(samples) / conversation.output_rate
                player.feed(now, len(samples) / conversation.output_rate)
            case ReplyDone(reason=reason, error=error):
                talked.reason = "" if reason in ("completed", "max_output_tokens") else f"{reason}: {error}"
                break
    player.finish(loop.time())
    talked.underruns, talked.dry_seconds = player.underruns, player.dry_seconds
    return talked


def _percentiles(seconds: Sequence[float | None]) -> dict[int, float]:
    known = [each * 1e3 for each in seconds if each is not None]
    return {part: float(np.percentile(known, part)) for part in PERCENTILES} if known else {}


def _parts(pipeline: MossSpeechBackend) -> dict[str, float]:
    known = [first.seconds for first in pipeline.first_sounds]
    return {part: float(np.median([each[part] for each in known])) * 1e3 for part in known[0]} if known else {}


@dataclass(frozen=True)
class _Way:
    """What was done one way."""

    passes: int
    jobs: int
    busy: float

    def since(self, before: "_Way") -> "_Way":
        return _Way(self.passes - before.passes, self.jobs - before.jobs, self.busy - before.busy)

    def told(self, wall: float) -> dict[str, float]:
        passes = max(1, self.passes)
        each = {"jobs": self.jobs / passes, "ms": self.busy / passes * 1e3}
        return {"passes": self.passes, **each, "share": self.busy / wall}


@dataclass(frozen=True)
class _Counters:
    steps: int
    busy: float
    ways: dict[str, _Way]

    @classmethod
    def of(cls, pipeline: MossSpeechBackend) -> "_Counters":
        gatherings: list[DynamicBatcher[Any, Any]] = [pipeline.ear, *pipeline.voice.ways]
        ways = {each.name: _Way(each.batches, each.jobs, each.busy) for each in gatherings}
        return cls(pipeline.core.steps, pipeline.core.slack.busy, ways)

    def since(self, before: "_Counters") -> "_Counters":
        ways = {name: way.since(before.ways[name]) for name, way in self.ways.items()}
        return _Counters(self.steps - before.steps, self.busy - before.busy, ways)

    @property
    def passes(self) -> int:
        """Of the voice."""
        return sum(way.passes for name, way in self.ways.items() if name != EAR)

    @property
    def jobs(self) -> int:
        """Of the voice."""
        return sum(way.jobs for name, way in self.ways.items() if name != EAR)


__all__ = ["Level", "Script", "Talked", "measure_level", "run"]
