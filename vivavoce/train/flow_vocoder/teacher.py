"""Speech as the reply voice learns it: at 24 kHz, with the vocoder's mel and the pitch of every frame."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel import MATCHA_24KHZ, VocoderMel
from vivavoce.errors import InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.train.corpus import Corpus
from vivavoce.train.features import pitch
from vivavoce.train.loop import LOG, plot_curves

CORPUS_RATE = 16_000
FULL_SCALE = 32_767
REACH = 24  # input samples that the resampler looks to either side
BATCH = 64


def upsampled(samples: Tensor) -> Tensor:
    """16 kHz → 24 kHz.  # [batch, time] → [batch, time // 2 · 3]"""
    place = torch.arange(3, dtype=torch.float64)[:, None] * 2 / 3  # of the three outputs after every second input
    away = torch.arange(-REACH, REACH + 2, dtype=torch.float64) - place
    taps = torch.sinc(away) * torch.special.i0(9 * (1 - (away / (REACH + 2)).square()).sqrt())
    taps = (taps / taps.sum(-1, keepdim=True)).to(samples)
    even = samples[:, : samples.shape[-1] // 2 * 2]
    phases = functional.conv1d(functional.pad(even[:, None], (REACH, REACH)), taps[:, None], stride=2)
    return phases.transpose(1, 2).flatten(1)


@dataclass(frozen=True)
class TeacherSpeech:
    """Utterances one behind the other, each cut to whole mel frames."""

    samples: Tensor  # int16 [frame · hop]
    mel: Tensor  # float32 [frame, band]
    f0: Tensor  # float32 [frame], 0 where there is no voice
    starts: Tensor  # int64 [utterance + 1], in frames, on the CPU

    @classmethod
    def of(cls, corpus: Corpus, indices: np.ndarray, device: torch.device | str) -> "TeacherSpeech":
        """These utterances of a corpus."""
        if len(indices) == 0:
            raise InputError("there is no utterance to learn from; give a larger corpus")
        pieces = [corpus.samples[corpus.starts[index] : corpus.starts[index + 1]] for index in indices]
        ratio = MATCHA_24KHZ.hop * CORPUS_RATE // MATCHA_24KHZ.rate
        frames = np.array([len(piece) // ratio for piece in pieces])
        starts = torch.zeros(len(pieces) + 1, dtype=torch.int64)
        starts[1:] = torch.from_numpy(frames).cumsum(0)
        total = int(starts[-1])
        speech = cls(
            torch.zeros(total * MATCHA_24KHZ.hop, dtype=torch.int16, device=device),
            torch.zeros(total, MATCHA_24KHZ.mels, device=device),
            torch.zeros(total, device=device),
            starts,
        )
        analysis = VocoderMel(MATCHA_24KHZ).to(device)
        for members in np.array_split(np.argsort(frames, kind="stable"), math.ceil(len(pieces) / BATCH)):
            speech._fill(members, [pieces[member] for member in members], analysis, ratio)
        return speech

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def seconds(self) -> float:
        """How long all of it is."""
        return len(self.mel) * MATCHA_24KHZ.hop / MATCHA_24KHZ.rate

    def sound(self, frames: Tensor) -> Tensor:
        """The samples of runs of frames.  # [batch, frame] indices → float32 [batch, frame · hop]"""
        hop = MATCHA_24KHZ.hop
        return self.samples.view(-1, hop)[frames].flatten(1).float() / FULL_SCALE

    @torch.no_grad()
    def _fill(self, members: np.ndarray, pieces: list[np.ndarray], analysis: VocoderMel, ratio: int) -> None:
        longest = max(len(piece) for piece in pieces) // ratio * ratio
        padded = np.zeros((len(pieces), longest), dtype=np.float32)
        for place, piece in enumerate(pieces):
            padded[place, : min(len(piece), longest)] = piece[:longest].astype(np.float32) / 32_768
        low = torch.from_numpy(padded).to(self.mel.device)
        high = upsampled(low)
        mel, f0 = analysis(high).transpose(1, 2), pitch(low, CORPUS_RATE, ratio)
        sounds = (high.clamp(-1, 1) * FULL_SCALE).round().to(torch.int16)
        for row, member in enumerate(members):
            begin, end = int(self.starts[member]), int(self.starts[member + 1])
            count, hop = end - begin, MATCHA_24KHZ.hop
            self.samples[begin * hop : end * hop] = sounds[row, : count * hop]
            self.mel[begin:end], self.f0[begin:end] = mel[row, :count], f0[row, :count]


def segment_starts(speech: TeacherSpeech, frames: int, utterances: Tensor | None = None) -> Tensor:
    """Every frame at which a segment of so many frames lies within one utterance.  # [segment] int64"""
    chosen = torch.arange(len(speech)) if utterances is None else utterances
    runs = [torch.arange(int(speech.starts[i]), int(speech.starts[i + 1]) - frames + 1) for i in chosen.tolist()]
    starts = torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)
    return starts.to(speech.mel.device)


def write_part(module: nn.Module, sizes: Mapping[str, Any], file: Path) -> None:
    """The weights under their published names, and `sizes.json` beside them."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in published_tensors(module).items()}
    save_file(tensors, file)
    (file.parent / "sizes.json").write_text(json.dumps(sizes, indent=2), encoding="utf8")


def keep_curves(out: Path) -> None:
    """The log and its picture beside the weights; the state of the course, which is large, stays where it is."""
    course = out / "course"
    picture = plot_curves(course)
    for file in (course / LOG, picture):
        if file is not None:
            (out / file.name).write_bytes(file.read_bytes())
