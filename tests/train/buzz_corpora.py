"""Corpora of buzzes, which need no synthesizer: for runs whose output is not listened to."""

import numpy as np

from vivavoce.audio.level import buzz
from vivavoce.train.corpus import Corpus
from vivavoce.train.voices import TEACHER

TEXTS = ["Good morning.", "A table for two.", "Yes.", "The bill, please.", "At seven.", "Thank you.", "No.", "Goodbye."]
VOICES = (TEACHER.name, "flite-slt-1.0", "espeak-en-us-m1")


def equal_buzzes(count: int, codes: int = 25, voice: str = TEACHER.name) -> Corpus:
    """`count` utterances of one voice, each of `codes` codes of 80 ms."""
    sounds = [buzz(codes * 0.08, 16_000, seed).samples[0] for seed in range(count)]
    return Corpus.of([((sound * 32_000).astype("int16"), f"buzz {i}", voice) for i, sound in enumerate(sounds)])


def buzzes_with_texts(sentences: int = 48) -> Corpus:
    """Distinct texts by three voices in turn; utterances are as long as their texts."""
    utterances = []
    for number in range(sentences):
        text = f"{TEXTS[number % len(TEXTS)]} {chr(97 + number // 8)}"
        samples = buzz(0.3 + 0.03 * len(text), 16_000, seed=number).samples[0]
        utterances.append(((samples * 32767).astype(np.int16), text, VOICES[number % 3]))
    return Corpus.of(utterances)
