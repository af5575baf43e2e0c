"""Text to ids and back: Hugging Face `tokenizer.json`, and SentencePiece BPE models read without their library."""

import functools
import heapq
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vivavoce.errors import CheckpointError, MissingDependencyError


class TextTokenizer:
    """A byte-level BPE tokenizer as Hugging Face publishes it; special tokens are recognised, never added."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @classmethod
    def load(cls, folder: str | Path) -> "TextTokenizer":
        """The tokenizer of a checkpoint folder."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependencyError("text needs the tokenizers package: pip install tokenizers") from error
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist; the folder must hold the checkpoint's tokenizer files")
        try:
            backend = Tokenizer.from_file(str(file))
            backend.no_truncation()  # which the files of sentence encoders ask for, as they do for padding
            backend.no_padding()
            return cls(backend)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} is not a tokenizer ({error})") from error

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens left out."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def id_of(self, token: str) -> int | None:
        """The id of a special token, or None."""
        id_: int | None = self._backend.token_to_id(token)
        return id_

    def to_json(self) -> str:
        """The tokenizer in Hugging Face's format."""
        text: str = self._backend.to_str()
        return text

    def bytes_of(self, id: int) -> bytes:
        """The bytes of one token, which may be a part of a character."""
        token: str | None = self._backend.id_to_token(id)
        values = _byte_values()
        return bytes(values[letter] for letter in token or "" if letter in values)


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in GPT-2's kind of vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@functools.cache
def _byte_values() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(byte_letters())}


SPACE = "▁"
NORMAL, UNKNOWN, USER_DEFINED, BYTE = 1, 2, 4, 6  # kinds of pieces; the others are never produced
BPE = 2
WORD_CACHE_SIZE = 10_000
PIECES, TRAINER, NORMALISER = 1, 2, 3  # fields of the model, then of its parts
PIECE_TEXT, PIECE_SCORE, PIECE_KIND = 1, 2, 3
MODEL_KIND = 3
CHARACTER_MAP, DUMMY_PREFIX, COLLAPSE_SPACES = 2, 3, 4


class SentencePieceTokenizer:
    """A SentencePiece BPE tokenizer; nothing is added at either end."""

    def __init__(self, pieces: list[tuple[str, float, int]], normaliser: "Normaliser") -> None:
        self.size = len(pieces)
        self._normaliser = normaliser
        self._scores = {text: (id, score) for id, (text, score, kind) in enumerate(pieces) if kind == NORMAL}
        self._symbols = {text: id for id, (text, _, kind) in enumerate(pieces) if kind == USER_DEFINED}
        self._bytes = [id for id, (_, _, kind) in enumerate(pieces) if kind == BYTE]
        self._unknown = next((id for id, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN), 0)
        # If no piece spans a space, words are independent, and their ids can be cached.
        self._are_words_independent = not any(SPACE in text[1:] for text in self._scores)
        self._word_ids = functools.lru_cache(WORD_CACHE_SIZE)(self._ids_of_word)

    @classmethod
    def load(cls, source: str | Path) -> "SentencePieceTokenizer":
        """The tokenizer of a checkpoint folder, or of a `.model` file."""
        file = Path(source) / "tokenizer.model" if Path(source).is_dir() else Path(source)
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist; the folder must hold the checkpoint's tokenizer.model")
        try:
            pieces, normaliser, kind = _read(file.read_bytes())
        except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
            raise CheckpointError(f"{file} is not a SentencePiece model ({error}); fetch it again") from error
        if kind != BPE or not pieces:
            raise CheckpointError(f"{file} is not a SentencePiece model of the BPE kind")
        return cls(pieces, normaliser)

    def encode(self, text: str, symbols: bool = True) -> list[int]:
        """The ids of a text. Without `symbols`, user-defined symbols are treated as plain text."""
        normal = self._normaliser(text, self._symbols if symbols else {})
        words = re.split(f"(?={SPACE})", normal) if self._are_words_independent else [normal]
        return [id for word in words for id in self._word_ids(word, symbols)]

    def _ids_of_word(self, word: str, symbols: bool) -> list[int]:
        known = self._symbols if symbols else {}
        return [id for part in self._joined(word, known) for id in self._ids(part, known)]

    def _ids(self, symbol: str, known: dict[str, int]) -> list[int]:
        if symbol in known:
            return [known[symbol]]
        if symbol in self._scores:
            return [self._scores[symbol][0]]
        if self._bytes:
            return [self._bytes[byte] for byte in symbol.encode()]
        return [self._unknown]

    def _joined(self, text: str, known: dict[str, int]) -> Iterator[str]:
        """BPE merges: the piece of the highest score first, the leftmost of equals."""
        parts: list[str | None] = list(_split(text, known))
        following = list(range(1, len(parts) + 1))
        previous = list(range(-1, len(parts) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def propose(left: int, right: int) -> None:
            if left < 0 or right >= len(parts) or parts[left] in known or parts[right] in known:
                return
            joined = f"{parts[left]}{parts[right]}"
            if joined in self._scores:
                heapq.heappush(queue, (-self._scores[joined][1], left, right, joined))

        for left in range(len(parts) - 1):
            propose(left, left + 1)
        while queue:
            _, left, right, joined = heapq.heappop(queue)
            if parts[left] is None or parts[right] is None or f"{parts[left]}{parts[right]}" != joined:
                continue  # stale: one of the two was merged already
            parts[left], parts[right] = joined, None
            following[left] = following[right]
            if following[right] < len(parts):
                previous[following[right]] = left
            propose(previous[left], left)
            propose(left, following[left])
        return (part for part in parts if part is not None)


@dataclass(frozen=True)
class Normaliser:
    """The model's character map, a double-array trie over UTF-8 bytes, and its white-space rules."""

    units: list[int] = field(default_factory=list)
    strings: bytes = b""
    adds_dummy_prefix: bool = True
    collapses_spaces: bool = True

    def __call__(self, text: str, known: dict[str, int]) -> str:
        """The normalised text: spaces are `▁`, one before the first word."""
        encoded = text.encode("utf8", errors="replace")
        firsts = {symbol.encode()[0] for symbol in known}
        out: list[str] = []
        start = 0
        while start < len(encoded):
            symbol = _symbol_at(encoded, start, known) if encoded[start] in firsts else None
            if symbol is not None:
                replacement, length = symbol, len(symbol.encode())
            else:
                replacement, length = self._replaced(encoded, start)
            out.append(replacement)
            start += length
        joined = "".join(out)
        if self.collapses_spaces:
            joined = " ".join(word for word in joined.split(" ") if word)
        if not joined:
            return ""
        return (SPACE if self.adds_dummy_prefix else "") + joined.replace(" ", SPACE)

    def _replaced(self, encoded: bytes, start: int) -> tuple[str, int]:
        """The replacement of the longest mapped sequence at `start` and its length; else one character."""
        offset, length = self._match(encoded, start)
        if length:
            return self.strings[offset : self.strings.index(b"\0", offset)].decode(), length
        length = _character_length(encoded[start])
        return encoded[start : start + length].decode(), length

    def _match(self, encoded: bytes, start: int) -> tuple[int, int]:
        """Offset of the replacement of the longest mapped sequence, and the sequence's length in bytes."""
        if not self.units:
            return 0, 0
        match = (0, 0)
        node = _children(self.units[0])
        for index in range(start, len(encoded)):
            node ^= encoded[index]
            unit = self.units[node]
            if unit & 0x800000FF != encoded[index]:
                break
            node ^= _children(unit)
            if unit >> 8 & 1:  # end of a sequence; its value is the first child
                match = (self.units[node] & 0x7FFFFFFF, index + 1 - start)
        return match


def _children(unit: int) -> int:
    """Offset from a trie node to its children."""
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _character_length(first: int) -> int:
    """Bytes of a UTF-8 character by its first byte."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _symbol_at(encoded: bytes, start: int, known: dict[str, int]) -> str | None:
    """The longest user-defined symbol at this byte."""
    return max((symbol for symbol in known if encoded.startswith(symbol.encode(), start)), key=len, default=None)


def _split(text: str, known: dict[str, int]) -> Iterator[str]:
    """Single characters and whole symbols."""
    firsts = {symbol[0] for symbol in known}
    start = 0
    while start < len(text):
        part = text[start]
        if part in firsts:
            candidates = (symbol for symbol in known if text.startswith(symbol, start))
            part = max(candidates, key=len, default=part)
        yield part
        start += len(part)


def _read(content: bytes) -> tuple[list[tuple[str, float, int]], Normaliser, int]:
    """Pieces, normaliser and kind of a serialised model."""
    pieces: list[tuple[str, float, int]] = []
    normaliser, model_kind = Normaliser(), 1
    for number, value in _fields(content):
        if number == PIECES:
            piece = dict(_fields(_bytes(value)))
            score = struct.unpack("<f", _bytes(piece.get(PIECE_SCORE, bytes(4))))[0]
            kind = piece.get(PIECE_KIND, NORMAL)
            pieces.append((_bytes(piece[PIECE_TEXT]).decode(), score, kind if isinstance(kind, int) else NORMAL))
        elif number == TRAINER:
            model_kind = int(dict(_fields(_bytes(value))).get(MODEL_KIND, 1))
        elif number == NORMALISER:
            normaliser = _normaliser(dict(_fields(_bytes(value))))
    return pieces, normaliser, model_kind


def _normaliser(fields: dict[int, int | bytes]) -> Normaliser:
    character_map = _bytes(fields.get(CHARACTER_MAP, b""))
    flags = bool(fields.get(DUMMY_PREFIX, 1)), bool(fields.get(COLLAPSE_SPACES, 1))
    if not character_map:
        return Normaliser([], b"", *flags)
    size = 4 + struct.unpack_from("<I", character_map)[0]
    units = np.frombuffer(character_map[4:size], dtype="<u4")
    return Normaliser(units.tolist(), character_map[size:], *flags)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: number, and an integer or the bytes."""
    start = 0
    while start < len(message):
        key, start = _varint(message, start)
        kind = key & 7
        if kind == 0:
            value, start = _varint(message, start)
            yield key >> 3, value
            continue
        if kind == 2:
            length, start = _varint(message, start)
        else:
            length = {1: 8, 5: 4}[kind]
        if start + length > len(message):
            raise ValueError("it ends in the middle of a field")
        yield key >> 3, message[start : start + length]
        start += length


def _varint(message: bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[start]
        start += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, start


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise TypeError("a number where bytes are expected")
    return value
