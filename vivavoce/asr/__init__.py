"""Speech recognition: `transcribe("meeting.m4a")`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce._deprecated import former_arguments
from vivavoce.audio.io import Sound, Source, read
from vivavoce.device import pick
from vivavoce.errors import InputError
from vivavoce.hub import resolve
from vivavoce.models.whisper.config import Task
from vivavoce.models.whisper.transcriber import Padding, TranscriptionOptions, TranscriptSegment, WhisperTranscriber

if TYPE_CHECKING:
    from vivavoce.asr.backends import Backend, BackendName
    from vivavoce.asr.transcriber import Transcriber

RATE = 16_000
DEFAULT_MODEL = "mini-asr"


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
    model: "str | Path | Backend | Transcriber" = DEFAULT_MODEL,
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
    backend: "BackendName" = "auto",
    draft: str | Path | None = None,
    heads: str | Path | None = None,
    lookup: bool = False,
    gate: bool = True,
    device: str = "auto",
    dtype: str = "auto",
    on_segment: Callable[[TranscriptSegment], None] | None = None,
) -> Transcript:
    """The transcript of a file, its bytes, a `Sound`, or samples at 16 kHz, by a Whisper or Breeze-ASR-25.

    Without a `language` it is detected. `on_segment` gets each segment as soon as it is final. The `gate` drops
    segments in which no speech is detected. `draft`, `heads` and `lookup` speed up decoding; the text is the same.
    """
    from vivavoce.asr.drafts import DraftChoice
    from vivavoce.asr.transcriber import SpeechGate, Transcriber, shared_backend

    if isinstance(model, str | Path):
        model = shared_backend(str(model), backend, device, dtype, DraftChoice(draft, heads, lookup))
    listener = model if isinstance(model, Transcriber) else Transcriber(model, SpeechGate() if gate else None)
    samples, seconds = _samples(sound)
    options = TranscriptionOptions(
        language, task, prompt, prefix, tuple(hotwords), word_times or max_silence is not None, timestamps,
        follow_earlier, padding, None if temperatures is None else tuple(temperatures), max_silence, seed,
        beams,
    )  # fmt: skip
    segments = []
    for segment in listener.segments(samples, options):
        segments.append(segment)
        if on_segment is not None:
            on_segment(segment)
    text = "".join(segment.text for segment in segments).strip()
    detected = language or next((segment.language for segment in segments if segment.language), None)
    return Transcript(text, tuple(segments), detected or listener.own_language(samples), seconds)


def load_transcriber(model: str | Path, device: str = "auto", dtype: str = "auto") -> WhisperTranscriber:
    """A model by bundled name, folder, OpenAI's file, or hub id; the last two stay loaded."""
    return _loaded(str(model), device, dtype)


@lru_cache(maxsize=2)
def _loaded(model: str, device: str, dtype: str) -> WhisperTranscriber:
    path = Path(model).expanduser()
    source = path if path.is_file() else resolve(model)
    from vivavoce.asr.backends import own_listener

    return own_listener(source, pick(device), dtype)


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
