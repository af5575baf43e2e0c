"""Raw 16-bit PCM to float samples in [-1, 1) and back, without wrap-around."""

import numpy as np
from numpy.typing import NDArray

from vivavoce.errors import InputError

FULL_SCALE = 32768.0  # so that every int16 value survives the way to float32 and back


def pcm16_to_float(data: bytes | NDArray[np.int16]) -> NDArray[np.float32]:
    """Float samples of little-endian 16-bit PCM: bytes as one channel, an int16 array in its own shape."""
    if isinstance(data, np.ndarray):
        if data.dtype != np.int16:
            raise InputError(f"16-bit PCM must be an int16 array, this one is {data.dtype}")
        return data.astype(np.float32) / np.float32(FULL_SCALE)
    if len(data) % 2:
        raise InputError(f"16-bit PCM has two bytes a sample, but {len(data)} bytes is an odd number: a sample was cut")
    return np.frombuffer(data, dtype="<i2").astype(np.float32) / np.float32(FULL_SCALE)


def float_to_pcm16(samples: NDArray[np.floating]) -> NDArray[np.int16]:
    """The nearest int16 samples; what lies outside [-1, 1] is limited to full scale instead of wrapping around."""
    check_finite(samples)
    scaled = np.rint(np.asarray(samples, dtype=np.float64) * FULL_SCALE)
    return np.clip(scaled, -32768, 32767).astype(np.int16)


def check_finite(samples: NDArray[np.floating]) -> None:
    """Raise InputError where samples are NaN or infinite."""
    finite = np.isfinite(samples)
    if not finite.all():
        first = int(np.argwhere(~finite)[0, -1])
        count = int(finite.size - np.count_nonzero(finite))
        raise InputError(f"{count} of {finite.size} samples are NaN or infinite, the first at sample {first}")
