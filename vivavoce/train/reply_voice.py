"""The voices of the desk's replies in a corpus: a synthesizer's, or one of Kokoro's for each language."""

from collections import Counter
from collections.abc import Iterable

from vivavoce.train.utterances import REPLY_VOICES
from vivavoce.train.voices import TEACHER

KOKORO = "kokoro-"
NAMES = (TEACHER.name, *(f"{KOKORO}{voice}" for voice in REPLY_VOICES.values()))


def reply_voices_of(voices: Iterable[str]) -> tuple[str, ...]:
    """The reply voices, most frequent first: the synthesizers' alone, or Kokoro's of every language."""
    counts = Counter(voice for voice in voices if voice in NAMES)
    names = [name for name, _ in counts.most_common()] or [TEACHER.name]
    return tuple(name for name in names if name.startswith(KOKORO) == names[0].startswith(KOKORO))


def reply_voice_of(voices: Iterable[str]) -> str:
    """The reply voice that most utterances have; that of the synthesizers if none has one."""
    return reply_voices_of(voices)[0]


def short_name(voice: str) -> str:
    """The name under which a model has the voice: `rms`, `af_heart`."""
    return voice.removeprefix(KOKORO).removeprefix("flite-").removesuffix("-1.0")
