"""Live transcription: words are committed one by one while audio arrives; the rest of the text is pending.

A buffer with the last seconds of audio is transcribed again whenever `every` seconds of it are new. A policy decides
which words of the hypothesis are committed: LocalAgreement those that two consecutive hypotheses share, AlignAtt those
whose tokens did not attend to the end of the audio. Committed words are the prefix of every later hypothesis; once the
buffer is long, their audio is dropped and their tokens become context. Each hypothesis is the draft of the next.
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
from vivavoce.models.whisper.steps import (
    Answer,
    DetectLanguage,
    EncodeWindow,
    Question,
    TranscriptionOptions,
    WriteText,
)
from vivavoce.models.whisper.transcriber import WhisperTranscriber

RATE = 16_000
TRIM_FROM = 0.5  # share of a window that the buffer may fill before audio of committed words is dropped
KEPT_SHARE = 0.2  # share of a window that stays in the buffer
MIN_SECONDS = 0.1  # shorter audio holds no word
CONTEXT_TOKENS = 120


@dataclass(frozen=True)
class HypothesisWord:
    """A word with its times in seconds of the buffer, and the latest time that its tokens attended to."""

    text: str
    tokens: tuple[int, ...]
    start: float
    end: float
    attended: float


@dataclass(frozen=True)
class LiveHypothesis:
    """A transcription of the buffer: the committed words, timed again, and the pending words after them."""

    committed: tuple[HypothesisWord, ...] = ()
    pending: tuple[HypothesisWord, ...] = ()


LiveSteps = Generator[Question, Answer, LiveHypothesis]


def hypothesis_steps(
    transcriber: WhisperTranscriber,
    samples: Tensor,
    options: TranscriptionOptions,
    context: Sequence[int] = (),
    committed: Sequence[int] = (),
) -> LiveSteps:
    """Transcribe audio of at most one window; the caller answers the yielded questions on the device.  # [time]

    `context` are tokens of the text before the audio, `committed` the tokens that its text starts with.
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
    room = config.max_target_positions - len(prompt) - len(committed) - 1
    text = yield WriteText(memory, (*prompt, *committed), options, 0.0, 1, min(half, room), bool(committed))
    assert isinstance(text, Text)
    if transcriber.is_silence(text):
        text = replace(text, tokens=[])
    return _align(transcriber, memory, options.language or "", committed, text.tokens, frames)


@torch.inference_mode()
def _align(
    transcriber: WhisperTranscriber,
    memory: WindowMemory,
    language: str,
    committed: Sequence[int],
    pending: Sequence[int],
    frames: int,
) -> LiveHypothesis:
    """Committed and pending words with times from the alignment heads, whose attention is cut to the audio's length."""
    tokens, spell = transcriber.tokens, transcriber.text_of
    written = [token for token in (*committed, *pending) if token < tokens.endoftext]
    if not written:
        return LiveHypothesis()
    prompt = tokens.prompt(language if tokens.is_multilingual else None)
    ids = torch.tensor([[*prompt, *written, tokens.endoftext]], device=memory.keys.device)
    positions = max(1, frames // CONV_STRIDE)
    heads = transcriber.settings.alignment_heads
    attention = cross_attention_weights(transcriber.model.decoder, ids, memory, heads, positions)
    attention = attention[0, :, len(prompt) - 1 : -1].float()
    starts = token_times(attention)
    smooth = median_filter(attention.mean(0), MEDIAN_WIDTH)  # [token, position]
    attended = (smooth.argmax(-1) * SECONDS_PER_TIMESTAMP).tolist()
    count = sum(token < tokens.endoftext for token in committed)
    first = split_words(written[:count], spell, language)
    words: list[HypothesisWord] = []
    start = 0
    for group in (*first, *split_words(written[count:], spell, language)):
        end = start + len(group)
        until = min(float(starts[end]), frames / MEL_FRAMES_PER_SECOND)
        words.append(HypothesisWord(spell(group), tuple(group), float(starts[start]), until, max(attended[start:end])))
        start = end
    return LiveHypothesis(tuple(words[: len(first)]), tuple(words[len(first) :]))


class CommitPolicy(Protocol):
    """Decides how many pending words of a hypothesis are committed."""

    def count_committed(self, hypothesis: LiveHypothesis, previous: LiveHypothesis, seconds: float) -> int:
        """The number of words to commit, given two consecutive hypotheses and the length of the audio."""
        ...


@dataclass(frozen=True)
class LocalAgreement:
    """Commits words that two hypotheses in a row have in common (LocalAgreement-2)."""

    def count_committed(self, hypothesis: LiveHypothesis, previous: LiveHypothesis, seconds: float) -> int:
        """The length of the common prefix."""
        pairs = zip(hypothesis.pending, previous.pending, strict=False)
        return next((n for n, (one, other) in enumerate(pairs) if _plain(one) != _plain(other)),
                    min(len(hypothesis.pending), len(previous.pending)))  # fmt: skip


@dataclass(frozen=True)
class AlignAtt:
    """Commits words whose tokens did not attend to the last `margin` seconds of the audio.

    Attention that jumps back by more than `max_jump_back` seconds means that the decoder lost its place: no word is
    committed from there on.
    """

    margin: float = 0.5
    max_jump_back: float = 4.0

    def count_committed(self, hypothesis: LiveHypothesis, previous: LiveHypothesis, seconds: float) -> int:
        """The number of words before the first that attends too close to the end, or jumps back."""
        last = hypothesis.committed[-1].attended if hypothesis.committed else 0.0
        for count, word in enumerate(hypothesis.pending):
            if word.attended > seconds - self.margin or word.attended < last - self.max_jump_back:
                return count
            last = max(last, word.attended)
        return len(hypothesis.pending)


POLICIES: dict[str, CommitPolicy] = {"local-agreement": LocalAgreement(), "alignatt": AlignAtt()}


@dataclass(frozen=True)
class LiveWord:
    """A committed word: its times in the stream, and the seconds of audio received when it was committed."""

    text: str
    start: float
    end: float
    committed_at: float

    @property
    def latency(self) -> float:
        """Seconds of audio between the end of the word and its commit, without computing time."""
        return self.committed_at - self.end


@dataclass(frozen=True)
class LiveUpdate:
    """Newly committed words, and the pending text after them."""

    words: tuple[LiveWord, ...]
    pending: str
    received: float
    is_final: bool = False

    @property
    def text(self) -> str:
        """The new words, with their leading spaces."""
        return "".join(word.text for word in self.words)


@dataclass(frozen=True)
class LiveState:
    """The state of one stream. An immutable value: it may be copied, and continued more than once."""

    sound: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # [time]: the buffer
    offset: float = 0.0  # start of the buffer, in seconds of the stream
    new_samples: int = 0  # samples of the buffer that no hypothesis covers
    context: tuple[int, ...] = ()  # tokens of the text before the buffer
    committed: tuple[int, ...] = ()
    hypothesis: LiveHypothesis = LiveHypothesis()
    words: tuple[LiveWord, ...] = ()

    @property
    def received(self) -> float:
        """Seconds of the stream so far."""
        return self.offset + len(self.sound) / RATE

    @property
    def text(self) -> str:
        """All committed words."""
        return "".join(word.text for word in self.words).strip()


class LiveTranscriber:
    """Transcribes streams on one engine, each with its own `LiveState`."""

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
            samples, state = self.append(state, samples)
            if self.is_due(state):
                update, state = self.commit(state, self._hypothesis(state))
                updates.append(update)
        return updates, state

    def finish(self, state: LiveState) -> tuple[LiveUpdate, LiveState]:
        """Commit all words of the last hypothesis: the stream is over."""
        return self.commit(state, self._hypothesis(state), is_final=True)

    def append(self, state: LiveState, samples: NDArray[np.float32]) -> tuple[NDArray[np.float32], LiveState]:
        """Add samples up to the point where the next hypothesis is due; return the remaining samples.  # [time]

        Updates therefore do not depend on how the audio is split into pieces.
        """
        now, later = np.split(samples, [max(1, self._stride - state.new_samples)])
        added = torch.from_numpy(np.ascontiguousarray(now, dtype=np.float32))
        return later, replace(state, sound=torch.cat([state.sound, added]), new_samples=state.new_samples + len(now))

    def is_due(self, state: LiveState) -> bool:
        """Whether enough audio is new for another hypothesis."""
        return state.new_samples >= self._stride

    def has_enough_audio(self, state: LiveState) -> bool:
        """Whether the buffer is long enough to hold a word."""
        return len(state.sound) >= MIN_SECONDS * RATE

    def transcribe_buffer(self, state: LiveState) -> TranscriptionJob[LiveHypothesis]:
        """A job for the next hypothesis, which must be iterated to its end."""
        window = int(self.max_seconds * RATE)
        steps = hypothesis_steps(
            self.engine.transcriber, state.sound[:window], self.options, state.context, state.committed
        )
        return self.engine.run(steps, _tokens(state.hypothesis.pending))

    def commit(
        self, state: LiveState, hypothesis: LiveHypothesis, is_final: bool = False
    ) -> tuple[LiveUpdate, LiveState]:
        """Commit words of a hypothesis; all of them at the end of a turn and when the buffer is full."""
        seconds = len(state.sound) / RATE
        is_full = seconds >= self.max_seconds - self.every
        count = len(hypothesis.pending)
        if not (is_final or is_full):
            count = self.policy.count_committed(hypothesis, state.hypothesis, seconds)
        new, rest = hypothesis.pending[:count], hypothesis.pending[count:]
        words = tuple(
            LiveWord(word.text, state.offset + word.start, state.offset + word.end, state.received) for word in new
        )
        update = LiveUpdate(words, "".join(word.text for word in rest), state.received, is_final)
        state = replace(state, new_samples=0, committed=(*state.committed, *_tokens(new)), words=(*state.words, *words))
        if is_final:
            follows = self.options.follow_earlier
            context = (*state.context, *state.committed)[-CONTEXT_TOKENS:] if follows else ()
            return update, replace(self.initial_state(), words=state.words, offset=state.received, context=context)
        state = replace(state, hypothesis=LiveHypothesis((*hypothesis.committed, *new), rest))
        return update, self._trim(state, force=is_full)

    def _hypothesis(self, state: LiveState) -> LiveHypothesis:
        if not self.has_enough_audio(state):
            return LiveHypothesis()
        job = self.transcribe_buffer(state)
        for _ in job:
            pass
        return job.result or LiveHypothesis()

    def _trim(self, state: LiveState, force: bool) -> LiveState:
        """Drop the audio of early committed words from a long buffer, up to the end of the last of them."""
        seconds = len(state.sound) / RATE
        if seconds < TRIM_FROM * self.max_seconds:
            return state
        words, latest = state.hypothesis.committed, seconds - KEPT_SHARE * self.max_seconds
        count = max((n for n, word in enumerate(words, start=1) if word.end <= latest), default=0)
        if count:
            return self._cut(state, count, words[count - 1].end)
        return self._cut(state, len(words), latest) if force else state

    def _cut(self, state: LiveState, count: int, seconds: float) -> LiveState:
        """Drop the first `count` words and seconds of audio."""
        dropped, left = state.hypothesis.committed[:count], state.hypothesis.committed[count:]
        samples = int(seconds * RATE)
        return replace(
            state,
            sound=state.sound[samples:],
            offset=state.offset + samples / RATE,
            context=(*state.context, *_tokens(dropped))[-CONTEXT_TOKENS:],
            committed=_tokens(left),
            hypothesis=LiveHypothesis(_shifted(left, seconds), _shifted(state.hypothesis.pending, seconds)),
        )


def _plain(word: HypothesisWord) -> str:
    return word.text.strip().strip(".,!?;:。，！？").casefold()


def _tokens(words: Sequence[HypothesisWord]) -> tuple[int, ...]:
    return tuple(token for word in words for token in word.tokens)


def _shifted(words: Sequence[HypothesisWord], seconds: float) -> tuple[HypothesisWord, ...]:
    """The words with their times moved back by `seconds`."""
    return tuple(
        replace(word, start=word.start - seconds, end=word.end - seconds, attended=word.attended - seconds)
        for word in words
    )
