"""A corpus that needs no synthesizer: buzzes as long as their texts."""

import numpy as np

from vivavoce.audio.level import buzz
from vivavoce.train.corpus import Corpus
from vivavoce.train.voices import TEACHER

TEXTS = ["Good morning.", "A table for two.", "Yes.", "The bill, please.", "At seven.", "Thank you.", "No.", "Goodbye."]
VOICES = (TEACHER.name, "flite-slt-1.0", "espeak-en-us-m1")


def buzzes(sentences: int = 48) -> Corpus:
    """Sentences in turn by three voices, each of its own text."""
    utterances = []
    for number in range(sentences):
        text = f"{TEXTS[number % len(TEXTS)]} {chr(97 + number // 8)}"
        samples = buzz(0.3 + 0.03 * len(text), 16_000, seed=number).samples[0]
        utterances.append(((samples * 32767).astype(np.int16), text, VOICES[number % 3]))
    return Corpus.of(utterances)
