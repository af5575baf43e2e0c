"""Passages of text files, found by BM25, and by what they say where an embedding model is there.

Words are the terms of most scripts, pairs of characters those of Chinese.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vivavoce.errors import InputError
from vivavoce.server.tools.markup import without_markup

SUFFIXES = (".txt", ".md", ".rst", ".html", ".htm", ".csv", ".tsv", ".json", ".yaml", ".yml", ".xml")
MAX_FILES = 5000
MAX_BYTES = 8 << 20  # of all files together
PASSAGE_LENGTH = 700
K1, B = 1.2, 0.75
MIN_SIMILARITY = 0.2  # of a passage and a query, below which they have nothing in common
RANK_OFFSET = 60  # of reciprocal rank fusion, as published

IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
RUN = re.compile(rf"[{IDEOGRAPHS}]+|[^\W_{IDEOGRAPHS}]+")
IDEOGRAPH = re.compile(rf"[{IDEOGRAPHS}]")
PARAGRAPH = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Passage:
    """A part of a file."""

    file: str
    text: str


class TextEmbedder(Protocol):
    """An embedding model."""

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """A unit vector for each text.  # [text, dimension]"""
        ...


class PassageIndex:
    """An inverted index of passages, and their embeddings if there is a model for them."""

    def __init__(self, passages: Sequence[Passage], embedder: TextEmbedder | None = None) -> None:
        self.passages = passages
        texts = [passage.text for passage in passages]
        self._embedded = None if embedder is None else (embedder, embedder.embed(texts))
        self._found: dict[str, list[tuple[int, int]]] = defaultdict(
            list
        )  # by term: passages, and how often it is there
        self._lengths: list[int] = []
        for index, passage in enumerate(passages):
            counts = Counter(terms(passage.text))
            self._lengths.append(counts.total())
            for term, count in counts.items():
                self._found[term].append((index, count))
        self._mean = sum(self._lengths) / max(1, len(self._lengths)) or 1.0

    def search(self, query: str, count: int = 4) -> list[Passage]:
        """The passages that fit best; none where no term of the query is in any, and none says anything like it."""
        rankings = [self._by_terms(query)]
        if self._embedded is not None:
            rankings.append(_by_meaning(query, *self._embedded))
        scores: dict[int, float] = defaultdict(float)
        for ranking in rankings:
            for rank, index in enumerate(ranking):
                scores[index] += 1 / (RANK_OFFSET + rank)
        best = sorted(scores, key=lambda index: (-scores[index], index))[:count]
        return [self.passages[index] for index in best]

    def _by_terms(self, query: str) -> list[int]:
        """Passages that have terms of a query, the best first."""
        scores: dict[int, float] = defaultdict(float)
        for term in set(terms(query)):
            found = self._found.get(term, ())
            weight = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for index, times in found:
                norm = K1 * (1 - B + B * self._lengths[index] / self._mean)
                scores[index] += weight * times * (K1 + 1) / (times + norm)
        return sorted(scores, key=lambda index: (-scores[index], index))


def _by_meaning(query: str, embedder: TextEmbedder, vectors: NDArray[np.float32]) -> list[int]:
    """Passages whose embedding is like that of a query, the best first."""
    similarities: NDArray[Any] = vectors @ embedder.embed([query])[0]
    return [int(index) for index in np.argsort(-similarities) if similarities[index] >= MIN_SIMILARITY]


def terms(text: str) -> Iterator[str]:
    """The terms of a text: words in lower case, and pairs of neighbouring characters of Chinese and Japanese."""
    for match in RUN.finditer(text):
        run = match[0]
        if len(run) == 1 or not IDEOGRAPH.match(run):
            yield run.lower()
        else:
            yield from (first + second for first, second in pairwise(run))


def read_passages(path: Path) -> list[Passage]:
    """The passages of a file, or of all text files in a folder; links that lead out of it are left out."""
    root = path.resolve()
    if not root.exists():
        raise InputError(f"there is no file or folder {str(path)!r}")
    files = [root] if root.is_file() else sorted(_text_files(root))
    if len(files) > MAX_FILES:
        raise InputError(f"{str(path)!r} has {len(files)} text files; {MAX_FILES} are the limit")
    passages, size = list[Passage](), 0
    for file in files:
        size += file.stat().st_size
        if size > MAX_BYTES:
            raise InputError(f"{str(path)!r} has more than {MAX_BYTES >> 20} MiB of text, which is the limit")
        text = file.read_bytes().decode("utf8", "replace")
        if file.suffix.lower() in (".html", ".htm", ".xml"):
            text = without_markup(text)
        name = file.name if root.is_file() else file.relative_to(root).as_posix()
        passages += [Passage(name, each) for each in split_passages(text)]
    if not passages:
        raise InputError(f"{str(path)!r} has no text; files that end with {', '.join(SUFFIXES)} are read")
    return passages


def _text_files(root: Path) -> Iterator[Path]:
    for file in root.rglob("*"):
        is_text = file.suffix.lower() in SUFFIXES and file.is_file()
        if is_text and file.resolve().is_relative_to(root) and not _is_hidden(file.relative_to(root)):
            yield file


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def split_passages(text: str, length: int = PASSAGE_LENGTH) -> list[str]:
    """Neighbouring paragraphs together, up to a length; longer ones are cut between lines, sentences or words."""
    found: list[str] = []
    current = ""
    for paragraph in PARAGRAPH.split(text):
        for piece in _pieces(paragraph.strip(), length):
            if current and len(current) + len(piece) + 2 > length:
                found.append(current)
                current = ""
            current = f"{current}\n\n{piece}" if current else piece
    return [*found, current] if current else found


def _pieces(text: str, length: int) -> Iterator[str]:
    while len(text) > length:
        ends = (text.rfind(mark, length // 2, length) for mark in ("\n", ". ", "。", "！", "？", " "))
        cut = next((end + 1 for end in ends if end >= 0), length)
        yield text[:cut].strip()
        text = text[cut:].strip()
    if text:
        yield text
