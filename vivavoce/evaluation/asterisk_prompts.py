"""Recordings of a person with their texts: the prompts of a telephone system, of two Debian packages."""

import gzip
import re
from pathlib import Path

PACKAGE = "asterisk-core-sounds-en"
SOUNDS = Path("usr/share/asterisk/sounds/en_US_f_Allison")  # of -g722
TEXTS = Path(f"usr/share/doc/{PACKAGE}/core-sounds-en.txt.gz")
UNSPOKEN = re.compile(r"[\[\]()<>\d]")  # remarks, tones and digits


def prompt_files(root: Path = Path("/"), min_words: int = 2) -> list[tuple[Path, str]]:
    """The sound files below `root` with their texts, by name; empty where the packages are not there."""
    if not (root / TEXTS).is_file():
        return []
    with gzip.open(root / TEXTS, "rt", encoding="utf8", errors="replace") as lines:
        pairs = [line.strip().partition(":") for line in lines if not line.startswith(";")]
    found = [
        (root / SOUNDS / f"{name}.g722", text.strip())
        for name, _, text in pairs
        if len(text.split()) >= min_words and not UNSPOKEN.search(text)
    ]
    return sorted((sound, text) for sound, text in found if sound.is_file())
