"""Training of the reply voice's flow decoder and vocoder, and the data that both train on.

The data is the reply voice at 24 kHz with mel, pitch and codes. A flow batch is a prompt and the speech after it, under
the attention masks of streams and of offline decoding. Pitch follows Boersma (1993): candidates are peaks of each
frame's autocorrelation, divided by that of the window; the cheapest path through them and "unvoiced" is the pitch.
"""

import json
import math
from collections.abc import Mapping, Sequence
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
from vivavoce.models.flow.model import FlowConfig
from vivavoce.train.corpus import Corpus
from vivavoce.train.loop import LOG, plot_curves

CORPUS_RATE = 16_000
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
    f0: Tensor  # float32 [frame], 0 where unvoiced
    starts: Tensor  # int64 [utterance + 1], in frames, on the CPU

    @classmethod
    def of(cls, corpus: Corpus, indices: np.ndarray, device: torch.device | str) -> "TeacherSpeech":
        if len(indices) == 0:
            raise InputError("the corpus has no utterance to train on; use a larger one")
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
        return len(self.mel) * MATCHA_24KHZ.hop / MATCHA_24KHZ.rate

    def sound(self, frames: Tensor) -> Tensor:
        """The samples of frames.  # [batch, frame] indices → float32 [batch, frame · hop]"""
        hop = MATCHA_24KHZ.hop
        return self.samples.view(-1, hop)[frames].flatten(1).float() / FULL_SCALE

    @torch.no_grad()
    def _fill(self, members: np.ndarray, pieces: list[np.ndarray], analysis: VocoderMel, ratio: int) -> None:
        length = max(len(piece) for piece in pieces) // ratio * ratio
        padded = np.zeros((len(pieces), length), dtype=np.float32)
        for position, piece in enumerate(pieces):
            padded[position, : min(len(piece), length)] = piece[:length].astype(np.float32) / 32_768
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


UNLIMITED = 1_000_000  # left chunks
NO_MASK = -1  # left chunks; stands for full attention


@dataclass(frozen=True)
class FlowBatchShape:
    """Sequence length in codes and rows of a batch."""

    codes: int
    rows: int


@dataclass(frozen=True)
class FlowBatchOptions:
    """Probabilities of the augmentations of a sequence."""

    whole: float = 0.2  # full attention, as offline
    window: float = 0.5  # a stream with the prompt and a window of chunks
    windows: tuple[int, int] = (2, 10)  # in chunks
    prompt: float = 0.85
    prompts: tuple[int, int] = (2, 8)  # in chunks
    from_the_start: float = 0.6  # speech starts at the start of an utterance
    final: float = 0.4  # without look-ahead, as at the end of a reply
    unguided: float = 0.15
    replaced: float = 0.03  # share of codes replaced


@dataclass(frozen=True)
class CodedSpeech:
    """Concatenated utterances as codes and mel, each cut to whole codes."""

    codes: Tensor  # int64 [code]
    mel: Tensor  # float32 [code · ratio, band]
    starts: Tensor  # int64 [utterance + 1], in codes
    ratio: int

    @classmethod
    def of(cls, speech: TeacherSpeech, codes: Sequence[np.ndarray], ratio: int) -> "CodedSpeech":
        begins, ends = speech.starts[:-1].tolist(), speech.starts[1:].tolist()
        lengths = [min(len(c), (end - begin) // ratio) for c, begin, end in zip(codes, begins, ends, strict=True)]
        trimmed = [torch.from_numpy(c[:n].astype(np.int64)) for c, n in zip(codes, lengths, strict=True)]
        mels = [speech.mel[begin : begin + n * ratio] for begin, n in zip(begins, lengths, strict=True)]
        device = speech.mel.device
        starts = torch.tensor([0, *lengths]).cumsum(0)
        return cls(torch.cat(trimmed).to(device), torch.cat(mels), starts.to(device), ratio)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def seconds(self) -> float:
        return len(self.codes) * 0.08

    def utterance(self, index: int) -> tuple[Tensor, Tensor]:
        """Codes and mel of one utterance.  # [code], [frame, band]"""
        begin, end = int(self.starts[index]), int(self.starts[index + 1])
        return self.codes[begin:end], self.mel[begin * self.ratio : end * self.ratio]

    def prompt(self, chunk: int, min_codes: int = 25, max_codes: int = 30) -> tuple[Tensor, Tensor]:
        """Codes and mel of a sentence of about 2 s in whole chunks, on the CPU."""
        lengths = self.starts.diff()
        whole = (lengths % chunk == 0) & (lengths >= min_codes) & (lengths <= max_codes)
        candidates = whole.nonzero() if whole.any() else (lengths >= min_codes).nonzero()
        codes, mel = self.utterance(int(candidates[0]) if len(candidates) else int(lengths.argmax()))
        length = min(max_codes, len(codes) // chunk * chunk)
        if length == 0:
            raise InputError(f"no utterance of the corpus is as long as a chunk of {chunk} codes; use longer ones")
        return codes[:length].cpu(), mel[: length * self.ratio].cpu()


def code_bias(left: Tensor, sink: Tensor, codes: int, chunk: int) -> Tensor:
    """Attention bias at code rate: `left` chunks are visible, and the first `sink` codes always.

    # [row], [row] → [row, 1, code, code]
    """
    position = torch.arange(codes, device=left.device)
    query, key = position[:, None] // chunk, position // chunk
    window = left.clamp(min=0)[:, None, None]
    seen = (key <= query) & ((key >= query - window) | (position < sink[:, None, None]))
    seen = seen | (left == NO_MASK)[:, None, None]
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, float("-inf"))[:, None]


class FlowBatches:
    """Batches of prompt and speech, the shapes in turn."""

    def __init__(
        self,
        speech: CodedSpeech,
        config: FlowConfig,
        shapes: Sequence[FlowBatchShape],
        options: FlowBatchOptions,
        solver_times: Tensor,
        solver_share: float,
    ) -> None:
        needed = max(shape.codes for shape in shapes) + config.lookahead
        if len(speech.codes) <= needed:
            raise InputError(
                f"the corpus has {len(speech.codes)} codes; a sequence needs {needed}; use a larger corpus"
            )
        self.speech, self.config, self.shapes, self.options = speech, config, shapes, options
        self.solver_times, self.solver_share = solver_times, solver_share

    def batch(self, number: int, generator: torch.Generator) -> dict[str, Tensor]:
        shape = self.shapes[number % len(self.shapes)]
        prompt = self._prompts(shape, generator)
        indices = self._code_indices(shape, prompt, generator)
        codes = self._replace_codes(self.speech.codes[indices], generator)
        device, ratio = codes.device, self.config.ratio
        inner = torch.arange(ratio, device=device)
        frames = (indices[:, : shape.codes, None] * ratio + inner).flatten(1)
        final = self._uniform(shape.rows, generator) < self.options.final
        mel = self.speech.mel[frames]
        return {
            "codes": codes,
            "mel": mel,
            "noise": torch.randn(mel.shape, generator=generator, device=device),
            "prompted": torch.arange(frames.shape[1], device=device) < prompt[:, None] * ratio,
            "sink": (prompt - self.config.chunk).clamp(min=0),  # the last chunk looks ahead into the speech
            "left": self._windows(shape, generator),
            "ends": torch.where(final, shape.codes, shape.codes + self.config.lookahead),
            "guided": (self._uniform(shape.rows, generator) >= self.options.unguided).float(),
            "times": self._times(shape, generator),
        }

    def _prompts(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        """Length of each row's prompt in codes: whole chunks, as in inference, at most half of the row."""
        low, high = self.options.prompts
        high = min(high, shape.codes // self.config.chunk // 2)
        chunks = min(low, high) + (self._uniform(shape.rows, generator) * (max(0, high - low) + 1)).long()
        return chunks * self.config.chunk * (self._uniform(shape.rows, generator) < self.options.prompt)

    def _code_indices(self, shape: FlowBatchShape, prompt: Tensor, generator: torch.Generator) -> Tensor:
        """Code indices of each row: a prompt from anywhere, then speech from anywhere else.  # [row, code]"""
        total = shape.codes + self.config.lookahead
        last = len(self.speech.codes) - total
        begins = self.speech.starts[:-1]
        begins = begins[(self._uniform(shape.rows, generator) * len(begins)).long()].clamp(max=last)
        anywhere = (self._uniform(shape.rows, generator) * last).long()
        begins = torch.where(self._uniform(shape.rows, generator) < self.options.from_the_start, begins, anywhere)
        prompts = (self._uniform(shape.rows, generator) * last).long()
        position = torch.arange(total, device=begins.device)
        behind = position - prompt[:, None]
        return torch.where(behind < 0, prompts[:, None] + position, begins[:, None] + behind)

    def _replace_codes(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.rand(codes.shape, generator=generator, device=codes.device)
        others = torch.rand(codes.shape, generator=generator, device=codes.device) * len(self.speech.codes)
        return torch.where(drawn < self.options.replaced, self.speech.codes[others.long()], codes)

    def _windows(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        low, high = self.options.windows
        windows = low + (self._uniform(shape.rows, generator) * (high - low + 1)).long()
        kind = self._uniform(shape.rows, generator)
        windows = torch.where(kind < self.options.whole + self.options.window, windows, UNLIMITED)
        return torch.where(kind < self.options.whole, NO_MASK, windows)

    def _times(self, shape: FlowBatchShape, generator: torch.Generator) -> Tensor:
        """Flow times: with the density of the solver's schedule, or exactly the solver's times."""
        anywhere = 1 - torch.cos(self._uniform(shape.rows, generator) * (torch.pi / 2))
        chosen = self.solver_times[(self._uniform(shape.rows, generator) * len(self.solver_times)).long()]
        return torch.where(self._uniform(shape.rows, generator) < self.solver_share, chosen, anywhere)

    def _uniform(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.rand(rows, generator=generator, device=self.speech.codes.device)


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
