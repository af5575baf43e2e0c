"""Speech written down while it is spoken: what is sure is told word by word, what may still change beside it.

The sound of the last seconds is heard again whenever enough of it is new. A policy says which of the words that are
guessed then may be told for good: LocalAgreement those on which two guesses in a row agree, AlignAtt those for which
the decoder did not look at the very end of the sound. What is told becomes the beginning of every later text, what
lies too far back is left out of the sound and given as context, and each guess is the draft of the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.asr.batch import RecognitionJob, TranscribingEngine
from vivavoce.errors import InputError
from vivavoce.models.whisper.live import GuessedWord, LiveGuess, hear_live
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.models.whisper.windows import TranscriptionOptions

RATE = 16_000
FORGOTTEN = 0.5  # share of a window from which on told words are left out of the sound
LEAST_SOUND = 0.1  # seconds below which nothing can have been said
CONTEXT_TOKENS = 120  # of what was said before that are kept


@dataclass(frozen=True)
class LiveWord:
    """A word that was told: its time in the stream, and how much of the stream had been heard when it was."""

    text: str
    start: float
    end: float
    told_at: float

    @property
    def latency(self) -> float:
        """Seconds of sound between the end of the word and its telling, computing not counted."""
        return self.told_at - self.end


@dataclass(frozen=True)
class LiveUpdate:
    """What has become sure, and what follows it as far as one can say."""

    words: tuple[LiveWord, ...]
    pending: str
    heard: float
    is_final: bool = False

    @property
    def text(self) -> str:
        """What has become sure, as it stands in the whole."""
        return "".join(word.text for word in self.words)


@dataclass(frozen=True)
class LiveState:
    """A stream under way. A value: it may be kept, copied and gone on from twice."""

    sound: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # [time]: what may still be heard again
    begins: float = 0.0  # when that begins, in seconds of the stream
    fresh: int = 0  # samples of it that no guess has heard
    context: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()
    guess: LiveGuess = LiveGuess()  # noqa: RUF009 - frozen
    told: tuple[LiveWord, ...] = ()

    @property
    def heard(self) -> float:
        """Seconds of the stream so far."""
        return self.begins + len(self.sound) / RATE

    @property
    def text(self) -> str:
        """Everything that was told."""
        return "".join(word.text for word in self.told).strip()


class CommitPolicy(Protocol):
    """How many of the guessed words are sure."""

    def sure(self, guess: LiveGuess, before: LiveGuess, seconds: float) -> int:
        """By the guess, the one before it, and how long the sound is."""
        ...


@dataclass(frozen=True)
class LocalAgreement:
    """Words that stand in both of two guesses in a row (LocalAgreement-2)."""

    def sure(self, guess: LiveGuess, before: LiveGuess, seconds: float) -> int:
        """How many words at the beginning agree."""
        pairs = zip(guess.guessed, before.guessed, strict=False)
        return next((n for n, (one, other) in enumerate(pairs) if _plain(one) != _plain(other)),
                    min(len(guess.guessed), len(before.guessed)))  # fmt: skip


@dataclass(frozen=True)
class AlignAtt:
    """Words for which the decoder looked no later than `margin` before the end of the sound.

    A look far behind the last word's is of a decoder that has lost its way: nothing is sure from there on.
    """

    margin: float = 0.5
    farthest_back: float = 4.0

    def sure(self, guess: LiveGuess, before: LiveGuess, seconds: float) -> int:
        """How many words at the beginning are far enough from the end."""
        last = guess.settled[-1].look if guess.settled else 0.0
        for count, word in enumerate(guess.guessed):
            if word.look > seconds - self.margin or word.look < last - self.farthest_back:
                return count
            last = max(last, word.look)
        return len(guess.guessed)


POLICIES: dict[str, CommitPolicy] = {"local-agreement": LocalAgreement(), "alignatt": AlignAtt()}


class LiveListener:
    """Streams on one engine, each a `LiveState`; many of them may be heard side by side."""

    def __init__(
        self,
        engine: TranscribingEngine,
        policy: CommitPolicy | str = "alignatt",
        wish: TranscriptionOptions | None = None,
        every: float = 0.5,
    ) -> None:
        if isinstance(policy, str):
            if policy not in POLICIES:
                raise InputError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
            policy = POLICIES[policy]
        self.engine, self.policy, self.every = engine, policy, every
        self._stride = max(1, round(every * RATE))
        self.wish = wish or TranscriptionOptions(padding="trim")
        self.longest = self.listener.model.config.window_seconds

    @property
    def listener(self) -> WhisperTranscriber:
        """Who hears."""
        return self.engine.listener

    def initial_state(self) -> LiveState:
        """A stream before its first sample."""
        return LiveState()

    def step(self, state: LiveState, samples: NDArray[np.float32]) -> tuple[list[LiveUpdate], LiveState]:
        """Take in samples at 16 kHz, in pieces of any length, and tell what has become sure.  # [time]"""
        updates = []
        while len(samples):
            samples, state = self.take(state, samples)
            if self.is_due(state):
                update, state = self.settle(state, self._heard(state))
                updates.append(update)
        return updates, state

    def finish(self, state: LiveState) -> tuple[LiveUpdate, LiveState]:
        """The stream is over: everything that is guessed is told."""
        return self.settle(state, self._heard(state), is_final=True)

    def take(self, state: LiveState, samples: NDArray[np.float32]) -> tuple[NDArray[np.float32], LiveState]:
        """The state with sound up to where it is listened to again, and the sound behind that.  # [time]

        So what is told does not depend on the pieces in which the sound comes.
        """
        now, later = np.split(samples, [max(1, self._stride - state.fresh)])
        added = torch.from_numpy(np.ascontiguousarray(now, dtype=np.float32))
        return later, replace(state, sound=torch.cat([state.sound, added]), fresh=state.fresh + len(now))

    def is_due(self, state: LiveState) -> bool:
        """Whether enough is new to listen again."""
        return state.fresh >= self._stride

    def is_audible(self, state: LiveState) -> bool:
        """Whether there is sound in which something can have been said."""
        return len(state.sound) >= LEAST_SOUND * RATE

    def ask(self, state: LiveState) -> RecognitionJob:
        """Have the engine hear the sound as it is now."""
        window = int(self.longest * RATE)
        going = hear_live(self.listener, state.sound[:window], self.wish, state.context, state.settled)
        earlier = [token for word in state.guess.guessed for token in word.tokens]
        return self.engine.go(going, earlier)

    def settle(self, state: LiveState, guess: LiveGuess, is_final: bool = False) -> tuple[LiveUpdate, LiveState]:
        """What a guess makes sure, and the state after it."""
        seconds = len(state.sound) / RATE
        full = seconds >= self.longest - self.every
        sure = len(guess.guessed) if is_final or full else self.policy.sure(guess, state.guess, seconds)
        fresh = guess.guessed[:sure]
        words = tuple(
            LiveWord(word.text, state.begins + word.start, state.begins + word.end, state.heard) for word in fresh
        )
        rest = guess.guessed[sure:]
        update = LiveUpdate(words, "".join(word.text for word in rest), state.heard, is_final)
        settled = (*state.settled, *(token for word in fresh for token in word.tokens))
        state = replace(state, fresh=0, settled=settled, told=(*state.told, *words))
        if is_final:
            return update, replace(self.initial_state(), told=state.told, begins=state.heard, context=self._kept(state))
        kept = replace(state, guess=LiveGuess((*guess.settled, *fresh), rest))
        return update, self._shortened(kept, force=full)

    def _heard(self, state: LiveState) -> LiveGuess:
        if not self.is_audible(state):
            return LiveGuess()
        one = self.ask(state)
        while not one.is_done:
            self.engine.advance()
        if one.error is not None:
            raise one.error
        return one.guess or LiveGuess()

    def _shortened(self, state: LiveState, force: bool) -> LiveState:
        """Leave out the sound of told words that lie far back, at the end of the last of them that does."""
        seconds = len(state.sound) / RATE
        if seconds < FORGOTTEN * self.longest:
            return state
        words = state.guess.settled
        far = [n for n, word in enumerate(words, start=1) if word.end <= seconds - 0.2 * self.longest]
        if not far:
            if not force:
                return state
            return self._without(state, len(words), seconds - 0.2 * self.longest)
        return self._without(state, far[-1], words[far[-1] - 1].end)

    def _without(self, state: LiveState, count: int, cut: float) -> LiveState:
        """The state without its first words and seconds."""
        gone, kept = state.guess.settled[:count], state.guess.settled[count:]
        samples = int(cut * RATE)
        return replace(
            state,
            sound=state.sound[samples:],
            begins=state.begins + samples / RATE,
            context=(*state.context, *_tokens(gone))[-CONTEXT_TOKENS:],
            settled=tuple(_tokens(kept)),
            guess=LiveGuess(_earlier(kept, cut), _earlier(state.guess.guessed, cut)),
        )

    def _kept(self, state: LiveState) -> tuple[int, ...]:
        return (*state.context, *state.settled)[-CONTEXT_TOKENS:] if self.wish.follow_earlier else ()


def _plain(word: GuessedWord) -> str:
    return word.text.strip().strip(".,!?;:。，！？").casefold()


def _tokens(words: Sequence[GuessedWord]) -> list[int]:
    return [token for word in words for token in word.tokens]


def _earlier(words: Sequence[GuessedWord], seconds: float) -> tuple[GuessedWord, ...]:
    """The words as a sound that begins later has them."""
    return tuple(
        replace(word, start=word.start - seconds, end=word.end - seconds, look=word.look - seconds) for word in words
    )
