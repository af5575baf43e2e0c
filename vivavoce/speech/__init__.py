"""Text to speech: `say` for a whole sound, `speak_stream` for its pieces as they are made."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.live_resample import LiveResampler
from vivavoce.audio.sound import Sound
from vivavoce.speech.speaker import Manner, Speaker
from vivavoce.speech.voices import KeptVoice, VoiceShelf

__all__ = ["KeptVoice", "Manner", "Speaker", "VoiceShelf", "say", "speak_stream", "speaker"]


@lru_cache(maxsize=2)
def speaker(model: str = "mini-tts", device: str = "auto") -> Speaker:
    """A speech model, loaded once and kept."""
    return Speaker.load(model, device)


def say(
    text: str,
    voice: str | Sound | None = None,
    model: str = "mini-tts",
    speed: float = 1.0,
    pause: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    rate: int | None = None,
) -> Sound:
    """A text as sound, in a voice by name or like a recording, at this rate or the model's own."""
    sound = speaker(model, device).say(text, voice, Manner(speed, pause, seed))
    return sound if rate is None else sound.resampled(rate)


def speak_stream(
    text: str,
    voice: str | Sound | None = None,
    model: str = "mini-tts",
    speed: float = 1.0,
    pause: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    rate: int | None = None,
) -> Iterator[NDArray[np.float32]]:
    """The same, piece by piece from the first frame on.  # [channel, time]"""
    speaks = speaker(model, device)
    pieces = speaks.stream(text, voice, Manner(speed, pause, seed))
    return pieces if rate is None or rate == speaks.rate else _resampled(pieces, speaks, rate)


def _resampled(pieces: Iterator[NDArray[np.float32]], speaks: Speaker, rate: int) -> Iterator[NDArray[np.float32]]:
    resampler = LiveResampler(speaks.rate, rate)
    state = resampler.initial_state(speaks.codec.config.channels)
    for piece in pieces:
        new, state = resampler.step(state, piece)
        if new.shape[1]:
            yield new
    yield resampler.flush(state)
