"""Runs engines built from exported checkpoints with TensorRT-LLM, and reports what this machine can run."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from shutil import which
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vivavoce.errors import CheckpointError, InputError, MissingDependencyError
from vivavoce.export.trtllm.folder import NAME as BUILD_SCRIPT
from vivavoce.export.trtllm.folder import read_manifest
from vivavoce.export.trtllm.moss_speech import joint_id, row_of
from vivavoce.export.trtllm.options import LAST_ENGINES, parse_version
from vivavoce.export.trtllm.whisper import PROMPT_FILE, prompt_ids
from vivavoce.models.cosyvoice.lm import CosyVoiceLMConfig
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.model import MossSpeechConfig

NEVER = float("-inf")


@dataclass(frozen=True)
class ModeRule:
    """MOSS-Speech: in text mode only text ids may follow, in audio mode only codes up to the end of speech."""

    config: MossSpeechConfig

    def in_speech(self, ids: Sequence[int]) -> bool:
        """Whether what follows these joint ids is speech."""
        config, last = self.config, ids[-1]
        if last < config.vocab_size:
            return last == config.sosp_token_id
        return last - config.vocab_size not in (config.eosp_token_id, config.audio_pad_token_id)

    def __call__(self, request: int, logits: Tensor, ids: list[list[int]], stream: int | None, *_: Any) -> None:
        """Mask the ids of the other modality.  # logits [1, beam, joint id]"""
        text = self.config.vocab_size
        with _on(stream):
            for beam, generated in enumerate(ids):
                row = logits[0, beam]
                if self.in_speech(generated):
                    row[:text] = NEVER
                    row[text + self.config.eosp_token_id + 1 :] = NEVER
                else:
                    row[text:] = NEVER


@dataclass(frozen=True)
class BiasRule:
    """CosyVoice 2: the LM head's bias, which engines do not support."""

    bias: Tensor  # [speech id]

    def __call__(self, request: int, logits: Tensor, ids: list[list[int]], stream: int | None, *_: Any) -> None:
        """# logits [1, beam, speech id]"""
        with _on(stream):
            logits[..., : len(self.bias)] += self.bias.to(logits)


def _on(stream: int | None) -> Any:
    """Context of the CUDA stream of this handle; none on a CPU."""
    return nullcontext() if not stream else torch.cuda.stream(torch.cuda.ExternalStream(stream))


RULE = "vivavoce"


@dataclass(frozen=True)
class EngineSampling:
    """Sampling settings of the engine."""

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


class MossSpeechEngine:
    """A whole MOSS-Speech: rows in, the rows of a reply out."""

    def __init__(self, folder: str | Path, model: str | Path) -> None:
        """`folder` is an export with its engine built, `model` the folder it was exported from."""
        self.config = MossSpeechConfig.read(model)
        self.runner = _open_runner(Path(folder), "moss-speech", ModeRule(self.config))

    def reply(
        self,
        rows: Sequence[Row],
        max_new: int | None = None,
        sampling: EngineSampling | None = None,
        most: int | None = None,
    ) -> Iterator[Row]:
        """Stream the rows of a reply up to the end of the turn; `most` is the deprecated name of `max_new`."""
        max_new = _limit(max_new, most)
        ids = [joint_id(self.config, row) for row in rows]
        ends = [self.config.eos_token_id]
        for joint in _generated(
            self.runner, ids, max_new, ends, self.config.pad_token_id, sampling or EngineSampling()
        ):
            yield row_of(self.config, joint)


class CosyVoiceEngine:
    """CosyVoice's language model: the rows of a prompt in, speech codes out."""

    def __init__(self, folder: str | Path, config: CosyVoiceLMConfig) -> None:
        folder = Path(folder)
        bias = None
        if (folder / PROMPT_FILE).is_file():
            self.tables = load_file(folder / PROMPT_FILE)
            bias = self.tables.get("head_bias")
        self.config = config
        self.runner = _open_runner(folder, "cosyvoice-lm", None if bias is None else BiasRule(bias))

    def speak(
        self,
        rows: Sequence[Row],
        max_new: int | None = None,
        sampling: EngineSampling | None = None,
        most: int | None = None,
    ) -> Iterator[int]:
        """Stream the codes after the rows of `CosyVoiceLM.prompt`; `most` is the deprecated name of `max_new`."""
        max_new = _limit(max_new, most)
        ids, table = prompt_ids(self.config, self.tables, rows)
        options = {} if table is None else {"prompt_table": table[None], "prompt_tasks": "0"}
        end = self.config.end_code
        yield from _generated(self.runner, ids, max_new, [end], end, sampling or EngineSampling(), options)


def _limit(max_new: int | None, most: int | None) -> int:
    if most is not None:
        warnings.warn("`most` is deprecated; use `max_new`", DeprecationWarning, stacklevel=3)
        return most
    if max_new is None:
        raise InputError("give max_new, the maximum number of rows or codes to generate")
    return max_new


def _open_runner(folder: Path, kind: str, rule: Any) -> Any:
    manifest = read_manifest(folder)
    if manifest["kind"] != kind or manifest["part"] == "trunk":
        raise InputError(f"{folder} is the {manifest['part']} of {manifest['kind']}, not a whole {kind}")
    if manifest["backend"] != "tensorrt":
        raise InputError(f"{folder} is for TensorRT-LLM's PyTorch backend; import its definition and give it to LLM(…)")
    if not (folder / "engines" / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no engine yet; run {folder / BUILD_SCRIPT} on the machine that will use it"
        )
    runtime = _tensorrt_llm("tensorrt_llm.runtime")
    rules = {} if rule is None else {"logits_processor_map": {RULE: rule}}
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    runner = runtime.ModelRunnerCpp.from_dir(engine_dir=str(folder / "engines"), rank=rank, **rules)
    runner.rule_names = [RULE] if rules else None
    return runner


def _generated(
    runner: Any,
    ids: Sequence[int],
    max_new: int,
    ends: Sequence[int],
    pad: int,
    sampling: EngineSampling,
    options: dict[str, Any] | None = None,
) -> Iterator[int]:
    """Stream new ids, without the end id."""
    steps = runner.generate(
        batch_input_ids=[torch.tensor(ids, dtype=torch.int32)],
        max_new_tokens=max_new,
        end_id=ends[0],
        pad_id=pad,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        random_seed=sampling.seed,
        logits_processor_names=runner.rule_names,
        streaming=True,
        return_dict=True,
        output_sequence_lengths=True,
        **(options or {}),
    )
    known = len(ids)
    for step in steps:
        length = int(step["sequence_lengths"][0, 0])
        for token in step["output_ids"][0, 0, known:length].tolist():
            if token in ends:
                return
            yield token
        known = max(known, length)


def _tensorrt_llm(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"engines need TensorRT-LLM up to {LAST_ENGINES}: pip install 'tensorrt-llm<=1.2.1' on a machine with CUDA"
        ) from error


def usable_exports() -> list[str]:
    """What this machine can do with exported checkpoints, one line each, for `viva doctor`."""
    try:
        installed = metadata.version("tensorrt-llm")
    except metadata.PackageNotFoundError:
        return [
            "TensorRT-LLM is not installed: `viva export trtllm` writes checkpoints here, engines are built and run "
            "where `pip install tensorrt-llm` and a CUDA GPU are"
        ]
    if not torch.cuda.is_available():
        return [f"TensorRT-LLM {installed} is installed but there is no CUDA GPU: it cannot run here"]
    if parse_version(installed) > LAST_ENGINES:
        return [
            f"TensorRT-LLM {installed} has the PyTorch backend alone: `viva export trtllm --trt-version {installed}` "
            "writes its format; engines need 1.2.1 or 1.3.0rc20"
        ]
    if which("trtllm-build") is None:
        return [f"TensorRT-LLM {installed} can run engines of `viva export trtllm`; trtllm-build is not on the PATH"]
    return [f"TensorRT-LLM {installed} can build and run the engines of `viva export trtllm`"]
