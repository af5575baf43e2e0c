"""What a model learns from under rounding, and what it is judged by, apart from one another."""

import random

from vivavoce.audio.sound import Sound
from vivavoce.errors import MissingDependencyError
from vivavoce.quant.speech_set import RATE, SpeechSet, SpokenSample, project_set, scene_set
from vivavoce.train.front_desk import dialogues
from vivavoce.train.voices import TRAINING, programs, speak


def spoken_set(count: int, seed: int = 0) -> SpeechSet:
    """Questions of training's own grammar in training's own voices, spoken now by the synthesizers of this machine."""
    source, found = random.Random(f"qat {seed}"), programs()
    items = []
    for (exchange,) in dialogues("train", count, 7000 + seed, (1, 1)):
        items.append(SpokenSample(exchange.user, Sound(speak(source.choice(TRAINING), exchange.user, found), RATE)))
    return SpeechSet(f"{count} questions spoken anew", tuple(items))


def lesson_sets(kind: str, count: int, given: SpeechSet | None = None) -> tuple[SpeechSet, SpeechSet]:
    """What to learn from and what to judge by, apart from one another."""
    if given is not None:
        held = max(1, len(given.items) // 5)
        return SpeechSet(given.name, given.items[held:] or given.items), given.first(held)
    if kind == "moss_tts_nano":
        texts = [SpokenSample(exchange.reply) for (exchange,) in dialogues("train", count, 7000, (1, 1))]
        return SpeechSet(f"{count} replies of a front desk", tuple(texts)), scene_set()
    try:
        return spoken_set(count), project_set()
    except MissingDependencyError:
        whole = project_set()
        return SpeechSet(whole.name, whole.items[10:]), whole.first(10)
