"""Mel filterbanks: triangles whose corners are equally spaced on a mel scale."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    """Filters of equal height on the HTK scale, straight in mel and not in Hz: Kaldi's.  # [mel, n_fft/2 + 1]"""
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
