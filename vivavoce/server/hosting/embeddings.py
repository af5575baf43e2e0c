"""The embedding models: of sentences, which `--embedding` names, and of voices."""

import functools
from collections.abc import Callable

from vivavoce import hub
from vivavoce.dialogue.items import Samples
from vivavoce.models.campplus import SpeakerEncoder
from vivavoce.models.sentence_encoder import SentenceEncoder

SPEAKER_MODEL = "campplus"


@functools.lru_cache(2)
def load_sentence_encoder(name: str) -> SentenceEncoder:
    """The sentence encoder of this name, hub id or folder; it is loaded once."""
    return SentenceEncoder.load(hub.resolve(name))


@functools.lru_cache(2)
def load_speaker_encoder(name: str) -> SpeakerEncoder:
    """The speaker embeddings of this name, hub id or folder; they are loaded once."""
    return SpeakerEncoder.load(hub.resolve(name))


def installed_speaker_encoder(name: str) -> SpeakerEncoder | None:
    """The speaker embeddings, unless they would have to be downloaded."""
    return load_speaker_encoder(name) if _is_installed(name) else None


def installed_embed(name: str) -> Callable[[Samples], Samples] | None:
    """Embeds voices; the model is loaded when it is first needed. None where it would have to be downloaded."""
    return (lambda samples: load_speaker_encoder(name).embed(samples)) if _is_installed(name) else None


def _is_installed(name: str) -> bool:
    model = hub.known(name)
    return model is None or not model.missing(hub.listed_folder(model))
