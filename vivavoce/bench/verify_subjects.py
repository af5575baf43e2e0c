"""Kinds of models that `viva verify` supports, behind one protocol.

A new kind is a class with `make` and `first_logits`, and an entry of `KINDS`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce import hub
from vivavoce.audio.io import Sound, read
from vivavoce.audio.level import buzz
from vivavoce.device import Device, resolve_dtype
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.codecs import open_codec
from vivavoce.models.moss_speech.codec import DECODER_RATE, MossSpeechCodec
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt
from vivavoce.models.moss_tts_nano.prompt import NanoSampling
from vivavoce.models.registry import Task, family_of
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.nn.quantised import Int8Linear
from vivavoce.tts.interface import SpeakingStyle, SpeechModel, open_speech_model
from vivavoce.tts.nano import NanoTTS

TEXT = "Good evening. The train to the coast leaves at half past seven."
ASR_RATE = 16_000
REPLY_ROWS = 25
CODEC = "fnlp/MOSS-Speech-Codec"  # for models without a codec folder


@dataclass(frozen=True)
class Question:
    """Input of a model: text, and a voice or recording."""

    text: str = TEXT
    voice: str | None = None
    """A voice's name, or the path of a recording."""

    def recording(self) -> Sound | None:
        """The recording, if `voice` is a path."""
        return read(self.voice) if self.voice is not None and Path(self.voice).is_file() else None

    def audio_input(self) -> Sound:
        """Audio input: the recording, or a synthetic buzz."""
        if self.voice is not None and not Path(self.voice).is_file():
            raise InputError(f"there is no recording {self.voice!r}; give the path of one")
        return self.recording() or buzz(2.0, ASR_RATE)


@dataclass(frozen=True)
class VerifyOutput:
    """Output of a run: audio or text, and the time to its first part."""

    sound: Sound | None
    text: str | None
    first_seconds: float
    seconds: float
    """Seconds of audio, generated or transcribed."""


class VerifiedModel(Protocol):
    """A model on a device."""

    is_exact: bool
    """Whether it computes in float32 throughout."""

    def make(self, ask: Question, seed: int | None) -> VerifyOutput:
        """One run; without a seed it is greedy."""
        ...

    def first_logits(self, ask: Question) -> NDArray[np.float32] | None:
        """Logits of the first generated id; None for models that generate none."""
        ...


class SpeechSubject:
    """Text to speech."""

    def __init__(self, folder: Path, device: Device, dtype: str) -> None:
        self.model: SpeechModel = open_speech_model(str(folder), str(device), dtype)
        weights = self.model.model.modules() if isinstance(self.model, NanoTTS) else []
        is_rounded = any(isinstance(module, Int8Linear) for module in weights)
        self.is_exact = not is_rounded and (dtype == "float32" or device.kind == "cpu")

    def make(self, ask: Question, seed: int | None) -> VerifyOutput:
        style = SpeakingStyle(seed=seed or 0, greedy=seed is None)
        began, first, pieces = time.perf_counter(), None, []
        for piece in self.model.stream(ask.text, self._voice(ask), style, clock=None):
            first = first or time.perf_counter()
            pieces.append(piece)
        sound = Sound(np.concatenate(pieces, axis=1), self.model.rate)
        return VerifyOutput(sound, None, (first or began) - began, sound.seconds)

    @torch.inference_mode()
    def first_logits(self, ask: Question) -> NDArray[np.float32] | None:
        """Of the first code, by the plain implementation on this device's weights."""
        if not isinstance(self.model, NanoTTS):
            return None
        from vivavoce.bench.tts_contenders import PlainNano

        speaker = self.model
        reference = speaker._reference(self._voice(ask))
        rows = speaker.prompt.before_text(reference) + speaker.prompt.speech(speaker.prepare_text(ask.text))
        plain = PlainNano(speaker.model, speaker.codec, rows, 1, NanoSampling())
        hidden = plain.read(plain.rows, [])
        slot = speaker.model.transformer.wte.weight[speaker.model.config.audio_assistant_slot_token_id]
        return _as_numpy(speaker.model.code_logits(0, plain._local([hidden[0], slot])[None])[0])

    def _voice(self, ask: Question) -> str | Sound | None:
        if ask.voice is None:
            return next(iter(self.model.voices.built_in), None)
        return ask.recording() or ask.voice


class VerifiedWhisper:
    """Speech recognition."""

    def __init__(self, folder: Path, device: Device, dtype: str) -> None:
        kind = resolve_dtype(dtype, device)
        self.model = WhisperTranscriber.load(folder, device.torch_device, kind)
        self.is_exact = kind is torch.float32

    def make(self, ask: Question, seed: int | None) -> VerifyOutput:
        samples = self._samples(ask)
        began, first, texts = time.perf_counter(), None, []
        for segment in self.model.segments(samples, TranscriptionOptions(temperatures=(0.0,), seed=seed or 0)):
            first = first or time.perf_counter()
            texts.append(segment.text)
        return VerifyOutput(None, "".join(texts), (first or time.perf_counter()) - began, len(samples) / ASR_RATE)

    @torch.inference_mode()
    def first_logits(self, ask: Question) -> NDArray[np.float32] | None:
        """After the start-of-transcript token."""
        mel = self.model.window(self.model.log_mel(self._samples(ask)), 0, "full")
        start = torch.tensor([[self.model.tokens.startoftranscript]], device=self.model.device)
        return _as_numpy(self.model.model(mel, start)[0, -1])

    def _samples(self, ask: Question) -> Tensor:
        return torch.from_numpy(ask.audio_input().mono().resampled(ASR_RATE).samples[0].copy())


class ConversationSubject:
    """Speech to speech: text input, a spoken reply in the codec's first voice."""

    def __init__(self, folder: Path, device: Device, dtype: str) -> None:
        kind = resolve_dtype(dtype, device)
        self.model = MossSpeech.load(folder, device.torch_device, kind)
        codec = folder / "codec"
        self.codec = MossSpeechCodec.load(codec if codec.is_dir() else hub.resolve(CODEC), device.torch_device)
        self.prompt = MossSpeechPrompt(self.model.config, TextTokenizer.load(folder))
        limits = EngineLimits(cache_rows=1024)
        self.engine = Engine(self.model, device, kind, limits)
        self.plain = Engine(self.model, device, kind, limits, use_graphs=False)
        self.is_exact = kind is torch.float32

    @torch.inference_mode()
    def make(self, ask: Question, seed: int | None) -> VerifyOutput:
        """A reply of a few seconds."""
        began = time.perf_counter()
        sampling = GREEDY if seed is None else Sampling()
        sequence = self.engine.open(self._rows(ask))
        generation = Generation(sampling, REPLY_ROWS, REPLY_ROWS, seed or 0)
        codes = self.model.spoken_codes(self.engine.complete(sequence, generation))
        self.engine.close(sequence)
        if not codes:
            raise CheckpointError("the model answers without speech; is it trained?")
        names = self.codec.voices()
        voice = self.codec.named_voice(names[0]) if names else self.codec.voice(ask.audio_input())
        spoken = self.codec.speak(torch.tensor(codes), voice)
        sound = Sound(spoken.float().cpu().numpy(), DECODER_RATE)
        return VerifyOutput(sound, None, time.perf_counter() - began, sound.seconds)

    def first_logits(self, ask: Question) -> NDArray[np.float32] | None:
        seen = list[Tensor]()
        draws = self.model.next_rows

        def recorded_next_rows(hidden: Tensor, draw: object) -> Tensor:
            seen.append(self.model.logits(hidden)[1][0])
            return draws(hidden, draw)  # type: ignore[arg-type]

        self.model.next_rows = recorded_next_rows  # type: ignore[method-assign]
        try:
            sequence = self.plain.open(self._rows(ask))
            self.plain.complete(sequence, Generation(GREEDY, 1))
            self.plain.close(sequence)
        finally:
            self.model.next_rows = draws  # type: ignore[method-assign]
        return _as_numpy(seen[0])

    def _rows(self, ask: Question) -> list[tuple[int, ...]]:
        from vivavoce.models.moss_speech.prompt import Turn

        return [*self.prompt.turn(Turn("user", ask.text)), *self.prompt.open_reply("speech")]


class CodecSubject:
    """Codec: audio to codes and back."""

    def __init__(self, folder: Path, device: Device, dtype: str) -> None:
        self.codec = open_codec(folder, device.torch_device)
        self.is_exact = True

    def make(self, ask: Question, seed: int | None) -> VerifyOutput:
        began = time.perf_counter()
        sound = self.codec.resynthesise(ask.audio_input())
        return VerifyOutput(sound, None, time.perf_counter() - began, sound.seconds)

    def first_logits(self, ask: Question) -> NDArray[np.float32] | None:
        return None


@dataclass(frozen=True)
class VerifiableKind:
    """What a task's models are called, and how one is opened."""

    name: str
    load: Callable[[Path, Device, str], VerifiedModel]


OTHERS = VerifiableKind("codec", CodecSubject)
KINDS: dict[Task, VerifiableKind] = {
    "s2s": VerifiableKind("speech to speech", ConversationSubject),
    "asr": VerifiableKind("recognition", VerifiedWhisper),
    "tts": VerifiableKind("text to speech", SpeechSubject),
}


def kind_of(folder: Path) -> VerifiableKind:
    """The kind of a model by its family; a file is a Whisper, and a folder of no known family is opened as a codec."""
    family = family_of(folder, *KINDS)
    if family is None:
        return KINDS["asr"] if folder.is_file() else OTHERS
    return KINDS[family.task]


def _as_numpy(logits: Tensor) -> NDArray[np.float32]:
    return logits.float().cpu().numpy()
