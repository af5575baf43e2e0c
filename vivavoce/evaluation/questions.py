"""The bundled spoken questions: held-out phrasings in held-out voices, with the right replies.

The English ones are in the folder itself, those of another language in a folder of its code.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from vivavoce import hub
from vivavoce.errors import InputError

QUESTIONS = hub.BUNDLED / "questions"
INDEX = "questions.json"


@dataclass(frozen=True)
class QuestionRecording:
    """An audio file with its text, voice and the expected reply."""

    file: str
    text: str
    reply: str
    intent: str
    voice: str
    slots: tuple[tuple[str, str], ...] = ()


def question_folder(language: str = "en") -> Path:
    """The folder of the bundled questions in a language."""
    folders = {"en": QUESTIONS} | {index.parent.name: index.parent for index in sorted(QUESTIONS.glob(f"*/{INDEX}"))}
    if language not in folders:
        raise InputError(f"there are no bundled questions in {language!r}, only in {', '.join(folders)}")
    return folders[language]


def bundled_questions(language: str = "en") -> list[QuestionRecording]:
    """The bundled questions in a language; their files are in `question_folder`."""
    entries = json.loads((question_folder(language) / INDEX).read_text(encoding="utf8"))
    return [
        QuestionRecording(**entry | {"slots": tuple((name, value) for name, value in entry["slots"])})
        for entry in entries
    ]
