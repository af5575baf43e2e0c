"""Classify sound made while a reply plays: interruption, backchannel, noise or echo. Decided within 300 ms, or 400
where the evidence is even, from the sound alone or with a transcript where there is one.

A hum ("mm-hm") is soft, dark and steady; a cough is loud, noisy and short; echo correlates with the recent output. An
interruption lasts, changes its spectrum as words do, and is as loud as the user usually is.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Protocol

import numpy as np

from vivavoce.audio.vad import WINDOW_MS
from vivavoce.dialogue.front_end import AudioWindow, WindowFeatures, spectral_change, window_features
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.joined_turns import AnsweredTurn

AskTurnModel = Callable[[AnsweredTurn], None]
"""Asks whether a turn is finished; its `finished` has the answer later."""

BACKCHANNELS = frozenset(
    "mm mhm mmhm mmhmm hm hmm uh-huh uhhuh uh huh aha ah oh okay ok yeah yep yes right sure I see got it good great "
    "嗯 嗯嗯 对 对对 是 是的 好 好的 哦 噢 啊 行".lower().split()
)


END_WINDOWS = 3  # of silence
ECHO_SHARE = 0.5  # of echo, from which on a sound is taken for it
FAINT_DB = -16.0  # relative to the user's level: a breath, perhaps before a word
USUAL_WINDOWS = 96  # of the user's last speech that are kept, about three seconds


class OverlapVerdict(Enum):
    """The class of the sound."""

    INTERRUPTION = "interruption"
    BACKCHANNEL = "backchannel"
    NOISE = "noise"
    BYSTANDER = "bystander"
    ECHO = "echo"


@dataclass(frozen=True)
class OverlapLimits:
    """Deadlines of the decision, in milliseconds from the start of the sound, and the evidence it needs."""

    earliest_ms: int = 128
    usual_ms: int = 224
    """From here on `enough` is the threshold; before, it is higher."""
    latest_ms: int = 288
    """By then it is decided, unless the evidence is even: then the reply stays ducked."""
    undecided_until_ms: int = 384
    """Until then evidence may still decide; after, only the duration of the sound does."""
    max_backchannel_ms: int = 736
    """Speech longer than this is an interruption, whatever the first verdict was."""
    bystander_db: float = -15.0
    """Speech this far under the user's level comes from a bystander and is no interruption."""
    enough: float = 1.0
    early_margin: float = 0.25
    """Added to the threshold for every window before `usual_ms`."""
    harmless: float = -1.0
    """Below this the sound is no interruption at the latest time."""


@dataclass(frozen=True)
class OverlapState:
    """The windows since the start of the sound, and the verdict so far."""

    windows: tuple[WindowFeatures, ...] = ()
    probabilities: tuple[float, ...] = ()
    echoes: tuple[float, ...] = ()
    verdict: OverlapVerdict | None = None

    @property
    def lasted_ms(self) -> int:
        """Duration so far."""
        return len(self.windows) * WINDOW_MS


@dataclass
class UserLevel:
    """The user's usual level, a running mean over speech without echo, and the last loud windows of that speech."""

    user: float | None = None
    """In dB of full scale."""
    memory: float = 0.05
    loud: deque[Samples] = field(default_factory=lambda: deque(maxlen=USUAL_WINDOWS), repr=False)
    SOFT_DB = 8.0

    def copy(self) -> "UserLevel":
        """One that later speech does not change."""
        return replace(self, loud=self.loud.copy())

    def update(self, level_db: float, samples: Samples | None = None) -> None:
        """Add a window of the user's speech."""
        is_loud = self.user is None or level_db > self.user - self.SOFT_DB
        if is_loud and samples is not None:
            self.loud.append(samples.copy())  # not the batch of all sessions that it may be a part of
        if self.user is None:
            self.user = level_db
        else:
            # Averaged as power; soft windows count little, as interruptions are compared with loud speech.
            share = self.memory if is_loud else 0.1 * self.memory
            power = (1 - share) * 10 ** (self.user / 10) + share * 10 ** (level_db / 10)
            self.user = 10 * float(np.log10(power))


class WatchedOverlap(Protocol):
    """The watch of one sound made over a reply, by the rules or by the trained network."""

    words: str | None

    def step(self, samples: Samples, probability: float, echo: float, is_speech: bool, levels: UserLevel) -> None:
        """Add a window."""
        ...

    @property
    def verdict(self) -> OverlapVerdict | None:
        """The class of the sound; None: undecided."""
        ...

    @property
    def lasted_ms(self) -> int:
        """Duration so far."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the sound has ended."""
        ...

    @property
    def may_be_turn(self) -> bool:
        """Whether it may be the user who speaks."""
        ...

    def goes_on(self, before: AnsweredTurn | None, ask_turn_model: AskTurnModel | None) -> bool:
        """Whether the user, who has hardly heard the reply, goes on with the turn before it; None: there is none.

        Where it matters whether this turn was finished, the turn model is asked; None: there is no such model.
        """
        ...


class WatchedTurn(WatchedOverlap, Protocol):
    """The watch of a turn in silence, which may be another person's: it is judged as a sound over a reply is."""

    @property
    def bystander_odds(self) -> float:
        """Log-odds that it is another voice, or the user's own turned away."""
        ...

    @property
    def relative_db(self) -> float:
        """The mean level of its speech relative to the user's."""
        ...


class OverlapJudge(Protocol):
    """Makes the watches of overlaps: `OverlapClassifier`, or `ModelClassifier` of model_barge_in.py."""

    name: str
    """What the server's log calls it."""

    def watch(self, before: Sequence[AudioWindow] = (), levels: UserLevel | None = None) -> WatchedOverlap:
        """The watch of a new overlap; `before`: the windows before it."""
        ...

    def watch_turn(self, before: Sequence[AudioWindow], levels: UserLevel) -> WatchedTurn | None:
        """The watch of a turn in silence; None: all of them are the user's."""
        ...


class OverlapClassifier:
    """Steps an `OverlapState`. A verdict is final, except that it may still become an interruption."""

    name = "the rules"

    def __init__(self, limits: OverlapLimits | None = None) -> None:
        self.limits = limits or OverlapLimits()

    def watch(self, before: Sequence[AudioWindow] = (), levels: UserLevel | None = None) -> "OverlapWatch":
        """The watch of a new overlap; the rules do not use what was before it."""
        return OverlapWatch(self)

    def watch_turn(self, before: Sequence[AudioWindow], levels: UserLevel) -> None:
        """None: the rules take every turn in silence for the user's."""

    def step(
        self,
        state: OverlapState,
        window: WindowFeatures,
        probability: float,
        echo: float,
        levels: UserLevel,
        words: str | None = None,
    ) -> OverlapState:
        """The state after the next window of the sound; its `verdict` is None while it is undecided."""
        state = replace(
            state,
            windows=(*state.windows, window)[-64:],
            probabilities=(*state.probabilities, probability)[-64:],
            echoes=(*state.echoes, echo)[-64:],
        )
        return replace(state, verdict=self._verdict(state, levels, words))

    def end(self, state: OverlapState, levels: UserLevel, words: str | None = None) -> OverlapVerdict:
        """The verdict on a sound that ended undecided."""
        if not state.windows:
            return OverlapVerdict.NOISE
        evidence = self.evidence(state, levels, words)
        return OverlapVerdict.INTERRUPTION if evidence > self.limits.enough else _harmless_kind(state)

    def evidence(self, state: OverlapState, levels: UserLevel, words: str | None = None) -> float:
        """Log-odds of an interruption: 1 is about 73 %."""
        is_harmless = None if words is None else is_backchannel(words)
        if is_harmless is not None:
            return -6.0 if is_harmless else 6.0
        features = overlap_features(state, levels)
        return sum(WEIGHTS[name] * value for name, value in features.items())

    def _verdict(self, state: OverlapState, levels: UserLevel, words: str | None) -> OverlapVerdict | None:
        limits, lasted = self.limits, state.lasted_ms
        if state.verdict is OverlapVerdict.INTERRUPTION or self._goes_on(state, levels):
            return OverlapVerdict.INTERRUPTION
        if lasted < limits.earliest_ms or (state.verdict is not None and lasted > limits.undecided_until_ms):
            return state.verdict
        evidence = self.evidence(state, levels, words)
        early = max(0, limits.usual_ms - lasted) / WINDOW_MS
        if lasted <= limits.undecided_until_ms and evidence > limits.enough + limits.early_margin * early:
            return OverlapVerdict.INTERRUPTION
        if state.verdict is None and lasted >= limits.latest_ms and evidence < limits.harmless:
            return _harmless_kind(state)
        return state.verdict

    def _goes_on(self, state: OverlapState, levels: UserLevel) -> bool:
        """Whether speech, not that of a bystander, has lasted longer than a backchannel does."""
        speech = [
            window for window, probability in zip(state.windows, state.probabilities, strict=True) if probability >= 0.5
        ]
        if len(speech) * WINDOW_MS < self.limits.max_backchannel_ms:
            return False
        level = 10.0 * float(np.log10(np.mean([10.0 ** (window.level_db / 10) for window in speech])))
        if levels.user is not None and level - levels.user < self.limits.bystander_db:
            return False
        voiced = np.mean([window.periodicity > 0.6 for window in state.windows])
        return bool(voiced > 0.3 and np.mean(state.echoes) < ECHO_SHARE)


# Fitted to 800 interruptions and 800 backchannels in 53 synthesised voices, to hums, coughs and far-off talk, then
# rounded. Unconstrained, the fit takes any hiss for speech, as the synthesised words come without noise.
WEIGHTS = {
    "always": -5.3,
    "level": 0.61,
    "mean": 0.28,
    "probability": 6.0,
    "change": 0.48,
    "bright": -2.0,
    "flat": 4.0,
    "echo": -12.0,
}


def overlap_features(state: OverlapState, levels: UserLevel) -> dict[str, float]:
    """The features of the logistic model, by name."""
    loudest = max(window.level_db for window in state.windows)
    # Onset and decay are similar for all sounds: only the loud part counts.
    body = [window for window in state.windows if window.level_db > loudest - 25]
    changes = [min(spectral_change(one, two), 12.0) for one, two in pairwise(body)] or [0.0]
    usual = loudest if levels.user is None else levels.user
    return {
        "always": 1.0,
        "level": float(np.clip(loudest - usual, -8.0, 2.0)),
        "mean": float(np.mean([window.level_db for window in body])) - usual,
        "probability": float(np.mean(state.probabilities)),
        "change": float(np.mean(changes)),
        "bright": float(np.mean([window.brightness for window in body])),
        "flat": float(np.mean([window.flatness for window in body])),
        "echo": max(0.0, float(np.mean(state.echoes)) - 0.3),
    }


def _harmless_kind(state: OverlapState) -> OverlapVerdict:
    if float(np.mean(state.echoes)) >= ECHO_SHARE:
        return OverlapVerdict.ECHO
    periodicity = float(np.mean([window.periodicity for window in state.windows]))
    return OverlapVerdict.BACKCHANNEL if periodicity > 0.55 else OverlapVerdict.NOISE


@dataclass
class OverlapWatch:
    """Tracks one sound made over a reply until it is an interruption or has ended."""

    classifier: OverlapClassifier
    state: OverlapState = OverlapState()
    silent: int = 0
    words: str | None = None
    """The transcript, if one was requested and has arrived."""

    def step(self, samples: Samples, probability: float, echo: float, is_speech: bool, levels: UserLevel) -> None:
        """Add a window; the sound starts where it is louder than a breath."""
        if levels.user is not None and self._is_faint(levels.user):
            self.state = OverlapState()
        self.state = self.classifier.step(self.state, window_features(samples), probability, echo, levels, self.words)
        self.silent = 0 if is_speech else self.silent + 1
        if self.is_over and self.state.verdict is None:
            self.state = replace(self.state, verdict=self.classifier.end(self.state, levels, self.words))

    def _is_faint(self, user: float) -> bool:
        windows = self.state.windows
        return self.state.verdict is None and all(window.level_db < user + FAINT_DB for window in windows)

    @property
    def verdict(self) -> OverlapVerdict | None:
        """The class of the sound; None: undecided."""
        return self.state.verdict

    @property
    def is_over(self) -> bool:
        """Whether the sound has ended."""
        return self.silent >= END_WINDOWS

    @property
    def lasted_ms(self) -> int:
        """Duration so far."""
        return self.state.lasted_ms

    @property
    def is_echo(self) -> bool:
        """Whether it is mostly echo of the output."""
        return bool(self.state.echoes) and float(np.mean(self.state.echoes)) >= ECHO_SHARE

    @property
    def may_be_turn(self) -> bool:
        """Whether it may be the user who speaks."""
        return not self.is_echo

    def goes_on(self, before: AnsweredTurn | None, ask_turn_model: AskTurnModel | None) -> bool:
        """Whether it may be the user: the rules let a reply that was hardly heard yield to any voice."""
        return self.may_be_turn


def is_backchannel(words: str) -> bool | None:
    """Whether these words are only a backchannel such as "mm-hm"; None where there are none."""
    spoken = [word for word in re.split(r"[\s.,!?;:。，！？、…-]+", words.lower()) if word]
    return all(word in BACKCHANNELS for word in spoken) if spoken else None
