"""The embedding models that `--embedding` and `--speaker-model` name."""

import functools

from vivavoce import hub
from vivavoce.models.campplus import SpeakerEncoder
from vivavoce.models.sentence_encoder import SentenceEncoder


@functools.lru_cache(2)
def load_sentence_encoder(name: str) -> SentenceEncoder:
    """The sentence encoder of this name, hub id or folder; it is loaded once."""
    return SentenceEncoder.load(hub.resolve(name))


@functools.lru_cache(2)
def load_speaker_encoder(name: str) -> SpeakerEncoder:
    """The speaker embeddings of this name, hub id or folder; they are loaded once."""
    return SpeakerEncoder.load(hub.resolve(name))
