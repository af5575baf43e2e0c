"""Made-up speech for scenes, so that a test needs no synthesizer."""

import json
import zlib
from functools import cache
from pathlib import Path

from vivavoce.audio.io import Sound, write
from vivavoce.bench.duplex.speech import SpokenText, SpokenTexts
from vivavoce.bench.turn_sounds import RATE, talk


@cache
def speak(text: str, voice: str) -> SpokenText:
    """Syllables as long as the text, different for each text and voice."""
    sound = talk(0.4 + min(0.8, len(text) / 60), seed=zlib.crc32(f"{text}{voice}".encode()))
    cuts = tuple(len(sound) * text[:place].count(" ") // (text.count(" ") + 1) for place in _marks(text))
    return SpokenText(text, voice, sound, cuts)


def keep(folder: Path, text: str, voice: str) -> None:
    """Put a made-up utterance where `viva bench duplex` looks for spoken ones."""
    spoken = speak(text, voice)
    path = SpokenTexts(folder).path(text, voice)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, Sound(spoken.sound[None], RATE))
    path.with_suffix(".json").write_text(json.dumps({"cuts": spoken.cuts}), encoding="utf8")


def _marks(text: str) -> list[int]:
    return [place for place, letter in enumerate(text) if letter == "|"]
