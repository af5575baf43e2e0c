"""Trained parts as a miniature small enough to ship: `viva train ship --lm … --codec … --out …`.

Matrices become int8 with a scale a row; the vocoder, whose errors are heard at once, stays float16.
"""

import argparse
import json
import shutil
from pathlib import Path

from vivavoce.models.packing import pack_file

KEPT_WIDE = {"hift.safetensors": [""]}  # patterns of names that stay float16, by file
REPLIES = {"temperature": 0.0, "left_chunks": 4}
"""A front desk gives one answer to a question; the flow was trained to look back two to ten chunks."""


def ship_speech(lm: Path, codec: Path, out: Path) -> int:
    """Write the folder of a speech-to-speech miniature; its size in bytes."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy2(lm / name, out / name)
    pack_file(lm / "model.safetensors", out / "model.safetensors")
    (out / "generation_config.json").write_text(json.dumps(REPLIES, indent=2), encoding="utf8")
    for file in sorted(codec.rglob("*")):
        target = out / "codec" / file.relative_to(codec)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors" and file.parent.name != "voices":
            pack_file(file, target, KEPT_WIDE.get(file.name, ()))
        elif file.is_file():
            shutil.copy2(file, target)
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", type=Path, required=True, help="folder that vivavoce.train.language.lm wrote")
    parser.add_argument("--codec", type=Path, required=True, help="folder that vivavoce.train.voice.assemble wrote")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    size = ship_speech(given.lm, given.codec, given.out)
    print(f"{given.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
