"""One transcriber behind the Python API, the command line and the server: a backend and the speech gate over it."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.models.whisper_hearing import TranscriptionOptions, TranscriptSegment
from vivavoce.recognition.backends import Backend, BackendName, OwnBackend, load_backend
from vivavoce.recognition.drafting import DraftChoice, DraftReport
from vivavoce.recognition.speech_gate import SpeechGate


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

    def segments(self, samples: torch.Tensor, wish: TranscriptionOptions | None = None) -> Iterator[TranscriptSegment]:
        """Segments in which speech is detected, as they become final.  # [time] at 16 kHz"""
        chances = self.speech_chances(samples.numpy())
        going = self.backend.segments(samples, wish)
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
