"""`viva bench serve`: concurrent speech-to-speech sessions on one device, through the server's session code.

There are no sockets. Each session sends a question in real time, prefilled as it arrives; the reply goes to a simulated
player. Sessions start staggered until all of them are being answered; then newcomers join one at a time, to measure
latency under load. It runs in real time: a level takes about as long as its replies.
"""

import asyncio
import functools
import gc
import platform
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vivavoce.audio.level import buzz
from vivavoce.audio.player import PlaybackClock
from vivavoce.bench.serve_parts import (
    Level,
    ServeLoad,
    SessionResult,
    build,
    print_level,
    print_result,
    print_stages,
    save,
    stages,
)
from vivavoce.device import Device, pick
from vivavoce.dialogue.events import ReplyAudio, ReplyDone
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.reply import GuardLimits, SpeakingOptions
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, TurnSettings
from vivavoce.errors import InputError, VivaError
from vivavoce.evaluation.machine import HostWatch, PowerMeter, stage
from vivavoce.models.moss_speech.codec import ENCODER_RATE
from vivavoce.nn.process_settings import frozen_heap
from vivavoce.runtime.batcher import DynamicBatcher
from vivavoce.s2s.local_codec import SPEECH_ENCODER
from vivavoce.s2s.moss_speech import MossSpeechBackend
from vivavoce.s2s.options import MossSpeechOptions

PACKET_SECONDS = 0.08
PROBE_SECONDS = 1.6  # length of a newcomer's reply
AUDIBLE = 0.01
BATCHES = (1, 4, 16, 32)  # few, to keep the warm-up short
PERCENTILES = (50, 95, 99)
ENDLESS = GuardLimits(None, None, stuck_seconds=None)  # replies of random weights would trip the guards


class AlwaysSpeech:
    """A `VoiceActivity` that always reports speech, because turns are committed explicitly here."""

    def initial_state(self) -> None:
        return None

    def step(self, state: None, samples: Samples) -> tuple[float, None]:
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
    """Measure level by level until a reply underruns; print, write `serve.json` and `serve.png`, return the figures.

    `batches` are the vocoder batch sizes to capture; with `passes` each stage is also timed in isolation first.
    """
    if not sessions or min(sessions) < 1:
        raise InputError(f"sessions are 1 or more at each level, not {list(sessions)}")
    target = pick(device)
    load = ServeLoad(max(sessions), question, seconds)
    warm = [batch for batch in batches if batch < 2 * load.sessions]
    options = MossSpeechOptions(seed=1, left_chunks=left_chunks, voices_together=warm[-1], warm_batches=tuple(warm))
    with stage(f"building {shape} for {load.sessions} sessions"):
        pipeline = build(shape, target, dtype, load, options)
    about = {
        "what": "speech-to-speech sessions at once through the session code, simulated players, no sockets",
        "shape": shape,
        "device": target.name,
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

    def store_result(costs: dict[str, Any], levels: list[Level]) -> None:
        """Save after each level, so that an interrupted run keeps the finished ones."""
        held = [level.sessions for level in levels if level.holds]

        result.update(
            about
            | {
                "most_without_a_gap": max(held, default=0),
                "stages": costs,
                "levels": [level.as_json() for level in levels],
            }
        )
        if out is not None:
            save(result, out)

    script = Script(question, seconds, spread, newcomers)
    asyncio.run(_measure(pipeline, target, sessions, script, keep_going, passes, store_result))
    print_result(result)
    return result


@dataclass(frozen=True)
class Script:
    """Timing of a session, in seconds."""

    question: float
    reply: float
    spread: float
    newcomers: int


async def _measure(
    pipeline: MossSpeechBackend,
    target: Device,
    counts: Sequence[int],
    script: Script,
    keep_going: bool,
    passes: bool,
    store_result: Callable[[dict[str, Any], list[Level]], None],
) -> None:
    levels: list[Level] = []
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pipeline)
        with stage("warming up"):
            await pipeline.warm_up()
        stack.enter_context(frozen_heap())
        costs: dict[str, Any] = {}
        if passes:
            with stage("stages in isolation"):
                costs = stages(pipeline, target, pipeline.options.warm_batches)
                print_stages(costs)
        for count in counts:
            with stage(f"{count} sessions"):
                levels.append(await measure_level(pipeline, count, script))
            print_level(levels[-1])
            store_result(costs, levels)
            if not levels[-1].holds and not keep_going:
                break


async def measure_level(pipeline: MossSpeechBackend, count: int, script: Script) -> Level:
    """Run `count` concurrent sessions, and newcomers beside them."""
    gc.collect()
    loop, is_cuda = asyncio.get_running_loop(), pipeline.core.runner.device.type == "cuda"
    before = _Counters.of(pipeline)
    pipeline.core.slack.reset()
    pipeline.first_sounds.clear()
    started = loop.time()
    async with HostWatch() as host, PowerMeter() as power:
        gap = script.spread / count
        sessions = [
            asyncio.create_task(_run_session(pipeline, script.question, script.reply, started + number * gap))
            for number in range(count)
        ]
        newcomers = await _run_newcomers(pipeline, script, started + script.spread + script.question + 1.0)
        results = await asyncio.gather(*sessions)
    wall, spent = loop.time() - started, _Counters.of(pipeline).since(before)
    slack = pipeline.core.slack
    return Level(
        sessions=count,
        ttfa_ms=_percentiles([each.ttfa for each in results]),
        newcomer_ttfa_ms=_percentiles([each.ttfa for each in newcomers]),
        v2v_ms=_percentiles([each.v2v for each in results]),
        underruns=sum(each.underruns for each in [*results, *newcomers]),
        sessions_that_ran_dry=sum(each.underruns > 0 for each in [*results, *newcomers]),
        dry_seconds=sum(each.dry_seconds for each in [*results, *newcomers]),
        sound_seconds=sum(each.sound_seconds for each in results),
        wall_seconds=wall,
        engine_busy=spent.busy / wall,
        step_ms=spent.busy / max(1, spent.steps) * 1e3,
        max_step_ms=slack.max_step_seconds * 1e3,
        min_slack_ms=None if slack.min_slack is None else slack.min_slack * 1e3,
        passes=spent.passes,
        replies_a_pass=spent.jobs / max(1, spent.passes),
        ways={name: way.as_dict(wall) for name, way in spent.ways.items()},
        first_sound_parts_ms=_parts(pipeline),
        loop_lag_ms=host.lag * 1e3,
        threads=host.threads,
        memory_bytes=torch.cuda.max_memory_allocated() if is_cuda else None,
        reserved_bytes=torch.cuda.memory_reserved() if is_cuda else None,
        watts=power.mean,
        failed=sorted({each.reason for each in [*results, *newcomers] if each.reason}),
    )


async def _run_newcomers(pipeline: MossSpeechBackend, script: Script, start_at: float) -> list[SessionResult]:
    """Short sessions, one at a time, while the others are being answered."""
    loop, ends, results = asyncio.get_running_loop(), start_at + script.reply - script.spread - 1.0, []
    for _ in range(script.newcomers):
        if loop.time() > ends:
            break
        start = max(start_at, loop.time())
        results.append(await _run_session(pipeline, min(script.question, 0.4), PROBE_SECONDS, start))
    return results


async def _run_session(pipeline: MossSpeechBackend, question: float, reply: float, start_at: float) -> SessionResult:
    """Run one session to the end of its reply."""
    settings = ConversationSettings(
        turn=TurnSettings(detector="none"), max_output_tokens=max(1, round(reply / PACKET_SECONDS))
    )
    options = DialogueOptions(speaking=SpeakingOptions(guards=ENDLESS), activity=AlwaysSpeech(), echo=None)
    conversation = LiveConversation(pipeline, settings, options, input_rate=ENCODER_RATE)
    try:
        ended = await _ask(conversation, question, start_at)
        return await _listen(conversation, ended)
    except VivaError as error:
        return SessionResult(reason=str(error))
    finally:
        await conversation.close()


async def _ask(conversation: LiveConversation, question: float, start_at: float) -> float:
    """Send the question in real time; returns when it ended."""
    loop, sound = asyncio.get_running_loop(), _question(question)
    size = round(PACKET_SECONDS * ENCODER_RATE)
    for start in range(0, len(sound), size):
        packet = sound[start : start + size]
        await asyncio.sleep(max(0.0, start_at + (start + len(packet)) / ENCODER_RATE - loop.time()))
        conversation.hear(packet)
    ended = loop.time()
    conversation.commit()
    conversation.reply()
    return ended


@functools.cache
def _question(seconds: float) -> Samples:
    """The question of every session, cached because synthesising it would disturb the measurement."""
    return buzz(seconds, ENCODER_RATE).samples[0]


async def _listen(conversation: LiveConversation, ended: float) -> SessionResult:
    loop, player, results = asyncio.get_running_loop(), PlaybackClock(), SessionResult()
    async for event in conversation.events():
        now = loop.time()
        match event:
            case ReplyAudio(samples=samples):
                if results.ttfa is None:
                    results.ttfa = now - ended
                if results.v2v is None and np.abs(samples).max(initial=0.0) > AUDIBLE:
                    offset = (
                        results.sound_seconds + int(np.argmax(np.abs(samples) > AUDIBLE)) / conversation.output_rate
                    )
                    results.v2v = results.ttfa + offset
                results.sound_seconds += len(samples) / conversation.output_rate
                player.feed(now, len(samples) / conversation.output_rate)
            case ReplyDone(reason=reason, error=error):
                results.reason = "" if reason in ("completed", "max_output_tokens") else f"{reason}: {error}"
                break
    player.finish(loop.time())
    results.underruns, results.dry_seconds = player.underruns, player.dry_seconds
    return results


def _percentiles(seconds: Sequence[float | None]) -> dict[int, float]:
    known = [each * 1e3 for each in seconds if each is not None]
    return {part: float(np.percentile(known, part)) for part in PERCENTILES} if known else {}


def _parts(pipeline: MossSpeechBackend) -> dict[str, float]:
    known = [first.seconds for first in pipeline.first_sounds]
    return {part: float(np.median([each[part] for each in known])) * 1e3 for part in known[0]} if known else {}


@dataclass(frozen=True)
class _BatcherUse:
    """Work done by one batcher."""

    passes: int
    jobs: int
    busy: float

    def since(self, before: "_BatcherUse") -> "_BatcherUse":
        return _BatcherUse(self.passes - before.passes, self.jobs - before.jobs, self.busy - before.busy)

    def as_dict(self, wall: float) -> dict[str, float]:
        passes = max(1, self.passes)
        each = {"jobs": self.jobs / passes, "ms": self.busy / passes * 1e3}
        return {"passes": self.passes, **each, "share": self.busy / wall}


@dataclass(frozen=True)
class _Counters:
    steps: int
    busy: float
    ways: dict[str, _BatcherUse]

    @classmethod
    def of(cls, pipeline: MossSpeechBackend) -> "_Counters":
        batchers: list[DynamicBatcher[Any, Any]] = [pipeline.speech_encoder, *pipeline.vocoder.ways]
        ways = {each.name: _BatcherUse(each.batches, each.jobs, each.busy) for each in batchers}
        return cls(pipeline.core.steps, pipeline.core.slack.busy, ways)

    def since(self, before: "_Counters") -> "_Counters":
        ways = {name: way.since(before.ways[name]) for name, way in self.ways.items()}
        return _Counters(self.steps - before.steps, self.busy - before.busy, ways)

    @property
    def passes(self) -> int:
        """Of the vocoder batchers."""
        return sum(way.passes for name, way in self.ways.items() if name != SPEECH_ENCODER)

    @property
    def jobs(self) -> int:
        """Of the vocoder batchers."""
        return sum(way.jobs for name, way in self.ways.items() if name != SPEECH_ENCODER)


__all__ = ["Level", "Script", "SessionResult", "measure_level", "run"]
