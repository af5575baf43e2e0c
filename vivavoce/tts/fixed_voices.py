"""Parts that speech models share whose voices are fixed: they cannot imitate a recording."""

from typing import ClassVar

from vivavoce.audio.io import Sound
from vivavoce.errors import InputError
from vivavoce.tts.interface import StoredVoice, VoiceStore


class FixedVoices(VoiceStore):
    """The voices that a model comes with; none can be added."""

    refusal: ClassVar[str]
    """The error of adding one."""

    def add(self, voice: StoredVoice, recording: Sound | None = None) -> StoredVoice:
        """Refused."""
        raise InputError(self.refusal)


class FixedVoiceModel:
    """What a `SpeechModel` with such voices has of the interface."""

    voices: VoiceStore

    @property
    def channels(self) -> int:
        """Channels of the output."""
        return 1

    def add_voice(self, name: str, sound: Sound, consent: str = "", text: str = "") -> StoredVoice:
        """Refused: the model cannot imitate a recording."""
        return self.voices.add(StoredVoice(name, [], "", consent, text=text), sound)
