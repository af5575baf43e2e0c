"""The voice of the desk's replies in a corpus: a synthesizer's, or one of Kokoro's."""

from collections import Counter
from collections.abc import Iterable

from vivavoce.train.utterances import REPLY_VOICES
from vivavoce.train.voices import TEACHER

KOKORO = "kokoro-"
NAMES = (TEACHER.name, *(f"{KOKORO}{voice}" for voice in REPLY_VOICES.values()))


def reply_voice_of(voices: Iterable[str]) -> str:
    """The reply voice that most utterances have; that of the synthesizers if none has one."""
    counts = Counter(voice for voice in voices if voice in NAMES)
    return counts.most_common(1)[0][0] if counts else TEACHER.name


def short_name(voice: str) -> str:
    """The name under which a model has the voice: `rms`, `af_heart`."""
    return voice.removeprefix(KOKORO).removeprefix("flite-").removesuffix("-1.0")
