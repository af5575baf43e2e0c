"""`viva bench lm`: step time of MOSS-Speech's language model beside its memory floor and a `transformers` baseline.

A decode step must read every weight once and the keys and values of every sequence: those bytes over the measured
bandwidth are the floor. The peer is the same shape in eager `transformers` layers. Random weights: speed does not
depend on their values. All measured sequences generate speech, so a step may skip the text head; the floor counts every
weight, the achieved bandwidth only those that are read.
"""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from vivavoce.device import Device, pick, resolve_dtype
from vivavoce.engine.engine import Engine, EngineLimits, KVFormat
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.engine.sequence import Sequence
from vivavoce.errors import CapacityError, InputError, MissingDependencyError
from vivavoce.evaluation.machine import median_seconds, read_bandwidth, release_memory, stage
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.nn.modules import allocating
from vivavoce.nn.paged_kv import FP8
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
MAX_PEER_BATCH = 32  # larger batches of the peer are too slow to be informative


@dataclass(frozen=True)
class TimedStep:
    """Times of one batch size, in milliseconds."""

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
    if kv not in get_args(KVFormat):
        raise InputError(f"kv must be one of {', '.join(get_args(KVFormat))}, not {kv!r}")
    batches = batches or [1, 8, 32, 64, 128]
    target = pick(device)
    kind = resolve_dtype(dtype, target)
    config = SHAPES[shape]
    _require_memory(config, target, kind)
    with stage("reading memory, for the floor"):
        bandwidth = read_bandwidth(target)
    peer_times: dict[str, Any] = {"steps": {}, "prefill": None}
    if peer:
        small = [batch for batch in batches if batch <= MAX_PEER_BATCH]
        with stage("eager transformers layers, the peer"):
            peer_times = measure_peer(config, target, kind, small, context, prefill)
            release_memory(target)
    steps: list[TimedStep] = []
    by_weights: dict[str, Any] = {}
    for name in weights:
        with stage(f"the engine on {name} weights"):
            timed, about = _measure_weights(
                name, config, target, kind, batches, context, prefill, bandwidth, peer_times, kv
            )
            steps += timed
            by_weights[name] = about
            release_memory(target)
    result = {
        "what": "MOSS-Speech language model, random weights",
        "shape": shape,
        "parameters": _parameters(config),
        "device": target.name,
        "dtype": str(kind).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "context": context,
        "kv": kv,
        "bandwidth_gb_s": bandwidth / 1e9,
        "weights": by_weights,
        "weight_bytes_per_step": by_weights[weights[0]]["bytes"],
        "kv_bytes_per_row": by_weights[weights[0]]["kv_bytes_per_row"],
        "how": f"median of {REPEATS} engine steps after {WARM_UP}, wall time, sampling and reading the rows included",
        "steps": [
            asdict(step) | {"gb_s": step.gb_s, "over_floor": step.over_floor, "over_peer": step.over_peer}
            for step in steps
        ],
        "prefill": {
            "rows": prefill,
            "ms": by_weights[weights[0]]["prefill_ms"],
            "peer_ms": _milliseconds(peer_times["prefill"]),
        },
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if target.kind == "cuda" else None,
    }
    _print(result)
    if out is not None:
        _save(result, out)
    return result


def _measure_weights(
    weights: str,
    config: MossSpeechConfig,
    target: Device,
    dtype: torch.dtype,
    batches: list[int],
    context: int,
    prefill: int,
    bandwidth: float,
    peer_times: dict[str, Any],
    kv: str,
) -> tuple[list[TimedStep], dict[str, Any]]:
    """Step times of one weight format, and its sizes."""
    model = random_moss_speech(config, WEIGHTS[weights], target.torch_device, dtype)
    every, row = _weight_bytes(model), model.kv_shape.bytes_per_row(dtype if kv == "float" else FP8)
    skipped = _skipped_bytes(model)
    seconds, prefill_ms = _measure_engine(model, target, dtype, batches, context, prefill, kv)
    steps = [
        TimedStep(
            weights,
            batch,
            seconds[batch] * 1e3,
            (every + batch * context * row) / bandwidth * 1e3,
            every - skipped + batch * context * row,
            _milliseconds(peer_times["steps"].get(batch)),
        )
        for batch in batches
    ]
    about = {"bytes": every, "read_bytes": every - skipped, "kv_bytes_per_row": row, "prefill_ms": prefill_ms}
    return steps, about


def _parameters(config: MossSpeechConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in MossSpeech(config).parameters())


def _require_memory(config: MossSpeechConfig, device: Device, dtype: torch.dtype) -> None:
    """Raise before allocation if the weights do not fit, rather than be killed by the OOM killer."""
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
    """Seconds of a step at this context by batch size, and milliseconds of one prefill."""
    max_batch = max(batches)
    rows_each = context + (WARM_UP + REPEATS + 2) * len(batches) + 16
    limits = EngineLimits(
        cache_rows=max_batch * rows_each + prefill + 16,
        rows_per_step=max(2048, prefill),
        sequences_per_step=max_batch,
        kv=cast(KVFormat, kv),
    )
    engine = Engine(model, device, dtype, limits)
    engine.runner.warm_up(tuple(batches))
    prompt = _speech(model.config, prefill, seed=1)
    prefill_seconds = median_seconds(lambda: _prefill_once(engine, prompt), device, repeats=5)
    sequences = [engine.open(_speech(model.config, context, seed)) for seed in range(max_batch)]
    while engine.has_work:
        engine.step()
    return {batch: _decode_seconds(engine, sequences[:batch], device) for batch in batches}, prefill_seconds * 1e3


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _decode_seconds(engine: Engine, sequences: list[Sequence], device: Device) -> float:
    """Median time of a decode step of these sequences."""
    rows = WARM_UP + REPEATS + 8  # a reply must not end while it is measured
    for number, sequence in enumerate(sequences):
        engine.generate(sequence, Generation(Sampling(), max_new_rows=rows, min_new_rows=rows, seed=number))
    engine.step()
    seconds = median_seconds(engine.step, device, REPEATS, WARM_UP)
    for sequence in sequences:
        engine.stop(sequence)
    return seconds


def _prefill_once(engine: Engine, prompt: list[Row]) -> None:
    sequence = engine.open(prompt)
    while engine.has_work:
        engine.step()
    engine.close(sequence)


def _speech(config: MossSpeechConfig, rows: int, seed: int) -> list[Row]:
    """Random codes as rows, as in the middle of a spoken reply."""
    codes = torch.randint(config.eosp_token_id, (rows,), generator=torch.Generator().manual_seed(seed))
    # If the last row were the audio padding code, a text reply would start.
    return [(config.modality_pad_token_id, code) for code in [*codes[:-1].tolist(), 1]]


def _weight_bytes(model: MossSpeech) -> int:
    """Bytes of all weights except the embeddings, of which a step reads single rows."""
    embeddings = (model.model.embed_tokens.weight, model.model.audio_embed.weight)
    return _bytes_of(model) - sum(table.nbytes for table in embeddings)


def _skipped_bytes(model: MossSpeech) -> int:
    """Bytes a speech-only step skips: the text head, and most of the last text layer."""
    last: Any = model.model.text_block.layers[-1]
    return sum(_bytes_of(part) for part in (model.text_lm_head, last.self_attn.o_proj, last.mlp))


def _bytes_of(module: nn.Module) -> int:
    small = [part for part in module.modules() if isinstance(part, QuantisedLinear)]
    return sum(p.nbytes for p in module.parameters()) + sum(b.nbytes for part in small for b in part.buffers())


class TransformersPeer(nn.Module):
    """40 Qwen3 layers in MOSS-Speech's arrangement, random weights, `DynamicCache`."""

    def __init__(self, config: MossSpeechConfig, device: Device, dtype: torch.dtype) -> None:
        super().__init__()
        try:
            from transformers import Qwen3Config
            from transformers.models.qwen3 import modeling_qwen3 as qwen3
        except ImportError as error:
            raise MissingDependencyError("the peer needs transformers: pip install 'vivavoce[peer]'") from error
        shared, tail = config.num_shared_layers, config.num_modality_layers
        self.shared, self.tail = shared, tail
        shape = Qwen3Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=shared + 2 * tail,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
        shape._attn_implementation = "sdpa"
        with allocating(device.torch_device, dtype):
            self.embed = nn.Embedding(config.audio_vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(qwen3.Qwen3DecoderLayer(shape, index) for index in range(shared + 2 * tail))
            self.norms = nn.ModuleList(qwen3.Qwen3RMSNorm(config.hidden_size) for _ in range(2))
            self.text_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.audio_head = nn.Linear(config.hidden_size, config.audio_vocab_size, bias=False)
        self.rotary = qwen3.Qwen3RotaryEmbedding(shape).to(device.torch_device)

    def forward(self, codes: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """The greedy next ids of both heads.  # [batch, row] → [batch] twice"""
        past = cache.get_seq_length()
        x = self.embed(codes)
        positions = torch.arange(past, past + codes.shape[1], device=codes.device)[None]
        angles = self.rotary(x, positions)

        def run(x: Tensor, first: int, count: int) -> Tensor:
            for layer in self.layers[first : first + count]:
                output = layer(x, position_embeddings=angles, past_key_values=cache, position_ids=positions)
                x = output[0] if isinstance(output, tuple) else output
            return x

        x = run(x, 0, self.shared)
        text = self.norms[0](run(x, self.shared, self.tail)[:, -1])
        audio = self.norms[1](run(x, self.shared + self.tail, self.tail)[:, -1])
        return self.text_head(text).argmax(-1), self.audio_head(audio).argmax(-1)


@torch.inference_mode()
def measure_peer(
    config: MossSpeechConfig, device: Device, dtype: torch.dtype, batches: list[int], context: int, prefill: int
) -> dict[str, Any]:
    """Seconds per decode step at each batch size with that much context, and seconds of one prefill."""
    from transformers import DynamicCache

    peer = TransformersPeer(config, device, dtype)

    def codes(batch: int, rows: int) -> Tensor:
        return torch.randint(config.eosp_token_id, (batch, rows), device=device.torch_device)

    steps = {}
    for batch in batches:
        cache = DynamicCache()
        peer(codes(batch, context), cache)
        one = codes(batch, 1)
        steps[batch] = median_seconds(lambda one=one, cache=cache: peer(one, cache), device, repeats=10)  # type: ignore[misc]
    whole = codes(1, prefill)
    return {"steps": steps, "prefill": median_seconds(lambda: peer(whole, DynamicCache()), device, repeats=5)}


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
