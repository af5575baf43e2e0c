"""Evaluate the language model on held-out phrasings and voices: correct answers by mode, noise and intent."""

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
from vivavoce.s2s.text_branch import NO_CALL
from vivavoce.train.front_desk import Exchange, SpokenLanguage, judge, language_of, normalise
from vivavoce.train.front_desk.evaluation_set import evaluation_dialogues
from vivavoce.train.lm import TrainingKVCache, hidden_states
from vivavoce.train.lm.batches import READ, TRANSCRIBE
from vivavoce.train.lm.corpus import CLEAN, NOISY
from vivavoce.train.lm.dialogue_data import Codes, SpokenDialogues
from vivavoce.train.lm.tool_examples import (
    EVALUATED_TOOLS,
    decision_of,
    has_tools,
    offer_text,
    returned,
    written,
)

ALIGNED = 16  # mask columns are a multiple of this, as attention kernels require
CHECK_EVERY = 16  # rows between checks for the end of all replies; each check synchronises


@torch.no_grad()
def greedy_replies(
    model: MossSpeech, prompts: Sequence[Sequence[Row]], max_rows: int, batch_size: int = 256
) -> list[list[Row]]:
    """Greedy reply to each prompt as the engine would generate it, end row included."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    replies: dict[int, list[Row]] = {}
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        generated = _batch(model, [prompts[index] for index in chosen], max_rows).tolist()
        for index, rows in zip(chosen, generated, strict=True):
            replies[index] = _until_end(model, [tuple(row) for row in rows])
    return [replies[index] for index in range(len(prompts))]


def _until_end(model: MossSpeech, rows: list[Row]) -> list[Row]:
    end = next((number for number, row in enumerate(rows, start=1) if model.ends(row)), len(rows))
    return rows[:end]


def _batch(model: MossSpeech, prompts: list[Sequence[Row]], max_rows: int) -> Tensor:
    """Generated rows of each prompt; those after its end are undefined.  # [prompt, row, 2]"""
    device = model.model.audio_embed.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    max_length = max(len(prompt) for prompt in prompts)
    filler = (model.config.pad_token_id, model.config.audio_pad_token_id)
    padded = [[*prompt, *[filler] * (max_length - len(prompt))] for prompt in prompts]
    rows = torch.tensor(padded, device=device)
    modes = torch.tensor([model.start_mode(tuple(prompt[-1])) for prompt in prompts], device=device)
    room = -(-(max_length + max_rows) // ALIGNED) * ALIGNED
    past = TrainingKVCache.allocate(model, len(prompts), room)
    columns = torch.arange(room, device=device)

    def forward(rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states(model, rows, positions, columns <= positions[..., None], past=past)

    # Padding after a shorter prompt is masked, and overwritten by new rows.
    text, audio = forward(rows, columns[:max_length].expand(len(prompts), -1))
    last = (torch.arange(len(prompts), device=device), lengths - 1)
    text, audio = text[last], audio[last]
    generated: list[Tensor] = []
    finished = torch.zeros_like(lengths, dtype=torch.bool)
    for number in range(max_rows):
        row, modes = _next(model, text, audio, modes)
        generated.append(row)
        finished |= (row[:, TEXT] == model.config.eos_token_id) | (row[:, TEXT] == model.config.pad_token_id)
        if number % CHECK_EVERY == CHECK_EVERY - 1 and bool(finished.all()):
            break
        text, audio = (state[:, 0] for state in forward(row[:, None], (lengths + number)[:, None]))
    return torch.stack(generated, dim=1)


def _next(model: MossSpeech, text: Tensor, audio: Tensor, modes: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely row of each sequence, and the next mode."""
    config = model.config
    written = model.text_lm_head(text).argmax(-1)
    spoken = model.audio_lm_head(audio)[:, : config.eosp_token_id + 1].argmax(-1)
    row = torch.stack([torch.where(modes == AUDIO, config.modality_pad_token_id, written), spoken], dim=1)
    modes = torch.where(row[:, TEXT] == config.sosp_token_id, AUDIO, modes)
    return row, torch.where((modes == AUDIO) & (spoken == config.eosp_token_id), TEXT, modes)


MAX_CODES, MAX_TOKENS, MAX_CALL_TOKENS = 180, 48, 80


class ReadingTokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class EvaluatedAnswer:
    """A transcribed answer, and its code error rate against the teacher if spoken."""

    expected: Exchange
    turns: int
    transcribed: str
    code_errors: float | None = None

    @cached_property
    def is_right(self) -> bool:
        return judge(self.transcribed, self.expected)

    @cached_property
    def is_declined(self) -> bool:
        return judge(self.transcribed, Exchange("decline", "", language_of(self.expected.reply).replies["decline"]))


@dataclass
class Evaluation:
    """Evaluation of a model on held-out dialogues."""

    model: MossSpeech
    tokenizer: ReadingTokenizer
    data: SpokenDialogues
    samples: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = MossSpeechPrompt(self.model.config, self.tokenizer)
        self.lines = [line for line in self.data.dialogues if not has_tools(line)]
        self.tool_lines = [line for line in self.data.dialogues if has_tools(line)]

    def run(self) -> dict[str, Any]:
        """All metrics, for `metrics.json`."""
        figures: dict[str, Any] = {}
        for name, user_modality, reply_modality, condition in (
            ("speech_speech", "speech", "speech", CLEAN),
            ("speech_text", "speech", "text", CLEAN),
            ("speech_speech_15dB", "speech", "speech", NOISY),
            ("speech_text_15dB", "speech", "text", NOISY),
            ("text_text", "text", "text", CLEAN),
            ("text_speech", "text", "speech", CLEAN),
        ):
            answers = self.answers(user_modality, reply_modality, condition)  # type: ignore[arg-type]
            figures[name] = summary(answers)
            wrong = [answer for answer in answers if not answer.is_right]
            self.samples += [
                {"mode": name, "user": a.expected.user, "expected": a.expected.reply, "said": a.transcribed}
                for a in wrong[:25]
            ]
        if self.tool_lines:
            figures["tools"] = self.decisions("speech", CLEAN)
            figures["tools_15dB"] = self.decisions("speech", NOISY)
            figures["tools_text"] = self.decisions("text", CLEAN)
        figures["evaluation_set"] = summary(evaluation_set_answers(self.model, self.tokenizer))
        return figures | {"transcribe": self.transcription(), "read": self.reading(), "wrong": self.samples}

    def answers(self, user_modality: Modality, reply_modality: Modality, condition: int) -> list[EvaluatedAnswer]:
        """Replies to the last turn of each dialogue, with the correct history."""
        prompts = [self._prompt(line, user_modality, reply_modality, condition) for line in self.lines]
        replies = greedy_replies(self.model, prompts, MAX_CODES if reply_modality == "speech" else MAX_TOKENS)
        if reply_modality == "text":
            transcribed = [self._text(reply) for reply in replies]
            return [
                EvaluatedAnswer(line[-1], len(line), text) for line, text in zip(self.lines, transcribed, strict=True)
            ]
        codes = [self.model.spoken_codes(reply) for reply in replies]
        errors = [
            self._code_errors(line[-1].reply, generated) for line, generated in zip(self.lines, codes, strict=True)
        ]
        transcribed = self.transcripts(codes)
        rows = zip(self.lines, transcribed, errors, strict=True)
        return [EvaluatedAnswer(line[-1], len(line), text, error) for line, text, error in rows]

    def decisions(self, user_modality: Modality, condition: int) -> dict[str, Any]:
        """Shares of turns with tools in which the right call is made, or none where none is right; not masked."""
        turns = [(line[:end], line[end]) for line in self.tool_lines for end in range(len(line))]
        prompts = [self._tool_prompt(earlier, last, user_modality, condition) for earlier, last in turns]
        said = [self._text(reply) for reply in greedy_replies(self.model, prompts, MAX_CALL_TOKENS)]
        expected = [written(last) for _, last in turns]
        right: dict[str, list[bool]] = defaultdict(list)
        for (_, last), text, call in zip(turns, said, expected, strict=True):
            right[decision_of(last)].append(text == call)
        self.samples += [
            {"mode": f"tools, {user_modality}", "user": last.user, "expected": call, "said": text}
            for (_, last), text, call in zip(turns, said, expected, strict=True)
            if text != call
        ][:25]
        calls = [is_right for name, of_tool in right.items() if name != NO_CALL for is_right in of_tool]
        return {
            "right_calls": _share(calls),
            "right_without_call": _share(right[NO_CALL]),
            "questions": len(turns),
            "by_tool": {name: {"right": _share(found), "questions": len(found)} for name, found in right.items()},
        }

    def _tool_prompt(
        self, earlier: Sequence[Exchange], last: Exchange, user_modality: Modality, condition: int
    ) -> list[Row]:
        turns = [Turn("system", DEFAULT_SYSTEM["speech"])]
        for exchange in (*earlier, last):
            asked = self._codes(exchange.user, condition) if user_modality == "speech" else exchange.user
            turns.append(Turn("user", asked))
            if exchange is not last:
                if exchange.output:
                    turns += [Turn("assistant", written(exchange)), Turn("user", returned(exchange))]
                answered = self._reply_codes(exchange.reply) if user_modality == "speech" else exchange.reply
                turns.append(Turn("assistant", answered))
        return self.prompt.rows([*turns, Turn("system", offer_text(EVALUATED_TOOLS))], "text")

    def transcripts(self, spoken: Sequence[Sequence[int] | Codes]) -> list[str]:
        """Transcripts by the model itself."""
        nonempty = [list(map(int, codes)) or [0] for codes in spoken]
        prompts = [self.prompt.rows([Turn("system", TRANSCRIBE), Turn("user", codes)], "text") for codes in nonempty]
        return [self._text(reply) for reply in greedy_replies(self.model, prompts, MAX_TOKENS)]

    def transcription(self) -> dict[str, float]:
        """Word error rates: held-out users, clean and noisy, and replies."""
        user_speech, replies = self.data.user_speech, self.data.replies
        figures = {}
        for name, spoken, condition in (
            ("clean", user_speech, CLEAN),
            ("15dB", user_speech, NOISY),
            ("desk", replies, CLEAN),
        ):
            chosen = [int(i) for i in np.flatnonzero(spoken.condition == condition)]
            transcribed = self.transcripts([spoken.codes[i] for i in chosen])
            expected = [spoken.sentences[spoken.sentence[i]] for i in chosen]
            figures[name] = word_error_rate(expected, transcribed)
        return figures

    def reading(self) -> dict[str, float]:
        """Replies read aloud: code error rate against the teacher, and word error rate of the transcripts."""
        sentences = self.data.replies.sentences
        prompts = [self.prompt.rows([Turn("system", READ), Turn("user", text)], "speech") for text in sentences]
        codes = [self.model.spoken_codes(reply) for reply in greedy_replies(self.model, prompts, MAX_CODES)]
        errors = [self._code_errors(text, generated) for text, generated in zip(sentences, codes, strict=True)]
        return {
            "code_errors": float(np.mean(errors)),
            "word_error_rate": word_error_rate(sentences, self.transcripts(codes)),
        }

    def _prompt(
        self, line: Sequence[Exchange], user_modality: Modality, reply_modality: Modality, condition: int
    ) -> list[Row]:
        turns = [Turn("system", DEFAULT_SYSTEM[reply_modality])]
        for exchange in line:
            asked = self._codes(exchange.user, condition) if user_modality == "speech" else exchange.user
            answered = self._reply_codes(exchange.reply) if reply_modality == "speech" else exchange.reply
            turns += [Turn("user", asked), Turn("assistant", answered)]
        return self.prompt.rows(turns[:-1], reply_modality)

    def _codes(self, sentence: str, condition: int) -> list[int]:
        indices = self.data.user_speech.of(sentence, condition)
        return [int(code) for code in self.data.user_speech.codes[int(indices[0])]]

    def _reply_codes(self, sentence: str) -> list[int]:
        return [int(code) for code in self.data.replies.codes[int(self.data.replies.of(sentence)[0])]]

    def _code_errors(self, sentence: str, generated: Sequence[int]) -> float:
        expected = self._reply_codes(sentence)
        return error_rate([expected], [generated])

    def _text(self, reply: Sequence[Row]) -> str:
        return self.tokenizer.decode(self.model.written_ids(reply)).strip()


def evaluation_set_answers(model: MossSpeech, tokenizer: ReadingTokenizer) -> list[EvaluatedAnswer]:
    """Text replies to the phrasings for evaluation alone, as text."""
    prompt = MossSpeechPrompt(model.config, tokenizer)
    lines = evaluation_dialogues()
    prompts = []
    for line in lines:
        turns = [Turn("system", DEFAULT_SYSTEM["text"])]
        for exchange in line:
            turns += [Turn("user", exchange.user), Turn("assistant", exchange.reply)]
        prompts.append(prompt.rows(turns[:-1], "text"))
    replies = greedy_replies(model, prompts, MAX_TOKENS)
    said = [tokenizer.decode(model.written_ids(reply)).strip() for reply in replies]
    return [EvaluatedAnswer(line[-1], len(line), text) for line, text in zip(lines, said, strict=True)]


def summary(answers: Sequence[EvaluatedAnswer]) -> dict[str, Any]:
    """Accuracy in total, by number of turns and by intent; share declined inside and outside the domain."""
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
    by_language: dict[str, list[EvaluatedAnswer]] = defaultdict(list)
    for answer in answers:
        by_language[language_of(answer.expected.reply).code].append(answer)
    return figures | {"by_language": _table(by_language), "by_intent": _table(by_intent)}


def word_error_rate(expected: Sequence[str], transcribed: Sequence[str]) -> float:
    """Error rate of normalised words, in Mandarin of syllables and values."""
    spoken = [language_of(text) for text in expected]
    return error_rate(*(list(map(_words, texts, spoken)) for texts in (expected, transcribed)))


def _words(text: str, language: SpokenLanguage) -> Sequence[str]:
    return normalise(text).split() if language.code == "en" else language.spoken_words(text)


def _table(answers_by_name: Mapping[str, Sequence[EvaluatedAnswer]]) -> dict[str, dict[str, float]]:
    return {
        name: {"right": _share([answer.is_right for answer in answers]), "questions": len(answers)}
        for name, answers in sorted(answers_by_name.items())
    }


def _share(values: Sequence[bool]) -> float:
    return round(float(np.mean(values)), 4) if values else float("nan")
