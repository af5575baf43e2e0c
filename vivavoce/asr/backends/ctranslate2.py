"""Whisper in CTranslate2: through the faster-whisper package, or window by window in our transcription loop.

faster-whisper pads every window to 30 s, so models with shorter windows run in our loop.
"""

import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.hub import cache_folder
from vivavoce.models.checkpoint import save_weights
from vivavoce.models.quantised import is_packed
from vivavoce.models.whisper.alignment import TimedWord
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.decoding import Text
from vivavoce.models.whisper.model import Whisper, WindowMemory
from vivavoce.models.whisper.steps import (
    Answer,
    DetectLanguage,
    EncodeWindow,
    Question,
    TranscriptionOptions,
    TranscriptSegment,
    WriteText,
    run_steps,
)
from vivavoce.models.whisper.transcriber import WhisperTranscriber

CONVERTED = "model.bin"
COPIED = ("tokenizer.json", "preprocessor_config.json", "generation_config.json")
USUAL_FRAMES = 3000
MIN_WINDOW_SECONDS = 2.0  # on shorter windows, CTranslate2 4.8 sometimes hallucinates on Arm CPUs


class FasterWhisper:
    """CTranslate2's Whisper through the faster-whisper package."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages that it knows."""
        return tuple(self.model.supported_languages)

    def own_language(self, samples: torch.Tensor) -> str:
        """The language detected in the first window."""
        if not self.model.model.is_multilingual:
            return "en"
        known = self.model.supported_languages
        return str(known[0] if len(known) == 1 else self.model.detect_language(samples.numpy())[0])

    def segments(
        self, samples: torch.Tensor, options: TranscriptionOptions | None = None
    ) -> Iterator[TranscriptSegment]:
        """Segments as they become final."""
        options = options or TranscriptionOptions()
        _refuse_logprobs(options)
        extra: dict[str, Any] = {}
        if options.temperatures is not None:
            extra["temperature"] = list(options.temperatures)
        if options.hotwords:
            extra["hotwords"] = " ".join(options.hotwords)
        segments, info = self.model.transcribe(
            samples.numpy().astype(np.float32),
            language=options.language or self._likeliest(samples, options.languages),
            task=options.task,
            beam_size=options.beams,
            initial_prompt=options.prompt,
            prefix=options.prefix,
            word_timestamps=options.word_times,
            without_timestamps=options.timestamps is False,
            condition_on_previous_text=options.follow_earlier,
            hallucination_silence_threshold=options.max_silence,
            **extra,
        )
        for segment in segments:
            words = tuple(TimedWord(word.word, word.start, word.end, word.probability) for word in segment.words or ())
            yield TranscriptSegment(
                segment.start, segment.end, segment.text, tuple(segment.tokens), float(segment.temperature or 0.0),
                segment.avg_logprob, segment.compression_ratio, segment.no_speech_prob, words, info.language,
            )  # fmt: skip

    def _likeliest(self, samples: torch.Tensor, languages: Sequence[str]) -> str | None:
        """The likeliest of several languages; None: the model detects one of all."""
        if len(languages) < 2 or not self.model.model.is_multilingual:
            return languages[0] if len(languages) == 1 and self.model.model.is_multilingual else None
        _, _, probabilities = self.model.detect_language(samples.numpy())
        known = dict(probabilities)
        return max((name for name in languages if name in known), key=known.__getitem__, default=None)


def _refuse_logprobs(options: TranscriptionOptions | None) -> None:
    if options is not None and options.logprobs:
        raise InputError("faster-whisper returns no log-probabilities of tokens; use --backend ours")


@dataclass(frozen=True)
class EncodedWindow(WindowMemory):
    """A window encoded by CTranslate2; the tensors are empty."""

    encoded: Any


class ConvertedWindows:
    """Our transcription loop with CTranslate2's encoder and decoder."""

    def __init__(self, transcriber: WhisperTranscriber, model: Any) -> None:
        self.transcriber, self.model = transcriber, model
        seconds = max(MIN_WINDOW_SECONDS, transcriber.settings.min_window_seconds)
        transcriber.settings = replace(transcriber.settings, min_window_seconds=seconds)

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
        if options is not None and options.word_times:
            raise InputError("faster-whisper has no word times for this model; use --backend ours")
        _refuse_logprobs(options)
        if options is not None and options.hotwords:  # its decoder takes no rules of ours
            prompt = f"{options.prompt or ''} {', '.join(options.hotwords)}"
            options = replace(options, prompt=prompt, hotwords=())
        yield from run_steps(self.transcriber.transcription_steps(samples, options), self._answer)

    def _answer(self, request: Question) -> Answer:
        if isinstance(request, DetectLanguage):
            return self._language(request)
        return self._encode(request) if isinstance(request, EncodeWindow) else self._write(request)

    def _language(self, request: DetectLanguage) -> str:
        assert isinstance(request.memory, EncodedWindow)
        (probabilities,) = self.model.detect_language(request.memory.encoded)
        return request.likeliest({name.strip("<|>"): probability for name, probability in probabilities})

    def _encode(self, request: EncodeWindow) -> EncodedWindow:
        import ctranslate2

        features = ctranslate2.StorageView.from_array(np.ascontiguousarray(request.mel.float().numpy()))
        empty = torch.empty(0)
        return EncodedWindow(empty, empty, self.model.encode(features, to_cpu=False))

    def _write(self, request: WriteText) -> Text:
        assert isinstance(request.memory, EncodedWindow)
        settings, tokens = self.transcriber.settings, self.transcriber.tokens
        latest, suppressed = settings.latest_start, list(settings.suppressed)
        if not request.options.timestamps:
            suppressed += range(tokens.notimestamps, self.transcriber.model.config.vocab_size)
        sampling = {"sampling_topk": 0, "sampling_temperature": request.temperature} if request.temperature else {}
        (result,) = self.model.generate(
            request.memory.encoded,
            [list(request.prompt)],
            beam_size=request.beams,
            num_hypotheses=request.best_of,
            max_length=self.transcriber.model.config.max_target_positions,
            return_scores=True,
            return_no_speech_prob=True,
            suppress_blank=True,
            suppress_tokens=suppressed,
            max_initial_timestamp_index=50 if latest is None else round(latest / 0.02),
            **sampling,
        )
        ids = result.sequences_ids[0]
        written = [token for token in ids if token != tokens.endoftext]
        return Text(written, result.scores[0] * len(ids), True, result.no_speech_prob)


def load_converted(
    folder: str | Path, device: str = "cpu", compute: str = "int8", threads: int = 0
) -> FasterWhisper | ConvertedWindows:
    """A converted folder, or one in Hugging Face's layout, which is converted once and cached."""
    try:
        import ctranslate2
        from faster_whisper import WhisperModel
    except ImportError as error:
        raise MissingDependencyError("this backend is faster-whisper: pip install 'vivavoce[asr]'") from error
    folder, kind = Path(folder), "cuda" if device.startswith("cuda") else "cpu"
    ready = folder if (folder / CONVERTED).is_file() else converted(folder, compute)
    if ready is folder or WhisperConfig.read(folder).window_frames == USUAL_FRAMES:
        return FasterWhisper(WhisperModel(str(ready), device=kind, compute_type=compute, cpu_threads=threads))
    model = ctranslate2.models.Whisper(str(ready), device=kind, compute_type=compute, intra_threads=threads)
    return ConvertedWindows(WhisperTranscriber.load(folder), model)


def converted(folder: Path, compute: str = "int8") -> Path:
    """A Hugging Face folder in CTranslate2's format, converted once and cached."""
    target = cache_folder() / "ctranslate2" / f"{folder.resolve().name}-{compute}-{_stamp(folder)}"
    if (target / CONVERTED).is_file():
        return target
    try:
        import ctranslate2
        import transformers  # noqa: F401 - CTranslate2's converter needs it
    except ImportError as error:
        raise MissingDependencyError(
            f"{folder} must be converted for faster-whisper, which needs transformers: pip install 'vivavoce[asr,peer]'"
        ) from error
    copied = [name for name in COPIED if (folder / name).is_file()]
    try:
        with tempfile.TemporaryDirectory() as temporary:
            plain = _unpacked(folder, Path(temporary))
            converter = ctranslate2.converters.TransformersConverter(str(plain), copy_files=copied)
            converter.convert(str(target), quantization=None if compute == "float32" else compute, force=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        line = str(error).strip().partition("\n")[0]
        raise InputError(f"{folder} cannot be converted for faster-whisper ({line}); use --backend ours") from error
    return target


def _unpacked(folder: Path, temporary: Path) -> Path:
    """The folder itself, or an unpacked copy where its weights are in our packed format."""
    if not is_packed(folder):
        return folder
    for file in folder.glob("*.json"):
        shutil.copy2(file, temporary / file.name)
    save_weights(nn.ModuleDict({"model": Whisper.load(folder)}), temporary)
    return temporary


def _stamp(folder: Path) -> str:
    """Distinguishes folders of the same name, and versions of one folder."""
    newest = max((file.stat().st_mtime_ns for file in folder.glob("*.safetensors")), default=0)
    return f"{zlib.crc32(f'{folder.resolve()} {newest}'.encode()):08x}"
