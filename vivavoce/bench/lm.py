"""`viva bench lm`: the step time of MOSS-Speech's language model, beside what memory allows and what a peer takes.

A decode step must read every weight once and the keys and values of every sequence: those bytes over the measured
bandwidth are the floor. The peer is the same shape in eager `transformers` layers. All in one run, on random weights:
speed does not depend on their values. The measured sequences all speak, so that a step may leave out what only text
needs: the floor counts every weight, the achieved bytes a second those that were read.
"""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import nn

from vivavoce.bench import lm_peer as transformers_peer
from vivavoce.device import Device, pick, resolve_dtype
from vivavoce.engine.engine import Engine, EngineLimits, Kept
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.engine.sequence import Sequence
from vivavoce.errors import CapacityError, InputError
from vivavoce.evaluation.machine import give_back, median_seconds, read_bandwidth, stage
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.nn.paged_kv import NARROW
from vivavoce.nn.quantised import QuantisedLinear
from vivavoce.nn.quantised_weight import Scheme
from vivavoce.quant.plan import random_moss_speech

SMALL = MossSpeechConfig(
    vocab_size=8192,
    audio_vocab_size=4224,
    hidden_size=512,
    intermediate_size=1536,
    num_shared_layers=8,
    num_modality_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=8192,
    modality_pad_token_id=8000,
    sosp_token_id=8001,
    eosp_token_id=4096,
    eos_token_id=8002,
    pad_token_id=8003,
)
SHAPES = {"true": MossSpeechConfig(), "small": SMALL}
WEIGHTS: dict[str, Scheme | None] = {"float": None, "int8": "int8", "int4": "int4", "fp8": "float8"}
WARM_UP, REPEATS = 5, 30
PEER_MOST = 32  # the peer is slow enough at larger batches to say nothing more


@dataclass(frozen=True)
class TimedStep:
    """One batch size: times in milliseconds."""

    weights: str
    batch: int
    step_ms: float
    floor_ms: float
    read_bytes: int
    peer_ms: float | None

    @property
    def gb_s(self) -> float:
        return self.read_bytes / self.step_ms / 1e6

    @property
    def over_floor(self) -> float:
        return self.step_ms / self.floor_ms

    @property
    def over_peer(self) -> float | None:
        return None if self.peer_ms is None else self.peer_ms / self.step_ms


def run(
    device: str = "auto",
    dtype: str = "auto",
    shape: str = "true",
    batches: list[int] | None = None,
    context: int = 1024,
    prefill: int = 512,
    peer: bool = True,
    out: Path | None = None,
    weights: list[str] | None = None,
    kv: str = "float",
) -> dict[str, Any]:
    """Measure, print a table, write `lm.json` and `lm.png` to `out`, and return what was measured."""
    weights = weights or ["float"]
    if shape not in SHAPES:
        raise InputError(f"shape must be one of {', '.join(SHAPES)}, not {shape!r}")
    unknown = [name for name in weights if name not in WEIGHTS]
    if unknown:
        raise InputError(f"weights must be among {', '.join(WEIGHTS)}, not {unknown[0]!r}")
    if kv not in get_args(Kept):
        raise InputError(f"kv must be one of {', '.join(get_args(Kept))}, not {kv!r}")
    batches = batches or [1, 8, 32, 64, 128]
    place = pick(device)
    kind = resolve_dtype(dtype, place)
    config = SHAPES[shape]
    _require_room(config, place, kind)
    with stage("reading memory, for the floor"):
        bandwidth = read_bandwidth(place)
    peer_times: dict[str, Any] = {"steps": {}, "prefill": None}
    if peer:
        small = [batch for batch in batches if batch <= PEER_MOST]
        with stage("eager transformers layers, the peer"):
            peer_times = transformers_peer.measure(config, place, kind, small, context, prefill)
            give_back(place)
    steps: list[TimedStep] = []
    kept: dict[str, Any] = {}
    for name in weights:
        with stage(f"the engine on {name} weights"):
            measured, about = _measured(name, config, place, kind, batches, context, prefill, bandwidth, peer_times, kv)
            steps += measured
            kept[name] = about
            give_back(place)
    result = {
        "what": "MOSS-Speech language model, random weights",
        "shape": shape,
        "parameters": _parameters(config),
        "device": place.name,
        "dtype": str(kind).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "context": context,
        "kv": kv,
        "bandwidth_gb_s": bandwidth / 1e9,
        "weights": kept,
        "weight_bytes_per_step": kept[weights[0]]["bytes"],
        "kv_bytes_per_row": kept[weights[0]]["kv_bytes_per_row"],
        "how": f"median of {REPEATS} engine steps after {WARM_UP}, wall time, sampling and reading the rows included",
        "steps": [
            asdict(step) | {"gb_s": step.gb_s, "over_floor": step.over_floor, "over_peer": step.over_peer}
            for step in steps
        ],
        "prefill": {
            "rows": prefill,
            "ms": kept[weights[0]]["prefill_ms"],
            "peer_ms": _milliseconds(peer_times["prefill"]),
        },
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if place.kind == "cuda" else None,
    }
    _print(result)
    if out is not None:
        _save(result, out)
    return result


def _measured(
    weights: str,
    config: MossSpeechConfig,
    place: Device,
    dtype: torch.dtype,
    batches: list[int],
    context: int,
    prefill: int,
    bandwidth: float,
    peer_times: dict[str, Any],
    kv: str,
) -> tuple[list[TimedStep], dict[str, Any]]:
    """The steps of one way to keep the weights, and what it weighs."""
    model = random_moss_speech(config, WEIGHTS[weights], place.torch_device, dtype)
    every, row = _weight_bytes(model), model.kv_shape.bytes_per_row(dtype if kv == "float" else NARROW)
    spared = _spared_bytes(model)
    seconds, prefill_ms = _measure_engine(model, place, dtype, batches, context, prefill, kv)
    steps = [
        TimedStep(
            weights,
            batch,
            seconds[batch] * 1e3,
            (every + batch * context * row) / bandwidth * 1e3,
            every - spared + batch * context * row,
            _milliseconds(peer_times["steps"].get(batch)),
        )
        for batch in batches
    ]
    about = {"bytes": every, "read_bytes": every - spared, "kv_bytes_per_row": row, "prefill_ms": prefill_ms}
    return steps, about


def _parameters(config: MossSpeechConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in MossSpeech(config).parameters())


def _require_room(config: MossSpeechConfig, device: Device, dtype: torch.dtype) -> None:
    """Refuse a shape before it fills the memory; a laptop would be stopped by its own kernel."""
    needed = _parameters(config) * dtype.itemsize
    free = device.free_memory()
    if needed > free:
        raise CapacityError(
            f"this shape has {needed / 1e9:.0f} GB of weights and {device.name} {free / 1e9:.0f} GB free; "
            "try --shape small"
        )


def _measure_engine(
    model: MossSpeech,
    device: Device,
    dtype: torch.dtype,
    batches: list[int],
    context: int,
    prefill: int,
    kv: str,
) -> tuple[dict[int, float], float]:
    """Seconds a step takes with every sequence at that context, by batch size, and milliseconds of one prefill."""
    most = max(batches)
    room = context + (WARM_UP + REPEATS + 2) * len(batches) + 16
    limits = EngineLimits(
        cache_rows=most * room + prefill + 16,
        rows_per_step=max(2048, prefill),
        sequences_per_step=most,
        kv=cast(Kept, kv),
    )
    engine = Engine(model, device, dtype, limits)
    engine.runner.warm_up(tuple(batches))
    prefill_seconds = median_seconds(lambda: _prefill_once(engine, prefill), device, repeats=5)
    sequences = [engine.open(_speech(model.config, context, seed)) for seed in range(most)]
    while engine.has_work:
        engine.step()
    return {batch: _decode_seconds(engine, sequences[:batch], device) for batch in batches}, prefill_seconds * 1e3


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _decode_seconds(engine: Engine, sequences: list[Sequence], device: Device) -> float:
    """The median time of a step in which all of these speak."""
    least = WARM_UP + REPEATS + 8  # a reply must not end while it is measured
    for number, sequence in enumerate(sequences):
        engine.generate(sequence, Generation(Sampling(), max_new_rows=least, min_new_rows=least, seed=number))
    engine.step()
    seconds = median_seconds(engine.step, device, REPEATS, WARM_UP)
    for sequence in sequences:
        engine.stop(sequence)
    return seconds


def _prefill_once(engine: Engine, rows: int) -> None:
    config = engine.model.config  # type: ignore[attr-defined]
    sequence = engine.open(_speech(config, rows, seed=1))
    while engine.has_work:
        engine.step()
    engine.close(sequence)


def _speech(config: MossSpeechConfig, rows: int, seed: int) -> list[Row]:
    """Random codes as rows: a sequence that is in the middle of speech."""
    codes = torch.randint(config.eosp_token_id, (rows,), generator=torch.Generator().manual_seed(seed))
    # A last row that is the audio filler would read as text and begin a text reply.
    return [(config.modality_pad_token_id, code) for code in [*codes[:-1].tolist(), 1]]


def _weight_bytes(model: MossSpeech) -> int:
    """Bytes of all weights but the embeddings, of which a step reads a row."""
    embeddings = (model.model.embed_tokens.weight, model.model.audio_embed.weight)
    return _bytes_of(model) - sum(table.nbytes for table in embeddings)


def _spared_bytes(model: MossSpeech) -> int:
    """Bytes that a step leaves out where everybody speaks: the text head, and most of the last layer before it."""
    last: Any = model.model.text_block.layers[-1]
    return sum(_bytes_of(part) for part in (model.text_lm_head, last.self_attn.o_proj, last.mlp))


def _bytes_of(module: nn.Module) -> int:
    small = [part for part in module.modules() if isinstance(part, QuantisedLinear)]
    return sum(p.nbytes for p in module.parameters()) + sum(b.nbytes for part in small for b in part.buffers())


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True)
    console.print(
        f"{result['what']}, shape {result['shape']} ({result['parameters'] / 1e9:.2f} B parameters, {result['dtype']}) "
        f"on {result['device']}: memory reads {result['bandwidth_gb_s']:.0f} GB/s, context {result['context']}; "
        f"{result['how']}"
    )
    table = Table("weights", "batch", "step ms", "GB/s", "floor ms", "× floor", "eager transformers ms", "times faster")
    for step in result["steps"]:
        peer, gain = step["peer_ms"], step["over_peer"]
        table.add_row(
            step["weights"],
            str(step["batch"]),
            f"{step['step_ms']:.2f}",
            f"{step['gb_s']:.0f}",
            f"{step['floor_ms']:.2f}",
            f"{step['over_floor']:.2f}",
            "–" if peer is None else f"{peer:.1f}",
            "–" if gain is None else f"{gain:.1f}",
        )
    console.print(table)
    prefill = result["prefill"]
    beside = "" if prefill["peer_ms"] is None else f" (eager transformers {prefill['peer_ms']:.1f} ms)"
    console.print(f"prefill of {prefill['rows']} rows: {prefill['ms']:.1f} ms{beside}")


def _save(result: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "lm.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    batches = sorted({step["batch"] for step in result["steps"]})
    for weights in result["weights"]:
        steps = [step for step in result["steps"] if step["weights"] == weights]
        for name, label in (("step_ms", "Viva Voce"), ("floor_ms", "memory floor"), ("peer_ms", "eager transformers")):
            points = [(step["batch"], step[name]) for step in steps if step[name] is not None]
            if points and not (name == "peer_ms" and weights != next(iter(result["weights"]))):
                style = "--" if name == "floor_ms" else "-"
                axes.plot(*zip(*points, strict=True), style, marker="o", label=f"{label}, {weights}")
    axes.set(xscale="log", yscale="log", xlabel="sequences in the step", ylabel="milliseconds a step")
    axes.set_title(f"MOSS-Speech LM, {result['shape']} shape, {result['dtype']}, {result['device']}", fontsize=10)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.legend(loc="center")
    figure.savefig(out / "lm.png", dpi=130)
