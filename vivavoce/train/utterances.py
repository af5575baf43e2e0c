"""Plans of utterances in Kokoro's voices, as data: text, voice or mixture, speed, and how it was picked up.

Whole voices are held out, and no mixture has a part of them.
"""

import dataclasses
import json
import lzma
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from vivavoce.errors import InputError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.train.augment import NOISES
from vivavoce.train.front_desk import SpokenLanguage, general_sentences, language, reply_sentences, user_sentences
from vivavoce.train.front_desk.answers import fixed_replies, slotted_replies
from vivavoce.train.front_desk.general import word_strings
from vivavoce.train.front_desk.mandarin_general import mandarin_word_strings

TRAINING_VOICES = {
    "en": (
        *("af_alloy", "af_aoede", "af_bella", "af_heart", "af_jessica", "af_kore", "af_nicole", "af_river", "af_sarah"),
        *("af_sky", "am_adam", "am_echo", "am_eric", "am_fenrir", "am_liam", "am_michael", "am_puck", "am_santa"),
        *("bf_alice", "bf_emma", "bf_lily", "bm_daniel", "bm_fable", "bm_george"),
    ),
    "zh": ("zf_xiaobei", "zf_xiaoxiao", "zf_xiaoyi", "zm_yunjian", "zm_yunxi", "zm_yunxia"),
}
REPLY_VOICES = {"en": "af_heart", "zh": "zf_xiaoxiao"}
PARTS = ("mixed", "held_out", "teacher", "voice", "callers", "questions")
"""Corpora: callers to learn from, callers to evaluate with, the desk's replies, other sentences in its voice; callers
and questions of dialogues."""
CODECS = ("g711", "opus")
MIX_SIZES = {1: 0.3, 2: 0.45, 3: 0.25}  # voices in a mixture and their probability
SPEEDS = (0.8, 1.3)
REPLY_SPEEDS = (0.85, 1.2)
ROOM, NOISE, TELEPHONE, CODEC = 0.5, 0.7, 0.15, 0.25  # shares of utterances
GENERAL = {"general": 0.3, "strings": 0.2}  # shares of callers' sentences; the rest is said to the desk


@dataclass(frozen=True)
class Condition:
    """How an utterance was picked up: nothing of it by default."""

    room: float = 0.0
    """Reverberation time in seconds."""
    noise: str = ""
    """One of `augment.NOISES`."""
    snr: float = 0.0
    telephone: bool = False
    """Whether only 300 to 3400 Hz pass."""
    codec: str = ""
    """One of CODECS."""


@dataclass(frozen=True)
class Utterance:
    """A sentence of a corpus (`part`), the voice or mixture that speaks it, and its condition."""

    part: str
    language: str
    text: str
    voice: str
    speed: float = 1.0
    condition: Condition = Condition()
    phonemes: str = ""
    """In Kokoro's alphabet, where they are known already."""

    def to_json(self) -> str:
        """One line of a plan."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> "Utterance":
        """Read what `to_json` wrote."""
        content = json.loads(line)
        return cls(**{**content, "condition": Condition(**content["condition"])})


@dataclass(frozen=True)
class UtteranceCounts:
    """Number of utterances of each part in each language."""

    mixed: int = 12_000
    held_out: int = 500
    teacher: int = 4_000

    def scaled(self, share: float) -> "UtteranceCounts":
        """All numbers times a factor, at least 1."""
        return UtteranceCounts(*(max(1, round(share * count)) for count in dataclasses.astuple(self)))


def plan_of_texts(texts: Sequence[str], held_out: Sequence[str], seed: int = 0) -> list[Utterance]:
    """English sentences as clean utterances of `mixed`, and others in held-out voices; in the order given."""
    source = random.Random(f"texts {seed}")
    spoken = [Utterance("held_out", "en", text, source.choice(HELD_OUT_VOICES["en"])) for text in held_out]
    return spoken + [Utterance("mixed", "en", text, mixture("en", source), random_speed(source)) for text in texts]


def plan(codes: Sequence[str], counts: UtteranceCounts, seed: int = 0, edition: int = 2) -> list[Utterance]:
    """The utterances of all parts and languages, shuffled; deterministic for its arguments."""
    utterances = [each for code in codes for each in _of_language(language(code, edition), counts, seed)]
    random.Random(f"plan {seed}").shuffle(utterances)
    return utterances


def _of_language(spoken: SpokenLanguage, counts: UtteranceCounts, seed: int) -> list[Utterance]:
    source, code = random.Random(f"utterances {spoken.code} {seed}"), spoken.code
    mixed = [
        Utterance("mixed", code, text, mixture(code, source), random_speed(source), _condition(source))
        for text in callers_sentences(spoken, counts.mixed, seed)
    ]
    held_out = [
        Utterance("held_out", code, text, source.choice(HELD_OUT_VOICES[code]))
        for text in user_sentences("held_out", counts.held_out, seed, spoken)
    ]
    teacher = [Utterance("teacher", code, text, REPLY_VOICES[code]) for text in _replies(spoken, counts.teacher, seed)]
    return [*mixed, *held_out, *teacher]


def callers_sentences(spoken: SpokenLanguage, count: int, seed: int) -> list[str]:
    """Distinct sentences: to the desk and about anything else, in Mandarin strings of words."""
    if spoken.code != "en":
        strings = mandarin_word_strings(round(sum(GENERAL.values()) * count), seed)
        return user_sentences("train", count - len(strings), seed, spoken) + strings
    general_count, string_count = (round(share * count) for share in GENERAL.values())
    others = general_sentences(general_count, seed) + word_strings(string_count, seed + 10)
    return user_sentences("train", count - len(others), seed, spoken) + others


def _replies(spoken: SpokenLanguage, count: int, seed: int) -> list[str]:
    """Half of them replies of all kinds, and the few short ones again and again; in English, general sentences, too."""
    replies = reply_sentences(max(1, count // 2), seed, spoken)[:count]
    general = general_sentences((count - len(replies)) // 2, seed) if spoken.code == "en" else []
    short = islice(cycle([*fixed_replies(spoken), *slotted_replies(spoken)]), count - len(replies) - len(general))
    return [*replies, *general, *short]


def mixture(code: str, source: random.Random) -> str:
    """One, two or three voices of training; the first of a mixture gives the accent."""
    (size,) = source.choices(list(MIX_SIZES), list(MIX_SIZES.values()))
    names = source.sample(TRAINING_VOICES[code], size)
    if len(names) == 1:
        return names[0]
    return "+".join(f"{name}:{source.uniform(0.25, 1.0):.2f}" for name in names)


def random_speed(source: random.Random, speeds: tuple[float, float] = SPEEDS) -> float:
    """A speed of training."""
    return round(source.uniform(*speeds), 2)


def _condition(source: random.Random) -> Condition:
    return Condition(
        room=round(source.uniform(0.1, 0.6), 2) if source.random() < ROOM else 0.0,
        noise=(noise := source.choice(NOISES) if source.random() < NOISE else ""),
        snr=round(source.uniform(0.0, 30.0), 1) if noise else 0.0,
        telephone=source.random() < TELEPHONE,
        codec=source.choice(CODECS) if source.random() < CODEC else "",
    )


def write_plan(path: Path, utterances: Sequence[Utterance]) -> None:
    """Write a plan as JSON lines; one that is there already has to be the same."""
    content = "".join(f"{utterance.to_json()}\n" for utterance in utterances)
    if path.is_file() and path.read_text(encoding="utf8") != content:
        raise InputError(f"{path} is another plan; give its options again, or another folder")
    path.write_text(content, encoding="utf8")


def read_plan(path: Path) -> list[Utterance]:
    """Read a plan that `write_plan` wrote, or one written by hand; `.xz` is decompressed."""
    try:
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        return [Utterance.from_json(line) for line in content.decode("utf8").split("\n") if line]
    except OSError as error:
        raise InputError(f"no plan at {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, lzma.LZMAError) as error:
        raise InputError(f"{path} is no plan of utterances: {error}") from error
