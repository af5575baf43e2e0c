"""Checkpoint folders: written atomically with a manifest, read back with checks, and the engine build script."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from vivavoce.errors import CheckpointError, InputError
from vivavoce.export.trtllm.decoder import RankPlan, Shard, write_tensor_file
from vivavoce.export.trtllm.options import TrtLlmOptions

MANIFEST = "export.json"


@dataclass(frozen=True)
class CheckpointFolder:
    """One checkpoint for `trtllm-build`: config, plan of every rank's file, and extra files."""

    name: str  # below the export's folder; empty: the folder itself
    config: Mapping[str, Any]
    plan: Callable[[Shard], RankPlan]
    network: tuple[str, str] | None = None
    """File and class of a model definition that TensorRT-LLM lacks."""
    extras: Mapping[str, Callable[[], Mapping[str, Tensor]]] = field(default_factory=dict)
    prompt_table: int = 0
    """Maximum prompt-embedding rows of a request."""

    def write(self, folder: Path, tp: int) -> None:
        """Write the ranks' tensors, extra files and config."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(tp):
            write_tensor_file(folder / f"rank{rank}.safetensors", self.plan(Shard(rank, tp)).parts)
        for name, tensors in self.extras.items():
            save_file({key: tensor.contiguous() for key, tensor in tensors().items()}, folder / name)
        if self.network is not None:
            source = files("vivavoce.export.trtllm").joinpath(self.network[0])
            (folder / self.network[0]).write_text(source.read_text(encoding="utf8"), encoding="utf8")
        (folder / "config.json").write_text(json.dumps(self.config, indent=2), encoding="utf8")


def write_export(out: Path, writers: Sequence[Callable[[Path], None]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Run the writers on a temporary folder, write the manifest, then rename it to `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not an empty folder; name another, or remove it")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for write in writers:
        write(partial)
    written = sorted(path for path in partial.rglob("*") if path.is_file())
    manifest = {**about, "files": {str(path.relative_to(partial)): path.stat().st_size for path in written}}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf8")
    if out.is_dir():
        out.rmdir()
    partial.rename(out)
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete export; raises for an incomplete one."""
    file = folder / MANIFEST
    if not file.is_file():
        if folder.name.endswith(".partial"):
            raise CheckpointError(f"{folder} is an incomplete export; remove it and export again")
        raise CheckpointError(f"{folder} has no {MANIFEST}, so it is not a finished export; export again")
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
        sizes = dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); export again") from error
    for name, size in sizes.items():
        actual = (folder / name).stat().st_size if (folder / name).is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} of {size} bytes"
            raise CheckpointError(f"{folder} is incomplete: {name} {state}; export again")
    return manifest


NAME = "build_engine.sh"
MAX_INPUT, MAX_SEQUENCE = 2048, 6144
WHISPER_FRAMES, WHISPER_PROMPT, WHISPER_SEQUENCE = 3000, 14, 114

HEAD = """#!/usr/bin/env bash
# Engines for TensorRT-LLM {version}, {tp} GPU(s). They are written to engines/.
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v trtllm-build >/dev/null; then
  echo "trtllm-build is not installed: pip install tensorrt-llm=={version}" >&2
  exit 1
fi
"""
ONE_GPU = """found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
case "$found" in
  {fitting}) ;;
  *) echo "the weights are laid out for sm {sm}, this GPU is sm $found: export again with --sm $found" >&2; exit 1 ;;
esac
"""


def write_build_script(folder: Path, folders: Sequence[CheckpointFolder], options: TrtLlmOptions) -> None:
    """Write the executable script that builds all engines of an export."""
    text = HEAD.format(version=options.version, tp=options.tp)
    if options.quantise in ("int8", "int4"):
        fitting = "90" if options.sm == 90 else "80|86|89|120"
        text += ONE_GPU.format(fitting=fitting, sm=options.sm)
    for checkpoint in folders:
        flags = " \\\n  ".join(build_flags(checkpoint, options))
        text += f"\ntrtllm-build \\\n  {flags}\n"
    script = folder / NAME
    script.write_text(text, encoding="utf8")
    script.chmod(0o755)


def build_flags(checkpoint: CheckpointFolder, options: TrtLlmOptions) -> list[str]:
    """Flags of one `trtllm-build` call."""
    folder = checkpoint.name or "."
    engine = f"engines/{checkpoint.name}" if checkpoint.name else "engines"
    # A class from a file cannot be pickled, so its ranks are built sequentially.
    workers = 1 if checkpoint.network is not None else options.tp
    flags = [f"--checkpoint_dir {folder}", f"--output_dir {engine}", f"--workers {workers}"]
    flags.append('--max_batch_size "${MAX_BATCH_SIZE:-64}"')
    by_name = {"encoder": _encoder_flags, "decoder": _decoder_flags}
    flags += by_name.get(checkpoint.name, _lm_flags)(options)
    if checkpoint.prompt_table:
        flags.append(f"--max_prompt_embedding_table_size {checkpoint.prompt_table}")
    if checkpoint.network is not None:
        file, name = checkpoint.network
        flags += [f"--model_cls_file {file}", f"--model_cls_name {name}"]
    return flags


def _lm_flags(options: TrtLlmOptions) -> list[str]:
    flags = [
        f"--max_input_len {MAX_INPUT}",
        f"--max_seq_len {MAX_SEQUENCE}",
        "--max_num_tokens 8192",
        "--max_beam_width 1",
        *_paged(options),
        "--use_paged_context_fmha enable",
    ]
    if options.kv_cache == "fp8" and options.quantise == "fp8":
        flags.append("--use_fp8_context_fmha enable")
    return flags


def _encoder_flags(options: TrtLlmOptions) -> list[str]:
    return [
        f"--max_input_len {WHISPER_FRAMES}",
        f"--max_seq_len {WHISPER_FRAMES}",
        "--gemm_plugin disable",
        f"--bert_attention_plugin {options.dtype}",
        "--remove_input_padding enable",
    ]


def _decoder_flags(options: TrtLlmOptions) -> list[str]:
    return [
        f"--max_input_len {WHISPER_PROMPT}",
        f"--max_seq_len {WHISPER_SEQUENCE}",
        f"--max_encoder_input_len {WHISPER_FRAMES}",
        "--max_beam_width 4",
        f"--bert_attention_plugin {options.dtype}",
        *_paged(options),
    ]


def _paged(options: TrtLlmOptions) -> list[str]:
    gemm = "disable" if options.quantise == "fp8" else options.dtype
    return [
        "--kv_cache_type paged",
        "--remove_input_padding enable",
        "--context_fmha enable",
        f"--gpt_attention_plugin {options.dtype}",
        f"--gemm_plugin {gemm}",
    ]
