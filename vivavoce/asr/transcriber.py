"""One transcriber behind the Python API, the command line and the server: a backend and the speech gate over it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.asr.backends import Backend, BackendName, OwnBackend, load_backend
from vivavoce.asr.drafts import DraftChoice, DraftReport
from vivavoce.audio.vad import speech_chances, voice_activity
from vivavoce.models.whisper.windows import TranscriptionOptions, TranscriptSegment

RATE = 16_000
WINDOW = 512
AROUND = 0.3  # seconds before and after a segment that count as its own: its times are not exact


@dataclass(frozen=True)
class SpeechGate:
    """How likely a voice must be, and for how many windows of 32 ms."""

    least: float = 0.4
    windows: int = 3

    def heard(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The chance of speech in every 32 ms of a sound, the last of them filled up with silence.  # [time]"""
        filled = np.pad(samples, (0, -len(samples) % WINDOW))
        return speech_chances(voice_activity(), filled)

    def lets_through(self, segment: TranscriptSegment, chances: NDArray[np.float32]) -> bool:
        """Whether somebody speaks in a segment of the sound with these chances."""
        first = max(0, int((segment.start - AROUND) * RATE / WINDOW))
        last = int((segment.end + AROUND) * RATE / WINDOW) + 1
        return int((chances[first:last] >= self.least).sum()) >= self.windows


class Transcriber:
    """A `Backend` whose segments pass the speech gate; without a gate, the backend's own segments."""

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
        """A model by bundled name, folder, OpenAI's file or hub id, for up to `parallel` recordings at a time."""
        return cls(load_backend(model, backend, device, dtype, drafts, parallel), SpeechGate() if gate else None)

    def own_language(self, samples: torch.Tensor) -> str:
        """The language that is written where none is asked for.  # [time]"""
        return self.backend.own_language(samples)

    def segments(
        self, samples: torch.Tensor, options: TranscriptionOptions | None = None
    ) -> Iterator[TranscriptSegment]:
        """Segments in which speech is detected, as they become final.  # [time] at 16 kHz"""
        chances = self.speech_chances(samples.numpy())
        going = self.backend.segments(samples, options)
        return going if chances is None else (each for each in going if self.lets_through(each, chances))

    def speech_chances(self, samples: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """The chance of speech in every 32 ms; None without a gate.  # [time] at 16 kHz"""
        return None if self.gate is None else self.gate.heard(samples)

    def lets_through(self, segment: TranscriptSegment, chances: NDArray[np.float32] | None) -> bool:
        """Whether the gate keeps a segment of the sound with these chances."""
        return self.gate is None or chances is None or self.gate.lets_through(segment, chances)

    def report(self) -> DraftReport:
        """Passes, tokens and drafts since the last report."""
        assert isinstance(self.backend, OwnBackend)
        return self.backend.report()


@lru_cache(maxsize=2)
def shared_backend(model: str, backend: BackendName, device: str, dtype: str, drafts: DraftChoice) -> Backend:
    """A backend that stays loaded for the next call with the same choices."""
    return load_backend(model, backend, device, dtype, drafts)
