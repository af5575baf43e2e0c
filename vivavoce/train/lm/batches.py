"""Batches of the language model: conversations packed as rows in the chat format.

The system text comes first, as in live sessions; in a share of the examples its default comes before the last reply, as
in the published prompt. Transcription and reading aloud have separate system texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.models.moss_speech.model import MossSpeechConfig
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Modality, MossSpeechPrompt, SpeechTokenizerProtocol
from vivavoce.train.front_desk import Exchange
from vivavoce.train.lm.dialogue_data import Codes, SpokenDialogues
from vivavoce.train.lm.tool_examples import (
    DECISION_SHARES,
    DECLINED,
    Offers,
    has_tools,
    kind_of_decision,
    returned,
    tool_instructions,
    written,
)

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
CONTEXT, USER_SPEECH, REPLY_TEXT, REPLY_SPEECH, REPLY_SPEECH_CONTEXT = range(5)
"""Kinds of rows; only user speech, reply text and reply speech have a loss."""
CLOSE = "<|im_end|>\n"
COLUMNS = ("text", "audio", "position", "segment", "kind")
TOOL_INSTRUCTIONS = 400  # distinct ones
TEXT_ONLY = {"text_text": 0.85, "text_tools": 0.15}
FULL_MIX = {
    "speech_speech": 0.48,
    "speech_text": 0.13,
    "text_speech": 0.05,
    "text_text": 0.05,
    "mixed": 0.06,
    "transcribe": 0.16,
    "read": 0.07,
    "speech_tools": 0.11,
    "text_tools": 0.04,
}

Rows = NDArray[np.int32]


@dataclass
class LMExample:
    """One training conversation under construction.  # pieces of [row, 3]: text, audio, kind"""

    pieces: list[Rows] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    length: int = 0

    def add(self, piece: Rows) -> None:
        self.pieces.append(piece)
        self.length += len(piece)

    def end_turn(self) -> None:
        self.turn_ends.append(self.length)

    def rows(self) -> Rows:
        return np.concatenate(self.pieces)


@dataclass(frozen=True)
class LMBatchOptions:
    """Probabilities of variations of an example."""

    late_system: float = 0.15
    no_system: float = 0.04
    other_system: float = 0.12
    tool_instructions: float = 0.6
    """Of decisions on tools."""
    interrupted: float = 0.06
    position_gap: float = 0.2
    """Share of examples with a gap in their positions, so that large positions are trained too."""


class LMBatches:
    """Draws examples from spoken dialogues and packs them into batches of one shape."""

    def __init__(
        self,
        config: MossSpeechConfig,
        tokenizer: SpeechTokenizerProtocol,
        data: SpokenDialogues,
        mix: Mapping[str, float] = FULL_MIX,
        other_systems: Sequence[str] = (),
        options: LMBatchOptions | None = None,
    ) -> None:
        self.config, self.data, self.other_systems = config, data, list(other_systems)
        self.options = options or LMBatchOptions()
        self.prompt = MossSpeechPrompt(config, tokenizer)
        self._written = range(len(data.dialogues))
        self._spoken = [i for i in self._written if all(len(data.user_speech.of(e.user)) for e in data.dialogues[i])]
        self._decisions: dict[Modality, dict[str, list[tuple[int, int]]]] = {
            "speech": self._turns_by_decision(self._spoken),
            "text": self._turns_by_decision(self._written),
        }
        is_possible = {f"{modality}_tools": bool(turns) for modality, turns in self._decisions.items()}
        shares = {mode: share for mode, share in mix.items() if is_possible.get(mode, True)}
        self.modes = list(shares)
        self.cumulative_shares = np.cumsum(list(shares.values())) / sum(shares.values())
        self.offers = Offers()
        self._instructions = tool_instructions(TOOL_INSTRUCTIONS, seed=1)
        self._texts: dict[tuple[str, int], Rows] = {}
        self._open_speech = _with_kind(self.prompt.open_speech(), CONTEXT)

    def draw(self, random_source: np.random.Generator) -> LMExample:
        """A random example of a mode drawn from the mix."""
        mode = self.modes[int(np.searchsorted(self.cumulative_shares, random_source.random()))]
        if mode == "transcribe":
            return self.transcription(random_source)
        if mode == "read":
            return self.reading(random_source)
        if mode.endswith("_tools"):
            return self.decision("speech" if mode.startswith("speech") else "text", random_source)
        lines = self._written if mode == "text_text" else self._spoken
        dialogue = self.data.dialogues[lines[int(random_source.integers(len(lines)))]]
        return self.conversation(dialogue, mode, random_source)

    def conversation(self, dialogue: Sequence[Exchange], mode: str, random_source: np.random.Generator) -> LMExample:
        """A dialogue with speech or text on each side by the mode; text where there is no utterance."""
        example = LMExample()
        sides = [self._sides(mode, random_source) for _ in dialogue]
        system, is_late = self._system(sides[-1][1], random_source)
        if system is not None and not is_late:
            self._text_turn(example, "system", system)
        for number, (exchange, (user_modality, reply_modality)) in enumerate(zip(dialogue, sides, strict=True)):
            is_last = number == len(dialogue) - 1
            self._user_turn(example, exchange.user, user_modality, random_source)
            self._call_turns(example, exchange)
            if system is not None and is_late and is_last:
                self._text_turn(example, "system", system)
            is_interrupted = not is_last and random_source.random() < self.options.interrupted
            self._reply(
                example,
                exchange.reply,
                reply_modality,
                random_source,
                has_loss=is_last or not is_late,
                is_interrupted=is_interrupted,
            )
        return example

    def decision(self, user_modality: Modality, random_source: np.random.Generator) -> LMExample:
        """A dialogue up to a user's turn, tools that are offered, and the call or that there is none."""
        turns = self._decisions[user_modality]
        shares = np.array([DECISION_SHARES[name] for name in turns])
        name = list(turns)[int(random_source.choice(len(shares), p=shares / shares.sum()))]
        line, last = turns[name][int(random_source.integers(len(turns[name])))]
        earlier, exchange = self.data.dialogues[line][:last], self.data.dialogues[line][last]
        example = LMExample()
        system, _ = self._system("speech", random_source)
        if random_source.random() < self.options.tool_instructions:
            system = self._instructions[int(random_source.integers(len(self._instructions)))]
        if system is not None:
            self._text_turn(example, "system", system)
        for each in earlier:
            self._user_turn(example, each.user, user_modality, random_source)
            self._call_turns(example, each)
            self._reply(example, each.reply, user_modality, random_source, has_loss=False)
        self._user_turn(example, exchange.user, user_modality, random_source)
        offered, decided = self.offers.draw(exchange, random_source)
        self._text_turn(example, "system", offered)
        self._reply(example, decided, "text", random_source)
        return example

    def transcription(self, random_source: np.random.Generator) -> LMExample:
        """Transcription of a user utterance or a reply."""
        utterances = self.data.user_speech if random_source.random() < 0.7 else self.data.replies
        chosen = int(random_source.integers(len(utterances.codes)))
        example = LMExample()
        self._text_turn(example, "system", TRANSCRIBE)
        self._speech_turn(example, utterances.codes[chosen])
        self._reply(example, utterances.sentences[utterances.sentence[chosen]], "text", random_source)
        return example

    def reading(self, random_source: np.random.Generator) -> LMExample:
        """A sentence read aloud by the reply voice."""
        replies = self.data.replies
        sentence = replies.sentences[replies.sentence[int(random_source.integers(len(replies.codes)))]]
        example = LMExample()
        self._text_turn(example, "system", READ)
        self._text_turn(example, "user", sentence)
        self._reply(example, sentence, "speech", random_source)
        return example

    def batch(self, random_source: np.random.Generator, lines: int, length: int) -> Tensor:
        """Examples packed into lines, each one segment.  # [line, row, column of COLUMNS] int32"""
        packed = np.zeros((lines, length, len(COLUMNS)), dtype=np.int32)
        packed[..., 0], packed[..., 1] = self.config.pad_token_id, self.config.audio_pad_token_id
        packed[..., 2] = np.arange(length)  # padding rows have positions too
        filled = np.zeros(lines, dtype=np.int64)
        misses = segment = 0
        while misses < 4 and filled.min() < length - 40:
            example = self.draw(random_source)
            rows, positions = example.rows()[:length], self._positions(example, random_source)[:length]
            line = next((i for i in range(lines) if filled[i] + len(rows) <= length), None)
            if line is None:
                misses += 1
                continue
            segment += 1
            span = packed[line, filled[line] : filled[line] + len(rows)]
            span[:, :2], span[:, 2], span[:, 3], span[:, 4] = (
                rows[:, :2],
                positions,
                segment,
                rows[:, 2],
            )
            filled[line] += len(rows)
        return torch.from_numpy(packed)

    def _positions(self, example: LMExample, random_source: np.random.Generator) -> NDArray[np.int64]:
        positions = np.arange(example.length)
        room = self.config.max_position_embeddings - example.length
        if example.turn_ends and room > 0 and random_source.random() < self.options.position_gap:
            gap_at = example.turn_ends[int(random_source.integers(len(example.turn_ends)))]
            positions[gap_at:] += int(random_source.integers(room))
        return positions

    def _sides(self, mode: str, random_source: np.random.Generator) -> tuple[Modality, Modality]:
        if mode == "mixed":
            drawn = random_source.random(2)
            return ("speech" if drawn[0] < 0.6 else "text"), ("speech" if drawn[1] < 0.6 else "text")
        user_modality, reply_modality = mode.split("_")
        return ("speech" if user_modality == "speech" else "text"), ("speech" if reply_modality == "speech" else "text")

    def _system(self, reply_modality: Modality, random_source: np.random.Generator) -> tuple[str | None, bool]:
        """The system text, if any, and whether it stands late, before the last reply."""
        options, drawn = self.options, random_source.random()
        if drawn < options.late_system:
            return DEFAULT_SYSTEM[reply_modality], True
        if drawn < options.late_system + options.no_system:
            return None, False
        if self.other_systems and drawn < options.late_system + options.no_system + options.other_system:
            return self.other_systems[int(random_source.integers(len(self.other_systems)))], False
        return SYSTEMS[reply_modality][int(random_source.integers(len(SYSTEMS[reply_modality])))], False

    def _user_turn(
        self, example: LMExample, text: str, user_modality: Modality, random_source: np.random.Generator
    ) -> None:
        codes = self.data.user_speech.pick(text, random_source) if user_modality == "speech" else None
        if codes is None:
            self._text_turn(example, "user", as_typed(text, random_source))
        else:
            self._speech_turn(example, codes)

    def _call_turns(self, example: LMExample, exchange: Exchange) -> None:
        """The call of a turn and its output, if it has any; they have no loss, since nothing was offered here."""
        if exchange.output:
            self._text_turn(example, "assistant", written(exchange))
            self._text_turn(example, "user", returned(exchange))

    def _turns_by_decision(self, lines: Sequence[int]) -> dict[str, list[tuple[int, int]]]:
        """Turns that call functions or need none, by what is decided, if any dialogue has tools.

        What is declined at the beginning of a dialogue without tools needs none, either.
        """
        turns: dict[str, list[tuple[int, int]]] = {}
        if not any(has_tools(self.data.dialogues[line]) for line in lines):
            return turns
        for line in lines:
            for number, exchange in enumerate(self.data.dialogues[line]):
                kind = kind_of_decision(exchange)
                if exchange.call or (number == 0 and kind == DECLINED):
                    turns.setdefault(kind, []).append((line, number))
        return turns

    def _text_turn(self, example: LMExample, role: str, text: str) -> None:
        example.add(self._text(f"<|im_start|>{role}\n"))
        example.add(self._text(text))
        example.add(self._text(CLOSE))
        example.end_turn()

    def _speech_turn(self, example: LMExample, codes: Codes) -> None:
        example.add(self._text("<|im_start|>user\n"))
        example.add(self._open_speech)
        example.add(self._speech(codes, USER_SPEECH))
        example.add(self._text(CLOSE))
        example.end_turn()

    def _reply(
        self,
        example: LMExample,
        text: str,
        reply_modality: Modality,
        random_source: np.random.Generator,
        has_loss: bool = True,
        is_interrupted: bool = False,
    ) -> None:
        codes = self.data.replies.pick(text, random_source, condition=0) if reply_modality == "speech" else None
        example.add(self._text("<|im_start|>assistant\n"))
        if codes is None:
            example.add(self._text(text, REPLY_TEXT if has_loss else CONTEXT))
        elif is_interrupted:  # interrupted: the rest is dropped, and the reply has no loss
            example.add(self._open_speech)
            example.add(self._speech(codes[: int(random_source.integers(1, len(codes)))], REPLY_SPEECH_CONTEXT))
        else:
            example.add(self._open_speech)
            example.add(self._speech(codes, REPLY_SPEECH if has_loss else REPLY_SPEECH_CONTEXT))
        ending = CONTEXT if not has_loss or (is_interrupted and codes is not None) else REPLY_TEXT
        example.add(self._text("<|im_end|>", ending))
        example.add(self._text("\n"))
        example.end_turn()

    def _speech(self, codes: Codes, kind: int) -> Rows:
        """Rows of codes and the end of speech; the end of user speech has no loss."""
        rows = np.empty((len(codes) + 1, 3), dtype=np.int32)
        rows[:, 0], rows[:-1, 1], rows[:, 2] = self.config.modality_pad_token_id, codes, kind
        rows[-1, 1] = self.config.eosp_token_id
        if kind != REPLY_SPEECH:
            rows[-1, 2] = CONTEXT
        return rows

    def _text(self, text: str, kind: int = CONTEXT) -> Rows:
        if (text, kind) not in self._texts:
            self._texts[text, kind] = _with_kind(self.prompt.text(text), kind)
        return self._texts[text, kind]


def as_typed(text: str, random_source: np.random.Generator) -> str:
    """A sentence as typed: as is, without final punctuation, or also in lower case."""
    style = int(random_source.integers(3))
    if style == 0:
        return text
    bare = text.rstrip(".?!")
    return bare if style == 1 else bare.replace(",", "").lower()


def _with_kind(rows: Sequence[tuple[int, ...]], kind: int) -> Rows:
    return np.array([(*row, kind) for row in rows], dtype=np.int32).reshape(-1, 3)
