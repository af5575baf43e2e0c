"""`viva bench budget` and `viva bench sessions`: CPU time of a conversation, and memory that sessions leave behind.

The budget is CPU time by stage, not wall time, so that it is meaningful on a busy machine; batched stages are measured
alone and at the requested batch size. The session bench starts a server, opens many short conversations and compares
the server's resident memory at rest before and after them: a leak shows as bytes per session.
"""

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import torch

from vivavoce import hub
from vivavoce.audio.echo import EchoGuard
from vivavoce.audio.io import float_to_pcm16
from vivavoce.audio.level import buzz
from vivavoce.audio.vad import WINDOW, WINDOW_SECONDS, voice_activity
from vivavoce.bench.front_end_cost import front_end_costs
from vivavoce.bench.turn_client import Wire, connect
from vivavoce.bench.turn_sounds import RATE, Samples, gather
from vivavoce.cores import usable_cores
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.errors import InputError, VivaError
from vivavoce.evaluation.machine import free_port, stage
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.codec import DECODER_RATE, ENCODER_RATE
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Turn
from vivavoce.nn.process_settings import torch_threads
from vivavoce.s2s.moss_speech import MossSpeechBackend, load_moss_speech

HISTORY_SECONDS = 6.0
REPEATS = 12
WORDS_PER_SECOND = 14.0  # text rows per second of captioned speech


@dataclass(frozen=True)
class StageCost:
    """CPU milliseconds per second of conversation, alone and as one of a batch."""

    stage: str
    when: str
    alone_ms: float
    shared_ms: float


def run_budget(model: str = "mini-speech", sessions: int = 8, out: Path | None = None) -> dict[str, Any]:
    """Measure every stage, print a table, and write `budget.json` to `out`."""
    if sessions < 1:
        raise InputError(f"the budget needs at least 1 session, not {sessions}")
    with torch_threads.held(1):
        with stage(f"loading {model}"):
            pipeline = load_moss_speech(hub.resolve(model), device="cpu")
        with stage("measuring"), torch.inference_mode():
            costs = [*_listening(pipeline, sessions), *_speaking(pipeline, sessions), *_always()]
        with stage("measuring the audio front end"):
            front_end = front_end_costs()
    result = _result(model, sessions, costs) | {"front_end": [asdict(cost) for cost in front_end]}
    _print_budget(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "budget.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


def _result(model: str, sessions: int, costs: list[StageCost]) -> dict[str, Any]:
    speaking = [cost for cost in costs if cost.when != "listens"]
    listening = [cost for cost in costs if cost.when != "speaks"]
    cores = usable_cores()
    return {
        "what": "processor time of a conversation",
        "model": model,
        "sessions": sessions,
        "cores": cores,
        "costs": [asdict(cost) for cost in costs],
        "speaks_alone_ms": sum(cost.alone_ms for cost in speaking),
        "speaks_shared_ms": sum(cost.shared_ms for cost in speaking),
        "listens_shared_ms": sum(cost.shared_ms for cost in listening),
        "cores_for_all_speaking": sessions * sum(cost.shared_ms for cost in speaking) / 1e3,
        "cores_for_all_listening": sessions * sum(cost.shared_ms for cost in listening) / 1e3,
    }


def _listening(pipeline: MossSpeechBackend, sessions: int) -> list[StageCost]:
    """While the user speaks: speech encoder, and prefill of each code as it arrives."""
    encoder, samples = pipeline.codec.speech_encoder, torch.from_numpy(buzz(HISTORY_SECONDS, ENCODER_RATE).samples[0])
    seconds = encoder.samples_per_code / ENCODER_RATE
    pieces = samples.split(encoder.samples_per_code)[:-1]

    def encoder_ms(streams: int) -> float:
        states = [encoder.initial_state() for _ in range(streams)]
        times = []
        for piece in pieces:
            milliseconds, (_, states) = _timed(encoder.step_batch, states, [piece] * streams)
            times.append(milliseconds)
        return float(np.median(times)) / streams / seconds

    def prefill_ms(streams: int) -> float:
        core = pipeline.core
        sequences = [core.open(_history_rows(pipeline)) for _ in range(streams)]
        _finish_pending_work(pipeline)
        times = []
        for number in range(REPEATS):
            for sequence in sequences:
                core.append(sequence, pipeline.prompt.codes([number]))
            times.append(_timed(core.step)[0])
        for sequence in sequences:
            core.close(sequence)
        return float(np.median(times)) / streams / seconds

    return [
        StageCost("encoder", "listens", encoder_ms(1), encoder_ms(sessions)),
        StageCost("language model, reading", "listens", prefill_ms(1), prefill_ms(sessions)),
    ]


def _speaking(pipeline: MossSpeechBackend, sessions: int) -> list[StageCost]:
    """While the model speaks: decoding, flow, vocoder and captions."""
    frame = pipeline.policy.unit.frame_seconds
    rows = {streams: _rows(pipeline, streams, "speech") / streams for streams in (1, sessions)}
    words = {streams: _rows(pipeline, streams, "text") / streams for streams in (1, sessions)}
    vocoder_batch = min(sessions, pipeline.vocoder.max_batch)
    voices = {streams: _voice(pipeline, streams) for streams in (1, vocoder_batch)}
    return [
        StageCost("language model, speaking", "speaks", rows[1] / frame, rows[sessions] / frame),
        StageCost("flow", "speaks", voices[1][0], voices[vocoder_batch][0]),
        StageCost("vocoder", "speaks", voices[1][1], voices[vocoder_batch][1]),
        StageCost("words of the reply", "speaks", words[1] * WORDS_PER_SECOND, words[sessions] * WORDS_PER_SECOND),
    ]


def _rows(pipeline: MossSpeechBackend, streams: int, modality: str) -> float:
    """CPU milliseconds of one decode step of `streams` replies."""
    core, is_speech = pipeline.core, modality == "speech"
    history = _history_rows(pipeline) + pipeline.prompt.open_reply("speech" if is_speech else "text")
    sequences = [core.open(history) for _ in range(streams)]
    _finish_pending_work(pipeline)
    for sequence in sequences:
        core.generate(sequence, Generation(GREEDY, max_new_rows=4 * REPEATS, min_new_rows=4 * REPEATS))
    core.step()
    times = [
        milliseconds for milliseconds, outputs in (_timed(core.step) for _ in range(REPEATS)) if len(outputs) == streams
    ]
    for sequence in sequences:
        core.close(sequence)
    # A text reply may end early; its rows cost as much as rows of speech.
    return float(np.median(times)) if times else _rows(pipeline, streams, "speech")


def _voice(pipeline: MossSpeechBackend, streams: int) -> tuple[float, float]:
    """CPU milliseconds of flow and vocoder per second of audio, at steady-state chunk size."""
    codec, unit = pipeline.codec, pipeline.policy.unit
    size = 2 * unit.frames
    codes = torch.arange(REPEATS * size) % codec.flow.config.vocabulary
    states = [codec.start(pipeline.voice_of(None), pipeline.options.left_chunks) for _ in range(streams)]
    _, states = codec.step_batch(states, [codes[: size + unit.lookahead]] * streams, [False] * streams)
    flows, vocoders = [state.flow for state in states], [state.vocoder for state in states]
    last, times = [False] * streams, []
    for piece in codes.split(size)[1:]:
        mel_ms, (mels, flows) = _timed(codec.flow.step_batch, flows, [piece] * streams, last)
        given = [mel[None] for mel in mels]
        sound_ms, (sounds, vocoders) = _timed(codec.vocoder.step_batch, vocoders, given, last)
        seconds = streams * sounds[0].shape[-1] / DECODER_RATE
        times.append((mel_ms / seconds, sound_ms / seconds))
    flow, vocoder = np.median(np.array(times), axis=0)
    return float(flow), float(vocoder)


def _always() -> list[StageCost]:
    """VAD and echo detection, which run on every 32 ms of input."""
    activity, guard = voice_activity(), EchoGuard()
    window = buzz(1.0, ENCODER_RATE).samples[0][:WINDOW]
    listening, room = activity.initial_state(), guard.initial_state()
    milliseconds = {
        "voice activity": _median(activity.step, listening, window),
        "echo": _median(guard.step, room, window, window),
    }
    return [
        StageCost(name, "always", each / WINDOW_SECONDS, each / WINDOW_SECONDS) for name, each in milliseconds.items()
    ]


def _history_rows(pipeline: MossSpeechBackend) -> list[Row]:
    codes = [number % 64 for number in range(round(HISTORY_SECONDS / pipeline.policy.unit.frame_seconds))]
    turns = [Turn("system", DEFAULT_SYSTEM["speech"]), Turn("user", codes)]
    return [row for turn in turns for row in pipeline.prompt.turn(turn)]


def _finish_pending_work(pipeline: MossSpeechBackend) -> None:
    while pipeline.core.has_work:
        pipeline.core.step()


def _median(action: Callable[..., Any], *given: Any) -> float:
    return float(np.median([_timed(action, *given)[0] for _ in range(10 * REPEATS)]))


def _timed(action: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    """CPU milliseconds of this thread, and the result."""
    started = time.thread_time()
    result = action(*given)
    return 1e3 * (time.thread_time() - started), result


def _print_budget(result: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    sessions = result["sessions"]
    table = Table(box=SIMPLE_HEAD, title=f"{result['model']}: ms of a core for a second", title_justify="left")
    table.add_column("stage", no_wrap=True)
    table.add_column("when")
    for name in ("alone", f"one of {sessions}"):
        table.add_column(name, justify="right")
    for cost in result["costs"]:
        table.add_row(cost["stage"], cost["when"], f"{cost['alone_ms']:.1f}", f"{cost['shared_ms']:.1f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{sessions} sessions need {result['cores_for_all_speaking']:.2f} cores while the model speaks in all of them, "
        f"{result['cores_for_all_listening']:.2f} while all users speak; this machine has {result['cores']}. "
        "The event loop is not included."
    )
    counts = list(result["front_end"][0]["batched_us"])
    table = Table(box=SIMPLE_HEAD, title="audio front end: µs for 32 ms, by sessions in a batch", title_justify="left")
    for name in ("state", "plain", *map(str, counts)):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for cost in result["front_end"]:
        table.add_row(cost["when"], f"{cost['plain_us']:.0f}", *(f"{cost['batched_us'][each]:.0f}" for each in counts))
    console.print(table)


SILENCE_SECONDS = 0.6
START_SECONDS = 120.0
ANSWER_SECONDS = 60.0
COMPLETE_EVERY = 8
DELTAS = 3  # audio deltas after which the client disconnects
CONCURRENT_SESSIONS = 4
BETWEEN_SECONDS = 0.1  # for the server to close finished sessions
REST_SECONDS = 60.0  # timeout for the server to release all sessions
OPENS_PER_MINUTE = 10_000  # above the default limit per address


@dataclass(frozen=True)
class BenchServer:
    """A running server: its port and process."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/realtime"

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self.pid)

    def figure(self, name: str) -> float:
        """Current value of a metric of `/metrics`."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10.0) as page:
            lines = [line.split() for line in page.read().decode().splitlines()]
        return next(float(line[1]) for line in lines if line[0] == name)


def run_sessions(
    model: str = "mini-speech",
    count: int = 200,
    warm: int = 80,
    max_tokens: int = 25,
    between: float = BETWEEN_SECONDS,
    out: Path | None = None,
) -> dict[str, Any]:
    """Open `warm` and then `count` sessions; the server's memory in bytes."""
    if count < 2 or warm < 1:
        raise InputError(f"a slope needs at least 2 sessions after 1 to warm up, not {count} after {warm}")
    sounds = [question.sound for question in gather().questions]
    result = asyncio.run(measure_sessions(model, sounds, count, warm, max_tokens, between))
    _print_sessions(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "sessions.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


async def measure_sessions(
    model: str, questions: Sequence[Samples], count: int, warm: int, max_tokens: int, between: float
) -> dict[str, Any]:
    """Start a server, run the sessions, stop it; return the figures."""
    async with serving(model) as server:
        with stage(f"{warm} sessions to warm up, then {count}"):
            sizes = await open_and_end(server, range(warm), questions, max_tokens, between)
            before, cached_before = await asyncio.to_thread(_at_rest, server, warm)
            later = range(warm, warm + count)
            sizes += await open_and_end(server, later, questions, max_tokens, between)
            after, cached_after = await asyncio.to_thread(_at_rest, server, warm + count)
    half = warm + count // 2
    return {
        "what": "memory of a server over sessions that end",
        "model": model,
        "sessions": count,
        "rest_after_warm_up": before,
        "rest_at_the_end": after,
        "most_of_first_half": max(sizes[warm:half]),
        "most_of_second_half": max(sizes[half:]),
        "bytes_a_session": (after - before) / count,
        "cache_used_a_session": (cached_after - cached_before) / count,
        "sizes": sizes,
    }


async def open_and_end(
    server: BenchServer, numbers: range, questions: Sequence[Samples], max_tokens: int, between: float
) -> list[int]:
    """Run these sessions, a few at a time; the server's memory after each."""
    sizes: list[int] = []
    for first in numbers[::CONCURRENT_SESSIONS]:
        group = range(first, min(first + CONCURRENT_SESSIONS, numbers.stop))
        await asyncio.gather(*(_session(server, each, questions, max_tokens) for each in group))
        await asyncio.sleep(between)
        sizes += [server.resident_bytes] * len(group)
    return sizes


def _at_rest(server: BenchServer, sessions: int) -> tuple[int, float]:
    """Resident memory and KV cache use once the server has released this many sessions."""
    deadline = time.monotonic() + REST_SECONDS
    while server.figure("viva_sessions_tidied_total") < sessions:
        if time.monotonic() > deadline:
            raise VivaError(f"the server did not release {sessions} sessions within {REST_SECONDS:.0f} s")
        time.sleep(0.1)
    return server.resident_bytes, server.figure("viva_kv_used_ratio")


@contextlib.asynccontextmanager
async def serving(model: str, *arguments: str) -> AsyncIterator[BenchServer]:
    """A `viva serve` process that is ready, with more arguments; stopped on exit."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "serve.toml"
        limits = f"opens_per_minute = {OPENS_PER_MINUTE}\nmax_speech_load = 100.0"
        settings.write_text(f"[server]\n{limits}\n", encoding="utf8")
        command = [sys.executable, "-m", "vivavoce.cli", "serve", "--model", model, "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--config", str(settings), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            await asyncio.to_thread(_until_ready, process, port)
            yield BenchServer(port, process.pid)
        finally:
            process.terminate()
            await asyncio.to_thread(process.communicate)


def resident_bytes(pid: int) -> int:
    """Resident set size of a process (Linux)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"the memory of process {pid} cannot be read ({error}); this needs Linux") from error
    return pages * os.sysconf("SC_PAGE_SIZE")


def _until_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            stderr = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
            raise VivaError(
                f"the server ended before it was ready: {stderr.splitlines()[-1] if stderr else 'no message'}"
            )
        with contextlib.suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2.0) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise VivaError(f"the server was not ready within {START_SECONDS:.0f} s")


async def _session(server: BenchServer, number: int, questions: Sequence[Samples], max_tokens: int) -> None:
    async with connect(server.url) as wire:
        await _call(wire, questions[number % len(questions)], max_tokens, listens_to_end=number % COMPLETE_EVERY == 0)


async def _call(wire: Wire, question: Samples, max_tokens: int, listens_to_end: bool) -> None:
    """One session: send the question, receive some or all of the reply, disconnect."""
    await wire.send({"type": "session.update", "session": {"type": "realtime", "max_output_tokens": max_tokens}})
    sound = np.concatenate([question, np.zeros(round(SILENCE_SECONDS * RATE), np.float32)])
    pcm = float_to_pcm16(sound).astype("<i2", copy=False).tobytes()
    await wire.send({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()})
    deltas = 0
    async with asyncio.timeout(ANSWER_SECONDS):
        while True:
            event = await wire.receive()
            deltas += event["type"] == "response.output_audio.delta"
            if event["type"] == "response.done" or (deltas >= DELTAS and not listens_to_end):
                return


def _print_sessions(result: dict[str, Any]) -> None:
    from rich.console import Console

    mebibytes = {name: f"{result[name] / 2**20:.0f} MiB" for name in result if name.startswith(("rest", "most"))}
    Console(highlight=False).print(
        f"{result['sessions']} sessions of {result['model']}: {mebibytes['rest_after_warm_up']} at rest after warming "
        f"up, {mebibytes['rest_at_the_end']} after the last, {result['bytes_a_session'] / 2**10:.1f} KiB a session; at "
        f"most {mebibytes['most_of_first_half']} in their first half, {mebibytes['most_of_second_half']} in the second"
    )
