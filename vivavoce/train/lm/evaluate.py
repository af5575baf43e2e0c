"""What a trained miniature can do with phrasings and voices it never met: right answers by mode, noise and intent."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vivavoce.evaluation.scoring import error_rate
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.model import AUDIO, TEXT, MossSpeech
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Modality, MossSpeechPrompt, Turn
from vivavoce.train.front_desk import DECLINE, Exchange, judge, normalise
from vivavoce.train.lm.batches import READ, TRANSCRIBE, Codes, SpokenDialogues
from vivavoce.train.lm.corpus import CLEAN, NOISY
from vivavoce.train.lm.model import TrainingKVCache, hidden_states

ALIGNED = 16  # columns of a mask, as attention kernels like them
LOOK_EVERY = 16  # rows between two looks whether all replies are over: each look waits for the device


@torch.no_grad()
def greedy_replies(
    model: MossSpeech, prompts: Sequence[Sequence[Row]], most_rows: int, at_once: int = 256
) -> list[list[Row]]:
    """The reply to each prompt, as the engine makes it at temperature 0, end row included."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    replies: dict[int, list[Row]] = {}
    for begin in range(0, len(order), at_once):
        chosen = order[begin : begin + at_once]
        made = _batch(model, [prompts[index] for index in chosen], most_rows).tolist()
        for index, rows in zip(chosen, made, strict=True):
            replies[index] = _until_end(model, [tuple(row) for row in rows])
    return [replies[index] for index in range(len(prompts))]


def _until_end(model: MossSpeech, rows: list[Row]) -> list[Row]:
    end = next((number for number, row in enumerate(rows, start=1) if model.ends(row)), len(rows))
    return rows[:end]


def _batch(model: MossSpeech, prompts: list[Sequence[Row]], most_rows: int) -> Tensor:
    """So many rows after each prompt, those after its end without meaning.  # [prompt, row, 2]"""
    device = model.model.audio_embed.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = max(len(prompt) for prompt in prompts)
    filler = (model.config.pad_token_id, model.config.audio_pad_token_id)
    padded = [[*prompt, *[filler] * (longest - len(prompt))] for prompt in prompts]
    rows = torch.tensor(padded, device=device)
    modes = torch.tensor([model.start_mode(tuple(prompt[-1])) for prompt in prompts], device=device)
    room = -(-(longest + most_rows) // ALIGNED) * ALIGNED
    past = TrainingKVCache.allocate(model, len(prompts), room)
    columns = torch.arange(room, device=device)

    def look(rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states(model, rows, positions, columns <= positions[..., None], past=past)

    # What follows a shorter prompt is filler that no row sees, and new rows are written over it.
    text, audio = look(rows, columns[:longest].expand(len(prompts), -1))
    pick = (torch.arange(len(prompts), device=device), lengths - 1)
    text, audio = text[pick], audio[pick]
    made: list[Tensor] = []
    over = torch.zeros_like(lengths, dtype=torch.bool)
    for number in range(most_rows):
        row, modes = _next(model, text, audio, modes)
        made.append(row)
        over |= (row[:, TEXT] == model.config.eos_token_id) | (row[:, TEXT] == model.config.pad_token_id)
        if number % LOOK_EVERY == LOOK_EVERY - 1 and bool(over.all()):
            break
        text, audio = (state[:, 0] for state in look(row[:, None], (lengths + number)[:, None]))
    return torch.stack(made, dim=1)


def _next(model: MossSpeech, text: Tensor, audio: Tensor, modes: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest row of each sequence, and the mode after it."""
    config = model.config
    written = model.text_lm_head(text).argmax(-1)
    spoken = model.audio_lm_head(audio)[:, : config.eosp_token_id + 1].argmax(-1)
    row = torch.stack([torch.where(modes == AUDIO, config.modality_pad_token_id, written), spoken], dim=1)
    modes = torch.where(row[:, TEXT] == config.sosp_token_id, AUDIO, modes)
    return row, torch.where((modes == AUDIO) & (spoken == config.eosp_token_id), TEXT, modes)


MOST_CODES, MOST_TOKENS = 180, 48


class ReadingTokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class EvaluatedAnswer:
    """What a model said to one question, in words, and how far its codes are from the teacher's, if it spoke."""

    expected: Exchange
    turns: int
    said: str
    code_errors: float | None = None

    @cached_property
    def is_right(self) -> bool:
        return judge(self.said, self.expected)

    @cached_property
    def is_declined(self) -> bool:
        return judge(self.said, Exchange("decline", "", DECLINE))


@dataclass
class Evaluation:
    """Asks a model everything that is held out."""

    model: MossSpeech
    tokenizer: ReadingTokenizer
    data: SpokenDialogues
    samples: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = MossSpeechPrompt(self.model.config, self.tokenizer)

    def sit(self) -> dict[str, Any]:
        """All figures, for `metrics.json`."""
        figures: dict[str, Any] = {}
        for name, hears, says, condition in (
            ("speech_speech", "speech", "speech", CLEAN),
            ("speech_text", "speech", "text", CLEAN),
            ("speech_speech_15dB", "speech", "speech", NOISY),
            ("speech_text_15dB", "speech", "text", NOISY),
            ("text_text", "text", "text", CLEAN),
            ("text_speech", "text", "speech", CLEAN),
        ):
            answers = self.answers(hears, says, condition)  # type: ignore[arg-type]
            figures[name] = summary(answers)
            wrong = [answer for answer in answers if not answer.is_right]
            self.samples += [
                {"mode": name, "user": a.expected.user, "expected": a.expected.reply, "said": a.said}
                for a in wrong[:25]
            ]
        return figures | {"transcribe": self.transcription(), "read": self.reading(), "wrong": self.samples}

    def answers(self, hears: Modality, says: Modality, condition: int) -> list[EvaluatedAnswer]:
        """The reply to the last question of each dialogue, all before it being as it should be."""
        prompts = [self._prompt(line, hears, says, condition) for line in self.data.dialogues]
        replies = greedy_replies(self.model, prompts, MOST_CODES if says == "speech" else MOST_TOKENS)
        if says == "text":
            said = [self._text(reply) for reply in replies]
            return [
                EvaluatedAnswer(line[-1], len(line), text) for line, text in zip(self.data.dialogues, said, strict=True)
            ]
        codes = [self.model.spoken_codes(reply) for reply in replies]
        errors = [
            self._code_errors(line[-1].reply, made) for line, made in zip(self.data.dialogues, codes, strict=True)
        ]
        said = self.transcripts(codes)
        rows = zip(self.data.dialogues, said, errors, strict=True)
        return [EvaluatedAnswer(line[-1], len(line), text, error) for line, text, error in rows]

    def transcripts(self, spoken: Sequence[Sequence[int] | Codes]) -> list[str]:
        """Speech written down by the model itself."""
        heard = [list(map(int, codes)) or [0] for codes in spoken]
        prompts = [self.prompt.rows([Turn("system", TRANSCRIBE), Turn("user", codes)], "text") for codes in heard]
        return [self._text(reply) for reply in greedy_replies(self.model, prompts, MOST_TOKENS)]

    def transcription(self) -> dict[str, float]:
        """Word error rates: guests held out, clean and noisy, and the desk."""
        heard, replies = self.data.heard, self.data.replies
        figures = {}
        for name, spoken, condition in (("clean", heard, CLEAN), ("15dB", heard, NOISY), ("desk", replies, CLEAN)):
            chosen = [int(i) for i in np.flatnonzero(spoken.condition == condition)]
            said = self.transcripts([spoken.codes[i] for i in chosen])
            meant = [spoken.sentences[spoken.sentence[i]] for i in chosen]
            figures[name] = word_error_rate(meant, said)
        return figures

    def reading(self) -> dict[str, float]:
        """Sentences of the desk read aloud: distance from the teacher's codes, and words lost when written down."""
        sentences = self.data.replies.sentences
        prompts = [self.prompt.rows([Turn("system", READ), Turn("user", text)], "speech") for text in sentences]
        codes = [self.model.spoken_codes(reply) for reply in greedy_replies(self.model, prompts, MOST_CODES)]
        errors = [self._code_errors(text, made) for text, made in zip(sentences, codes, strict=True)]
        return {
            "code_errors": float(np.mean(errors)),
            "word_error_rate": word_error_rate(sentences, self.transcripts(codes)),
        }

    def _prompt(self, line: Sequence[Exchange], hears: Modality, says: Modality, condition: int) -> list[Row]:
        turns = [Turn("system", DEFAULT_SYSTEM[says])]
        for exchange in line:
            asked = self._codes(exchange.user, condition) if hears == "speech" else exchange.user
            answered = self._reply_codes(exchange.reply) if says == "speech" else exchange.reply
            turns += [Turn("user", asked), Turn("assistant", answered)]
        return self.prompt.rows(turns[:-1], says)

    def _codes(self, sentence: str, condition: int) -> list[int]:
        found = self.data.heard.of(sentence, condition)
        return [int(code) for code in self.data.heard.codes[int(found[0])]]

    def _reply_codes(self, sentence: str) -> list[int]:
        return [int(code) for code in self.data.replies.codes[int(self.data.replies.of(sentence)[0])]]

    def _code_errors(self, sentence: str, made: Sequence[int]) -> float:
        meant = self._reply_codes(sentence)
        return error_rate([meant], [made])

    def _text(self, reply: Sequence[Row]) -> str:
        return self.tokenizer.decode(self.model.written_ids(reply)).strip()


def summary(answers: Sequence[EvaluatedAnswer]) -> dict[str, Any]:
    """Shares of right answers: in all, by length and intent; of declines where due and where not."""
    inside = [answer for answer in answers if answer.expected.intent != "decline"]
    outside = [answer for answer in answers if answer.expected.intent == "decline"]
    by_intent: dict[str, list[EvaluatedAnswer]] = defaultdict(list)
    for answer in answers:
        by_intent[answer.expected.intent].append(answer)
    figures: dict[str, Any] = {
        "right": _share([a.is_right for a in answers]),
        "right_inside": _share([a.is_right for a in inside]),
        "right_first_turn": _share([a.is_right for a in inside if a.turns == 1]),
        "right_later_turn": _share([a.is_right for a in inside if a.turns > 1]),
        "right_memory": _share([a.is_right for a in inside if a.expected.intent.startswith("memory")]),
        "declined_outside": _share([a.is_declined for a in outside]),
        "declined_inside": _share([a.is_declined for a in inside]),
        "questions": len(answers),
    }
    errors = [answer.code_errors for answer in answers if answer.code_errors is not None]
    if errors:
        figures |= {"code_errors": float(np.mean(errors)), "codes_exact": _share([error == 0 for error in errors])}
    return figures | {"by_intent": _table(by_intent)}


def word_error_rate(meant: Sequence[str], said: Sequence[str]) -> float:
    """Wrong words per word meant, after both are normalised."""
    return error_rate(*([normalise(text).split() for text in texts] for texts in (meant, said)))


def _table(by_intent: Mapping[str, Sequence[EvaluatedAnswer]]) -> dict[str, dict[str, float]]:
    return {
        intent: {"right": _share([answer.is_right for answer in of_it]), "questions": len(of_it)}
        for intent, of_it in sorted(by_intent.items())
    }


def _share(facts: Sequence[bool]) -> float:
    return round(float(np.mean(facts)), 4) if facts else float("nan")
