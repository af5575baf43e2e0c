"""Speech of the language model's dialogues: which utterances are callers to learn from, questions, and replies."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.train.corpus import Corpus
from vivavoce.train.voices import HELD_OUT, TEACHER

CALLERS, QUESTIONS, REPLIES, UNUSED = range(4)
PARTS = {"callers": CALLERS, "questions": QUESTIONS, "teacher": REPLIES}  # of Kokoro's corpora


@dataclass(frozen=True)
class DialogueSpeech:
    """Utterances, and what each is for."""

    corpus: Corpus
    kinds: NDArray[np.int64]  # [utterance]

    @classmethod
    def joined(cls, parts: Sequence["DialogueSpeech"]) -> "DialogueSpeech":
        """Several together. A question that several have is asked by one of them, each of them as often."""
        kinds = [part.kinds.copy() for part in parts]
        askers: dict[str, list[tuple[int, int]]] = {}
        for number, part in enumerate(parts):
            for index in np.flatnonzero(part.kinds == QUESTIONS).tolist():
                askers.setdefault(part.corpus.texts[index], []).append((number, index))
        for text, asked in askers.items():
            of_parts = sorted({number for number, _ in asked})
            chosen = of_parts[zlib.crc32(text.encode()) % len(of_parts)]
            for number, index in asked:
                if number != chosen:
                    kinds[number][index] = UNUSED
        return cls(Corpus.joined([part.corpus for part in parts]), np.concatenate(kinds))


def kinds_of(voices: Sequence[str]) -> NDArray[np.int64]:
    """What utterances of the synthesizers are for, by their voice."""
    held_out = {voice.name for voice in HELD_OUT}
    return np.array(
        [QUESTIONS if name in held_out else REPLIES if name == TEACHER.name else CALLERS for name in voices]
    )


def kokoro_speech(folder: Path, has_replies: bool = True) -> DialogueSpeech:
    """The utterances of Kokoro's corpora in a folder, with or without the replies."""
    parts = {part: kind for part, kind in PARTS.items() if has_replies or kind != REPLIES}
    corpora = {kind: Corpus.load(folder / part) for part, kind in parts.items()}
    kinds = np.concatenate([np.full(len(corpus), kind) for kind, corpus in corpora.items()])
    return DialogueSpeech(Corpus.joined(list(corpora.values())), kinds)
