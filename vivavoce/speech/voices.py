"""Voices that stay: reference codes by name, those a model comes with and those a person has added on this machine."""

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vivavoce.errors import InputError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,63}")
DEFAULT_FOLDER = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "vivavoce" / "voices"


@dataclass(frozen=True)
class KeptVoice:
    """A reference voice as codes of one codec, with who agreed to it."""

    name: str
    codes: list[list[int]]  # [frame, codebook]
    codec: str = ""
    consent: str = ""
    """What the speaker agreed to, in the words or by the id that the caller gave."""
    created: float = 0.0

    def to_json(self) -> str:
        """As it is kept."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, content: str, source: str) -> "KeptVoice":
        """As `to_json` wrote it; one line says what is wrong with it."""
        try:
            given: dict[str, Any] = json.loads(content)
            codes = [[int(code) for code in frame] for frame in given["codes"]]
            return cls(str(given["name"]), codes, str(given.get("codec", "")), str(given.get("consent", "")))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{source} is not a voice as it was kept ({error}); remove it and add it anew") from error


class VoiceShelf:
    """Voices by name: `built_in` ones first, then those in a folder, one file each."""

    def __init__(self, built_in: Mapping[str, KeptVoice] | None = None, folder: str | Path | None = None) -> None:
        self.built_in = dict(built_in or {})
        self.folder = Path(folder) if folder is not None else DEFAULT_FOLDER

    def names(self) -> list[str]:
        """Every voice there is."""
        added = sorted(file.stem for file in self.folder.glob("*.json")) if self.folder.is_dir() else []
        return [*self.built_in, *(name for name in added if name not in self.built_in)]

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def get(self, name: str) -> KeptVoice:
        """A voice; its name is told if there is none."""
        if name in self.built_in:
            return self.built_in[name]
        file = self._file(name)
        if not file.is_file():
            known = ", ".join(self.names()) or "none yet"
            raise InputError(f"there is no voice {name!r}; known: {known}. Add one from a recording of 3 to 8 seconds")
        return KeptVoice.from_json(file.read_text(encoding="utf8"), str(file))

    def add(self, voice: KeptVoice) -> KeptVoice:
        """Keep a voice; one of that name that was added before is replaced."""
        if voice.name in self.built_in:
            raise InputError(f"the voice {voice.name!r} comes with the model; choose another name")
        if not voice.codes:
            raise InputError("a voice needs codes; give at least half a second of speech")
        file = self._file(voice.name)
        kept = KeptVoice(voice.name, voice.codes, voice.codec, voice.consent, voice.created or time.time())
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(kept.to_json(), encoding="utf8")
        os.replace(partial, file)
        return kept

    def remove(self, name: str) -> None:
        """Forget a voice that was added."""
        if name in self.built_in:
            raise InputError(f"the voice {name!r} comes with the model and cannot be removed")
        self.get(name)
        self._file(name).unlink()

    def _file(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise InputError(f"a voice's name has up to 64 letters, digits, spaces, '.', '_' and '-', unlike {name!r}")
        return self.folder / f"{name}.json"
