"""Recognition backends behind one interface: the engine of this package, faster-whisper, and Moonshine.

On a CPU, faster-whisper in int8 is the default for Whisper `small` and above if it is installed. All other Whispers run
in the engine, which alone has drafts, streaming and batching; it also reads CTranslate2's folders and OpenAI's files.
"""

import importlib.util
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import torch

from vivavoce.asr.backends.ctranslate2 import load_converted
from vivavoce.asr.backends.moonshine import Moonshine, MoonshineBackend
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.asr.drafts import DraftChoice, DraftReport
from vivavoce.device import Device, pick, resolve_dtype
from vivavoce.errors import InputError
from vivavoce.hub import resolve
from vivavoce.implementations import Choice, choose_asr_backend, choose_whisper_encoder
from vivavoce.models.checkpoint import is_pickled
from vivavoce.models.registry import moonshine_folder, openai_whisper_file
from vivavoce.models.whisper.cpu import OptimisedEncoder, has_plain_products, optimise_encoder, to_bf16, to_int8
from vivavoce.models.whisper.files import read_sizes
from vivavoce.models.whisper.steps import TranscriptionOptions, TranscriptSegment
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.models.whisper.vocabulary import ENGLISH_RANKS, MULTILINGUAL_RANKS

BackendName = Literal["auto", "ours", "faster-whisper", "moonshine"]
BACKENDS: tuple[BackendName, ...] = ("auto", "ours", "faster-whisper", "moonshine")
BACKEND_OF_CLASS: dict[str, BackendName] = {
    "OwnBackend": "ours",
    "FasterWhisper": "faster-whisper",
    "MoonshineBackend": "moonshine",
}
VOCABULARY = "whisper-vocabulary"  # in the catalogue of models
VOCABULARIES = ("tokenizer.json", ENGLISH_RANKS, MULTILINGUAL_RANKS)
__all__ = [
    "BACKENDS",
    "Backend",
    "BackendName",
    "Moonshine",
    "MoonshineBackend",
    "OwnBackend",
    "backend_choice",
    "fitting",
    "load_backend",
    "load_int8_whisper",
    "load_whisper",
]


class Backend(Protocol):
    """Transcribes samples at 16 kHz."""

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages that it knows."""
        ...

    def own_language(self, samples: torch.Tensor) -> str:
        """The language of the transcript if none is given.  # [time]"""
        ...

    def segments(
        self, samples: torch.Tensor, options: TranscriptionOptions | None = None
    ) -> Iterator[TranscriptSegment]:
        """Segments as they become final.  # [time]"""
        ...


class OwnBackend:
    """A Whisper in the engine of this package, optionally with drafts.

    Several threads may transcribe concurrently; the engine decodes up to `parallel` recordings in one batch.
    """

    def __init__(
        self,
        transcriber: WhisperTranscriber,
        device: Device,
        drafts: DraftChoice | None = None,
        parallel: int = 1,
    ) -> None:
        self.transcriber = transcriber
        self._device, self._drafts, self._parallel = device, drafts, parallel
        if parallel == 1:
            _ = self.engine  # so that a draft that does not fit the model is refused at load time

    @cached_property
    def engine(self) -> TranscribingEngine:
        """Created on first use: a server on a GPU does not need it, since all requests share another engine."""
        return TranscribingEngine(self.transcriber, self._device, windows=self._parallel, drafts=self._drafts)

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages that it knows."""
        return self.transcriber.languages

    def own_language(self, samples: torch.Tensor) -> str:
        """The language of the transcript if none is given.  # [time]"""
        return self.transcriber.own_language(samples)

    def segments(
        self, samples: torch.Tensor, options: TranscriptionOptions | None = None
    ) -> Iterator[TranscriptSegment]:
        """Segments as they become final."""
        return iter(self.engine.begin(samples, options))

    def report(self) -> DraftReport:
        """Passes, tokens and drafts since the last report."""
        return self.engine.report()


def load_backend(
    model: str | Path,
    backend: BackendName = "auto",
    device: str = "auto",
    dtype: str = "auto",
    drafts: DraftChoice | None = None,
    parallel: int = 1,
) -> Backend:
    """Load a bundled name, folder, OpenAI's file or hub id with this backend; `auto` picks one for the model."""
    if backend not in BACKENDS:
        raise InputError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    path = Path(model).expanduser()
    is_local = path.is_dir() or (path.is_file() and is_pickled(path))  # OpenAI publishes single .pt files
    source = path if is_local else resolve(str(model))
    picked = pick(device)
    chosen = fitting(source, picked, drafts) if backend == "auto" else backend
    if chosen == "moonshine":
        return MoonshineBackend(source)
    if chosen == "faster-whisper":
        compute = "float16" if picked.kind == "cuda" else "int8" if dtype in ("auto", "int8") else dtype
        return load_converted(source, picked.kind, compute)
    return OwnBackend(load_whisper(source, picked, dtype), picked, drafts, parallel)


def load_whisper(source: Path, device: Device, dtype: str = "auto") -> WhisperTranscriber:
    """A Whisper for the engine; on a CPU with an optimised encoder, in bfloat16 if that is fast."""
    if dtype == "int8":
        return load_int8_whisper(source, device)
    transcriber = WhisperTranscriber.load(
        source, device.torch_device, resolve_dtype(dtype, device), _vocabulary(source)
    )
    choice = choose_whisper_encoder(device, dtype, has_plain_products(transcriber.model.encoder))
    if choice.cls is OptimisedEncoder:
        (to_bf16 if choice.dtype == torch.bfloat16 else optimise_encoder)(transcriber.model)
    return transcriber


def load_int8_whisper(source: Path, device: Device) -> WhisperTranscriber:
    """A Whisper with int8 matrix products; CPUs only."""
    choose_whisper_encoder(device, "int8")  # raises an error on other devices
    transcriber = WhisperTranscriber.load(source, device.torch_device, vocabulary=_vocabulary(source))
    to_int8(transcriber.model)
    return transcriber


def fitting(source: Path, device: Device, drafts: DraftChoice | None = None) -> BackendName:
    """The default backend for a model, by its files and, on a CPU, by its size."""
    return BACKEND_OF_CLASS[backend_choice(source, device, drafts).name]


def backend_choice(source: Path, device: Device, drafts: DraftChoice | None = None) -> Choice:
    """The backend for a model, and why."""
    is_moonshine = moonshine_folder(source) is not None
    sizes = read_sizes(source) if device.kind == "cpu" and not is_moonshine else None
    return choose_asr_backend(
        device,
        None if sizes is None else sizes.d_model,
        is_moonshine,
        drafts=drafts is not None and drafts.is_any,
        has_faster_whisper=importlib.util.find_spec("faster_whisper") is not None,
    )


def _vocabulary(source: Path) -> Path | None:
    """The folder of byte-pair ranks for a file of OpenAI's without a tokenizer beside it; None if it has its own."""
    file = source if source.is_file() else openai_whisper_file(source)
    if file is None or any((file.parent / name).is_file() for name in VOCABULARIES):
        return None
    return resolve(VOCABULARY)
