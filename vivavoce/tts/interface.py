"""What every text-to-speech model can do, whatever is inside."""

import glob
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.audio.io import Sound, read, write
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.moss_tts_nano.prompt import MAX_CHUNK_TOKENS, NanoSampling
from vivavoce.models.registry import family_names, family_of

if TYPE_CHECKING:
    from vivavoce.engine.sampling import Generation


Samples = NDArray[np.float32]
MAX_PAUSE = 10.0
SETTINGS_FILE = "speech.json"
VOICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,63}")
RECORDING = ".flac"
DEFAULT_VOICE_FOLDER = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "vivavoce" / "voices"


@dataclass(frozen=True)
class SpeakingStyle:
    """How a text is said."""

    speed: float = 1.0
    """0.5 to 2, at the voice's own pitch."""
    pause: float = 1.0
    """Times the usual silence between sentences that are said apart."""
    seed: int = 0
    greedy: bool = False
    """Always the likeliest code: the same whatever the seed, and duller."""
    clean: bool = True
    """Whether markup and the like are taken out of the text first."""
    continues: bool = False
    """Whether to go on from the voice's recording, whose words must be known, rather than only to sound like it."""

    def __post_init__(self) -> None:
        if not 0 <= self.pause <= MAX_PAUSE:
            raise InputError(f"pause must be 0 to {MAX_PAUSE:.0f} times the usual, not {self.pause}")


@dataclass(frozen=True)
class StoredVoice:
    """A reference voice, with who agreed to it. `codes` may be empty where there is a recording."""

    name: str
    codes: list[list[int]]  # [frame, codebook]
    codec: str = ""
    """Whose codes they are; empty: the model's that the voice came with."""
    consent: str = ""
    """What the speaker agreed to, in the words or by the id that the caller gave."""
    created: float = 0.0
    text: str = ""
    """What the recording says, where that is known."""

    def to_json(self) -> str:
        """As it is kept."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, content: str, source: str) -> "StoredVoice":
        """As `to_json` wrote it; one line says what is wrong with it."""
        try:
            given: dict[str, Any] = json.loads(content)
            codes = [[int(code) for code in frame] for frame in given["codes"]]
            codec, consent, text = (str(given.get(name, "")) for name in ("codec", "consent", "text"))
            return cls(str(given["name"]), codes, codec, consent, float(given.get("created", 0.0)), text)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{source} is not a voice as it was kept ({error}); remove it and add it anew") from error


class VoiceStore:
    """Voices by name: `built_in` ones first, then those in a folder, one file each."""

    def __init__(self, built_in: Mapping[str, StoredVoice] | None = None, folder: str | Path | None = None) -> None:
        self.built_in = dict(built_in or {})
        self.folder = Path(folder) if folder is not None else DEFAULT_VOICE_FOLDER

    def names(self) -> list[str]:
        """Every voice there is."""
        added = sorted(file.stem for file in self.folder.glob("*.json")) if self.folder.is_dir() else []
        return [*self.built_in, *(name for name in added if name not in self.built_in)]

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def get(self, name: str) -> StoredVoice:
        """A voice; its name is told if there is none."""
        if name in self.built_in:
            return self.built_in[name]
        file = self._require(name)
        return StoredVoice.from_json(file.read_text(encoding="utf8"), str(file))

    def recording(self, name: str) -> Sound | None:
        """What an added voice was made of, where that was kept."""
        file = self._file(name).with_suffix(RECORDING)
        return read(file, mono=False) if name not in self.built_in and file.is_file() else None

    def add(self, voice: StoredVoice, recording: Sound | None = None) -> StoredVoice:
        """Keep a voice; one of that name that was added before is replaced."""
        if voice.name in self.built_in:
            raise InputError(f"the voice {voice.name!r} comes with the model; choose another name")
        if not voice.codes and recording is None:
            raise InputError("a voice needs codes or a recording; give at least half a second of speech")
        file = self._file(voice.name)
        kept = replace(voice, created=voice.created or time.time())
        self.folder.mkdir(parents=True, exist_ok=True)
        sound, partial = file.with_suffix(RECORDING), file.with_suffix(".partial")
        if recording is None:
            sound.unlink(missing_ok=True)
        else:
            write(partial, recording, RECORDING.removeprefix("."))
            os.replace(partial, sound)
        partial.write_text(kept.to_json(), encoding="utf8")
        os.replace(partial, file)
        return kept

    def remove(self, name: str) -> None:
        """Forget a voice that was added, damaged or not."""
        if name in self.built_in:
            raise InputError(f"the voice {name!r} comes with the model and cannot be removed")
        self._require(name).unlink()
        self._file(name).with_suffix(RECORDING).unlink(missing_ok=True)
        for derived in self.folder.glob(f"{glob.escape(name)}.*.safetensors"):  # what models made of it
            derived.unlink()

    def _require(self, name: str) -> Path:
        file = self._file(name)
        if not file.is_file():
            known = ", ".join(self.names()) or "none yet"
            raise InputError(f"there is no voice {name!r}; known: {known}. Add one from a recording of 3 to 8 seconds")
        return file

    def _file(self, name: str) -> Path:
        if not VOICE_NAME.fullmatch(name):
            raise InputError(f"a voice's name has up to 64 letters, digits, spaces, '.', '_' and '-', unlike {name!r}")
        return self.folder / f"{name}.json"


class SpeechModel(Protocol):
    """Text in, sound out. May be asked from several threads."""

    voices: VoiceStore

    @property
    def rate(self) -> int:
        """Samples a second of what comes out."""
        ...

    @property
    def channels(self) -> int:
        """Of what comes out."""
        ...

    def stream(
        self,
        text: str,
        voice: str | Sound | None = None,
        style: SpeakingStyle | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> Iterator[Samples]:
        """The sound of a text, as it is made.  # pieces [channel, time]

        `voice` is a name, or a recording to sound like; none is the model's own. Without a clock nobody waits for the
        sound, and its last bits are the same each time.
        """
        ...

    def say(self, text: str, voice: str | Sound | None = None, style: SpeakingStyle | None = None) -> Sound:
        """The whole sound of a text."""
        ...

    def add_voice(self, name: str, sound: Sound, consent: str = "", text: str = "") -> StoredVoice:
        """Keep a voice on this machine under a name, from a recording and, where known, its words."""
        ...


def open_speech_model(name: str, device: str = "auto", dtype: str = "auto") -> SpeechModel:
    """A model by its bundled name, folder or hub id."""
    folder = hub.resolve(name)
    family = family_of(folder, "tts")
    if family is None:
        known = ", ".join(family_names("tts"))
        raise CheckpointError(f"{folder} holds none of the text-to-speech models that are known: {known}")
    opened: SpeechModel = family.load(str(folder), device, dtype)
    return opened


def read_text(text: str | None, file: Path | None, standard_input: Callable[[], bytes]) -> str:
    """What is to be said: given as it is, in a file, or on standard input."""
    if text is not None and file is not None:
        raise InputError("give a text or --file, not both")
    try:
        content = text.encode("utf8", "surrogateescape") if text is not None else None
        if content is None or text == "-":
            content = standard_input() if file is None else file.read_bytes()
        return content.decode("utf8")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the text is not UTF-8 ({error.reason} at byte {error.start}); convert it first") from error


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
        file = Path(folder) / SETTINGS_FILE
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
        content = asdict(self) | {"voices": {name: voice.codes for name, voice in self.voices.items()}}
        (Path(folder) / SETTINGS_FILE).write_text(json.dumps(content), encoding="utf8")

    def max_frames(self, tokens: int) -> int:
        """Frames after which a text of so many tokens is ended."""
        frames = self.sampling.max_new_frames
        return frames if self.frames_a_token is None else min(frames, 25 + round(self.frames_a_token * tokens))

    def min_frames(self, tokens: int) -> int:
        """Frames before a text of so many tokens may end by itself."""
        return 1

    def generation(self, codebooks: int, tokens: int, seed: int, greedy: bool = False) -> "Generation":
        """How a text of so many tokens is drawn."""
        from vivavoce.engine.sampling import Generation, Sampling

        samplings = tuple(
            Sampling(0.0 if greedy else temperature, top_k, top_p, penalty)
            for temperature, top_k, top_p, penalty in self.sampling.per_channel(codebooks)
        )
        max_rows, min_rows = self.max_frames(tokens) + 1, self.min_frames(tokens) + 1
        return Generation(samplings, max_new_rows=max_rows, min_new_rows=min_rows, seed=seed, penalise_prompt=False)
