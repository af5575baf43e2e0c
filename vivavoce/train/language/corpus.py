"""Spoken dialogues as codes: what guests say in many voices, the desk's replies in one, and who answers what."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.errors import InputError
from vivavoce.train.front_desk import Exchange

Codes = NDArray[np.int32]


@dataclass(frozen=True)
class Ragged:
    """Many arrays of codes in one."""

    values: NDArray[np.uint16]
    starts: NDArray[np.int64]  # one more than there are arrays

    @classmethod
    def of(cls, arrays: Sequence[NDArray[np.integer]]) -> "Ragged":
        """Put arrays one behind the other."""
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
    """Sentences as codes; `sentence` and `condition` of each say which words these are, and how they were heard."""

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
        """The utterances of a sentence; none where it was never spoken."""
        found = self._by_sentence.get(sentence, np.zeros(0, dtype=np.int64))
        return found if condition is None else found[self.condition[found] == condition]

    def pick(self, sentence: str, random_source: np.random.Generator, condition: int | None = None) -> Codes | None:
        """The codes of one utterance of a sentence, or None where it was never spoken."""
        found = self.of(sentence, condition)
        return self.codes[int(found[random_source.integers(len(found))])] if len(found) else None


@dataclass(frozen=True)
class SpokenDialogues:
    """Dialogues with what of them was spoken: guests in many voices and conditions, replies and reading in one."""

    dialogues: list[list[Exchange]]
    heard: Utterances
    replies: Utterances
    code_count: int

    @property
    def written(self) -> Iterable[str]:
        """Every sentence that a reader of these dialogues meets."""
        spoken = dict.fromkeys([*self.heard.sentences, *self.replies.sentences])
        return dict.fromkeys([*spoken, *(text for line in self.dialogues for e in line for text in (e.user, e.reply))])

    def save(self, file: str | Path) -> None:
        """Write one compressed file."""
        lines = json.dumps([[asdict(exchange) for exchange in line] for line in self.dialogues])
        arrays: dict[str, NDArray[np.generic]] = {"code_count": np.array(self.code_count)}
        arrays["dialogues"] = np.frombuffer(lines.encode(), dtype=np.uint8)
        for name, utterances in (("heard", self.heard), ("replies", self.replies)):
            arrays[f"{name}_sentences"] = np.frombuffer(json.dumps(utterances.sentences).encode(), dtype=np.uint8)
            arrays[f"{name}_values"], arrays[f"{name}_starts"] = utterances.codes.values, utterances.codes.starts
            arrays[f"{name}_sentence"], arrays[f"{name}_condition"] = utterances.sentence, utterances.condition
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, file: str | Path) -> "SpokenDialogues":
        """Read what `save` wrote."""
        if not Path(file).is_file():
            raise InputError(f"{file} does not exist; make it with: viva train lm-data")
        with np.load(file) as kept:
            lines = [[_exchange(given) for given in line] for line in json.loads(kept["dialogues"].tobytes())]
            heard, replies = (_utterances(kept, name) for name in ("heard", "replies"))
            return cls(lines, heard, replies, int(kept["code_count"]))


def _exchange(given: dict[str, object]) -> Exchange:
    slots = given["slots"]
    assert isinstance(slots, list)
    return Exchange(str(given["intent"]), str(given["user"]), str(given["reply"]), tuple((a, b) for a, b in slots))


def _utterances(kept: "np.lib.npyio.NpzFile", name: str) -> Utterances:
    codes = Ragged(kept[f"{name}_values"], kept[f"{name}_starts"])
    sentences = json.loads(kept[f"{name}_sentences"].tobytes())
    return Utterances(sentences, codes, kept[f"{name}_sentence"], kept[f"{name}_condition"])
