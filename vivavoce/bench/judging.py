"""An independent recogniser that writes down replies, for the benches that judge what was said."""

from dataclasses import dataclass
from pathlib import Path

import torch

from vivavoce.asr.backends import Backend, load_backend
from vivavoce.audio.io import Sound
from vivavoce.audio.mel import WhisperMel
from vivavoce.models.whisper.steps import TranscriptionOptions

PROMPTS = {"zh": "以下是普通话的句子。"}  # for simplified characters


@dataclass(frozen=True)
class JudgeRecogniser:
    """A recogniser on the CPU, for one language."""

    name: str
    backend: Backend
    options: TranscriptionOptions

    @classmethod
    def load(cls, model: str | Path, language: str = "en") -> "JudgeRecogniser":
        """A recogniser by name or folder."""
        options = TranscriptionOptions(language, prompt=PROMPTS.get(language))
        return cls(Path(model).name, load_backend(model, device="cpu"), options)

    def transcribe(self, sound: Sound) -> str:
        """The text of a sound."""
        samples = torch.from_numpy(sound.mono().resampled(WhisperMel.RATE).samples[0])
        return "".join(segment.text for segment in self.backend.segments(samples, self.options)).strip()
