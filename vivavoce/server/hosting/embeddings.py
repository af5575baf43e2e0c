"""The embedding model that `--embedding` names."""

import functools

from vivavoce import hub
from vivavoce.models.sentence_encoder import SentenceEncoder


@functools.lru_cache(2)
def load_sentence_encoder(name: str) -> SentenceEncoder:
    """The sentence encoder of this name, hub id or folder; it is loaded once."""
    return SentenceEncoder.load(hub.resolve(name))
