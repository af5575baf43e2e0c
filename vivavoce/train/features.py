"""Batched features of speech on the device: pitch, log-mels of rows of different lengths, and codes of a corpus.

Pitch follows Boersma (1993): candidates are peaks of each frame's autocorrelation, divided by that of the window; the
cheapest path through them and "unvoiced" is the pitch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel import WHISPER_SPEECH_MAXIMUM, WhisperMel, whisper_normalise, whisper_normalise_running
from vivavoce.errors import InputError
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig
from vivavoce.train.corpus import Corpus

TINY = 1e-9


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
    loudest = samples.abs().amax(-1)[:, None].clamp(min=TINY)
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

    raw, own = correlate(frames), correlate(window)
    return raw / (raw[..., :1] + TINY) / (own / own[0])


def _peaks(heights: Tensor, min_lag: int, max_lag: int, rate: int, settings: PitchSettings) -> tuple[Tensor, Tensor]:
    """Frequency and height of the highest peaks by parabolic interpolation.  # [batch, frame, candidate]"""
    left, centre, right = (heights[..., min_lag + shift : max_lag + 1 + shift] for shift in (-1, 0, 1))
    curve = (2 * centre - left - right).clamp(min=TINY)
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


SILENCE = -10.0  # log10 of the smallest power that a log-mel holds
REACH = WhisperMel.N_FFT // 2  # samples of a frame after its centre


class BatchMel(nn.Module):
    """Normalised log-mels of rows of different lengths; frames past a row's end are silence."""

    def __init__(self, bins: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.mel = WhisperMel(bins).to(device)

    @torch.no_grad()
    def forward(self, samples: Tensor, lengths: Tensor, running: bool = False) -> Tensor:
        """Normalise by each row's maximum, or as in streaming by the maximum so far.

        # [batch, time], [batch] → [batch, bins, time // 160]
        """
        power = self.log_mel_power(samples, lengths)
        if running:
            return whisper_normalise_running(power, power.new_full((len(power),), WHISPER_SPEECH_MAXIMUM))[0]
        return whisper_normalise(power, power.amax(dim=(-2, -1)))

    @torch.no_grad()
    def log_mel_power(self, samples: Tensor, lengths: Tensor) -> Tensor:
        """Log-mels before normalisation.  # [batch, time], [batch] → [batch, bins, time // 160]"""
        with torch.autocast(samples.device.type, enabled=False):
            power = self.mel.log_mel_power(_reflected(samples.float(), lengths))
        power = power[..., : samples.shape[-1] // WhisperMel.HOP]
        frame = torch.arange(power.shape[-1], device=power.device)
        past = frame >= (lengths // WhisperMel.HOP)[:, None]
        return power.masked_fill(past[:, None], SILENCE)


def _reflected(samples: Tensor, lengths: Tensor) -> Tensor:
    """Rows extended by reflection at their ends, by half an FFT window.  # [batch, time + 200]"""
    time = torch.arange(samples.shape[-1] + REACH, device=samples.device)
    past = time - lengths[:, None]  # [batch, time], 0 at the first sample that is not there
    mirrored = torch.where(past < 0, time, lengths[:, None] - 2 - past)
    known = (past < REACH) & ((past < 0) | (lengths[:, None] > REACH))
    padded = samples.gather(1, mirrored.clamp(0, samples.shape[-1] - 1))
    return padded.masked_fill(~known, 0.0)


MAX_PADDING_RATIO = 1.25  # longest to shortest utterance of a batch


class Sounds:
    """A corpus on the device; rows are padded with silence to whole codes."""

    def __init__(self, corpus: Corpus, config: SpeechEncoderConfig, device: torch.device | str) -> None:
        self.samples = torch.as_tensor(corpus.samples).to(device)
        ends = np.asarray(corpus.starts, dtype=np.int64)
        self.starts, self.lengths = ends[:-1], np.diff(ends)
        self.samples_per_code = config.frames_per_code * WhisperMel.HOP
        max_lag = config.segment_frames * WhisperMel.HOP
        if len(self.lengths) and self.lengths.max() > max_lag:
            raise InputError(f"a sound of the corpus has {self.lengths.max()} samples; one segment takes {max_lag}")

    def rows(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Padded utterances, and their lengths in samples of whole codes.  # [row, time], [row]"""
        start, length = (torch.from_numpy(v[chosen]).to(self.samples.device) for v in (self.starts, self.lengths))
        whole = self.in_whole_codes(length)
        position = torch.arange(int(whole.max()), device=self.samples.device)
        taken = self.samples[(start[:, None] + position).clamp(max=len(self.samples) - 1)].float() / 32768
        return taken.masked_fill(position >= length[:, None], 0.0), whole

    def in_whole_codes(self, samples: Tensor) -> Tensor:
        """Lengths rounded up to whole codes."""
        return (samples + self.samples_per_code - 1) // self.samples_per_code * self.samples_per_code

    def length_batches(self, batch: int) -> list[np.ndarray]:
        """All utterances in batches of similar length."""
        order = np.argsort(self.lengths, kind="stable")
        order = order[self.lengths[order] > 0]
        batches, first = [], 0
        for position in range(1, len(order) + 1):
            full = position - first == batch or position == len(order)
            if full or self.lengths[order[position]] > MAX_PADDING_RATIO * self.lengths[order[first]] + 1280:
                batches.append(order[first:position])
                first = position
        return batches


@torch.no_grad()
def encode_batch(encoder: SpeechEncoder, mel: Tensor, lengths: Tensor) -> list[Tensor]:
    """Codes of each row up to its length.  # [batch, bins, frame], frames [batch] → [code] each"""
    per_code = encoder.config.frames_per_code
    if mel.shape[-1] > encoder.config.segment_frames:
        raise InputError(f"{mel.shape[-1]} mel frames are more than one segment; cut the sound at 30 s")
    codes = encoder.nearest(encoder.features(mel))
    return [row[: -(-length // per_code)] for row, length in zip(codes, lengths.tolist(), strict=True)]


@torch.no_grad()
def encode_corpus(
    encoder: SpeechEncoder,
    corpus: Corpus,
    device: torch.device | str,
    augmenter: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    batch: int = 256,
) -> list[np.ndarray]:
    """int16 codes of every utterance of a corpus, in its order; augmented first if an augmenter is given."""
    encoder = encoder.to(device)
    sounds, mel = Sounds(corpus, encoder.config, device), BatchMel(encoder.config.num_mel_bins, device)
    codes: list[np.ndarray] = [np.zeros(0, dtype=np.int16)] * len(sounds.lengths)
    for chosen in sounds.length_batches(batch):
        samples, lengths = sounds.rows(chosen)
        if augmenter is not None:
            samples, lengths = augmenter(samples, lengths)
            lengths = sounds.in_whole_codes(lengths).clamp(max=samples.shape[1])
        encoded = encode_batch(encoder, mel(samples, lengths, running=True), lengths // WhisperMel.HOP)
        for index, row in zip(chosen, _on_host(encoded), strict=True):
            codes[index] = row
    return codes


def _on_host(rows: Sequence[Tensor]) -> list[np.ndarray]:
    joined = torch.cat(list(rows)).to(torch.int16).cpu().numpy()
    return np.split(joined, np.cumsum([len(row) for row in rows])[:-1])
