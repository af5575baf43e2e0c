"""Lessons for MOSS-Speech: conversations as rows in the chat's format, each row marked with what it teaches.

The system's text stands first, as in live sessions; in a share of the lessons its default stands after all turns,
as the published prompt has it. Two skills have system texts of their own: writing down speech, and reading aloud.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.models.moss_speech.model import MossSpeechConfig
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Modality, MossSpeechPrompt, SpeechTokenizerProtocol
from vivavoce.train.front_desk import Exchange

TRANSCRIBE = "Write down what is said."
READ = "Read this aloud."
SYSTEMS: dict[Modality, tuple[str, ...]] = {
    "speech": (
        DEFAULT_SYSTEM["speech"],
        "You are a helpful voice assistant. Answer the user's questions with spoken responses.",
        "You are the front desk. Answer the guest in speech.",
        "You are the front desk of the Garden Hotel.",
        "You are a helpful assistant.",
        "Be brief and friendly.",
    ),
    "text": (
        DEFAULT_SYSTEM["text"],
        "You are a helpful assistant. Answer the user's questions with text.",
        "You are the front desk. Answer the guest in writing.",
        "You are the front desk of the Garden Hotel.",
        "You are a helpful assistant.",
        "Be brief and friendly.",
    ),
}
CONTEXT, HEARD, WRITTEN, SPOKEN, SAID = range(5)
"""Kinds of rows: nothing to learn; a guest's code; reply text and reply speech to learn; reply speech as context."""
CLOSE = "<|im_end|>\n"
COLUMNS = ("text", "audio", "position", "segment", "kind")
TEXT_ONLY = {"text_text": 1.0}
FULL_MIX = {
    "speech_speech": 0.48,
    "speech_text": 0.13,
    "text_speech": 0.05,
    "text_text": 0.05,
    "mixed": 0.06,
    "transcribe": 0.16,
    "read": 0.07,
}

Rows = NDArray[np.int32]


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


@dataclass
class LMBatch:
    """Rows in the making.  # pieces of [row, 3]: text, audio, kind"""

    pieces: list[Rows] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    length: int = 0

    def add(self, piece: Rows) -> None:
        """Put a piece at the end."""
        self.pieces.append(piece)
        self.length += len(piece)

    def end_turn(self) -> None:
        """Remember that a turn ends here."""
        self.turn_ends.append(self.length)

    def rows(self) -> Rows:
        """All pieces in one."""
        return np.concatenate(self.pieces)


@dataclass(frozen=True)
class LMBatchOptions:
    """How often something happens to a lesson."""

    late_system: float = 0.15
    no_system: float = 0.04
    strange_system: float = 0.08
    interrupted: float = 0.06
    distant: float = 0.2
    """Share of lessons with a gap in their positions, so that far places are met although lines are short."""


class LMBatches:
    """Draws lessons from spoken dialogues, and packs them into batches of one shape."""

    def __init__(
        self,
        config: MossSpeechConfig,
        tokenizer: SpeechTokenizerProtocol,
        data: SpokenDialogues,
        mix: Mapping[str, float] = FULL_MIX,
        strange: Sequence[str] = (),
        habits: LMBatchOptions | None = None,
    ) -> None:
        self.config, self.data, self.strange = config, data, list(strange)
        self.habits = habits or LMBatchOptions()
        self.prompt = MossSpeechPrompt(config, tokenizer)
        self.modes = list(mix)
        self.chances = np.cumsum(list(mix.values())) / sum(mix.values())
        self._written = range(len(data.dialogues))
        self._spoken = [i for i in self._written if all(len(data.heard.of(e.user)) for e in data.dialogues[i])]
        self._texts: dict[tuple[str, int], Rows] = {}
        self._open_speech = _marked(self.prompt.open_speech(), CONTEXT)

    def draw(self, random_source: np.random.Generator) -> LMBatch:
        """One lesson of a mode drawn by the mix."""
        mode = self.modes[int(np.searchsorted(self.chances, random_source.random()))]
        if mode == "transcribe":
            return self.transcription(random_source)
        if mode == "read":
            return self.reading(random_source)
        lines = self._written if mode == "text_text" else self._spoken
        dialogue = self.data.dialogues[lines[int(random_source.integers(len(lines)))]]
        return self.conversation(dialogue, mode, random_source)

    def conversation(self, dialogue: Sequence[Exchange], mode: str, random_source: np.random.Generator) -> LMBatch:
        """A dialogue in which each side speaks or writes, by the mode; what was never spoken is written."""
        lesson = LMBatch()
        sides = [self._sides(mode, random_source) for _ in dialogue]
        system, is_late = self._system(sides[-1][1], random_source)
        if system is not None and not is_late:
            self._text_turn(lesson, "system", system)
        for number, (exchange, (hears, says)) in enumerate(zip(dialogue, sides, strict=True)):
            is_last = number == len(dialogue) - 1
            self._user_turn(lesson, exchange.user, hears, random_source)
            if system is not None and is_late and is_last:
                self._text_turn(lesson, "system", system)
            is_cut = not is_last and random_source.random() < self.habits.interrupted
            self._reply(lesson, exchange.reply, says, random_source, learned=is_last or not is_late, is_cut=is_cut)
        return lesson

    def transcription(self, random_source: np.random.Generator) -> LMBatch:
        """Speech of a guest, or now and then of the desk, and its words."""
        utterances = self.data.heard if random_source.random() < 0.7 else self.data.replies
        chosen = int(random_source.integers(len(utterances.codes)))
        lesson = LMBatch()
        self._text_turn(lesson, "system", TRANSCRIBE)
        self._speech_turn(lesson, utterances.codes[chosen])
        self._reply(lesson, utterances.sentences[utterances.sentence[chosen]], "text", random_source)
        return lesson

    def reading(self, random_source: np.random.Generator) -> LMBatch:
        """A sentence, and the desk's voice reading it."""
        replies = self.data.replies
        sentence = replies.sentences[replies.sentence[int(random_source.integers(len(replies.codes)))]]
        lesson = LMBatch()
        self._text_turn(lesson, "system", READ)
        self._text_turn(lesson, "user", sentence)
        self._reply(lesson, sentence, "speech", random_source)
        return lesson

    def batch(self, random_source: np.random.Generator, lines: int, length: int) -> Tensor:
        """Lessons packed into lines, each lesson a segment of its own.  # [line, row, column of COLUMNS] int32"""
        packed = np.zeros((lines, length, len(COLUMNS)), dtype=np.int32)
        packed[..., 0], packed[..., 1] = self.config.pad_token_id, self.config.audio_pad_token_id
        packed[..., 2] = np.arange(length)  # fillers have places of their own too
        filled = np.zeros(lines, dtype=np.int64)
        misses = segment = 0
        while misses < 4 and filled.min() < length - 40:
            lesson = self.draw(random_source)
            rows, positions = lesson.rows()[:length], self._positions(lesson, random_source)[:length]
            line = next((i for i in range(lines) if filled[i] + len(rows) <= length), None)
            if line is None:
                misses += 1
                continue
            segment += 1
            place = packed[line, filled[line] : filled[line] + len(rows)]
            place[:, :2], place[:, 2], place[:, 3], place[:, 4] = rows[:, :2], positions, segment, rows[:, 2]
            filled[line] += len(rows)
        return torch.from_numpy(packed)

    def _positions(self, lesson: LMBatch, random_source: np.random.Generator) -> NDArray[np.int64]:
        positions = np.arange(lesson.length)
        room = self.config.max_position_embeddings - lesson.length
        if lesson.turn_ends and room > 0 and random_source.random() < self.habits.distant:
            gap_at = lesson.turn_ends[int(random_source.integers(len(lesson.turn_ends)))]
            positions[gap_at:] += int(random_source.integers(room))
        return positions

    def _sides(self, mode: str, random_source: np.random.Generator) -> tuple[Modality, Modality]:
        if mode == "mixed":
            chances = random_source.random(2)
            return ("speech" if chances[0] < 0.6 else "text"), ("speech" if chances[1] < 0.6 else "text")
        hears, says = mode.split("_")
        return ("speech" if hears == "speech" else "text"), ("speech" if says == "speech" else "text")

    def _system(self, says: Modality, random_source: np.random.Generator) -> tuple[str | None, bool]:
        """The system's text, if there is one, and whether it stands late, before the last reply."""
        habits, chance = self.habits, random_source.random()
        if chance < habits.late_system:
            return DEFAULT_SYSTEM[says], True
        if chance < habits.late_system + habits.no_system:
            return None, False
        if self.strange and chance < habits.late_system + habits.no_system + habits.strange_system:
            return self.strange[int(random_source.integers(len(self.strange)))], False
        return SYSTEMS[says][int(random_source.integers(len(SYSTEMS[says])))], False

    def _user_turn(self, lesson: LMBatch, text: str, hears: Modality, random_source: np.random.Generator) -> None:
        codes = self.data.heard.pick(text, random_source) if hears == "speech" else None
        if codes is None:
            self._text_turn(lesson, "user", typed(text, random_source))
        else:
            self._speech_turn(lesson, codes)

    def _text_turn(self, lesson: LMBatch, role: str, text: str) -> None:
        lesson.add(self._text(f"<|im_start|>{role}\n"))
        lesson.add(self._text(text))
        lesson.add(self._text(CLOSE))
        lesson.end_turn()

    def _speech_turn(self, lesson: LMBatch, codes: Codes) -> None:
        lesson.add(self._text("<|im_start|>user\n"))
        lesson.add(self._open_speech)
        lesson.add(self._speech(codes, HEARD))
        lesson.add(self._text(CLOSE))
        lesson.end_turn()

    def _reply(
        self,
        lesson: LMBatch,
        text: str,
        says: Modality,
        random_source: np.random.Generator,
        learned: bool = True,
        is_cut: bool = False,
    ) -> None:
        codes = self.data.replies.pick(text, random_source, condition=0) if says == "speech" else None
        lesson.add(self._text("<|im_start|>assistant\n"))
        if codes is None:
            lesson.add(self._text(text, WRITTEN if learned else CONTEXT))
        elif is_cut:  # a guest spoke into it: what was not heard is forgotten, and nothing is learned of it
            lesson.add(self._open_speech)
            lesson.add(self._speech(codes[: int(random_source.integers(1, len(codes)))], SAID))
        else:
            lesson.add(self._open_speech)
            lesson.add(self._speech(codes, SPOKEN if learned else SAID))
        ending = CONTEXT if not learned or (is_cut and codes is not None) else WRITTEN
        lesson.add(self._text("<|im_end|>", ending))
        lesson.add(self._text("\n"))
        lesson.end_turn()

    def _speech(self, codes: Codes, kind: int) -> Rows:
        """Codes and the row that ends them; a guest's end of speech is not to be learned."""
        rows = np.empty((len(codes) + 1, 3), dtype=np.int32)
        rows[:, 0], rows[:-1, 1], rows[:, 2] = self.config.modality_pad_token_id, codes, kind
        rows[-1, 1] = self.config.eosp_token_id
        if kind != SPOKEN:
            rows[-1, 2] = CONTEXT
        return rows

    def _text(self, text: str, kind: int = CONTEXT) -> Rows:
        if (text, kind) not in self._texts:
            self._texts[text, kind] = _marked(self.prompt.text(text), kind)
        return self._texts[text, kind]


def typed(text: str, random_source: np.random.Generator) -> str:
    """A sentence as people type it: carefully, without its full stop, or without capitals too."""
    style = int(random_source.integers(3))
    if style == 0:
        return text
    bare = text.rstrip(".?!")
    return bare if style == 1 else bare.replace(",", "").lower()


def _marked(rows: Sequence[tuple[int, ...]], kind: int) -> Rows:
    return np.array([(*row, kind) for row in rows], dtype=np.int32).reshape(-1, 3)
