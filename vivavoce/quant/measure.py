"""Measurements of a model version: disk size, load time and memory, step time, audio similarity, and logit divergence.

Versions alternate within one run, so that other load on the machine affects them equally.
"""

import importlib.util
import json
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vivavoce.audio.io import Sound
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.models.interface import GenerativeModel
from vivavoce.models.whisper.model import Whisper
from vivavoce.quant.subjects import CalibrationBatch, QuantSubject

BATCHES = (1, 8)
ROUNDS, STEPS = 7, 5
WEIGHTS = {".safetensors", ".pt", ".bin", ".onnx"}
# Run in a fresh process, which loads the model on a line of input and prints time and memory.
LOADING = """
import ctypes, json, sys, time
from pathlib import Path
import torch
from vivavoce.quant.subjects import SUBJECTS
torch.set_num_threads(1)
def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return [int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmHWM")]
input()
before, started = held(), time.perf_counter()
model = SUBJECTS[sys.argv[1]].load(Path(sys.argv[2]))
seconds = time.perf_counter() - started
ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
after = held()
print(json.dumps({"seconds": seconds, "memory": after[0] - before[0], "peak": after[1] - before[1]}), flush=True)
"""


@dataclass(frozen=True)
class Loading:
    """Seconds, and bytes of memory afterwards and at peak."""

    seconds: float
    memory: int
    peak: int


def loading(kind: str, folders: Mapping[str, Path]) -> dict[str, Loading]:
    """Time and memory to load each version's language model, in separate processes."""
    run = [sys.executable, "-c", LOADING, kind]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = {name: subprocess.Popen([*run, str(folder)], **pipes) for name, folder in folders.items()}
    found = {}
    for name, process in processes.items():  # started concurrently, loaded one after the other
        output, _ = process.communicate("\n")
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        found[name] = Loading(**json.loads(output.splitlines()[-1]))
    return found


def bytes_on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in WEIGHTS)


def step_seconds(
    subject: QuantSubject,
    models: Mapping[str, nn.Module],
    examples: Sequence[CalibrationBatch],
    batches: Sequence[int] = BATCHES,
) -> dict[str, dict[int, float]]:
    """Median CPU seconds of a decoding step by version and batch size."""
    found: dict[str, dict[int, float]] = {name: {} for name in models}
    for batch in batches:
        steppers = {name: stepper(model, examples, batch) for name, model in models.items()}
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(ROUNDS):
            for name, step in steppers.items():
                started = time.process_time()
                for _ in range(STEPS):
                    step()
                times[name].append((time.process_time() - started) / STEPS)
        for name, taken in times.items():
            found[name][batch] = sorted(taken)[len(taken) // 2]
    return found


def stepper(model: nn.Module, examples: Sequence[CalibrationBatch], batch: int) -> Callable[[], None]:
    """A function that runs the next decoding step of `batch` replies to the first example."""
    example = examples[0]
    if isinstance(model, Whisper):
        return _whisper_stepper(model, example, batch)
    engine = _engine(model)  # type: ignore[arg-type]
    prompt = [tuple(row) for row in example.rows[: example.start].tolist()]
    wanted = ROUNDS * STEPS + 8
    generation = Generation(GREEDY, max_new_rows=wanted, min_new_rows=wanted)
    for _ in range(batch):
        engine.generate(engine.open(prompt), generation)
    for _ in range(3):
        engine.step()

    def step() -> None:
        engine.step()

    return step


def _engine(model: GenerativeModel) -> Engine:
    return Engine(model, pick("cpu"), torch.float32, EngineLimits(cache_rows=8192))


def _whisper_stepper(model: Whisper, example: CalibrationBatch, batch: int) -> Callable[[], None]:
    assert example.mel is not None
    with torch.inference_mode():
        memory = model.decoder.cross_kv(model.encoder(example.mel.expand(batch, -1, -1)))
        _, state = model.decoder.step(model.decoder.initial_state(memory), example.rows[:, :4].expand(batch, -1))
    token = example.rows[:, 4:5].expand(batch, 1)

    @torch.inference_mode()
    def step() -> None:
        hidden, _ = model.decoder.step(state, token)
        model.decoder.logits(hidden[:, -1])

    return step


logger = logging.getLogger(__name__)

RATE = 16_000
MIN_SECONDS = 0.6  # too short for the metrics below this
PACKAGES = {"visqol": "visqol", "pesq": "pesq", "stoi": "pystoi", "speaker": "resemblyzer"}


@dataclass(frozen=True)
class Likeness:
    """Scores of an audio pair; None where the metric is not installed or failed."""

    visqol: float | None
    pesq: float | None
    stoi: float | None
    speaker: float | None


class AudioMetrics:
    """The installed metrics, each created once."""

    def __init__(self, wanted: Collection[str] = tuple(PACKAGES)) -> None:
        makers: dict[str, Callable[[], Callable[[Any, Any], float]]] = {
            "visqol": _visqol,
            "pesq": _pesq,
            "stoi": _stoi,
            "speaker": _speaker,
        }
        installed = [name for name in wanted if importlib.util.find_spec(PACKAGES[name]) is not None]
        self.judges = {name: makers[name]() for name in installed}
        self.absent = sorted(set(wanted) - set(installed))

    def compare(self, exact: Sound, other: Sound) -> Likeness:
        """Similarity of `other` to `exact`, both cut to the shorter length."""
        one, two = (sound.mono().resampled(RATE).samples[0].astype(np.float64) for sound in (exact, other))
        length = min(len(one), len(two))
        scores: dict[str, float | None] = dict.fromkeys(PACKAGES)
        if length >= MIN_SECONDS * RATE:
            scores |= {name: _judged(judge, one[:length], two[:length]) for name, judge in self.judges.items()}
        return Likeness(**scores)


def _judged(judge: Callable[[Any, Any], float], one: NDArray[np.float64], two: NDArray[np.float64]) -> float | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(judge(one, two))
    except Exception:  # metrics raise various errors on silence and very short audio
        logger.debug("a metric failed", exc_info=True)
        return None


def _visqol() -> Callable[[Any, Any], float]:
    api: Any = import_module("visqol").VisqolApi()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        api.create(mode="speech")
    return lambda one, two: api.measure_from_arrays(one, two, RATE).moslqo


def _pesq() -> Callable[[Any, Any], float]:
    pesq: Any = import_module("pesq").pesq
    return lambda one, two: pesq(RATE, one, two, "wb")


def _stoi() -> Callable[[Any, Any], float]:
    stoi: Any = import_module("pystoi").stoi
    return lambda one, two: stoi(one, two, RATE)


def _speaker() -> Callable[[Any, Any], float]:
    encoder: Any = import_module("resemblyzer").VoiceEncoder("cpu", verbose=False)

    def similarity(one: Any, two: Any) -> float:
        first, second = (encoder.embed_utterance(each.astype(np.float32)) for each in (one, two))
        return float(first @ second)

    return similarity


@dataclass(frozen=True)
class Closeness:
    """Over all positions of all replies: mean KL divergence in nats, and agreement of the argmax."""

    divergence: float
    agreement: float
    places: int

    @property
    def drop(self) -> float:
        """Share of positions with a different argmax."""
        return 1 - self.agreement


@torch.no_grad()
def log_probabilities(subject: QuantSubject, model: nn.Module, examples: Sequence[CalibrationBatch]) -> list[Tensor]:
    """Log-probabilities at every position of every reply.  # [position, id] each"""
    return [subject.logits(model, example).float().log_softmax(-1) for example in examples]


def closeness(exact: Sequence[Tensor], other: Sequence[Tensor]) -> Closeness:
    divergence = same = places = 0.0
    for one, two in zip(exact, other, strict=True):
        divergence += float((one.exp() * (one - two)).sum())
        same += float((one.argmax(-1) == two.argmax(-1)).sum())
        places += len(one)
    return Closeness(divergence / places, same / places, int(places))
