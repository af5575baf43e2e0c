"""The speech in a recording, without the pauses: what a speaker embedding is computed from."""

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.vad import WINDOW, VoiceActivity, speech_probabilities

Array = NDArray[np.float32]
IS_SPEECH = 0.5


def voiced_samples(samples: Array, detector: VoiceActivity) -> Array:
    """The windows of a sound at 16 kHz that are speech, joined.  # [time] → [time]"""
    return joined_speech(samples, speech_probabilities(detector, samples))


def joined_speech(samples: Array, probabilities: Array) -> Array:
    """The windows that are probably speech, joined.  # [time], [window]"""
    count = min(len(probabilities), len(samples) // WINDOW)
    windows = samples[: count * WINDOW].reshape(-1, WINDOW)
    speech: Array = windows[probabilities[:count] >= IS_SPEECH].reshape(-1)
    return speech
