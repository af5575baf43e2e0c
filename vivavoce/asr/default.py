"""Which recogniser transcribes where none is named: the best one in the cache, else the bundled miniature."""

import importlib.util

from vivavoce import hub

MINIATURE = "mini-asr"
FOR_PEOPLE = "whisper-base"
MOONSHINE = "moonshine-base-en"
ENGLISH = (MOONSHINE, FOR_PEOPLE, "whisper-tiny.en")  # in the order of their word errors and cost
ANY_LANGUAGE = (FOR_PEOPLE,)


def default_recogniser(language: str | None = None, needs_whisper: bool = False) -> str:
    """The name of the recogniser for a language (None: it must be detected); nothing is downloaded.

    `needs_whisper` leaves out Moonshine, which has no word times, prompts, hotwords or translation.
    """
    candidates = (*ANY_LANGUAGE, *ENGLISH) if language is None else ENGLISH if language == "en" else ANY_LANGUAGE
    return next((name for name in candidates if _is_usable(name, needs_whisper)), MINIATURE)


def explain(name: str) -> str:
    """One line about a recogniser that was not asked for."""
    if name == MINIATURE:
        return f"model: {name}, a miniature that understands few people; better: viva models fetch {FOR_PEOPLE}"
    return f"model: {name}, the best in the cache; --model names another"


def _is_usable(name: str, needs_whisper: bool) -> bool:
    if name == MOONSHINE and (needs_whisper or importlib.util.find_spec("onnxruntime") is None):
        return False
    model = hub.known(name)
    return model is not None and not model.missing(hub.listed_folder(model))
