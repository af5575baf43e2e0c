"""Memory plan of MOSS-Speech by method, computed from shapes, and random quantised models of any shape.

`python -m vivavoce.quant.plan` verifies the plan. For every weight format it allocates 9.1 B random weights, the codec,
and as large a KV cache as `plan` predicts, under a memory cap (24 GB by default), then runs a prefill and engine steps
at batch 1 and 8. What does not fit fails, as it would on a card of that size. Needs torch only.
"""

import argparse
import gc
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.device import Device, pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import median_seconds
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.flow.model import FlowConfig, FlowDecoder
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.models.quantised import ReadQuantised, install
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig
from vivavoce.nn.linear import postponed
from vivavoce.nn.modules import allocating
from vivavoce.nn.quantised_weight import CASTS, GROUP, QuantisedWeight, Scheme, group_of
from vivavoce.quant.policy import METHODS, MOSS_SPEECH

ROWS_A_MINUTE = 12.5 * 60  # of speech, of either side
DRIVER = 600_000_000  # the CUDA context and its libraries
GRAPHS = 500_000_000  # captured graphs of all batch sizes, and their activations
PREFILL_ROWS = 512
SCALE_BYTES = 4
# Prefill workspace in multiples of the largest matrix in 16 bits; int4 is dequantised via float32 and unpacked codes.
WIDENED: dict[Scheme | None, int] = {"int8": 3, "float8": 3, "int4": 5}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "": 1}


@dataclass(frozen=True)
class Fit:
    """Bytes by purpose for one method, and the minutes of conversation that fit in the rest."""

    method: str
    weights: int
    codec: int
    workspace: int
    kv_a_minute: int
    minutes: float

    @property
    def is_possible(self) -> bool:
        """Whether at least a minute fits."""
        return self.minutes >= 1


def plan(memory: int, config: MossSpeechConfig | None = None, dtype: torch.dtype = torch.bfloat16) -> list[Fit]:
    """Every method on a card with this memory, the float model first."""
    with torch.device("meta"):
        model = MossSpeech(config or MossSpeechConfig())
    codec = codec_bytes()
    kv = round(model.kv_shape.bytes_per_row(dtype) * ROWS_A_MINUTE)
    fits = []
    for name, scheme in {"bf16 (as published)": None, **{m.name: m.scheme for m in METHODS.values()}}.items():
        weights, workspace = weight_bytes(model, scheme, dtype), _workspace(model, scheme, dtype)
        left = memory - weights - codec - workspace
        fits.append(Fit(name, weights, codec, workspace, kv, max(0.0, left / kv)))
    return fits


def weight_bytes(model: MossSpeech, scheme: Scheme | None, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the language model with the policy's matrices in `scheme`, the rest in `dtype`."""
    part, total = MOSS_SPEECH.parts[0], 0
    for name, tensor in published_tensors(model).items():
        chosen = None if scheme is None else part.scheme_of(name, tensor.shape, scheme)
        total += tensor.numel() * dtype.itemsize if chosen is None else _matrix_bytes(tensor.shape, chosen)
    return total


def _matrix_bytes(shape: torch.Size, scheme: Scheme) -> int:
    outputs, inputs = shape
    if scheme == "int4":
        return outputs * inputs // 2 + 2 * 2 * outputs * (inputs // group_of(inputs))
    return outputs * inputs + SCALE_BYTES * outputs if scheme in ("int8", "float8") else 2 * outputs * inputs


def codec_parts(device: torch.device | str) -> list[nn.Module]:
    """Speech encoder, flow decoder and vocoder of the published sizes."""
    with torch.device(device):
        return [SpeechEncoder(SpeechEncoderConfig()), FlowDecoder(FlowConfig.moss_speech()), HiFT(HiFTConfig())]


def codec_bytes() -> int:
    """Bytes of the codec in float32."""
    return sum(4 * tensor.numel() for part in codec_parts("meta") for tensor in published_tensors(part).values())


def _workspace(model: MossSpeech, scheme: Scheme | None, dtype: torch.dtype) -> int:
    """Bytes of CUDA context, graphs, prefill activations and logits, and one dequantised matrix."""
    config = model.config
    rows = PREFILL_ROWS * (6 * config.hidden_size + 4 * config.intermediate_size) * dtype.itemsize
    logits = 8 * 4 * (config.vocab_size + config.audio_vocab_size) * 4
    widest = 2 * config.intermediate_size * config.hidden_size * dtype.itemsize
    return DRIVER + GRAPHS + rows + logits + WIDENED.get(scheme, 0) * widest


def byte_count(text: str) -> int:
    """`9GB` as bytes."""
    digits = text.strip().rstrip("BbIiKkMmGg")
    unit = text.strip()[len(digits) :].upper()
    try:
        return round(float(digits) * UNITS[unit])
    except (ValueError, KeyError) as error:
        raise InputError(f"{text!r} is not a size; give one such as 9GB or 500MB") from error


DEVIATION = 0.02
SCHEMES: tuple[Scheme, ...] = ("int8", "int4", "float8")
SMALL = MossSpeechConfig(
    vocab_size=2048, audio_vocab_size=1032, hidden_size=256, intermediate_size=512, num_shared_layers=2,
    num_modality_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    modality_pad_token_id=2000, sosp_token_id=2001, eosp_token_id=1024, eos_token_id=2002, pad_token_id=2003,
)  # fmt: skip


def random_weight(outputs: int, inputs: int, scheme: Scheme, device: torch.device | str) -> QuantisedWeight:
    """A quantised matrix with approximately normal values."""
    if scheme in CASTS:
        return QuantisedWeight(scheme, torch.randn(outputs, inputs, device=device).mul_(DEVIATION).to(CASTS[scheme]))
    if scheme == "int4":
        groups = inputs // group_of(inputs, GROUP)
        data = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
        scale = torch.full((outputs, groups), DEVIATION / 4.6, dtype=torch.float16, device=device)
        return QuantisedWeight(scheme, data, scale, scale * -7.5)
    scale = torch.full((outputs,), DEVIATION / 73, device=device)
    data = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
    if scheme == "float8":
        return QuantisedWeight(scheme, data.to(torch.float16).to(torch.float8_e4m3fn), scale)
    return QuantisedWeight(scheme, data, scale)


@torch.no_grad()
def random_moss_speech(
    config: MossSpeechConfig, scheme: Scheme | None, device: torch.device | str, dtype: torch.dtype
) -> MossSpeech:
    """A random model with the policy's matrices in this scheme; None: all in `dtype`."""
    if scheme is None:
        return MossSpeech.random(config, device, dtype)
    part = MOSS_SPEECH.parts[0]
    with postponed(), allocating(device, dtype):
        model = MossSpeech(config)
    quantised: dict[str, ReadQuantised] = {}
    for name, tensor in published_tensors(model).items():
        chosen = part.scheme_of(name, tensor.shape, scheme)
        if chosen is not None:
            outputs, inputs = tensor.shape
            quantised[name] = partial(random_weight, outputs, inputs, chosen, device)

    def absent(name: str) -> Tensor:
        raise AssertionError(f"MOSS-Speech's linear layers have no bias, so {name} is not read")

    install(model, quantised, absent)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, DEVIATION)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model.eval()


def supported_schemes(target: Device) -> list[Scheme]:
    """Weight schemes that a device supports."""
    has_float8 = target.kind == "cuda" and torch.cuda.get_device_capability(target.index) >= (8, 9)
    return [scheme for scheme in SCHEMES if scheme != "float8" or has_float8]


logger = logging.getLogger(__name__)

PROMPT_ROWS = 512
BATCHES = (1, 8)
SHARES = (1.0, 0.9)  # of the predicted KV cache; the second is tried if the first fails
CPU_ROWS = 4096  # cache size on a CPU, without a cap
METHOD_OF: dict[Scheme | None, str] = {
    None: "bf16 (as published)",
    "int8": "int8-weight",
    "int4": "int4-weight",
    "float8": "fp8",
}


def check_memory(
    device: str, is_small: bool, cap: int, out: Path | None = None, only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Measure, print and write `memory.json`; `only` selects methods."""
    target, config = pick(device), SMALL if is_small else MossSpeechConfig()
    dtype = torch.bfloat16 if target.kind == "cuda" else torch.float32
    schemes = [
        scheme for scheme in (None, *supported_schemes(target)) if not only or METHOD_OF[scheme].split()[0] in only
    ]
    fits = {fit.method: fit for fit in plan(cap, config)}
    found = []
    for scheme in schemes:
        for share in SHARES:
            found.append(_filled(target, dtype, config, scheme, fits[METHOD_OF[scheme]], cap, share))
            print(json.dumps(found[-1]), flush=True)
            if "failed" not in found[-1]:
                break
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "memory.json").write_text(json.dumps(found, indent=2), encoding="utf8")
    return found


def _filled(
    target: Device,
    dtype: torch.dtype,
    config: MossSpeechConfig,
    scheme: Scheme | None,
    fit: Fit,
    cap: int,
    share: float,
) -> dict[str, Any]:
    """One weight format: predicted and measured gigabytes, and step times."""
    started, is_cuda = time.perf_counter(), target.kind == "cuda"
    minutes = share * fit.minutes
    rows = round(minutes * ROWS_A_MINUTE) if is_cuda else CPU_ROWS
    found: dict[str, Any] = {"method": fit.method, "cap_gb": cap / 1e9, "minutes": round(minutes, 1)}
    found |= {"weights_gb": fit.weights / 1e9, "codec_gb": fit.codec / 1e9, "workspace_gb": fit.workspace / 1e9}
    if is_cuda:
        _cap(target, cap - DRIVER)
    try:
        model = random_moss_speech(config, scheme, target.torch_device, dtype)
        found["weights_gb_measured"] = _bytes_of([model]) / 1e9
        codec = codec_parts(target.torch_device if is_cuda else "meta")
        found["codec_gb_measured"] = _bytes_of(codec) / 1e9
        engine = Engine(model, target, dtype, EngineLimits(cache_rows=rows, sequences_per_step=max(BATCHES)))
        for batch in BATCHES:
            found[f"step_ms_{batch}"] = 1e3 * _step_seconds(engine, config, batch, target)
        if is_cuda:
            found["peak_gb"] = (torch.cuda.max_memory_reserved(target.index) + DRIVER) / 1e9
    except Exception as error:
        logger.debug("the memory check failed", exc_info=True)
        found["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    finally:
        model = engine = codec = None  # type: ignore[assignment]
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
    found["took_s"] = round(time.perf_counter() - started, 1)
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def _cap(target: Device, cap: int) -> None:
    total = torch.cuda.get_device_properties(target.index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), target.index)
    torch.cuda.reset_peak_memory_stats(target.index)


def _bytes_of(modules: Sequence[nn.Module]) -> int:
    return sum(t.nbytes for module in modules for t in (*module.parameters(), *module.buffers()))


def _step_seconds(engine: Engine, config: MossSpeechConfig, batch: int, target: Device) -> float:
    prompt = [(config.modality_pad_token_id, code % 1000) for code in range(PROMPT_ROWS)]
    generation = Generation(Sampling(0.7, 20, 0.95), max_new_rows=60, min_new_rows=60)
    sequences = [engine.open(prompt) for _ in range(batch)]
    for sequence in sequences:
        engine.generate(sequence, generation)
    for _ in range(8 + batch):
        engine.step()
    seconds = median_seconds(engine.step, target, repeats=20)
    for sequence in sequences:
        engine.close(sequence)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vivavoce.quant.plan", description="The memory plan of MOSS-Speech, verified."
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="a small shape that runs anywhere")
    parser.add_argument("--cap", default="24GB", help="GPU memory to stay below")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--only", nargs="+", default=(), help="of " + ", ".join(n.split()[0] for n in METHOD_OF.values())
    )
    options = parser.parse_args(arguments)
    check_memory(options.device, options.small, byte_count(options.cap), options.out, options.only)


if __name__ == "__main__":
    main()
