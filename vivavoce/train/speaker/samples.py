"""What a course leaves behind, in few files that travel well: weights as float16, sounds to listen to in one WAV."""

import copy
import json
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vivavoce.models.checkpoint import save_weights

PAUSE = 0.4  # seconds between two samples


def save_half(module: nn.Module, folder: Path) -> None:
    """`model.safetensors` under the published names."""
    save_weights(copy.deepcopy(module).half(), folder)


def write_samples(folder: Path, samples: Sequence[tuple[str, NDArray[np.float32]]], rate: int) -> None:
    """`samples.wav`, and in `samples.json` the name, first and last sample of each."""
    pieces: list[NDArray[np.int16]] = []
    entries = []
    place = 0
    for name, sound in samples:
        pcm = (np.clip(sound, -1, 1) * 32767).astype(np.int16)
        entries.append({"name": name, "start": place, "end": place + len(pcm)})
        pieces += [pcm, np.zeros(int(PAUSE * rate), np.int16)]
        place += len(pieces[-2]) + len(pieces[-1])
    with wave.open(str(folder / "samples.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.concatenate(pieces).astype("<i2").tobytes() if pieces else b"")
    (folder / "samples.json").write_text(json.dumps({"rate": rate, "samples": entries}, indent=1), encoding="utf8")
