"""Recordings with what is said in them, for measuring recognition."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vivavoce import hub
from vivavoce.audio.files import read
from vivavoce.errors import InputError
from vivavoce.train.corpus import Corpus

RATE = 16_000
BUNDLED = hub.BUNDLED / "questions"
INDEX = "questions.json"


@dataclass(frozen=True)
class LabelledRecording:
    """A recording at 16 kHz and its text."""

    samples: torch.Tensor  # [time]
    text: str

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / RATE


def spoken_sentences(source: Path | None = None, most: int | None = None) -> list[LabelledRecording]:
    """The bundled questions; a folder's, by its `questions.json` or by a .txt beside each sound; or a corpus's."""
    found = list(_of_corpus(source) if source is not None and not source.is_dir() else _of_folder(source or BUNDLED))
    if not found:
        raise InputError(f"{source or BUNDLED} holds no sound with a text; put NAME.txt beside NAME.wav")
    return found[:most]


def _of_corpus(path: Path) -> Iterator[LabelledRecording]:
    corpus = Corpus.load(path)
    for number in range(len(corpus)):
        samples, text, _ = corpus[number]
        yield LabelledRecording(torch.from_numpy(samples), text)


def _of_folder(folder: Path) -> Iterator[LabelledRecording]:
    index = folder / INDEX
    if index.is_file():
        listed = [(folder / one["file"], one["text"]) for one in json.loads(index.read_text(encoding="utf8"))]
    else:
        pairs = [(next(folder.glob(f"{text.stem}.[!t]*"), None), text) for text in sorted(folder.glob("*.txt"))]
        listed = [(sound, text.read_text(encoding="utf8")) for sound, text in pairs if sound is not None]
    for sound, text in listed:
        yield LabelledRecording(torch.from_numpy(read(sound, rate=RATE).samples[0].copy()), text.strip())
