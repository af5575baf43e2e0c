"""Training of the reply voice's flow decoder and vocoder, and the data that both train on.

The data is the reply voice at 24 kHz with mel and pitch. Pitch follows Boersma (1993): candidates are peaks of each
frame's autocorrelation, divided by that of the window; the cheapest path through them and "unvoiced" is the pitch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel import MATCHA_24KHZ, VocoderMel
from vivavoce.errors import InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.train.corpus import Corpus
from vivavoce.train.loop import LOG, plot_curves

CORPUS_RATE = 16_000
FRAME = MATCHA_24KHZ.hop * CORPUS_RATE // MATCHA_24KHZ.rate  # samples of a corpus in a mel frame
FULL_SCALE = 32_767
REACH = 24  # input samples on either side of the resampling filter
BATCH = 64


def upsampled(samples: Tensor) -> Tensor:
    """Resample 16 kHz to 24 kHz.  # [batch, time] → [batch, time // 2 · 3]"""
    position = torch.arange(3, dtype=torch.float64)[:, None] * 2 / 3  # of three outputs for every two inputs
    distance = torch.arange(-REACH, REACH + 2, dtype=torch.float64) - position
    taps = torch.sinc(distance) * torch.special.i0(9 * (1 - (distance / (REACH + 2)).square()).sqrt())
    taps = (taps / taps.sum(-1, keepdim=True)).to(samples)
    even = samples[:, : samples.shape[-1] // 2 * 2]
    phases = functional.conv1d(functional.pad(even[:, None], (REACH, REACH)), taps[:, None], stride=2)
    return phases.transpose(1, 2).flatten(1)


@dataclass(frozen=True)
class TeacherSpeech:
    """Concatenated utterances at 24 kHz with vocoder mel and f0, each cut to whole mel frames."""

    samples: Tensor  # int16 [frame · hop]
    mel: Tensor  # float32 [frame, band]
    f0: Tensor  # float32 [frame], 0 where unvoiced or not measured
    starts: Tensor  # int64 [utterance + 1], in frames, on the CPU

    @classmethod
    def of(
        cls, corpus: Corpus, indices: np.ndarray, device: torch.device | str, has_pitch: bool = True
    ) -> "TeacherSpeech":
        if len(indices) == 0:
            raise InputError("the corpus has no utterance to train on; use a larger one")
        pieces = [corpus.samples[corpus.starts[index] : corpus.starts[index + 1]] for index in indices]
        frames = np.array([len(piece) // FRAME for piece in pieces])
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
            speech._fill(members, [pieces[member] for member in members], analysis, has_pitch)
        return speech

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def seconds(self) -> float:
        return len(self.mel) * MATCHA_24KHZ.hop / MATCHA_24KHZ.rate

    def sound(self, frames: Tensor) -> Tensor:
        """The samples of frames.  # [batch, frame] indices → float32 [batch, frame · hop]"""
        hop = MATCHA_24KHZ.hop
        return self.samples.view(-1, hop)[frames].flatten(1).float() / FULL_SCALE

    @torch.no_grad()
    def _fill(self, members: np.ndarray, pieces: list[np.ndarray], analysis: VocoderMel, has_pitch: bool) -> None:
        length = max(len(piece) for piece in pieces) // FRAME * FRAME
        padded = np.zeros((len(pieces), length), dtype=np.int16)
        for position, piece in enumerate(pieces):
            padded[position, : min(len(piece), length)] = piece[:length]
        low = torch.from_numpy(padded).to(self.mel.device).float() / 32_768
        high = upsampled(low)
        mel = analysis(high).transpose(1, 2)
        f0 = pitch(low, CORPUS_RATE, FRAME) if has_pitch else torch.zeros_like(mel[..., 0])
        sounds = (high.clamp(-1, 1) * FULL_SCALE).round().to(torch.int16)
        for row, member in enumerate(members):
            begin, end = int(self.starts[member]), int(self.starts[member + 1])
            count, hop = end - begin, MATCHA_24KHZ.hop
            self.samples[begin * hop : end * hop] = sounds[row, : count * hop]
            self.mel[begin:end], self.f0[begin:end] = mel[row, :count], f0[row, :count]


def segment_starts(speech: TeacherSpeech, frames: int, utterances: Tensor | None = None) -> Tensor:
    """Frames at which a segment of this length starts within one utterance, if it is long enough.  # [segment] int64"""
    chosen = torch.arange(len(speech)) if utterances is None else utterances
    spans = [(int(speech.starts[i]), int(speech.starts[i + 1]) - frames + 1) for i in chosen.tolist()]
    runs = [torch.arange(first, max(first, end)) for first, end in spans]
    starts = torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)
    return starts.to(speech.mel.device)


def write_part(module: nn.Module, sizes: Mapping[str, Any], file: Path) -> None:
    """Write the weights under their published names, and `sizes.json`."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in published_tensors(module).items()}
    save_file(tensors, file)
    (file.parent / "sizes.json").write_text(json.dumps(sizes, indent=2), encoding="utf8")


def copy_curves(out: Path) -> None:
    """Copy the log and its plot beside the weights; the large run state stays in its folder."""
    folder = out / "course"
    picture = plot_curves(folder)
    for file in (folder / LOG, picture):
        if file is not None:
            (out / file.name).write_bytes(file.read_bytes())


EPSILON = 1e-9


@dataclass(frozen=True)
class PitchSettings:
    """Pitch range and path costs."""

    low: float = 60.0
    high: float = 400.0
    candidates: int = 6
    voicing: float = 0.45  # autocorrelation below which a loud frame is unvoiced
    silence: float = 0.03  # relative to the peak; quieter frames tend to be unvoiced
    octave: float = 0.02  # preference for a candidate one octave up
    octave_jump: float = 0.35
    voicing_change: float = 0.14


class Candidates(NamedTuple):
    """States of the Viterbi path; the last of each frame is "unvoiced"."""

    frequency: Tensor  # [batch, frame, state] in Hz, 0 where there is no voice
    strength: Tensor  # [batch, frame, state]


def pitch(samples: Tensor, rate: int, hop: int, settings: PitchSettings | None = None) -> Tensor:
    """f0 in Hz at the centre of each hop, 0 where unvoiced.  # [batch, time] → [batch, time // hop]"""
    settings = settings or PitchSettings()
    candidates = pitch_candidates(samples.float(), rate, hop, settings)
    return _cheapest_path(candidates, settings, rate / hop)


def pitch_candidates(samples: Tensor, rate: int, hop: int, settings: PitchSettings) -> Candidates:
    """The highest peaks of each frame's autocorrelation."""
    length = 2 * round(1.5 * rate / settings.low)  # three periods of the lowest pitch
    count = samples.shape[-1] // hop
    frames = functional.pad(samples, (length // 2 - hop // 2, length)).unfold(-1, length, hop)[:, :count]
    loudest = samples.abs().amax(-1)[:, None].clamp(min=EPSILON)
    loudness = frames[..., length // 4 : -length // 4].abs().amax(-1) / loudest
    min_lag, max_lag = math.floor(rate / settings.high), math.ceil(rate / settings.low)
    heights = _autocorrelation(frames, max_lag + 2)
    frequency, height = _peaks(heights, min_lag, max_lag, rate, settings)
    unvoiced = settings.voicing + (2 - loudness * (1 + settings.voicing) / settings.silence).clamp(min=0)
    strength = height - settings.octave * torch.log2(settings.low / frequency.clamp(min=settings.low))
    strength = strength.masked_fill(height <= 0, -1.0)
    return Candidates(functional.pad(frequency, (0, 1)), torch.cat([strength, unvoiced[..., None]], -1))


def _autocorrelation(frames: Tensor, lags: int) -> Tensor:  # [batch, frame, time] → [batch, frame, lag]
    length = frames.shape[-1]
    window = torch.hann_window(length, device=frames.device)
    frames = (frames - frames.mean(-1, keepdim=True)) * window
    size = 2 ** math.ceil(math.log2(length + lags))

    def correlate(x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, size).abs().square())[..., :lags]

    raw, window_correlation = correlate(frames), correlate(window)
    return raw / (raw[..., :1] + EPSILON) / (window_correlation / window_correlation[0])


def _peaks(heights: Tensor, min_lag: int, max_lag: int, rate: int, settings: PitchSettings) -> tuple[Tensor, Tensor]:
    """Frequency and height of the highest peaks by parabolic interpolation.  # [batch, frame, candidate]"""
    left, centre, right = (heights[..., min_lag + shift : max_lag + 1 + shift] for shift in (-1, 0, 1))
    curve = (2 * centre - left - right).clamp(min=EPSILON)
    is_peak = (centre > left) & (centre >= right)
    offset = ((right - left) / (2 * curve)).clamp(-0.5, 0.5)
    height = torch.where(is_peak, centre + (right - left) * offset / 4, 0.0)
    frequency = rate / (torch.arange(min_lag, max_lag + 1, device=heights.device) + offset)
    preferred = height + settings.octave * torch.log2(frequency / settings.low)
    best = preferred.masked_fill(~is_peak, -1.0).topk(settings.candidates, dim=-1).indices
    return frequency.gather(-1, best), height.gather(-1, best)


def _cheapest_path(candidates: Candidates, settings: PitchSettings, frames_per_second: float) -> Tensor:
    frequency, strength = candidates
    octaves = torch.log2(frequency.clamp(min=1.0))
    voiced = frequency > 0
    frame_scale = 100 / frames_per_second  # the published costs are for 100 frames a second
    total, steps = strength[:, 0], []
    for frame in range(1, frequency.shape[1]):
        jump = (octaves[:, frame - 1, :, None] - octaves[:, frame, None, :]).abs() * settings.octave_jump
        was, is_ = voiced[:, frame - 1, :, None], voiced[:, frame, None, :]
        cost = torch.where(was & is_, jump, torch.where(was ^ is_, settings.voicing_change, 0.0)) / frame_scale
        best = (total[:, :, None] - cost).max(dim=1)
        total = best.values + strength[:, frame]
        steps.append(best.indices)
    state = total.argmax(-1, keepdim=True)
    path = [state]
    for step in reversed(steps):
        state = step.gather(-1, state)
        path.append(state)
    chosen = torch.stack(path[::-1], dim=1)  # [batch, frame, 1]
    return frequency.gather(-1, chosen).squeeze(-1)
