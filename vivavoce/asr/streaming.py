"""Live transcription: words are committed one by one while speech comes in, the rest is pending and may change.

The last seconds of sound are transcribed again whenever enough of them is new. A policy decides which words of a
hypothesis are committed: LocalAgreement those on which two hypotheses in a row agree, AlignAtt those for which the
decoder did not attend to the very end of the sound. Committed words are the prefix of every later text; what lies too
far back is cut off the sound and becomes context. Each hypothesis is the draft of the next.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.asr.batch import TranscribingEngine, TranscriptionJob
from vivavoce.errors import InputError
from vivavoce.models.whisper.alignment import (
    MEDIAN_WIDTH,
    cross_attention_weights,
    median_filter,
    split_words,
    token_times,
)
from vivavoce.models.whisper.config import CONV_STRIDE, MEL_FRAMES_PER_SECOND, SECONDS_PER_TIMESTAMP
from vivavoce.models.whisper.decoding import Text
from vivavoce.models.whisper.model import WindowMemory
from vivavoce.models.whisper.transcriber import (
    Answer,
    DetectLanguage,
    EncodeWindow,
    Question,
    TranscriptionOptions,
    WhisperTranscriber,
    WriteText,
)

RATE = 16_000
CUT_FROM = 0.5  # share of a window from which on the sound of committed words is cut off
KEPT_BEHIND_CUT = 0.2  # share of a window that stays
MIN_SECONDS = 0.1  # of sound, below which there can be no word
CONTEXT_TOKENS = 120


@dataclass(frozen=True)
class GuessedWord:
    """A word with its time in seconds of the sound, and the latest moment its tokens attended to."""

    text: str
    tokens: tuple[int, ...]
    start: float
    end: float
    look: float


@dataclass(frozen=True)
class LiveGuess:
    """A hypothesis: the committed words of a sound, timed again, and those that may follow."""

    settled: tuple[GuessedWord, ...] = ()
    guessed: tuple[GuessedWord, ...] = ()


LiveSteps = Generator[Question, Answer, LiveGuess]


def guess_steps(
    transcriber: WhisperTranscriber,
    samples: Tensor,
    options: TranscriptionOptions,
    context: Sequence[int] = (),
    settled: Sequence[int] = (),
) -> LiveSteps:
    """The hypothesis for a sound of at most a window, with the device's work left to the caller.  # [time]

    `context` are tokens of the text before the sound, `settled` the tokens its text begins with.
    """
    options = replace(options, language=options.language or transcriber.default_language, timestamps=False)
    config = transcriber.model.config
    mel = transcriber.log_mel(samples)
    frames = min(config.window_frames, mel.shape[-1] - config.window_frames)
    memory = yield EncodeWindow(transcriber.window(mel, 0, options.padding, frames))
    assert isinstance(memory, WindowMemory)
    if options.language is None:
        options = replace(options, language=str((yield DetectLanguage(memory))))
    half = config.max_target_positions // 2
    prompt = transcriber.tokens.prompt(options.language, options.task, False, [*context][-(half // 2) :])
    room = config.max_target_positions - len(prompt) - len(settled) - 1
    text = yield WriteText(memory, (*prompt, *settled), options, 0.0, 1, min(half, room), bool(settled))
    assert isinstance(text, Text)
    if transcriber.is_silence(text):
        text = replace(text, tokens=[])
    return _align(transcriber, memory, options.language or "", settled, text.tokens, frames)


@torch.inference_mode()
def _align(
    transcriber: WhisperTranscriber,
    memory: WindowMemory,
    language: str,
    settled: Sequence[int],
    guessed: Sequence[int],
    frames: int,
) -> LiveGuess:
    """Words of both parts with their times, by the alignment heads' attention to the part of the window with sound."""
    tokens, spell = transcriber.tokens, transcriber.text_of
    written = [token for token in (*settled, *guessed) if token < tokens.endoftext]
    if not written:
        return LiveGuess()
    prompt = tokens.prompt(language if tokens.is_multilingual else None)
    ids = torch.tensor([[*prompt, *written, tokens.endoftext]], device=memory.keys.device)
    positions = max(1, frames // CONV_STRIDE)
    heads = transcriber.settings.alignment_heads
    attention = cross_attention_weights(transcriber.model.decoder, ids, memory, heads, positions)
    attention = attention[0, :, len(prompt) - 1 : -1].float()
    begins = token_times(attention)
    smooth = median_filter(attention.mean(0), MEDIAN_WIDTH)  # [token, position]
    looks = (smooth.argmax(-1) * SECONDS_PER_TIMESTAMP).tolist()
    count = sum(token < tokens.endoftext for token in settled)
    first = split_words(written[:count], spell, language)
    words: list[GuessedWord] = []
    start = 0
    for group in (*first, *split_words(written[count:], spell, language)):
        end = start + len(group)
        until = min(float(begins[end]), frames / MEL_FRAMES_PER_SECOND)
        words.append(GuessedWord(spell(group), tuple(group), float(begins[start]), until, max(looks[start:end])))
        start = end
    return LiveGuess(tuple(words[: len(first)]), tuple(words[len(first) :]))


class CommitPolicy(Protocol):
    """Decides how many of the guessed words are committed."""

    def sure(self, guess: LiveGuess, before: LiveGuess, seconds: float) -> int:
        """By a hypothesis, the one before it, and the length of the sound."""
        ...


@dataclass(frozen=True)
class LocalAgreement:
    """Commits words that two hypotheses in a row have in common (LocalAgreement-2)."""

    def sure(self, guess: LiveGuess, before: LiveGuess, seconds: float) -> int:
        """The length of the common prefix."""
        pairs = zip(guess.guessed, before.guessed, strict=False)
        return next((n for n, (one, other) in enumerate(pairs) if _plain(one) != _plain(other)),
                    min(len(guess.guessed), len(before.guessed)))  # fmt: skip


@dataclass(frozen=True)
class AlignAtt:
    """Commits words for which the decoder attended to nothing in the last `margin` seconds of the sound.

    A look far before that of the word before means that the decoder is lost: nothing is committed from there on.
    """

    margin: float = 0.5
    farthest_back: float = 4.0

    def sure(self, guess: LiveGuess, before: LiveGuess, seconds: float) -> int:
        """The number of words before the first that is too close to the end."""
        last = guess.settled[-1].look if guess.settled else 0.0
        for count, word in enumerate(guess.guessed):
            if word.look > seconds - self.margin or word.look < last - self.farthest_back:
                return count
            last = max(last, word.look)
        return len(guess.guessed)


POLICIES: dict[str, CommitPolicy] = {"local-agreement": LocalAgreement(), "alignatt": AlignAtt()}


@dataclass(frozen=True)
class LiveWord:
    """A committed word: its time in the stream, and how much of the stream had come when it was committed."""

    text: str
    start: float
    end: float
    committed_at: float

    @property
    def latency(self) -> float:
        """Seconds of sound between the end of the word and its commit; computing time is not counted."""
        return self.committed_at - self.end


@dataclass(frozen=True)
class LiveUpdate:
    """Newly committed words, and the text that may follow them."""

    words: tuple[LiveWord, ...]
    pending: str
    heard: float
    is_final: bool = False

    @property
    def text(self) -> str:
        """The new words, with the spaces they have in the whole text."""
        return "".join(word.text for word in self.words)


@dataclass(frozen=True)
class LiveState:
    """A stream under way, as a value: it may be copied, and continued twice."""

    sound: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # [time]: what is transcribed again
    begins: float = 0.0  # when that begins, in seconds of the stream
    fresh: int = 0  # samples of it that no hypothesis has covered
    context: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()
    guess: LiveGuess = LiveGuess()
    committed: tuple[LiveWord, ...] = ()

    @property
    def heard(self) -> float:
        """Seconds of the stream so far."""
        return self.begins + len(self.sound) / RATE

    @property
    def text(self) -> str:
        """All committed words."""
        return "".join(word.text for word in self.committed).strip()


class LiveTranscriber:
    """Streams on one engine, each a `LiveState`; several may be transcribed at once."""

    def __init__(
        self,
        engine: TranscribingEngine,
        policy: CommitPolicy | str = "alignatt",
        options: TranscriptionOptions | None = None,
        every: float = 0.5,
    ) -> None:
        if isinstance(policy, str):
            if policy not in POLICIES:
                raise InputError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
            policy = POLICIES[policy]
        self.engine, self.policy, self.every = engine, policy, every
        self._stride = max(1, round(every * RATE))
        self.options = options or TranscriptionOptions(padding="trim")
        self.max_seconds = engine.transcriber.model.config.window_seconds

    def initial_state(self) -> LiveState:
        """A stream before its first sample."""
        return LiveState()

    def step(self, state: LiveState, samples: NDArray[np.float32]) -> tuple[list[LiveUpdate], LiveState]:
        """Take samples at 16 kHz, in pieces of any length; the updates they lead to.  # [time]"""
        updates = []
        while len(samples):
            samples, state = self.take(state, samples)
            if self.is_due(state):
                update, state = self.settle(state, self._guess(state))
                updates.append(update)
        return updates, state

    def finish(self, state: LiveState) -> tuple[LiveUpdate, LiveState]:
        """Commit all words of the last hypothesis: the stream is over."""
        return self.settle(state, self._guess(state), is_final=True)

    def take(self, state: LiveState, samples: NDArray[np.float32]) -> tuple[NDArray[np.float32], LiveState]:
        """Add samples up to where the next hypothesis is due; the samples behind that, and the state.  # [time]

        So updates do not depend on the pieces in which the sound comes.
        """
        now, later = np.split(samples, [max(1, self._stride - state.fresh)])
        added = torch.from_numpy(np.ascontiguousarray(now, dtype=np.float32))
        return later, replace(state, sound=torch.cat([state.sound, added]), fresh=state.fresh + len(now))

    def is_due(self, state: LiveState) -> bool:
        """Whether enough sound is new for another hypothesis."""
        return state.fresh >= self._stride

    def is_audible(self, state: LiveState) -> bool:
        """Whether there is enough sound for a word."""
        return len(state.sound) >= MIN_SECONDS * RATE

    def ask(self, state: LiveState) -> TranscriptionJob[LiveGuess]:
        """The next hypothesis, to be iterated to its end."""
        window = int(self.max_seconds * RATE)
        steps = guess_steps(self.engine.transcriber, state.sound[:window], self.options, state.context, state.settled)
        return self.engine.run(steps, _tokens(state.guess.guessed))

    def settle(self, state: LiveState, guess: LiveGuess, is_final: bool = False) -> tuple[LiveUpdate, LiveState]:
        """What a hypothesis commits, and the state after it."""
        seconds = len(state.sound) / RATE
        is_full = seconds >= self.max_seconds - self.every
        sure = len(guess.guessed) if is_final or is_full else self.policy.sure(guess, state.guess, seconds)
        fresh, rest = guess.guessed[:sure], guess.guessed[sure:]
        words = tuple(
            LiveWord(word.text, state.begins + word.start, state.begins + word.end, state.heard) for word in fresh
        )
        update = LiveUpdate(words, "".join(word.text for word in rest), state.heard, is_final)
        state = replace(state, fresh=0, settled=(*state.settled, *_tokens(fresh)), committed=(*state.committed, *words))
        if is_final:
            follows = self.options.follow_earlier
            context = (*state.context, *state.settled)[-CONTEXT_TOKENS:] if follows else ()
            return update, replace(self.initial_state(), committed=state.committed, begins=state.heard, context=context)
        state = replace(state, guess=LiveGuess((*guess.settled, *fresh), rest))
        return update, self._shorten(state, force=is_full)

    def _guess(self, state: LiveState) -> LiveGuess:
        if not self.is_audible(state):
            return LiveGuess()
        job = self.ask(state)
        for _ in job:
            pass
        return job.result or LiveGuess()

    def _shorten(self, state: LiveState, force: bool) -> LiveState:
        """Cut off the sound of committed words that lie far back, at the end of the last of them."""
        seconds = len(state.sound) / RATE
        if seconds < CUT_FROM * self.max_seconds:
            return state
        words, latest = state.guess.settled, seconds - KEPT_BEHIND_CUT * self.max_seconds
        count = max((n for n, word in enumerate(words, start=1) if word.end <= latest), default=0)
        if count:
            return self._cut(state, count, words[count - 1].end)
        return self._cut(state, len(words), latest) if force else state

    def _cut(self, state: LiveState, count: int, seconds: float) -> LiveState:
        """The state without its first words and seconds of sound."""
        gone, left = state.guess.settled[:count], state.guess.settled[count:]
        samples = int(seconds * RATE)
        return replace(
            state,
            sound=state.sound[samples:],
            begins=state.begins + samples / RATE,
            context=(*state.context, *_tokens(gone))[-CONTEXT_TOKENS:],
            settled=_tokens(left),
            guess=LiveGuess(_shifted(left, seconds), _shifted(state.guess.guessed, seconds)),
        )


def _plain(word: GuessedWord) -> str:
    return word.text.strip().strip(".,!?;:。，！？").casefold()


def _tokens(words: Sequence[GuessedWord]) -> tuple[int, ...]:
    return tuple(token for word in words for token in word.tokens)


def _shifted(words: Sequence[GuessedWord], seconds: float) -> tuple[GuessedWord, ...]:
    """The words as timed in a sound that begins so much later."""
    return tuple(
        replace(word, start=word.start - seconds, end=word.end - seconds, look=word.look - seconds) for word in words
    )
