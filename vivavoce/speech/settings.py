"""How a speech model wants to be used, if its folder says so in `speech.json`; as published otherwise."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivavoce.errors import CheckpointError
from vivavoce.models.moss_tts_nano_config import NanoSampling
from vivavoce.models.moss_tts_nano_text import MAX_CHUNK_TOKENS
from vivavoce.speech.voices import StoredVoice

if TYPE_CHECKING:
    from vivavoce.engine.sampling import Generation

FILE = "speech.json"


@dataclass(frozen=True)
class SpeechSettings:
    """Sampling, the size of what is said in one breath, and the voices that come along."""

    sampling: NanoSampling = field(default_factory=NanoSampling)
    chunk_tokens: int = MAX_CHUNK_TOKENS
    frames_a_token: float | None = None
    """Speech longer than this many frames for each token of its text has lost its way, and is ended."""
    spells_numbers: bool = False
    """Whether the model has learned English letters but no digits."""
    own_voice: str | None = None
    """The voice that speaks without a reference, by name."""
    voices: dict[str, StoredVoice] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: str | Path) -> "SpeechSettings":
        """The settings of a model's folder."""
        file = Path(folder) / FILE
        if not file.is_file():
            return cls()
        try:
            given: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
            given["sampling"] = NanoSampling(**given.get("sampling", {}))
            voices = given.pop("voices", {})
            return cls(**given, voices={name: StoredVoice(name, codes) for name, codes in voices.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); fetch the model again") from error

    def write(self, folder: str | Path) -> None:
        """Write `speech.json`."""
        content = dataclasses.asdict(self) | {"voices": {name: voice.codes for name, voice in self.voices.items()}}
        (Path(folder) / FILE).write_text(json.dumps(content), encoding="utf8")

    def longest(self, tokens: int) -> int:
        """Frames after which a text of so many tokens is ended."""
        frames = self.sampling.max_new_frames
        return frames if self.frames_a_token is None else min(frames, 25 + round(self.frames_a_token * tokens))

    def fewest(self, tokens: int) -> int:
        """Frames before a text of so many tokens may end by itself."""
        return 1

    def generation(self, codebooks: int, tokens: int, seed: int, greedy: bool = False) -> "Generation":
        """How a text of so many tokens is drawn."""
        from vivavoce.engine.sampling import Generation, Sampling

        samplings = tuple(
            Sampling(0.0 if greedy else temperature, top_k, top_p, penalty)
            for temperature, top_k, top_p, penalty in self.sampling.per_channel(codebooks)
        )
        most, least = self.longest(tokens) + 1, self.fewest(tokens) + 1
        return Generation(samplings, max_new_rows=most, min_new_rows=least, seed=seed, penalise_prompt=False)
