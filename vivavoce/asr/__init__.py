"""Speech recognition: `transcribe("meeting.m4a")`.

The Python API, the command line and the server share `Transcriber`: a backend, and the speech gate over its segments.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce._deprecated import former_arguments
from vivavoce.asr.backends import Backend, BackendName, OwnBackend, load_backend, load_whisper
from vivavoce.asr.default import MINIATURE, default_recogniser
from vivavoce.asr.drafts import DraftChoice, DraftReport
from vivavoce.audio.io import Sound, Source, read
from vivavoce.audio.vad import speech_probabilities, voice_activity
from vivavoce.device import pick
from vivavoce.errors import InputError
from vivavoce.hub import resolve
from vivavoce.models.whisper.config import Task
from vivavoce.models.whisper.steps import Padding, TranscriptionOptions, TranscriptSegment
from vivavoce.models.whisper.transcriber import WhisperTranscriber

RATE = 16_000
WINDOW = 512
MARGIN = 0.3  # seconds before and after a segment that count as part of it, since its times are not exact
AMPLITUDE_FLOOR = 1e-6


@dataclass(frozen=True)
class SpeechActivity:
    """Speech probability and level of every 32 ms of a recording."""

    probabilities: NDArray[np.float32]
    decibels: NDArray[np.float32]


@dataclass(frozen=True)
class SpeechGate:
    """Drops segments in which no speech is detected."""

    min_probability: float = 0.4
    min_windows: int = 3
    """Windows of 32 ms that must reach this probability."""
    min_range: float = 1.5
    """Decibels by which the level of these windows must vary. The detector can take a hum for a voice, but a hum is
    steady: its level varies by less than 0.5 dB, that of speech in noise 5 dB louder by more than 2 dB."""

    def activity(self, samples: NDArray[np.float32]) -> SpeechActivity:
        """Speech activity of a recording; its last window is padded with silence.  # [time] at 16 kHz"""
        padded = np.pad(samples, (0, -len(samples) % WINDOW))
        power = np.square(padded.reshape(-1, WINDOW)).mean(1)
        return SpeechActivity(speech_probabilities(voice_activity(), padded), 10 * np.log10(power + AMPLITUDE_FLOOR**2))

    def passes(self, segment: TranscriptSegment, activity: SpeechActivity) -> bool:
        """Whether a segment contains speech."""
        first = max(0, int((segment.start - MARGIN) * RATE / WINDOW))
        last = int((segment.end + MARGIN) * RATE / WINDOW) + 1
        levels = activity.decibels[first:last][activity.probabilities[first:last] >= self.min_probability]
        if len(levels) < self.min_windows:
            return False
        low, high = np.percentile(levels, (10, 90))
        return bool(high - low >= self.min_range)


class Transcriber:
    """A `Backend` and the speech gate that its segments pass; without a gate, all segments are returned."""

    def __init__(self, backend: Backend, gate: SpeechGate | None) -> None:
        self.backend, self.gate = backend, gate

    @classmethod
    def load(
        cls,
        model: str | Path,
        backend: BackendName = "auto",
        device: str = "auto",
        dtype: str = "auto",
        drafts: DraftChoice | None = None,
        gate: bool = True,
        parallel: int = 1,
    ) -> "Transcriber":
        """Load a bundled name, folder, OpenAI's file or hub id, for up to `parallel` concurrent recordings."""
        return cls(load_backend(model, backend, device, dtype, drafts, parallel), SpeechGate() if gate else None)

    def own_language(self, samples: torch.Tensor) -> str:
        """The language of the transcript if none is given.  # [time]"""
        return self.backend.own_language(samples)

    def segments(
        self, samples: torch.Tensor, options: TranscriptionOptions | None = None
    ) -> Iterator[TranscriptSegment]:
        """Segments in which speech is detected, as they become final.  # [time] at 16 kHz"""
        activity = self.speech_activity(samples.numpy())
        return (each for each in self.backend.segments(samples, options) if self.is_speech(each, activity))

    def speech_activity(self, samples: NDArray[np.float32]) -> SpeechActivity | None:
        """Speech activity for `is_speech`; None without a gate.  # [time] at 16 kHz"""
        return None if self.gate is None else self.gate.activity(samples)

    def is_speech(self, segment: TranscriptSegment, activity: SpeechActivity | None) -> bool:
        """Whether the gate keeps a segment of the recording with this activity."""
        return self.gate is None or activity is None or self.gate.passes(segment, activity)

    def report(self) -> DraftReport:
        """Passes, tokens and drafts since the last report."""
        assert isinstance(self.backend, OwnBackend)
        return self.backend.report()


@lru_cache(maxsize=2)
def shared_backend(model: str, backend: BackendName, device: str, dtype: str, drafts: DraftChoice) -> Backend:
    """Load a backend once for all calls with the same arguments."""
    return load_backend(model, backend, device, dtype, drafts)


@dataclass(frozen=True)
class Transcript:
    """The text of a recording, its segments and its language."""

    text: str
    segments: tuple[TranscriptSegment, ...]
    language: str
    seconds: float


@former_arguments(longest_silence="max_silence")
def transcribe(
    sound: Sound | Source | NDArray[np.floating],
    model: "str | Path | Backend | Transcriber | None" = None,
    language: str | None = None,
    *,
    task: Task = "transcribe",
    prompt: str | None = None,
    prefix: str | None = None,
    hotwords: Sequence[str] = (),
    word_times: bool = False,
    timestamps: bool | None = None,
    follow_earlier: bool = True,
    padding: Padding = "full",
    temperatures: Sequence[float] | None = None,
    max_silence: float | None = None,
    seed: int = 0,
    beams: int = 1,
    backend: BackendName = "auto",
    draft: str | Path | None = None,
    heads: str | Path | None = None,
    lookup: bool = False,
    gate: bool = True,
    device: str = "auto",
    dtype: str = "auto",
    on_segment: Callable[[TranscriptSegment], None] | None = None,
) -> Transcript:
    """Transcribe a file, its bytes, a `Sound`, or samples at 16 kHz.

    Without a `model`, the best one in the cache transcribes (`default_recogniser`), else the bundled miniature.
    Without a `language` it is detected. `on_segment` gets each segment as soon as it is final. The `gate` drops
    segments in which no speech is detected. `draft`, `heads` and `lookup` speed up decoding; the text is the same.
    """
    if model is None:
        has_drafts = draft is not None or heads is not None
        is_special = task != "transcribe" or bool(word_times or prompt or prefix or hotwords or max_silence or lookup)
        model = MINIATURE if has_drafts else default_recogniser(language, is_special)
    if isinstance(model, str | Path):
        model = shared_backend(str(model), backend, device, dtype, DraftChoice(draft, heads, lookup))
    transcriber = model if isinstance(model, Transcriber) else Transcriber(model, SpeechGate() if gate else None)
    samples, seconds = _samples(sound)
    options = TranscriptionOptions(
        language, task, prompt, prefix, tuple(hotwords), word_times or max_silence is not None, timestamps,
        follow_earlier, padding, None if temperatures is None else tuple(temperatures), max_silence, seed,
        beams,
    )  # fmt: skip
    segments = []
    for segment in transcriber.segments(samples, options):
        segments.append(segment)
        if on_segment is not None:
            on_segment(segment)
    text = "".join(segment.text for segment in segments).strip()
    detected = language or next((segment.language for segment in segments if segment.language), None)
    return Transcript(text, tuple(segments), detected or transcriber.own_language(samples), seconds)


def load_transcriber(model: str | Path, device: str = "auto", dtype: str = "auto") -> WhisperTranscriber:
    """Load a Whisper by bundled name, folder, OpenAI's file or hub id; the two last used stay in memory."""
    return _loaded(str(model), device, dtype)


@lru_cache(maxsize=2)
def _loaded(model: str, device: str, dtype: str) -> WhisperTranscriber:
    path = Path(model).expanduser()
    source = path if path.is_file() else resolve(model)
    return load_whisper(source, pick(device), dtype)


def _samples(sound: Sound | Source | NDArray[np.floating]) -> tuple[torch.Tensor, float]:
    """Mono samples at 16 kHz, and the length of the sound in seconds."""
    if isinstance(sound, np.ndarray):
        sound = Sound(sound, RATE)
    if not isinstance(sound, Sound):
        sound = read(sound, rate=RATE)
    if sound.samples.shape[1] == 0:
        raise InputError("the sound is empty: there is nothing to transcribe")
    mono = sound.mono().resampled(RATE)
    return torch.from_numpy(mono.samples[0].copy()), sound.seconds
