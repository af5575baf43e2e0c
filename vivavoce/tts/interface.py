"""The interface of TTS models: `SpeechModel`, speaking styles, stored voices, and the settings in `speech.json`.

A voice that was added keeps its recording beside its codes, so that every model can derive what it needs from it: codes
of another codec, a speaker embedding, a prompt with its transcript.
"""

import glob
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.audio.io import Sound, read, write
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.moss_tts_nano.prompt import MAX_CHUNK_TOKENS, NanoSampling
from vivavoce.models.registry import family_names, family_of, import_entry

if TYPE_CHECKING:
    from vivavoce.engine.sampling import Generation


Samples = NDArray[np.float32]
MAX_PAUSE = 10.0
SETTINGS_FILE = "speech.json"
VOICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,63}")
RECORDING = ".flac"
PACKAGED = {"hibari": "vivavoce.tts.hibari:HibariTTS.load"}  # models that are Python packages
DEFAULT_VOICE_FOLDER = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "vivavoce" / "voices"


@dataclass(frozen=True)
class SpeakingStyle:
    """How a text is spoken."""

    speed: float = 1.0
    """0.5 to 2, at unchanged pitch."""
    pause: float = 1.0
    """Factor for the silence between parts of a text."""
    seed: int = 0
    greedy: bool = False
    """Always the most probable code: independent of the seed, and less lively."""
    clean: bool = True
    """Whether markup is removed from the text."""
    continues: bool = False
    """Whether to continue the voice's recording, whose transcript must be stored, rather than only imitate it."""

    def __post_init__(self) -> None:
        if not 0 <= self.pause <= MAX_PAUSE:
            raise InputError(f"pause must be a factor of 0 to {MAX_PAUSE:.0f}, not {self.pause}")


@dataclass(frozen=True)
class StoredVoice:
    """A reference voice and the consent of its speaker. `codes` may be empty if there is a recording."""

    name: str
    codes: list[list[int]]  # [frame, codebook]
    codec: str = ""
    """The codec of the codes; empty: that of the model the voice comes with."""
    consent: str = ""
    """What the speaker agreed to, in words or as the id of a recorded consent."""
    created: float = 0.0
    text: str = ""
    """The transcript of the recording, if known."""

    def to_json(self) -> str:
        """The content of the voice's file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, content: str, source: str) -> "StoredVoice":
        """Read what `to_json` wrote; `source` is named in errors."""
        try:
            fields: dict[str, Any] = json.loads(content)
            codes = [[int(code) for code in frame] for frame in fields["codes"]]
            codec, consent, text = (str(fields.get(name, "")) for name in ("codec", "consent", "text"))
            return cls(str(fields["name"]), codes, codec, consent, float(fields.get("created", 0.0)), text)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{source} is not a stored voice ({error}); remove it and add it again") from error


class VoiceStore:
    """Voices by name: those built into a model, then those in a folder, one file each."""

    def __init__(self, built_in: Mapping[str, StoredVoice] | None = None, folder: str | Path | None = None) -> None:
        self.built_in = dict(built_in or {})
        self.folder = Path(folder) if folder is not None else DEFAULT_VOICE_FOLDER

    def names(self) -> list[str]:
        """The names of all voices."""
        added = sorted(file.stem for file in self.folder.glob("*.json")) if self.folder.is_dir() else []
        return [*self.built_in, *(name for name in added if name not in self.built_in)]

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def get(self, name: str) -> StoredVoice:
        """A voice by name; an error lists the known names."""
        if name in self.built_in:
            return self.built_in[name]
        file = self._require(name)
        return StoredVoice.from_json(file.read_text(encoding="utf8"), str(file))

    def recording(self, name: str) -> Sound | None:
        """The recording of an added voice, if it has one."""
        file = self._file(name).with_suffix(RECORDING)
        return read(file, mono=False) if name not in self.built_in and file.is_file() else None

    def add(self, voice: StoredVoice, recording: Sound | None = None) -> StoredVoice:
        """Store a voice; an added voice of the same name is replaced."""
        if voice.name in self.built_in:
            raise InputError(f"the voice {voice.name!r} comes with the model; choose another name")
        if not voice.codes and recording is None:
            raise InputError("a voice needs codes or a recording; give at least half a second of speech")
        file = self._file(voice.name)
        stored = replace(voice, created=voice.created or time.time())
        self.folder.mkdir(parents=True, exist_ok=True)
        sound, partial = file.with_suffix(RECORDING), file.with_suffix(".partial")
        if recording is None:
            sound.unlink(missing_ok=True)
        else:
            write(partial, recording, RECORDING.removeprefix("."))
            os.replace(partial, sound)
        partial.write_text(stored.to_json(), encoding="utf8")
        os.replace(partial, file)
        return stored

    def remove(self, name: str) -> None:
        """Remove an added voice and its files, damaged or not."""
        if name in self.built_in:
            raise InputError(f"the voice {name!r} comes with the model and cannot be removed")
        self._require(name).unlink()
        self._file(name).with_suffix(RECORDING).unlink(missing_ok=True)
        for derived in self.folder.glob(f"{glob.escape(name)}.*.safetensors"):  # derived by models
            derived.unlink()

    def _require(self, name: str) -> Path:
        file = self._file(name)
        if not file.is_file():
            known = ", ".join(self.names()) or "none yet"
            raise InputError(f"there is no voice {name!r}; known: {known}. Add one from a recording of 3 to 8 seconds")
        return file

    def _file(self, name: str) -> Path:
        if not VOICE_NAME.fullmatch(name):
            raise InputError(f"{name!r} cannot name a voice: use up to 64 letters, digits, spaces, '.', '_' and '-'")
        return self.folder / f"{name}.json"


class SpeechModel(Protocol):
    """A TTS model. Several threads may use it concurrently."""

    voices: VoiceStore

    @property
    def rate(self) -> int:
        """Sample rate of the output in Hz."""
        ...

    @property
    def channels(self) -> int:
        """Channels of the output."""
        ...

    def stream(
        self,
        text: str,
        voice: str | Sound | None = None,
        style: SpeakingStyle | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> Iterator[Samples]:
        """Speak a text, and yield audio while it is generated.  # pieces [channel, time]

        `voice` is the name of a voice or a recording of one; None is the model's default. Without a clock there are no
        deadlines, and the result is the same bit for bit each time.
        """
        ...

    def say(self, text: str, voice: str | Sound | None = None, style: SpeakingStyle | None = None) -> Sound:
        """Speak a text, and return all of its audio."""
        ...

    def add_voice(self, name: str, sound: Sound, consent: str = "", text: str = "") -> StoredVoice:
        """Store a voice by name, from a recording and, if known, its transcript."""
        ...


@runtime_checkable
class DescribedSpeech(Protocol):
    """What some TTS models tell of themselves."""

    @property
    def languages(self) -> Sequence[str]:
        """Codes of the languages it speaks; empty: not known."""
        ...

    @property
    def frame_rate(self) -> float:
        """Frames of codes a second."""
        ...

    def count_tokens(self, text: str) -> int:
        """The tokens of a text."""
        ...


def open_speech_model(name: str, device: str = "auto", dtype: str = "auto") -> SpeechModel:
    """Load a TTS model by bundled name, folder or hub id, or that of a package."""
    if name in PACKAGED:
        packaged: SpeechModel = import_entry(PACKAGED[name])(name, device, dtype)
        return packaged
    folder = hub.resolve(name)
    family = family_of(folder, "tts")
    if family is None:
        known = ", ".join(family_names("tts"))
        raise CheckpointError(f"{folder} holds no known text-to-speech model; known are {known}")
    opened: SpeechModel = family.load(str(folder), device, dtype)
    return opened


def read_text(text: str | None, file: Path | None, standard_input: Callable[[], bytes]) -> str:
    """The text to speak: an argument, a file's content, or standard input."""
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
    """The settings in a model's `speech.json`: sampling, the length of text parts, and built-in voices."""

    sampling: NanoSampling = field(default_factory=NanoSampling)
    chunk_tokens: int = MAX_CHUNK_TOKENS
    frames_a_token: float | None = None
    """Generation stops after this many frames per token of text: longer speech is a repetition."""
    spells_numbers: bool = False
    """Whether numbers are written as words, for models trained on text without digits."""
    own_voice: str | None = None
    """The name of the voice without a reference."""
    languages: tuple[str, ...] = ()
    """Codes of the languages it was trained on; empty: not known."""
    voices: dict[str, StoredVoice] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: str | Path) -> "SpeechSettings":
        """The settings of a model's folder."""
        file = Path(folder) / SETTINGS_FILE
        if not file.is_file():
            return cls()
        try:
            fields: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
            fields["sampling"] = NanoSampling(**fields.get("sampling", {}))
            fields["languages"] = tuple(fields.get("languages", ()))
            voices = fields.pop("voices", {})
            return cls(**fields, voices={name: StoredVoice(name, codes) for name, codes in voices.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); fetch the model again") from error

    def write(self, folder: str | Path) -> None:
        """Write `speech.json`."""
        content = asdict(self) | {"voices": {name: voice.codes for name, voice in self.voices.items()}}
        (Path(folder) / SETTINGS_FILE).write_text(json.dumps(content), encoding="utf8")

    def max_frames(self, tokens: int) -> int:
        """Frames after which the generation for a text of this length stops."""
        frames = self.sampling.max_new_frames
        return frames if self.frames_a_token is None else min(frames, 25 + round(self.frames_a_token * tokens))

    def min_frames(self, tokens: int) -> int:
        """Frames before which it may not end."""
        return 1

    def generation(self, codebooks: int, tokens: int, seed: int, greedy: bool = False) -> "Generation":
        """The engine's generation settings for a text of this length."""
        from vivavoce.engine.sampling import Generation, Sampling

        samplings = tuple(
            Sampling(0.0 if greedy else temperature, top_k, top_p, penalty)
            for temperature, top_k, top_p, penalty in self.sampling.per_channel(codebooks)
        )
        max_rows, min_rows = self.max_frames(tokens) + 1, self.min_frames(tokens) + 1
        return Generation(samplings, max_new_rows=max_rows, min_new_rows=min_rows, seed=seed, penalise_prompt=False)
