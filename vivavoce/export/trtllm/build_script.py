"""`build_engine.sh`: the commands that make engines of an export, with a look at the GPU first."""

from collections.abc import Sequence
from pathlib import Path

from vivavoce.export.trtllm.checkpoint_folder import CheckpointFolder
from vivavoce.export.trtllm.options import TrtLlmOptions

NAME = "build_engine.sh"
LONGEST_INPUT, LONGEST_SEQUENCE = 2048, 6144
WHISPER_FRAMES, WHISPER_PROMPT, WHISPER_SEQUENCE = 3000, 14, 114

HEAD = """#!/usr/bin/env bash
# Engines for TensorRT-LLM {version}, {tp} GPU(s). They go beside the checkpoints, into engines/.
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v trtllm-build >/dev/null; then
  echo "trtllm-build is not here: pip install tensorrt-llm=={version}" >&2
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
    """The script of all checkpoints of an export, ready to be run."""
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
    """The flags of one `trtllm-build`, in the order they are written."""
    place = checkpoint.name or "."
    engine = f"engines/{checkpoint.name}" if checkpoint.name else "engines"
    # A class from a file cannot be sent to other processes, so its ranks are built one after the other.
    workers = 1 if checkpoint.network is not None else options.tp
    flags = [f"--checkpoint_dir {place}", f"--output_dir {engine}", f"--workers {workers}"]
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
        f"--max_input_len {LONGEST_INPUT}",
        f"--max_seq_len {LONGEST_SEQUENCE}",
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
