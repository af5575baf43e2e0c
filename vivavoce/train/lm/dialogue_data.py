"""Training data of the language model: dialogues with encoded utterances of users and replies, and their file."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.errors import InputError
from vivavoce.train.front_desk import Exchange
from vivavoce.train.lm.tool_examples import returned, written

Codes = NDArray[np.int32]


@dataclass(frozen=True)
class Ragged:
    """Ragged array of codes."""

    values: NDArray[np.uint16]
    starts: NDArray[np.int64]  # [array + 1]

    @classmethod
    def of(cls, arrays: Sequence[NDArray[np.integer]]) -> "Ragged":
        starts = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=starts[1:])
        flat = np.concatenate(arrays) if arrays else np.zeros(0)
        return cls(flat.astype(np.uint16), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Codes:
        return self.values[self.starts[index] : self.starts[index + 1]].astype(np.int32)


@dataclass(frozen=True)
class Utterances:
    """Encoded utterances with the index of their sentence and their acoustic condition."""

    sentences: list[str]
    codes: Ragged
    sentence: NDArray[np.int32]  # [utterance]
    condition: NDArray[np.uint8]  # [utterance]: 0 clean, 1 augmented or noisy

    @cached_property
    def _by_sentence(self) -> dict[str, NDArray[np.int64]]:
        order = np.argsort(self.sentence, kind="stable")
        bounds = np.searchsorted(self.sentence[order], np.arange(len(self.sentences) + 1))
        return {text: order[bounds[i] : bounds[i + 1]] for i, text in enumerate(self.sentences)}

    def of(self, sentence: str, condition: int | None = None) -> NDArray[np.int64]:
        """Indices of the utterances of a sentence."""
        indices = self._by_sentence.get(sentence, np.zeros(0, dtype=np.int64))
        return indices if condition is None else indices[self.condition[indices] == condition]

    def pick(self, sentence: str, random_source: np.random.Generator, condition: int | None = None) -> Codes | None:
        """Codes of a random utterance of a sentence, or None."""
        indices = self.of(sentence, condition)
        return self.codes[int(indices[random_source.integers(len(indices))])] if len(indices) else None


@dataclass(frozen=True)
class SpokenDialogues:
    """Dialogues with encoded utterances: user turns in many voices and conditions, replies in one voice."""

    dialogues: list[list[Exchange]]
    user_speech: Utterances
    replies: Utterances
    code_count: int

    @property
    def written(self) -> Iterable[str]:
        """All distinct sentences."""
        spoken = dict.fromkeys([*self.user_speech.sentences, *self.replies.sentences])
        texts = dict.fromkeys([*spoken, *(text for line in self.dialogues for e in line for text in (e.user, e.reply))])
        called = (exchange for line in self.dialogues for exchange in line if exchange.output)
        return texts | dict.fromkeys(text for each in called for text in (written(each), returned(each)))

    def save(self, file: str | Path) -> None:
        lines = json.dumps([[asdict(exchange) for exchange in line] for line in self.dialogues])
        arrays: dict[str, NDArray[np.generic]] = {"code_count": np.array(self.code_count)}
        arrays["dialogues"] = np.frombuffer(lines.encode(), dtype=np.uint8)
        for name, utterances in (("heard", self.user_speech), ("replies", self.replies)):
            arrays[f"{name}_sentences"] = np.frombuffer(json.dumps(utterances.sentences).encode(), dtype=np.uint8)
            arrays[f"{name}_values"], arrays[f"{name}_starts"] = utterances.codes.values, utterances.codes.starts
            arrays[f"{name}_sentence"], arrays[f"{name}_condition"] = utterances.sentence, utterances.condition
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, file: str | Path) -> "SpokenDialogues":
        if not Path(file).is_file():
            raise InputError(f"{file} does not exist; create it with `viva train lm-data`")
        with np.load(file) as stored:
            lines = [[_exchange(entry) for entry in line] for line in json.loads(stored["dialogues"].tobytes())]
            user_speech, replies = (_utterances(stored, name) for name in ("heard", "replies"))
            return cls(lines, user_speech, replies, int(stored["code_count"]))


def _exchange(entry: dict[str, object]) -> Exchange:
    slots = entry["slots"]
    assert isinstance(slots, list)
    texts = {name: str(entry.get(name, "")) for name in ("intent", "user", "reply", "call", "output")}
    return Exchange(**texts, slots=tuple((a, b) for a, b in slots))


def _utterances(stored: "np.lib.npyio.NpzFile", name: str) -> Utterances:
    codes = Ragged(stored[f"{name}_values"], stored[f"{name}_starts"])
    sentences = json.loads(stored[f"{name}_sentences"].tobytes())
    return Utterances(sentences, codes, stored[f"{name}_sentence"], stored[f"{name}_condition"])
