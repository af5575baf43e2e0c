"""Windows to texts: the loop that takes tokens one by one, greedy or drawn, many windows at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.models.whisper import Whisper, WhisperDecoder, WindowMemory
from vivavoce.models.whisper_rules import LogitRule, apply
from vivavoce.models.whisper_tokens import WhisperTokens

STEPS_BETWEEN_LOOKS = 8  # on a GPU: asking whether all texts have ended waits for it


@dataclass(frozen=True)
class Text:
    """What was decoded of one window."""

    tokens: list[int]  # without prompt and <|endoftext|>
    logprob: float  # of all tokens, the end included
    is_ended: bool
    no_speech: float

    @property
    def average_logprob(self) -> float:
        """Per token, the end counted."""
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
    most: int | None = None,
    seed: int = 0,
) -> list[Text]:
    """The text of each window, prompted by prompts of one length; at a temperature, the best of some drawn."""
    best_of = best_of if temperature > 0 else 1
    state = model.decoder.initial_state(memory, best_of)
    prompt = _prompt_rows(prompts, memory, best_of)
    room = model.config.max_target_positions - prompt.shape[1]
    steps = min(room, model.config.max_target_positions // 2 if most is None else most)
    generator = torch.Generator(prompt.device).manual_seed(seed) if temperature > 0 else None
    hidden, state = model.decoder.step(state, prompt)
    no_speech = no_speech_chances(model.decoder, tokens, hidden, prompt)
    logits = model.decoder.logits(hidden[:, -1])
    sampled = prompt[:, :0]
    logprob = torch.zeros(prompt.shape[0], device=prompt.device)
    ended = torch.zeros_like(logprob, dtype=torch.bool)
    for step in range(steps):
        ruled = apply(rules, logits, sampled)
        taken = take(ruled, temperature, generator)
        of_taken = ruled.log_softmax(-1).gather(1, taken[:, None])[:, 0]
        logprob += of_taken.masked_fill(ended, 0.0)
        sampled = torch.cat([sampled, taken.masked_fill(ended, tokens.endoftext)[:, None]], dim=1)
        ended |= taken == tokens.endoftext
        looks = ended.device.type == "cpu" or step % STEPS_BETWEEN_LOOKS == STEPS_BETWEEN_LOOKS - 1
        if step + 1 == steps or (looks and bool(ended.all())):
            break
        hidden, state = model.decoder.step(state, sampled[:, -1:])
        logits = model.decoder.logits(hidden[:, -1])
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
    """A finished text of one window judged in one pass: the same as `decode` says of the text it makes."""
    ids = torch.tensor([[*prompt, *written]], device=memory.keys.device)
    hidden = model.decoder(ids, memory)
    logits = model.decoder.logits(hidden[0, len(prompt) - 1 :])
    taken = [*written, tokens.endoftext] if is_ended else list(written)
    total = 0.0
    for place, token in enumerate(taken):
        ruled = apply(rules, logits[place : place + 1], ids[:, len(prompt) : len(prompt) + place])
        total += float(ruled.log_softmax(-1)[0, token])
    (silence,) = no_speech_chances(model.decoder, tokens, hidden, ids[:, : len(prompt)])
    return Text(list(written), total, is_ended, silence)


@torch.inference_mode()
def language_chances(model: Whisper, tokens: WhisperTokens, memory: WindowMemory) -> list[dict[str, float]]:
    """How likely each language is, by window."""
    start = torch.full((memory.windows, 1), tokens.startoftranscript, device=memory.keys.device)
    hidden, _ = model.decoder.step(model.decoder.initial_state(memory), start)
    logits = model.decoder.logits(hidden[:, -1])
    ids = torch.tensor(list(tokens.languages.values()), device=logits.device)
    chances = logits[:, ids].softmax(-1).tolist()
    return [dict(zip(tokens.languages, row, strict=True)) for row in chances]


def _prompt_rows(prompts: Sequence[Sequence[int]], memory: WindowMemory, rows_per_window: int) -> Tensor:
    if len(prompts) != memory.windows or len({len(prompt) for prompt in prompts}) != 1 or not prompts[0]:
        lengths = [len(prompt) for prompt in prompts]
        raise InputError(f"{memory.windows} windows need as many prompts of one length, not of {lengths}")
    rows = torch.tensor([list(prompt) for prompt in prompts], device=memory.keys.device)
    return rows.repeat_interleave(rows_per_window, dim=0)


def no_speech_chances(decoder: WhisperDecoder, tokens: WhisperTokens, hidden: Tensor, prompt: Tensor) -> list[float]:
    """How likely the model finds it that nobody speaks: read where the transcript starts.  # one a row"""
    starts = (prompt == tokens.startoftranscript).int().argmax(-1)
    rows = torch.arange(len(starts), device=starts.device)
    chances = decoder.logits(hidden[rows, starts]).softmax(-1)
    of_rows: list[float] = chances[:, tokens.nospeech].tolist()
    return of_rows


def take(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """The likeliest token of each row, or one drawn at a temperature.  # [row, vocabulary] → [row]"""
    if generator is None:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def _texts(sampled: Tensor, logprob: Tensor, no_speech: list[float], end: int) -> list[Text]:
    texts = []
    for row, total, silence in zip(sampled.tolist(), logprob.tolist(), no_speech, strict=True):
        ends = end in row
        texts.append(Text(row[: row.index(end)] if ends else row, total, ends, silence))
    return texts
