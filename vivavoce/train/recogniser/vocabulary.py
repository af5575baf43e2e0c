"""A small byte-level BPE learnt from the corpus, with Whisper's special tokens behind it, written as tokenizer.json."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from vivavoce.models.whisper_tokens import AFTER_LANGUAGES, SECONDS_PER_TIMESTAMP, WhisperTokens

WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s+")
LANGUAGE = "en"
SPELLINGS = 8  # drawn of each word, where merges are dropped

Pair = tuple[str, str]


def byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte, in GPT-2's order: visible Latin-1 first, the rest from U+0100."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible}
    return letters | {byte: chr(256 + index) for index, byte in enumerate(hidden)}


@dataclass
class Vocabulary:
    """Merges in the order they were learnt, and the seconds its timestamps reach to."""

    merges: list[Pair]
    window_seconds: float
    _ranks: dict[Pair, int] = field(init=False, repr=False)
    _ids: dict[str, int] = field(init=False, repr=False)
    _letters: dict[int, str] = field(init=False, repr=False)
    _known: dict[str, list[int]] = field(init=False, repr=False, default_factory=dict)
    _varied: dict[tuple[str, float], list[list[int]]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self._letters = byte_letters()
        pieces = [*self._letters.values(), *("".join(pair) for pair in self.merges)]
        self._ids = {piece: id_ for id_, piece in enumerate(pieces)}

    @classmethod
    def learn(cls, texts: Iterable[str], merges: int, window_seconds: float) -> "Vocabulary":
        """The most frequent pairs of the texts' words, merged one after another."""
        letters = byte_letters()
        counts = Counter(word for text in texts for word in WORDS.findall(" " + text))
        words = [([letters[byte] for byte in word.encode()], count) for word, count in sorted(counts.items())]
        learnt: list[Pair] = []
        while len(learnt) < merges:
            pairs: Counter[Pair] = Counter()
            for pieces, count in words:
                for pair in pairwise(pieces):
                    pairs[pair] += count
            known = {"".join(pair) for pair in learnt}
            best = max((p for p in pairs if "".join(p) not in known), key=lambda p: (pairs[p], p), default=None)
            if best is None or pairs[best] < 2:
                break
            learnt.append(best)
            words = [(_merged(pieces, best), count) for pieces, count in words]
        return cls(learnt, window_seconds)

    @property
    def tokens(self) -> WhisperTokens:
        """Where the special tokens stand."""
        return WhisperTokens.in_order(len(self._ids), [LANGUAGE])

    @property
    def size(self) -> int:
        """All ids: text, special tokens and timestamps."""
        return self.tokens.timestamps + round(self.window_seconds / SECONDS_PER_TIMESTAMP) + 1

    def encode(self, text: str, dropout: float = 0.0, chance: random.Random | None = None) -> list[int]:
        """Ids of a text that begins a segment, so with a space before it. With `dropout`, merges are skipped at random,
        so that a model also learns to spell.
        """
        words = WORDS.findall(" " + text)
        if dropout and chance is not None:
            return [id_ for word in words for id_ in chance.choice(self._spellings(word, dropout, chance))]
        for word in words:
            if word not in self._known:
                self._known[word] = self._encode_word(word, 0.0, random.Random(0))
        return [id_ for word in words for id_ in self._known[word]]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens left out."""
        bytes_of = {letter: byte for byte, letter in self._letters.items()}
        pieces = list(self._ids)
        spelt = "".join(pieces[id_] for id_ in ids if id_ < len(pieces))
        return bytes(bytes_of[letter] for letter in spelt).decode(errors="replace")

    def _spellings(self, word: str, dropout: float, chance: random.Random) -> list[list[int]]:
        """A few drawn spellings of a word, drawn once."""
        if (word, dropout) not in self._varied:
            drawn = [self._encode_word(word, dropout, chance) for _ in range(SPELLINGS)]
            self._varied[word, dropout] = drawn
        return self._varied[word, dropout]

    def _encode_word(self, word: str, dropout: float, chance: random.Random) -> list[int]:
        pieces = [self._letters[byte] for byte in word.encode()]
        while len(pieces) > 1:
            pairs = [p for p in pairwise(pieces) if p in self._ranks]
            if dropout:
                pairs = [p for p in pairs if chance.random() >= dropout]
            if not pairs:
                break
            pieces = _merged(pieces, min(pairs, key=self._ranks.__getitem__))
        return [self._ids[piece] for piece in pieces]

    def write(self, folder: str | Path) -> None:
        """Write `tokenizer.json`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(self._tokenizer(), ensure_ascii=False) + "\n", "utf8")

    @classmethod
    def read(cls, folder: str | Path) -> "Vocabulary":
        """The vocabulary that `write` wrote."""
        tokenizer = json.loads((Path(folder) / "tokenizer.json").read_text("utf8"))
        times = [token for token in tokenizer["added_tokens"] if re.fullmatch(r"<\|\d+\.\d\d\|>", token["content"])]
        merges = [(first, second) for first, second in tokenizer["model"]["merges"]]
        return cls(merges, (len(times) - 1) * SECONDS_PER_TIMESTAMP)

    def special_names(self) -> list[str]:
        """Every special token, in the order of its id."""
        times = range(self.size - self.tokens.timestamps)
        names = ["endoftext", "startoftranscript", LANGUAGE, *AFTER_LANGUAGES]
        return [f"<|{name}|>" for name in names] + [f"<|{time * SECONDS_PER_TIMESTAMP:.2f}|>" for time in times]

    def _tokenizer(self) -> dict[str, Any]:
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = [
            {"id": len(self._ids) + index, "content": name, **flags, "special": not name[2].isdigit()}
            for index, name in enumerate(self.special_names())
        ]
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": self._ids,
            "merges": [list(pair) for pair in self.merges],
        }
        parts = {"truncation": None, "padding": None, "normalizer": None, "post_processor": None}
        return {
            "version": "1.0",
            **parts,
            "added_tokens": added,
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": model,
        }


def _merged(pieces: list[str], pair: Pair) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged
