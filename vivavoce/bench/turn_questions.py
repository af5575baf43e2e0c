"""What is asked: recordings of the user's, those that come with the package, a synthesizer's, or mere syllables."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from vivavoce import minis
from vivavoce.audio.files import read
from vivavoce.audio.level import normalise_speech
from vivavoce.audio.sound import Sound
from vivavoce.bench.turn_sounds import RATE, SPEECH_DBFS, Samples, at_level, mm_hm, talk, voiced_bounds
from vivavoce.errors import InputError

BUNDLED = Path(minis.__file__).parent / "questions"
ENDINGS = {".wav", ".flac", ".opus", ".ogg", ".mp3"}
MARGIN = RATE // 20  # silence left around the voice
HUMS = 12
TEXTS = (
    "What time do you open tomorrow?",
    "Can I bring my dog with me?",
    "How far is it to the railway station?",
    "Is breakfast included in the price?",
    "Could you book a table for two at seven?",
    "Where can I leave my car overnight?",
    "Do you have a room with a view of the garden?",
    "What is the weather like this weekend?",
    "How do I connect to the wireless network?",
    "Which museum would you recommend?",
    "Can I pay with a credit card?",
    "At what time must I leave the room?",
)
BACKCHANNELS = ("mm-hm", "yeah", "okay", "right", "uh huh", "I see")


@dataclass(frozen=True)
class SpokenQuestion:
    """Something to ask, at the rate of the wire; `reply` is what should be answered, where that is known."""

    text: str
    sound: Samples = field(repr=False)
    voice: str = ""
    reply: str | None = None


@dataclass(frozen=True)
class Material:
    """All that a script is made of."""

    questions: tuple[SpokenQuestion, ...]
    backchannels: tuple[Samples, ...]
    source: str
    """Where the questions are from, in words."""


def gather(speech: Path | None = None) -> Material:
    """Recordings in `speech` (and in its folder `backchannels`), else the bundled ones, else what can be made here."""
    if speech is not None:
        if not speech.is_dir():
            raise InputError(f"{speech} is not a folder of recorded questions")
        return Material(recorded(speech), _backchannels(speech), f"recordings in {speech}")
    if (BUNDLED / "questions.json").is_file():
        return Material(recorded(BUNDLED), _backchannels(BUNDLED), "bundled recordings")
    program = next((name for name in ("flite", "espeak-ng") if shutil.which(name)), None)
    if program is not None and find_spec("scipy") is not None:  # which the synthetic speakers resample with
        spoken = [question.sound for question in synthesised(program, BACKCHANNELS)]
        softer = [at_level(sound, SPEECH_DBFS - 6) for sound in spoken]
        mixed = [each for pair in zip(softer, _backchannels(None), strict=False) for each in pair]
        return Material(synthesised(program), tuple(mixed), f"synthesised by {program}")
    asked = tuple(SpokenQuestion(f"syllables {seed}", talk(1.6, seed), f"made-up {seed}") for seed in range(len(TEXTS)))
    return Material(asked, _backchannels(None), "made-up syllables")


def recorded(folder: Path) -> tuple[SpokenQuestion, ...]:
    """The questions of a folder: as its `questions.json` tells, else every sound file by its name."""
    index = folder / "questions.json"
    if index.is_file():
        entries = _entries(index)
    else:
        files = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
        entries = [{"file": name, "text": Path(name).stem.replace("_", " ")} for name in files]
    if not entries:
        raise InputError(f"{folder} holds no recorded questions; it needs sound files, or questions.json naming them")
    return tuple(
        SpokenQuestion(
            entry.get("text", ""), _prepared(folder / entry["file"]), entry.get("voice", ""), entry.get("reply")
        )
        for entry in entries
    )


def synthesised(program: str, texts: Sequence[str] = TEXTS) -> tuple[SpokenQuestion, ...]:
    """The texts in a few voices of an installed program."""
    from vivavoce.train.voices import VOICES, programs, speak

    every = [voice for voice in VOICES if voice.program == program]
    voices = every[:: max(1, len(every) // 4)]
    spoken = []
    for number, text in enumerate(texts):
        voice = voices[number % len(voices)]
        spoken.append(SpokenQuestion(text, _level(Sound(speak(voice, text, programs()), 16_000)), voice.name))
    return tuple(spoken)


def _entries(index: Path) -> list[dict[str, str]]:
    try:
        entries = json.loads(index.read_text(encoding="utf8"))
    except ValueError as error:
        raise InputError(f"{index} is not JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "file" in entry for entry in entries):
        raise InputError(f'{index} must be a list of {{"file": …, "text": …}}')
    return entries


def _backchannels(folder: Path | None) -> tuple[Samples, ...]:
    place = None if folder is None else folder / "backchannels"
    if place is not None and place.is_dir():
        files = sorted(path for path in place.iterdir() if path.suffix.lower() in ENDINGS)
        if files:
            return tuple(at_level(_prepared(path), SPEECH_DBFS - 6) for path in files)
    return tuple(mm_hm(seed) for seed in range(HUMS))


def _prepared(path: Path) -> Samples:
    return _level(read(path))


def _level(sound: Sound) -> Samples:
    """At the rate of the wire and the usual level of speech, with a short silence on both sides."""
    samples = normalise_speech(sound.mono().resampled(RATE), SPEECH_DBFS).samples[0]
    first, last = voiced_bounds(samples)
    if last == 0:
        raise InputError("a recorded question is silent")
    return samples[max(0, first - MARGIN) : last + MARGIN].copy()
