"""Kokoro's voices: tables with one style vector for every length of text, and weighted mixtures of them."""

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import first_line

FOLDER = "voices"
NAME = re.compile(r"[a-z][fm]_[a-z]+")
MIX = re.compile(r"[^:+]+(:\d*\.?\d+)?(\+[^:+]+(:\d*\.?\d+)?)*")


class VoiceTables:
    """The voices of a published folder, read when first used."""

    def __init__(self, folder: Path, width: int) -> None:
        """`width`: numbers of a style vector."""
        files = sorted(file for suffix in ("bin", "pt") for file in (folder / FOLDER).glob(f"*.{suffix}"))
        self._files = {file.stem: file for file in files}
        self._width = width
        self._tables: dict[str, Tensor] = {}
        if not self._files:
            raise CheckpointError(f"{folder / FOLDER} has no voices; fetch the model again")

    @property
    def names(self) -> list[str]:
        """The names of all voices."""
        return list(self._files)

    def style(self, voice: str, phonemes: int) -> Tensor:
        """The vector of a voice, or of a mixture such as `af_heart:0.7+af_bella:0.3`, for a length of text."""
        parts = self.mixture(voice)
        total = sum(parts.values())
        rows = [self._row(name, phonemes) * (weight / total) for name, weight in parts.items()]
        return torch.stack(rows).sum(0)

    def mixture(self, voice: str) -> dict[str, float]:
        """The voices of a mixture with their weights; without one, a voice counts 1."""
        if not MIX.fullmatch(voice):
            raise InputError(f"{voice!r} is no voice; use a name or a mixture such as af_heart:0.7+af_bella:0.3")
        parts: dict[str, float] = {}
        for part in voice.split("+"):
            name, _, weight = part.strip().partition(":")
            if name not in self._files:
                raise InputError(f"there is no voice {name!r}; known: {', '.join(self._files)}")
            parts[name] = parts.get(name, 0.0) + (float(weight) if weight else 1.0)
        if sum(parts.values()) <= 0:
            raise InputError(f"the weights of {voice!r} add up to nothing; give at least one above 0")
        return parts

    def _row(self, name: str, phonemes: int) -> Tensor:
        if name not in self._tables:
            self._tables[name] = self._read(self._files[name])
        table = self._tables[name]
        return table[min(max(phonemes, 1), len(table)) - 1]

    def _read(self, file: Path) -> Tensor:
        try:
            if file.suffix == ".pt":
                table = torch.load(file, map_location="cpu", weights_only=True).float()
            else:
                table = torch.from_numpy(np.fromfile(file, "<f4"))
            return table.reshape(-1, self._width)
        except Exception as error:  # pickles and reshapes fail in many ways
            raise CheckpointError(f"{file} cannot be read as a voice ({first_line(error)}); fetch it again") from error
