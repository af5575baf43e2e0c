"""Which languages a model knows, as its checkpoint or the catalogue says."""

import json
from pathlib import Path

from vivavoce.errors import CheckpointError
from vivavoce.hub import BUNDLED, CODEC_FOLDER, GENERATION_CONFIG, bundled, known

LANGUAGES = {"en": "English", "zh": "Mandarin"}
"""By code: those of stacks, demos and bundled questions."""
ENGLISH_PACKAGES = {"hibari", "smollm2"}  # models of other packages


def spoken_languages(name: str) -> tuple[str, ...]:
    """Codes of those of LANGUAGES that a model knows; all of them where nothing says otherwise.

    A checkpoint lists them as `languages` in generation_config.json. Bundled models without a list, and others of this
    project, which have their codec inside, are English. Other names are those of the catalogue. Nothing is fetched.
    """
    if (model := known(name)) is not None:
        return tuple(code for code, language in LANGUAGES.items() if language in model.languages) or tuple(LANGUAGES)
    folder = bundled().get(name) or Path(name).expanduser()
    if listed := checkpoint_languages(folder):
        return listed
    is_english = BUNDLED in folder.parents or (folder / CODEC_FOLDER).is_dir() or name in ENGLISH_PACKAGES
    return ("en",) if is_english else tuple(LANGUAGES)


def checkpoint_languages(folder: Path) -> tuple[str, ...]:
    """The languages that a folder's generation_config.json lists; empty: none."""
    file = folder / GENERATION_CONFIG
    if not file.is_file():
        return ()
    try:
        listed = json.loads(file.read_text(encoding="utf8")).get("languages", [])
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a JSON object ({error})") from error
    if not isinstance(listed, list) or not all(code in LANGUAGES for code in listed):
        raise CheckpointError(f"{file}: languages is {listed!r}, not a list of {', '.join(LANGUAGES)}")
    return tuple(listed)


def language_names(codes: tuple[str, ...]) -> str:
    """The languages of these codes in words."""
    return " and ".join(LANGUAGES[code] for code in codes)
