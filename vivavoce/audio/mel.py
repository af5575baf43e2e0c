"""Log-mel features of published models: Whisper's, the vocoders', and Kaldi's filterbank features."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import InputError

Array = NDArray[np.float64]

SLANEY_BREAK_HZ, SLANEY_BREAK_MEL = 1000.0, 15.0  # linear below, logarithmic above
SLANEY_HZ_PER_MEL = 200.0 / 3.0
SLANEY_LOG_STEP = np.log(6.4) / 27.0


def slaney_filters(rate: int, n_fft: int, mels: int, low: float = 0.0, high: float | None = None) -> Tensor:
    """Filters of equal area on Slaney's mel scale, as librosa, Whisper and the vocoders use.  # [mel, n_fft/2 + 1]"""
    nyquist = rate / 2
    corners = slaney_to_hz(np.linspace(hz_to_slaney(low), hz_to_slaney(high or nyquist), mels + 2))
    bins = np.linspace(0.0, nyquist, n_fft // 2 + 1)
    equal_area = 2.0 / (corners[2:] - corners[:-2])
    return torch.from_numpy(_triangles(bins, corners) * equal_area[:, None]).float()


def kaldi_filters(rate: int, n_fft: int, mels: int, low: float = 20.0, high: float | None = None) -> Tensor:
    """Kaldi's filters: of equal height on the HTK scale, triangular in mel rather than in Hz.  # [mel, n_fft/2 + 1]"""
    nyquist = rate / 2
    corners = np.linspace(hz_to_htk(low), hz_to_htk(high or nyquist), mels + 2)
    bins = hz_to_htk(np.linspace(0.0, nyquist, n_fft // 2 + 1))
    filters = _triangles(bins, corners)
    filters[:, -1] = 0.0  # Kaldi leaves the Nyquist bin out
    return torch.from_numpy(filters).float()


def hz_to_slaney(hz: float | Array) -> Array:
    """Slaney's mel scale: 3 mels every 200 Hz up to 1 kHz, then 27 mels for every factor of 6.4."""
    hz = np.asarray(hz, dtype=np.float64)
    above = SLANEY_BREAK_MEL + np.log(np.maximum(hz, SLANEY_BREAK_HZ) / SLANEY_BREAK_HZ) / SLANEY_LOG_STEP
    return np.where(hz < SLANEY_BREAK_HZ, hz / SLANEY_HZ_PER_MEL, above)


def slaney_to_hz(mel: float | Array) -> Array:
    """The frequency of a Slaney mel."""
    mel = np.asarray(mel, dtype=np.float64)
    above = SLANEY_BREAK_HZ * np.exp(SLANEY_LOG_STEP * (mel - SLANEY_BREAK_MEL))
    return np.where(mel < SLANEY_BREAK_MEL, mel * SLANEY_HZ_PER_MEL, above)


def hz_to_htk(hz: float | Array) -> Array:
    """HTK's mel scale, with Kaldi's constant."""
    return 1127.0 * np.log1p(np.asarray(hz, dtype=np.float64) / 700.0)


def _triangles(points: Array, corners: Array) -> Array:
    """Triangle i rises from corner i to i + 1 and falls to i + 2.  # [mel, point]"""
    left, peak, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (points - left) / (peak - left), (right - points) / (right - peak)
    return np.maximum(0.0, np.minimum(rising, falling))


WHISPER_SPEECH_MAXIMUM = 1.5  # the largest log-mel of speech at −17…−24 dBFS is 1.3…1.8: where a running maximum starts


@dataclass(frozen=True)
class WhisperMelState:
    """State of one stream, or of a batch of streams in step."""

    held: Tensor  # [batch, time]: samples that later frames need
    started: bool  # whether the reflection before the first sample is part of `held`


class WhisperMel(nn.Module):
    """Whisper's log-mel at 16 kHz, 100 frames a second, of a whole sound or of a stream.

    A stream emits each frame as soon as its last sample is in; the frame that reaches past the end comes from `flush`.
    Whisper normalises by the maximum over all frames, which a stream does not know: `whisper_normalise` takes it,
    `whisper_normalise_running` uses the maximum so far.
    """

    RATE, N_FFT, HOP = 16_000, 400, 160

    def __init__(self, mels: int = 128) -> None:
        super().__init__()
        self.filters: Tensor
        self.window: Tensor
        self.register_buffer("filters", slaney_filters(self.RATE, self.N_FFT, mels), persistent=False)
        self.register_buffer("window", torch.hann_window(self.N_FFT), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """The normalised log-mel, each row by its maximum.  # [batch, time] → [batch, mel, time // 160]"""
        if samples.shape[-1] < self.HOP:
            raise InputError(f"a log-mel frame needs {self.HOP} samples, the sound has {samples.shape[-1]}")
        log_mel = self.log_mel_power(samples)
        return whisper_normalise(log_mel, log_mel.amax(dim=(-2, -1)))

    def log_mel_power(self, samples: Tensor) -> Tensor:
        """The log-mel before normalisation.  # [batch, time] → [batch, mel, time // 160]"""
        frames, state = self.step(self.initial_state(samples.shape[0]), samples)
        return torch.cat([frames, self.flush(state)], dim=-1)

    def initial_state(self, batch: int = 1) -> WhisperMelState:
        """The state before the first sample."""
        return WhisperMelState(self.window.new_zeros(batch, 0), started=False)

    def step(self, state: WhisperMelState, samples: Tensor) -> tuple[Tensor, WhisperMelState]:
        """The frames that are complete after these samples, not normalised.  # [batch, time] → [batch, mel, frame]"""
        joined = torch.cat([state.held, samples], dim=-1)
        reach = self.N_FFT // 2
        if not state.started:
            if joined.shape[-1] <= reach:
                return self.log_mel_frames(joined[:, :0]), WhisperMelState(joined, started=False)
            joined = torch.cat([joined[:, 1 : reach + 1].flip(-1), joined], dim=-1)
        count = max(0, (joined.shape[-1] - self.N_FFT) // self.HOP + 1)
        return self.log_mel_frames(joined), WhisperMelState(joined[:, count * self.HOP :], started=True)

    def flush(self, state: WhisperMelState) -> Tensor:
        """The frames, none or one, that the end of the sound completes.  # [batch, mel, frame]"""
        length, reach = state.held.shape[-1], self.N_FFT // 2
        if not state.started:  # too short for reflection: padded with silence, as Whisper does
            frames, _ = self.step(state, state.held.new_zeros(state.held.shape[0], reach + 1 - length))
            return frames[..., : length // self.HOP]
        if (length - reach) // self.HOP < 1:
            return self.log_mel_frames(state.held[:, :0])
        missing = self.N_FFT - length
        return self.log_mel_frames(functional.pad(state.held, (0, missing), mode="reflect"))

    def log_mel_frames(self, samples: Tensor) -> Tensor:
        """log10 of the mel power of every whole frame.  # [batch, time] → [batch, mel, frame]"""
        power = _frame_power(samples, self.window, self.HOP, self.N_FFT)
        return (self.filters @ power.transpose(-2, -1)).clamp(min=1e-10).log10()


def whisper_normalise(log_mel: Tensor, maximum: Tensor | float) -> Tensor:
    """Whisper's range: cut off 80 dB under the maximum (one for all, or [batch]), then shifted and scaled."""
    maximum = torch.as_tensor(maximum, dtype=log_mel.dtype, device=log_mel.device)
    floor = (maximum - 8.0).reshape(-1, 1, 1)
    return (torch.maximum(log_mel, floor) + 4.0) / 4.0


def whisper_normalise_running(log_mel: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
    """Each frame normalised by the maximum up to it, and that maximum to pass on: the same for any pieces.

    `maximum` [batch] starts as WHISPER_SPEECH_MAXIMUM; from less, the noise before the first word would set the floor.
    """
    peaks = torch.cat([maximum[:, None], log_mel.amax(dim=-2)], dim=-1)
    running = peaks.cummax(dim=-1).values
    floor = running[:, None, 1:] - 8.0
    return (torch.maximum(log_mel, floor) + 4.0) / 4.0, running[:, -1]


@dataclass(frozen=True)
class VocoderMelSpec:
    """What differs between the mels of HiFi-GAN's descendants. `high` None is the Nyquist frequency."""

    rate: int
    n_fft: int
    hop: int
    mels: int
    high: float | None = None


MATCHA_24KHZ = VocoderMelSpec(24_000, 1920, 480, 80, high=8000.0)  # MOSS-Speech and CosyVoice 2
COSYVOICE3_24KHZ = VocoderMelSpec(24_000, 1920, 480, 80)
HIFIGAN_22KHZ = VocoderMelSpec(22_050, 1024, 256, 80, high=8000.0)
BIGVGAN_V2_22KHZ_80BAND = VocoderMelSpec(22_050, 1024, 256, 80)
BIGVGAN_V2_24KHZ_100BAND = VocoderMelSpec(24_000, 1024, 256, 100)
BIGVGAN_V2_44KHZ_128BAND_512X = VocoderMelSpec(44_100, 2048, 512, 128)


class VocoderMel(nn.Module):
    """The natural log of the mel magnitude, with a frame for every whole hop."""

    def __init__(self, spec: VocoderMelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.filters: Tensor
        self.window: Tensor
        filters = slaney_filters(spec.rate, spec.n_fft, spec.mels, high=spec.high)
        self.register_buffer("filters", filters, persistent=False)
        self.register_buffer("window", torch.hann_window(spec.n_fft), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """Log-mel of whole sounds.  # [batch, time] → [batch, mel, time // hop]"""
        length, spec = samples.shape[-1], self.spec
        margin = (spec.n_fft - spec.hop) // 2
        long_enough = functional.pad(samples, (0, max(0, margin + 1 - length)))
        padded = functional.pad(long_enough, (margin, margin), mode="reflect")
        power = _frame_power(padded, self.window, spec.hop, spec.n_fft)[:, : length // spec.hop]
        magnitude = (power + 1e-9).sqrt()
        return (self.filters @ magnitude.transpose(-2, -1)).clamp(min=1e-5).log()


class KaldiFbank(nn.Module):
    """Kaldi's log filterbank energies at 16 kHz, 25 ms every 10 ms, without dither; samples in [-1, 1]."""

    RATE, FRAME, HOP, N_FFT = 16_000, 400, 160, 512

    def __init__(self, mels: int = 80, subtract_mean: bool = False) -> None:
        super().__init__()
        self.subtract_mean = subtract_mean
        self.filters: Tensor
        self.window: Tensor
        povey = torch.hann_window(self.FRAME, periodic=False, dtype=torch.float64).pow(0.85)
        self.register_buffer("filters", kaldi_filters(self.RATE, self.N_FFT, mels), persistent=False)
        self.register_buffer("window", povey.float(), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """Features of all whole frames, less their mean with `subtract_mean`.  # [batch, time] → [batch, frame, mel]"""
        if samples.shape[-1] < self.FRAME:
            raise InputError(f"a filterbank frame needs {self.FRAME} samples, the sound has {samples.shape[-1]}")
        frames = samples.unfold(-1, self.FRAME, self.HOP)
        frames = frames - frames.mean(dim=-1, keepdim=True)
        previous = torch.cat([frames[..., :1], frames[..., :-1]], dim=-1)
        spectrum = torch.fft.rfft((frames - 0.97 * previous) * self.window, n=self.N_FFT)
        energy = spectrum.real.square() + spectrum.imag.square()
        features: Tensor = (energy @ self.filters.T).clamp(min=torch.finfo(torch.float32).eps).log()
        return features - features.mean(dim=-2, keepdim=True) if self.subtract_mean else features


def _frame_power(samples: Tensor, window: Tensor, hop: int, n_fft: int) -> Tensor:
    """Power spectrum of every whole windowed frame.  # [batch, time] → [batch, frame, n_fft/2 + 1]"""
    if samples.shape[-1] < n_fft:
        return samples.new_zeros(samples.shape[0], 0, n_fft // 2 + 1)
    spectrum: Tensor = torch.fft.rfft(samples.unfold(-1, n_fft, hop) * window)
    return spectrum.real.square() + spectrum.imag.square()
