"""A corpus of buzzes, for training that is to be seen running and not to be listened to."""

from vivavoce.audio.level import buzz
from vivavoce.train.corpus import Corpus
from vivavoce.train.voices import TEACHER


def buzzing(count: int, codes: int = 25, voice: str = TEACHER.name) -> Corpus:
    """So many utterances of so many codes of 80 ms each."""
    sounds = [buzz(codes * 0.08, 16_000, seed).samples[0] for seed in range(count)]
    return Corpus.of([((sound * 32_000).astype("int16"), f"buzz {i}", voice) for i, sound in enumerate(sounds)])
