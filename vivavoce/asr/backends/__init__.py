"""Recognition backends behind one interface: the engine of this package, faster-whisper, and Moonshine.

On a CPU, faster-whisper in int8 is the default for Whisper `small` and above if it is installed. All other models run
in the engine, which alone has drafts, streaming and batching. Moonshine base (MIT) is for English on small machines:
its ONNX files are in the npm package `@usefulsensors/moonshine-js@0.1.16`, its tokenizer in the PyPI package
`useful-moonshine-onnx`; neither is downloaded here.
"""

import importlib.util
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.asr.backends.ctranslate2 import CONVERTED, load_converted
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.asr.drafts import DraftChoice, DraftReport
from vivavoce.audio.io import Sound
from vivavoce.device import Device, pick, resolve_dtype
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.hub import resolve
from vivavoce.implementations import Choice, choose_asr_backend, choose_whisper_encoder
from vivavoce.models.checkpoint import is_pickled
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.cpu import OptimisedEncoder, has_plain_products, optimise_encoder, to_bf16, to_int8
from vivavoce.models.whisper.transcriber import TranscriptionOptions, TranscriptSegment, WhisperTranscriber

BackendName = Literal["auto", "ours", "faster-whisper", "moonshine"]
BACKENDS: tuple[BackendName, ...] = ("auto", "ours", "faster-whisper", "moonshine")
BACKEND_OF_CLASS: dict[str, BackendName] = {
    "OwnBackend": "ours",
    "FasterWhisper": "faster-whisper",
    "MoonshineBackend": "moonshine",
}
MOONSHINE_SECONDS = 30.0  # per piece; its authors advise against more
MOONSHINE_ENCODER, MOONSHINE_DECODER = "encoder_model.onnx", "decoder_model_merged.onnx"
MOONSHINE_FOLDERS = ("", "dist/model/base/quantized", "package/dist/model/base/quantized")
MOONSHINE_START, MOONSHINE_END = 1, 2
MOONSHINE_TOKENS_PER_SECOND = 6.5  # of English; a longer text repeats itself


class Backend(Protocol):
    """Transcribes samples at 16 kHz."""

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


class Moonshine:
    """Speech to text by Moonshine base; `folder` is the unpacked npm package, or the files themselves."""

    RATE = 16_000

    def __init__(self, folder: str | Path, threads: int = 2) -> None:
        found = moonshine_folder(Path(folder))
        if found is None:
            raise InputError(
                f"{folder} holds no {MOONSHINE_ENCODER}; unpack `npm pack @usefulsensors/moonshine-js@0.1.16` there"
            )
        self._encoder = onnx_session(found / MOONSHINE_ENCODER, threads)
        self._decoder = onnx_session(found / MOONSHINE_DECODER, threads)
        self._pasts = [given for given in self._decoder.get_inputs() if given.name.startswith("past")]
        self._presents = [given.name for given in self._decoder.get_outputs()][1:]
        self._tokenizer = _tokenizer()

    def transcribe(self, sound: Sound) -> str:
        """The text of a sound."""
        return self.write(sound.mono().resampled(self.RATE).samples[0])

    def write(self, samples: NDArray[np.float32]) -> str:
        """The text of samples at 16 kHz.  # [time]"""
        hidden = self._encoder.run(None, {"input_values": samples[None].astype(np.float32)})[0]
        past = {given.name: np.zeros((1, given.shape[1], 0, given.shape[3]), np.float32) for given in self._pasts}
        tokens = [MOONSHINE_START]
        for step in range(max(8, int(len(samples) / self.RATE * MOONSHINE_TOKENS_PER_SECOND))):
            logits, *present = self._decoder.run(
                None,
                {
                    "input_ids": np.array([tokens[-1:]], np.int64),
                    "encoder_hidden_states": hidden,
                    "use_cache_branch": np.array([step > 0]),
                    **past,
                },
            )
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] == MOONSHINE_END:
                break
            for name, value in zip(self._presents, present, strict=True):
                # Cross-attention keys and values are returned by the first step only.
                if step == 0 or ".decoder." in name:
                    past[name.replace("present", "past_key_values")] = value
        text: str = self._tokenizer.decode(tokens)
        return text


class MoonshineBackend:
    """`Moonshine` as a `Backend`: one segment for every 30 seconds, without word times."""

    def __init__(self, folder: str | Path, threads: int = 2) -> None:
        self.model = Moonshine(folder, threads)

    def own_language(self, samples: torch.Tensor) -> str:
        """English."""
        return "en"

    def segments(
        self, samples: torch.Tensor, options: TranscriptionOptions | None = None
    ) -> Iterator[TranscriptSegment]:
        """A segment for every 30 seconds."""
        if options is not None and (options.language not in (None, "en") or options.task != "transcribe"):
            raise InputError(f"Moonshine transcribes English only, not {options.language!r}; use another backend")
        size = int(MOONSHINE_SECONDS * Moonshine.RATE)
        for first in range(0, len(samples), size):
            piece = samples[first : first + size].numpy()
            text = self.model.write(piece)
            if text.strip():
                begin = first / Moonshine.RATE
                yield TranscriptSegment(
                    begin, begin + len(piece) / Moonshine.RATE, f" {text.strip()}", (), 0.0, 0.0, 0.0, 0.0
                )


def moonshine_folder(folder: Path) -> Path | None:
    """The subfolder with Moonshine's files; None if there is none."""
    candidates = [folder / inner for inner in MOONSHINE_FOLDERS]
    return next((each for each in candidates if (each / MOONSHINE_ENCODER).is_file()), None)


def onnx_session(file: Path, threads: int) -> Any:
    """An ONNX Runtime session on the CPU."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError("this network needs onnxruntime: pip install 'vivavoce[onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    spec = importlib.util.find_spec("moonshine_onnx")
    if spec is None or spec.origin is None:
        raise MissingDependencyError("Moonshine's tokenizer is missing: pip install --no-deps useful-moonshine-onnx")
    return Tokenizer.from_file(str(Path(spec.origin).parent / "assets" / "tokenizer.json"))


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
    transcriber = WhisperTranscriber.load(source, device.torch_device, resolve_dtype(dtype, device))
    choice = choose_whisper_encoder(device, dtype, has_plain_products(transcriber.model.encoder))
    if choice.cls is OptimisedEncoder:
        (to_bf16 if choice.dtype == torch.bfloat16 else optimise_encoder)(transcriber.model)
    return transcriber


def load_int8_whisper(source: Path, device: Device) -> WhisperTranscriber:
    """A Whisper with int8 matrix products; CPUs only."""
    choose_whisper_encoder(device, "int8")  # raises an error on other devices
    transcriber = WhisperTranscriber.load(source, device.torch_device)
    to_int8(transcriber.model)
    return transcriber


def fitting(source: Path, device: Device, drafts: DraftChoice | None = None) -> BackendName:
    """The default backend for a model, by its files and, on a CPU, by its size."""
    return BACKEND_OF_CLASS[backend_choice(source, device, drafts).name]


def backend_choice(source: Path, device: Device, drafts: DraftChoice | None = None) -> Choice:
    """The backend for a model, and why."""
    is_moonshine, is_converted = moonshine_folder(source) is not None, (source / CONVERTED).is_file()
    is_whisper = not is_moonshine and not is_converted and (source / "config.json").is_file()
    return choose_asr_backend(
        device,
        WhisperConfig.read(source).d_model if is_whisper and device.kind == "cpu" else None,
        is_moonshine,
        is_converted,
        drafts=drafts is not None and drafts.is_any,
        has_faster_whisper=importlib.util.find_spec("faster_whisper") is not None,
    )
