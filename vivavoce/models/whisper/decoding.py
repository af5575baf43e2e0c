"""Decoding of windows: logit rules, greedy and sampled decoding, beam search, and segments by timestamps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.models.whisper.config import CONV_STRIDE, MEL_FRAMES_PER_SECOND, WhisperTokens
from vivavoce.models.whisper.model import DecoderState, Whisper, WhisperDecoder, WindowMemory

FORBIDDEN = float("-inf")


class LogitRule(Protocol):
    """Changes the logits of texts by the tokens sampled so far."""

    def __call__(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """# [row, vocabulary], [row, token so far] → [row, vocabulary]"""
        ...


class Suppress:
    """Ids that are never sampled."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = sorted(set(ids))

    def __call__(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """The logits without these ids."""
        return logits.index_fill(-1, torch.tensor(self.ids, dtype=torch.long, device=logits.device), FORBIDDEN)


class SuppressAtStart(Suppress):
    """Ids that are not sampled first: a blank, and the end of the text."""

    def __call__(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """The logits without these ids, if no token is sampled yet."""
        return logits if sampled.shape[1] else super().__call__(logits, sampled)


class TimestampRules:
    """Timestamps come in pairs around text, never decrease, and start early; if their probabilities sum to more than
    that of the likeliest text token, a timestamp is sampled.
    """

    def __init__(self, tokens: WhisperTokens, latest_start: float | None = 1.0) -> None:
        self.tokens = tokens
        self.latest_start = None if latest_start is None else tokens.timestamp(latest_start)

    def __call__(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """The logits under the rules, by the tokens of each row."""
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return self.preferred(logits.masked_fill(self._forbidden(ids, sampled), FORBIDDEN))

    def _forbidden(self, ids: Tensor, sampled: Tensor) -> Tensor:
        """Which ids are forbidden, by row.  # [vocabulary], [row, token] → [row, vocabulary]"""
        rows, count = sampled.shape
        begin = self.tokens.timestamps
        if count == 0:
            return self.forbidden_first(ids).expand(rows, -1)
        is_time = sampled >= begin
        last = is_time[:, -1]
        previous = is_time[:, -2] if count > 1 else torch.ones_like(last)
        position = torch.arange(count, device=ids.device)
        newest = torch.where(is_time, position, -1).amax(-1)
        latest = sampled.gather(1, newest.clamp(min=0)[:, None])[:, 0]
        latest = torch.where(newest < 0, begin - 1, latest)
        return self.forbidden_after(ids, last, previous, latest)

    def forbidden_first(self, ids: Tensor) -> Tensor:
        """Ids that cannot start a text: everything but timestamps up to `latest_start`."""
        forbidden = ids < self.tokens.timestamps
        return forbidden if self.latest_start is None else forbidden | (ids > self.latest_start)

    def forbidden_after(self, ids: Tensor, last: Tensor, previous: Tensor, latest: Tensor) -> Tensor:
        """Ids that cannot follow, by whether the last two tokens are timestamps, and by the latest timestamp.

        # each [row]; `latest` is the id before <|0.00|> where there is none yet → [row, vocabulary]
        """
        is_time = ids >= self.tokens.timestamps
        closes = (last & ~previous)[:, None]
        first_free = latest[:, None] + (~closes).long()
        forbidden = (last & previous)[:, None] & is_time
        forbidden |= closes & (ids < self.tokens.endoftext)
        forbidden |= is_time & (ids < first_free)
        return forbidden | (ids == self.tokens.notimestamps)

    def preferred(self, logits: Tensor) -> Tensor:
        """Forbid text where the summed probability of timestamps exceeds that of any text token."""
        begin = self.tokens.timestamps
        times = logits[:, begin:].float().logsumexp(-1)
        text = logits[:, :begin].float().amax(-1)
        is_text = torch.arange(logits.shape[-1], device=logits.device) < begin
        return logits.masked_fill((times > text)[:, None] & is_text, FORBIDDEN)


class Hotwords:
    """Expected words: a bonus for tokens that start or continue one of them."""

    def __init__(self, words: Sequence[Sequence[int]], bonus: float = 2.0) -> None:
        self.words = [list(word) for word in words if word]
        self.bonus = bonus

    def __call__(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """Raise the next token of every word."""
        raised = torch.zeros_like(logits)
        for row, tokens in enumerate(sampled.tolist()):
            for word in self.words:
                matched = max(n for n in range(len(word)) if n == 0 or tokens[-n:] == word[:n])
                raised[row, word[matched]] = self.bonus
        return logits + raised


def apply(rules: Sequence[LogitRule], logits: Tensor, sampled: Tensor) -> Tensor:
    """The logits under all rules, in order."""
    for rule in rules:
        logits = rule(logits, sampled)
    return logits


STEPS_PER_CHECK = 8  # on a GPU, checking whether all texts have ended synchronises


@dataclass(frozen=True)
class Text:
    """A decoded text of one window."""

    tokens: list[int]  # without prompt and <|endoftext|>
    logprob: float  # of all tokens, the end included
    is_ended: bool
    no_speech: float

    @property
    def average_logprob(self) -> float:
        """Per token, the end included."""
        return self.logprob / (len(self.tokens) + 1)

    @property
    def rank(self) -> float:
        """The score candidates of one window are compared by: per token, the end not counted (as openai-whisper)."""
        return self.logprob / max(1, len(self.tokens))


def best_text(texts: Iterable[Text]) -> Text:
    """The candidate with the highest rank; of equal ones the first."""
    return max(texts, key=lambda text: text.rank)


@torch.inference_mode()
def decode(
    model: Whisper,
    tokens: WhisperTokens,
    memory: WindowMemory,
    prompts: Sequence[Sequence[int]],
    rules: Sequence[LogitRule] = (),
    temperature: float = 0.0,
    best_of: int = 1,
    max_tokens: int | None = None,
    seed: int = 0,
    guess: Sequence[int] = (),
) -> list[Text]:
    """The text of each window, by prompts of one length; at a temperature, the best of `best_of` samples.

    `guess`, of one window at temperature 0, is verified with the prompt: tokens that it guesses right take no step.
    """
    best_of = best_of if temperature > 0 else 1
    state = model.decoder.initial_state(memory, best_of)
    prompt = _prompt_rows(prompts, memory, best_of)
    room = model.config.max_target_positions - prompt.shape[1]
    steps = min(room, model.config.max_target_positions // 2 if max_tokens is None else max_tokens)
    generator = torch.Generator(prompt.device).manual_seed(seed) if temperature > 0 else None
    steps_ahead = min(steps, len(guess))
    guessed = torch.tensor([list(guess[:steps_ahead])], dtype=prompt.dtype, device=prompt.device)
    hidden, state = model.decoder.step(state, torch.cat([prompt, guessed.expand(len(prompt), -1)], dim=1))
    no_speech = no_speech_probabilities(model.decoder, tokens, hidden, prompt)
    known = model.decoder.logits(hidden[:, prompt.shape[1] - 1 :])  # of the next token, and of those after the guess
    sampled = prompt[:, :0]
    logprob = torch.zeros(prompt.shape[0], device=prompt.device)
    ended = torch.zeros_like(logprob, dtype=torch.bool)
    for step in range(steps):
        ruled = apply(rules, known[:, 0], sampled)
        chosen = take(ruled, temperature, generator)
        token_logprobs = ruled.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        logprob += token_logprobs.masked_fill(ended, 0.0)
        sampled = torch.cat([sampled, chosen.masked_fill(ended, tokens.endoftext)[:, None]], dim=1)
        ended |= chosen == tokens.endoftext
        checks = ended.device.type == "cpu" or step % STEPS_PER_CHECK == STEPS_PER_CHECK - 1
        if step + 1 == steps or (checks and bool(ended.all())):
            break
        if step < steps_ahead and bool((chosen == guess[step]).all()):
            known = known[:, 1:]
            continue
        steps_ahead = 0
        state = state.rewound(prompt.shape[1] + step)
        hidden, state = model.decoder.step(state, sampled[:, -1:])
        known = model.decoder.logits(hidden)
    texts = _texts(sampled, logprob, no_speech, tokens.endoftext)
    groups = [texts[first : first + best_of] for first in range(0, len(texts), best_of)]
    return [best_text(group) for group in groups]


@torch.inference_mode()
def score(
    model: Whisper,
    tokens: WhisperTokens,
    memory: WindowMemory,
    prompt: Sequence[int],
    written: Sequence[int],
    rules: Sequence[LogitRule] = (),
    is_ended: bool = True,
) -> Text:
    """Score a finished text of one window in one pass, as `decode` scores the texts it decodes."""
    ids = torch.tensor([[*prompt, *written]], device=memory.keys.device)
    hidden = model.decoder(ids, memory)
    logits = model.decoder.logits(hidden[0, len(prompt) - 1 :])
    chosen = [*written, tokens.endoftext] if is_ended else list(written)
    total = sum(_logprobs(logits, ids[:, len(prompt) :], chosen, rules))
    (silence,) = no_speech_probabilities(model.decoder, tokens, hidden, ids[:, : len(prompt)])
    return Text(list(written), total, is_ended, silence)


@torch.inference_mode()
def token_logprobs(
    model: Whisper,
    memory: WindowMemory,
    prompt: Sequence[int],
    written: Sequence[int],
    rules: Sequence[LogitRule] = (),
) -> list[float]:
    """The log-probability of each token of a finished text of one window, in one pass."""
    ids = torch.tensor([[*prompt, *written]], device=memory.keys.device)
    logits = model.decoder.logits(model.decoder(ids, memory)[0, len(prompt) - 1 :])
    return _logprobs(logits, ids[:, len(prompt) :], written, rules)


def _logprobs(logits: Tensor, written: Tensor, chosen: Sequence[int], rules: Sequence[LogitRule]) -> list[float]:
    """The log-probability of each chosen token under the rules.  # [token, vocabulary], [1, token]"""
    ruled = (apply(rules, logits[index : index + 1], written[:, :index]) for index in range(len(chosen)))
    return [float(row.log_softmax(-1)[0, token]) for row, token in zip(ruled, chosen, strict=True)]


@torch.inference_mode()
def language_probabilities(model: Whisper, tokens: WhisperTokens, memory: WindowMemory) -> list[dict[str, float]]:
    """The probability of each language, by window."""
    start = torch.full((memory.windows, 1), tokens.startoftranscript, device=memory.keys.device)
    hidden, _ = model.decoder.step(model.decoder.initial_state(memory), start)
    logits = model.decoder.logits(hidden[:, -1])
    ids = torch.tensor(list(tokens.languages.values()), device=logits.device)
    probabilities = logits[:, ids].softmax(-1).tolist()
    return [dict(zip(tokens.languages, row, strict=True)) for row in probabilities]


def _prompt_rows(prompts: Sequence[Sequence[int]], memory: WindowMemory, rows_per_window: int) -> Tensor:
    if len(prompts) != memory.windows or len({len(prompt) for prompt in prompts}) != 1 or not prompts[0]:
        lengths = [len(prompt) for prompt in prompts]
        raise InputError(f"{memory.windows} windows need as many prompts of one length, not of {lengths}")
    rows = torch.tensor([list(prompt) for prompt in prompts], device=memory.keys.device)
    return rows.repeat_interleave(rows_per_window, dim=0)


def no_speech_probabilities(
    decoder: WhisperDecoder, tokens: WhisperTokens, hidden: Tensor, prompt: Tensor
) -> list[float]:
    """The probability of <|nospeech|> at <|startoftranscript|>, by row."""
    starts = (prompt == tokens.startoftranscript).int().argmax(-1)
    rows = torch.arange(len(starts), device=starts.device)
    probabilities = decoder.logits(hidden[rows, starts]).softmax(-1)
    of_rows: list[float] = probabilities[:, tokens.nospeech].tolist()
    return of_rows


def take(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """The likeliest token of each row, or one sampled at a temperature.  # [row, vocabulary] → [row]"""
    if generator is None:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def _texts(sampled: Tensor, logprob: Tensor, no_speech: list[float], end: int) -> list[Text]:
    texts = []
    for row, total, silence in zip(sampled.tolist(), logprob.tolist(), no_speech, strict=True):
        ends = end in row
        texts.append(Text(row[: row.index(end)] if ends else row, total, ends, silence))
    return texts


@torch.inference_mode()
def beam_search(
    model: Whisper,
    tokens: WhisperTokens,
    memory: WindowMemory,
    prompt: Sequence[int],
    rules: Sequence[LogitRule] = (),
    beams: int = 5,
    max_tokens: int | None = None,
) -> Text:
    """The text of one window with the highest rank, by beam search."""
    decoder, room = model.decoder, model.config.max_target_positions - len(prompt)
    steps = min(room, model.config.max_target_positions // 2 if max_tokens is None else max_tokens)
    rows = torch.tensor([list(prompt)] * beams, device=memory.keys.device)
    hidden, state = decoder.step(decoder.initial_state(memory, beams), rows)
    (silence,) = no_speech_probabilities(decoder, tokens, hidden[:1], rows[:1])
    sampled = rows[:, :0]
    totals = torch.full((beams,), -torch.inf, device=rows.device)
    totals[0] = 0.0  # all rows are equal at the first step: only one may branch
    finished: list[Text] = []
    for step in range(steps):
        probabilities = apply(rules, decoder.logits(hidden[:, -1]), sampled).log_softmax(-1)
        followed = follow(totals, probabilities, sampled, beams, tokens.endoftext, silence, finished)
        if followed is None:
            totals = torch.full_like(totals, -torch.inf)  # every candidate has ended
        if followed is None or len(finished) >= beams:
            break
        parents, totals, sampled = followed
        if step + 1 == steps:
            break
        hidden, state = decoder.step(DecoderState(state.past.picked(parents), memory), sampled[:, -1:])
    if len(finished) < beams:
        finished += [
            Text(row, float(total), False, silence)
            for row, total in zip(sampled.tolist(), totals, strict=True)
            if torch.isfinite(total)
        ]
    return best_text(finished)


def follow(
    totals: Tensor, probabilities: Tensor, sampled: Tensor, beams: int, end: int, silence: float, finished: list[Text]
) -> tuple[list[int], Tensor, Tensor] | None:
    """Parents, totals and tokens of the next beams; texts that end are appended to `finished`."""
    scores = (totals[:, None] + probabilities).flatten()
    best, indices = scores.topk(min(2 * beams, scores.shape[0]))
    beams_left: list[tuple[int, int, float]] = []
    for total, index in zip(best.tolist(), indices.tolist(), strict=True):
        row, token = divmod(index, probabilities.shape[1])
        if total == float("-inf") or len(beams_left) == beams:
            break
        if token == end and len(finished) >= beams:
            continue
        if token == end:
            finished.append(Text(sampled[row].tolist(), total, True, silence))
        else:
            beams_left.append((row, token, total))
    if not beams_left:
        return None
    beams_left += [(beams_left[0][0], beams_left[0][1], float("-inf"))] * (beams - len(beams_left))
    parents = [row for row, _, _ in beams_left]
    added = torch.tensor([[token] for _, token, _ in beams_left], device=sampled.device)
    extended = torch.cat([sampled[parents], added], dim=1)
    return parents, torch.tensor([total for _, _, total in beams_left], device=totals.device), extended


@dataclass(frozen=True)
class SegmentPart:
    """Tokens between two times of a window, in seconds from its beginning."""

    tokens: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Cut:
    """The segments of a window, and the mel frames by which to advance."""

    segments: tuple[SegmentPart, ...]
    frames: int


def cut_segments(tokens: Sequence[int], ids: WhisperTokens, frames: int, timestamps: bool | None) -> Cut:
    """Cut between two consecutive timestamps; tokens after the last pair are decoded again in the next window.

    A text that ends in a single timestamp is complete; so is one without pairs, which starts with the window.
    Timestamps after the end of the sound are not changed. All of this is as in openai-whisper.
    """
    seconds = frames / MEL_FRAMES_PER_SECOND
    is_time = [ids.is_timestamp(token) for token in tokens] if timestamps else [False] * len(tokens)
    ends_in_timestamp = is_time[-2:] == [False, True]
    pairs = [index for index in range(1, len(tokens)) if is_time[index - 1] and is_time[index]]
    if not pairs:
        times = [ids.seconds(token) for token, time in zip(tokens, is_time, strict=True) if time]
        end = times[-1] if times and times[-1] > 0 else seconds
        return Cut((SegmentPart(tuple(tokens), 0.0, end),), frames)
    bounds = [0, *pairs, len(tokens)] if ends_in_timestamp else [0, *pairs]
    parts = []
    for first, last in pairwise(bounds):
        piece = tokens[first:last]
        begin = ids.seconds(piece[0]) if ids.is_timestamp(piece[0]) else 0.0
        parts.append(SegmentPart(tuple(piece), begin, ids.seconds(piece[-1])))
    if ends_in_timestamp:
        return Cut(tuple(parts), frames)
    done = round(ids.seconds(tokens[bounds[-1] - 1]) / 0.02) * CONV_STRIDE
    return Cut(tuple(parts), min(frames, done) if done else frames)
