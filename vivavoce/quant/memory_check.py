"""`python -m vivavoce.quant.memory_check`: the memory plan of MOSS-Speech, verified on a GPU.

For every weight format it allocates 9.1 B random weights, the codec, and as large a KV cache as `plan` predicts, under
a memory cap (24 GB by default), then runs a prefill and engine steps at batch 1 and 8. What does not fit fails, as it
would on a card of that size. Needs torch only.
"""

import argparse
import gc
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vivavoce.device import Device, pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.evaluation.machine import median_seconds
from vivavoce.models.moss_speech.model import MossSpeechConfig
from vivavoce.nn.quantised_weight import Scheme
from vivavoce.quant.linear_bench import SMALL, supported_schemes
from vivavoce.quant.plan import DRIVER, ROWS_A_MINUTE, Fit, byte_count, codec_parts, plan, random_moss_speech

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


def run(
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
    parser = argparse.ArgumentParser(prog="python -m vivavoce.quant.memory_check", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="a small shape that runs anywhere")
    parser.add_argument("--cap", default="24GB", help="GPU memory to stay below")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--only", nargs="+", default=(), help="of " + ", ".join(n.split()[0] for n in METHOD_OF.values())
    )
    options = parser.parse_args(arguments)
    run(options.device, options.small, byte_count(options.cap), options.out, options.only)


if __name__ == "__main__":
    main()
