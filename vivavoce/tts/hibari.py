"""hibari, a light English TTS model from the package `hibari-tts`: 8 MB, much faster than real time on one core."""

import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from vivavoce.audio.io import Sound
from vivavoce.audio.stretch import FASTEST, SLOWEST
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.models.moss_tts_nano.prompt import has_cjk
from vivavoce.tts.fixed_voices import FixedVoiceModel, FixedVoices
from vivavoce.tts.interface import Samples, SpeakingStyle, StoredVoice
from vivavoce.tts.text import cleaned

PAUSE = 0.25  # seconds between sentences
MISSING = "hibari needs its package: pip install 'vivavoce[hibari]'"


class HibariTTS(FixedVoiceModel):
    """A `SpeechModel`; several threads may speak concurrently."""

    def __init__(self) -> None:
        try:
            import hibari
            from hibari.voices import DEFAULT, VOICES
        except ImportError as error:
            raise MissingDependencyError(MISSING) from error
        self._open, self._default = hibari.Hibari, str(DEFAULT)
        self._speakers: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._rate = int(hibari.SAMPLE_RATE)
        names = [self._default, *(name for name in VOICES if name != self._default)]
        self.voices = HibariVoices({name: StoredVoice(name, []) for name in names})
        self._speaker(self._default)

    @classmethod
    def load(cls, name: str = "hibari", device: str = "auto", dtype: str = "auto") -> "HibariTTS":
        """The package's model. It runs on the CPU in its own precision; `dtype` must be auto."""
        if dtype != "auto":
            raise InputError(f"hibari has one precision, not {dtype}; leave --dtype out")
        return cls()

    @property
    def rate(self) -> int:
        """Sample rate of the output in Hz."""
        return self._rate

    def stream(
        self,
        text: str,
        voice: str | Sound | None = None,
        style: SpeakingStyle | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> Iterator[Samples]:
        """Speak a text, and yield each sentence when it is ready.  # pieces [1, time]"""
        style = style or SpeakingStyle()
        if isinstance(voice, Sound):
            raise InputError(HibariVoices.refusal)
        if not SLOWEST <= style.speed <= FASTEST:
            raise InputError(f"speed must be {SLOWEST} to {FASTEST}, not {style.speed}")
        spoken = cleaned(text) if style.clean else text
        if has_cjk(spoken):
            raise InputError("hibari speaks English only; take Kokoro for Mandarin: --model kokoro-82m")
        return self._sentences(spoken, self._speaker(voice or self._default), style)

    def say(self, text: str, voice: str | Sound | None = None, style: SpeakingStyle | None = None) -> Sound:
        """Speak a text, and return all of its audio."""
        return Sound(np.concatenate(list(self.stream(text, voice, style)), axis=1), self.rate)

    def _sentences(self, text: str, speaker: Any, style: SpeakingStyle) -> Iterator[Samples]:
        pause = np.zeros((1, round(PAUSE * style.pause * self.rate)), np.float32)
        for sentence in speaker.stream(text, speed=style.speed, seed=style.seed):
            yield np.asarray(sentence, np.float32)[None]
            yield pause

    def _speaker(self, voice: str) -> Any:
        """The model of a voice. The default is in the package; others are fetched by it when first used."""
        if voice not in self.voices:
            raise InputError(f"there is no voice {voice!r}; known: {', '.join(self.voices.names())}")
        with self._lock:
            if voice not in self._speakers:
                try:
                    self._speakers[voice] = self._open(voice)
                except RuntimeError as error:
                    raise InputError(f"the voice {voice!r} cannot be had: {error}") from error
            return self._speakers[voice]


class HibariVoices(FixedVoices):
    """The package's voices."""

    refusal = "hibari cannot imitate a recording; give the name of one of its voices"

    def names(self) -> list[str]:
        """The names of the package's voices, the default first."""
        return list(self.built_in)


def default_speech_model() -> str:
    """The model of `viva say`: hibari where its package is installed, else the bundled one."""
    return "hibari" if find_spec("hibari") is not None else "mini-tts"
