"""Trained parts as a miniature small enough to ship: `viva train ship --lm … --codec … --out …`.

With `--tts` and `--codec`, a voice; with `--asr`, a recogniser; with `--draft`, what guesses ahead of one. Matrices
become int8 with a scale a row, those of a voice and a recogniser less; of the vocoder float16 stays where errors are
heard at once.
"""

import argparse
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.models.quantised import is_matrix, pack_file, rounded

KEPT_WIDE = {"hift.safetensors": ["f0_predictor", "conv_post", "source_downs"]}  # patterns of names, by file
BITS_OF_SPEAKER = {"": 5}  # by patterns of names
BITS_OF_ITS_CODEC = {"encoder": 5, "decoder": 6}
BITS_OF_DRAFT = {"": 5}
BITS_OF_RECOGNISER = {r"encoder\.embed_positions": 8, "": 5}  # of which it has learnt all that learns
REPLIES = {"temperature": 0.0, "left_chunks": 4}
"""A front desk gives one answer to a question; the flow was trained to look back two to ten chunks."""
SPEECH_FILES = ("config.json", "tokenizer.json")
VOICE_FILES = ("config.json", "tokenizer.model", "speech.json")
RECOGNISER_FILES = ("config.json", "tokenizer.json", "generation_config.json", "preprocessor_config.json")
WEIGHTS = "model.safetensors"


def ship_speech(lm: Path, codec: Path, out: Path) -> int:
    """Write the folder of a speech-to-speech miniature; its size in bytes."""
    _ship(lm, SPEECH_FILES, out)
    (out / "generation_config.json").write_text(json.dumps(REPLIES, indent=2), encoding="utf8")
    for file in sorted(codec.rglob("*")):
        target = out / "codec" / file.relative_to(codec)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors" and file.parent.name != "voices":
            pack_file(file, target, KEPT_WIDE.get(file.name, ()))
        elif file.is_file():
            shutil.copy2(file, target)
    return _size(out)


def ship_voice(tts: Path, codec: Path, out: Path) -> int:
    """Write the folder of a text-to-speech miniature; its size in bytes."""
    _ship(tts, VOICE_FILES, out, BITS_OF_SPEAKER)
    _ship(codec, ("config.json",), out / "codec", BITS_OF_ITS_CODEC)
    return _size(out)


def ship_recogniser(asr: Path, out: Path) -> int:
    """Write the folder of a recogniser; its size in bytes."""
    _ship(asr, RECOGNISER_FILES, out, BITS_OF_RECOGNISER)
    return _size(out)


def ship_draft(draft: Path, out: Path) -> int:
    """Write the folder of a recogniser's draft or heads; its size in bytes."""
    _ship(draft, ("config.json",), out, BITS_OF_DRAFT)
    return _size(out)


def _ship(trained: Path, files: Sequence[str], out: Path, narrow: Mapping[str, int] | None = None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in files:
        shutil.copy2(trained / name, out / name)
    pack_file(trained / WEIGHTS, out / WEIGHTS, narrow=narrow)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", type=Path, help="folder that `viva train lm` wrote")
    parser.add_argument("--tts", type=Path, help="folder that `viva train tts` wrote")
    parser.add_argument("--asr", type=Path, help="folder that `viva train asr` wrote")
    parser.add_argument("--draft", type=Path, help="folder that `viva train draft` or `viva train medusa` wrote")
    parser.add_argument("--codec", type=Path, help="folder that `viva train assemble` or `viva train tts-codec` wrote")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.asr is not None:
        size = ship_recogniser(given.asr, given.out)
    elif given.draft is not None:
        size = ship_draft(given.draft, given.out)
    elif given.codec is None or (given.lm is None) == (given.tts is None):
        raise InputError("give --asr, or --draft, or --codec with either --lm or --tts")
    elif given.lm is not None:
        size = ship_speech(given.lm, given.codec, given.out)
    else:
        size = ship_voice(given.tts, given.codec, given.out)
    print(f"{given.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()


class Rounding:
    """The matrices of a module, rounded; what learns gets the gradient as if nothing had been."""

    def __init__(self, module: nn.Module, bits: int, wide: str | None = None) -> None:
        self.bits = bits
        named = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and is_matrix(parameter) and not (wide and re.search(wide, name))
        ]
        alike: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, parameter in named:
            # Matrices of one shape are rounded together; kernels of a convolution have rows of another kind.
            alike[tuple(parameter.shape) if parameter.ndim == 2 else (len(alike),)].append((name, parameter))
        self._alike = list(alike.values())

    def __call__(self, share: Tensor) -> dict[str, Tensor]:
        """By name, the matrices moved by this share of the way to what they are rounded to."""
        moved: dict[str, Tensor] = {}
        for group in self._alike:
            whole = torch.cat([parameter for _, parameter in group])
            changed = whole + share * (rounded(whole.detach(), self.bits) - whole.detach())
            moved.update(zip((name for name, _ in group), changed.split(len(group[0][1])), strict=True))
        return moved
