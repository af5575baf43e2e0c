"""Voices that stay, by name: those a model comes with, and those a person has added on this machine.

An added voice keeps its recording beside its codes, so that any model can make of it what it needs: codes of its own
codec, a speaker's vector, a prompt with its words.
"""

import glob
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vivavoce.audio.io import Sound, read, write
from vivavoce.errors import InputError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,63}")
RECORDING = ".flac"
DEFAULT_FOLDER = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "vivavoce" / "voices"


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
        self.folder = Path(folder) if folder is not None else DEFAULT_FOLDER

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
        if not NAME.fullmatch(name):
            raise InputError(f"a voice's name has up to 64 letters, digits, spaces, '.', '_' and '-', unlike {name!r}")
        return self.folder / f"{name}.json"
