"""`viva bench tts`: time to first audio and real-time factor of speech synthesis, by backend and thread count.

All backends in one run, beside a plain implementation of the published code. Random weights of the published shape:
speed does not depend on their values. The voice prompt is cached, as it is for every text but the first.
"""

import argparse
import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.audio.level import buzz
from vivavoce.audio.player import PlaybackClock
from vivavoce.bench.kokoro_onnx import PEERS, OnnxKokoro
from vivavoce.bench.kokoro_random import MODEL as RANDOM_KOKORO
from vivavoce.bench.kokoro_random import RandomKokoro
from vivavoce.bench.tts_contenders import CONTENDERS, ELSEWHERE, ON_DEVICE, TEXT, Contender, TTSBenchSetup
from vivavoce.device import Device, pick
from vivavoce.errors import InputError, VivaError
from vivavoce.evaluation.machine import release_memory, stage, synchronize
from vivavoce.nn.process_settings import torch_threads
from vivavoce.tts.interface import SpeakingStyle

ROUNDS = 3
REFERENCE_SECONDS = 4.0
STAGE_REPEATS = 32
PLAIN = "plain"


@dataclass(frozen=True)
class Speed:
    """One backend at one thread count: medians over rounds. RTF is seconds of work per second of audio."""

    backend: str
    threads: int
    first_sound_ms: float
    rtf: float
    cpu_seconds_a_second: float
    stages_ms: dict[str, float]
    stages_cpu_ms: dict[str, float]


@dataclass(frozen=True)
class ConcurrentRun:
    """Concurrent texts, each fed to its own simulated player."""

    streams: int
    seconds: float
    rtf: float
    underruns: int
    dry_seconds: float
    first_sound_ms_median: float
    first_sound_ms_worst: float


def run(
    device: str = "auto",
    backends: Sequence[str] | None = None,
    threads: Sequence[int] = (1, 2),
    streams: Sequence[int] | None = None,
    frames: int = 60,
    shape: str = "true",
    model: str | None = None,
    onnx: Path | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure, print, write `tts.json` and `tts.png` to `out`, and return what was measured."""
    target = pick(device)
    setup = TTSBenchSetup(target, shape, frames, onnx)
    factories = _factories(target, backends, model)
    speeds, absent = _speeds(setup, factories, threads if target.kind == "cpu" else (torch.get_num_threads(),))
    stream_counts = streams if streams is not None else [] if target.kind == "cpu" else [1, 16, 64]
    concurrent_runs = _measure_concurrent(setup, factories, stream_counts, absent)
    plain = min((speed.rtf for speed in speeds if speed.backend == PLAIN), default=None)
    result = {
        "what": _subject(model, shape),
        "device": target.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "frames": frames,
        "how": f"median of {ROUNDS} texts{f' of {frames} frames' if model is None else ''} after one, wall time, "
        f"the voice cached; stages: mean of {STAGE_REPEATS} frames",
        "speeds": [asdict(speed) | {"times_plain": plain and plain / speed.rtf} for speed in speeds],
        "absent": absent,
        "streams": [asdict(figures) for figures in concurrent_runs],
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if target.kind == "cuda" else None,
    }
    _print(result)
    if out is not None:
        _save(result, out)
    return result


def _subject(model: str | None, shape: str) -> str:
    if model is None or model == RANDOM_KOKORO:
        return f"{'MOSS-TTS-Nano' if model is None else 'Kokoro'}, {shape} shape, random weights"
    return model


def _factories(
    target: Device, backends: Sequence[str] | None, model: str | None
) -> dict[str, Callable[[TTSBenchSetup], Contender]]:
    names = tuple(backends or (ON_DEVICE.get(target.kind, ELSEWHERE) if model is None else ("auto",)))
    if model == RANDOM_KOKORO:
        return {name: partial(RandomKokoro, name) for name in names}
    if model is not None:
        hub.resolve(model)
        peers: dict[str, Callable[[TTSBenchSetup], Contender]] = {
            name: partial(OnnxKokoro, model, name) for name in names if name in PEERS
        }
        return {name: peers.get(name) or partial(NamedModel, model, name) for name in names}
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise InputError(f"backend {unknown[0]!r} is not known; use {', '.join(CONTENDERS)}")
    return {name: CONTENDERS[name] for name in names}


class NamedModel:
    """A text-to-speech model by name or folder."""

    def __init__(self, model: str, dtype: str, setup: TTSBenchSetup) -> None:
        from vivavoce.tts.cosyvoice import CosyVoiceTTS
        from vivavoce.tts.interface import open_speech_model

        self.name = dtype
        self._model = open_speech_model(model, str(setup.device), dtype)
        self.rate = self._model.rate
        has_none = isinstance(self._model, CosyVoiceTTS) and not self._model.voices.names()
        self._voice = buzz(REFERENCE_SECONDS, self.rate) if has_none else None

    def stream(self, seed: int) -> Iterator[NDArray[np.float32]]:
        """Audio of the text in the model's first voice, or in a synthetic one if it has none."""
        return self._model.stream(TEXT, self._voice, SpeakingStyle(seed=seed))

    def stages(self) -> dict[str, Callable[[], object]]:
        """No per-stage timing."""
        return {}


def _speeds(
    setup: TTSBenchSetup, factories: dict[str, Callable[[TTSBenchSetup], Contender]], threads: Sequence[int]
) -> tuple[list[Speed], dict[str, str]]:
    speeds, absent = list[Speed](), dict[str, str]()
    for name, make in factories.items():
        for count in threads:
            with stage(f"{name}, {count} thread(s)"), torch_threads.held(count):
                try:
                    speeds.append(_speed(make(setup), setup.device, count))
                except (VivaError, RuntimeError) as error:  # go on with the other backends
                    absent[name] = " ".join(str(error).split())
                    break
            release_memory(setup.device)
    return speeds, absent


def _speed(contender: Contender, device: Device, threads: int) -> Speed:
    firsts, factors, work = [], [], []
    for seed in range(1 + ROUNDS):
        began, cpu, first, samples = time.perf_counter(), time.process_time(), None, 0
        for piece in contender.stream(seed):
            first = first or time.perf_counter()
            samples += piece.shape[1]
        seconds = samples / contender.rate
        if seed:
            firsts.append((first or began) - began)
            factors.append((time.perf_counter() - began) / seconds)
            work.append((time.process_time() - cpu) / seconds)
    walls, cpus = {}, {}
    for name, action in contender.stages().items():
        walls[name], cpus[name] = _stage_ms(action, device)
    median = [float(np.median(values)) for values in (firsts, factors, work)]
    return Speed(contender.name, threads, 1e3 * median[0], median[1], median[2], walls, cpus)


def _stage_ms(action: Callable[[], object], device: Device) -> tuple[float, float]:
    """Mean wall and CPU milliseconds per frame; the mean, because some work is done every few frames only."""
    for _ in range(STAGE_REPEATS // 4):
        action()
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(STAGE_REPEATS):
        action()
    synchronize(device)
    return (time.perf_counter() - wall) / STAGE_REPEATS * 1e3, (time.process_time() - cpu) / STAGE_REPEATS * 1e3


def _measure_concurrent(
    setup: TTSBenchSetup,
    factories: dict[str, Callable[[TTSBenchSetup], Contender]],
    streams: Sequence[int],
    absent: dict[str, str],
) -> list[ConcurrentRun]:
    """Concurrent texts on the first backend that is not the plain one."""
    name = next((name for name in factories if name != PLAIN and name not in absent), None)
    if name is None or not streams:
        return []
    contender = factories[name](setup)
    list(contender.stream(0))
    concurrent_runs = []
    for count in streams:
        with stage(f"{count} concurrent streams, {name}"):
            _run_concurrent(contender, count)  # warm-up: new batch sizes are prepared on first use
            concurrent_runs.append(_run_concurrent(contender, count))
    return concurrent_runs


def _run_concurrent(contender: Contender, count: int) -> ConcurrentRun:
    players = [PlaybackClock() for _ in range(count)]
    firsts, lengths, errors = [0.0] * count, [0.0] * count, list[BaseException]()
    ready = threading.Barrier(count + 1)

    def listen(index: int) -> None:
        try:
            ready.wait()
            for piece in contender.stream(index):
                now = time.perf_counter()
                firsts[index] = firsts[index] or now
                lengths[index] += piece.shape[1] / contender.rate
                players[index].feed(now, piece.shape[1] / contender.rate)
            players[index].finish(time.perf_counter())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=listen, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    first_sound_ms = sorted(1e3 * (first - began) for first in firsts)
    return ConcurrentRun(
        streams=count,
        seconds=sum(lengths),
        rtf=(time.perf_counter() - began) / (sum(lengths) / count),
        underruns=sum(player.underruns for player in players),
        dry_seconds=sum(player.dry_seconds for player in players),
        first_sound_ms_median=first_sound_ms[count // 2],
        first_sound_ms_worst=first_sound_ms[-1],
    )


def _print(result: dict[str, Any]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # rich is not installed
        print(json.dumps(result, indent=1))
        return
    console = Console(stderr=True, highlight=False)
    console.print(f"{result['what']} on {result['device']}; {result['how']}")
    table = Table("backend", "threads", "first sound ms", "RTF", "CPU s / s", "× plain", "ms of each frame (CPU ms)")
    for speed in result["speeds"]:
        stages = [
            f"{name} {wall:.1f} ({speed['stages_cpu_ms'][name]:.1f})" for name, wall in speed["stages_ms"].items()
        ]
        gain = speed["times_plain"]
        table.add_row(
            speed["backend"],
            str(speed["threads"]),
            f"{speed['first_sound_ms']:.0f}",
            f"{speed['rtf']:.3f}",
            f"{speed['cpu_seconds_a_second']:.2f}",
            "–" if gain is None else f"{gain:.1f}",
            "\n".join(stages),
        )
    console.print(table)
    for name, why in result["absent"].items():
        console.print(f"{name}: not measured, {why}")
    for figures in result["streams"]:
        console.print(
            f"{figures['streams']} concurrent: {figures['underruns']} underruns ({figures['dry_seconds']:.2f} s dry), "
            f"RTF of each {figures['rtf']:.3f}, first sound {figures['first_sound_ms_median']:.0f} ms, "
            f"at worst {figures['first_sound_ms_worst']:.0f} ms"
        )


def _save(result: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "tts.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    rtf, first = figure.subplots(1, 2)
    labels = [f"{speed['backend']}, {speed['threads']}" for speed in result["speeds"]]
    rtf.barh(labels, [speed["rtf"] for speed in result["speeds"]])
    rtf.axvline(1.0, color="grey", linestyle=":", label="real time")
    rtf.set(xlabel="seconds of work a second of sound")
    rtf.legend()
    first.barh(labels, [speed["first_sound_ms"] for speed in result["speeds"]])
    first.set(xlabel="milliseconds to the first sound", yticklabels=[])
    for axes in (rtf, first):
        axes.invert_yaxis()
    figure.suptitle(f"{result['what']}, {result['device']}: backend, threads", fontsize=10)
    figure.savefig(out / "tts.png", dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line that needs torch only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", action="append")
    parser.add_argument("--threads", type=_numbers, default=[1, 2])
    parser.add_argument("--streams", type=_numbers)
    parser.add_argument("--frames", type=int, default=60)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--onnx", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    shape = "tiny" if given.tiny else "true"
    run(
        given.device,
        given.backend,
        given.threads,
        given.streams,
        given.frames,
        shape,
        given.model,
        given.onnx,
        given.out,
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
