"""Barge-in decided by the trained network: stop as soon as the odds that the user takes the turn pass a threshold.

`ModelClassifier` takes the place of the rules of `barge_in.py`, which remain for where there is no network.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from vivavoce.audio.vad import WINDOW_MS
from vivavoce.dialogue.barge_in import (
    ECHO_SHARE,
    END_WINDOWS,
    AskTurnModel,
    OverlapClassifier,
    OverlapJudge,
    OverlapVerdict,
    UserLevel,
    is_backchannel,
)
from vivavoce.dialogue.front_end import AudioWindow, WindowFeatures, window_features
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.joined_turns import AnsweredTurn
from vivavoce.dialogue.overlap_model import (
    BUNDLED,
    CONTEXT,
    MIN_ECHO,
    Array,
    OverlapInputs,
    OverlapNetwork,
    SoundKind,
    read_overlap_network,
    without_distance,
)

logger = logging.getLogger(__name__)

BY_MODEL, BY_RULES = "model", "rules"
WORDS_ODDS = 6.0
VOICED, VOICED_SHARE = 0.6, 0.3  # periodicity of a voiced window, and the share of them that a voice has
ECHO_WEIGHT = 12.0  # what the share of echo above `MIN_ECHO` takes from the odds, as it does in the rules
VERDICTS = {
    SoundKind.TURN: OverlapVerdict.BACKCHANNEL,  # of a sound that is not likely enough to be a turn
    SoundKind.BACKCHANNEL: OverlapVerdict.BACKCHANNEL,
    SoundKind.NOISE: OverlapVerdict.NOISE,
    SoundKind.BYSTANDER: OverlapVerdict.BYSTANDER,
    SoundKind.ECHO: OverlapVerdict.ECHO,
}


@dataclass(frozen=True)
class ModelLimits:
    """When the odds decide. Log-odds are natural logarithms, times count from the first window of speech."""

    earliest_ms: int = 96
    enough: float = 1.0
    """Log-odds of a turn from which on the reply stops."""
    early_margin: float = 0.5
    """Added for every window before `usual_ms`."""
    usual_ms: int = 224
    harmless_ms: int = 288
    """From here on a sound that is likely harmless no longer ducks the reply; it may still become an interruption."""
    harmless: float = -1.0
    max_backchannel_ms: int = 736
    """The user's voice for longer than this is an interruption."""
    enough_user: float = 1.0
    """Log-odds from which on it is taken for the user's voice then."""
    bystander_db: float = -15.0
    """Unless its speech is this far under the user's level, as by the rules: soft echo may sound like the user."""
    max_loud_ms: int = 1000
    """A voice as loud as the user for longer than this is an interruption, whatever the network takes it for."""
    loud_db: float = -3.0
    """Relative to the user's level."""
    unfinished: float = 0.1
    """The turn model's probability below which the turn before was not finished: the user may go on with it."""
    enough_going_on: float = -1.5
    """Log-odds of a turn from which on the user does."""


@cache
def overlap_judge(name: str = BY_MODEL) -> OverlapJudge:
    """What decides on barge-in: `model`, the bundled network or the rules where it is missing, `rules`, or a file."""
    if name == BY_RULES:
        return OverlapClassifier()
    if name == BY_MODEL and not BUNDLED.is_file():
        logger.warning("there is no %s: rules decide on barge-in", BUNDLED)
        return OverlapClassifier()
    return ModelClassifier(BUNDLED if name == BY_MODEL else name)


class ModelClassifier:
    """Makes the watches of overlaps. Threads and conversations may share it."""

    def __init__(self, weights: str | Path | OverlapNetwork = BUNDLED, limits: ModelLimits | None = None) -> None:
        self.name = "a model" if isinstance(weights, OverlapNetwork) else f"the model {weights}"
        self.network = weights if isinstance(weights, OverlapNetwork) else read_overlap_network(Path(weights))
        self.limits = limits or ModelLimits()

    def watch(self, before: Sequence[AudioWindow] = (), levels: UserLevel | None = None) -> "ModelWatch":
        """The watch of a new overlap; `before`: the windows before it, the last ones count."""
        watch = ModelWatch(self)
        watch.hear_before(before[-CONTEXT:], levels or UserLevel())
        return watch

    def watch_turn(self, before: Sequence[AudioWindow], levels: UserLevel) -> "ModelWatch":
        """The watch of a turn in silence: it is judged as over a reply."""
        return self.watch(before, levels)


@dataclass
class ModelWatch:
    """Tracks one sound made over a reply until it is an interruption or has ended."""

    classifier: ModelClassifier
    words: str | None = None
    """The transcript, if one was requested and has arrived."""
    verdict: OverlapVerdict | None = None
    """The class of the sound; None: undecided."""
    windows: int = 0
    """Since its start."""
    _outputs: Array = field(default_factory=lambda: np.zeros((2, len(SoundKind)), np.float32))  # after the last window
    _state: Array = field(init=False)
    _inputs: OverlapInputs = field(default_factory=OverlapInputs)
    _speech: int = 0  # windows
    _silent: int = 0
    _voiced: int = 0
    _power: float = 0.0  # of the windows of speech, relative to the user's level
    _echo: float = 0.0  # sum over windows

    def __post_init__(self) -> None:
        self._state = self.classifier.network.initial_state(rows=2)

    def hear_before(self, windows: Sequence[AudioWindow], levels: UserLevel) -> None:
        """Let the network hear the windows before the overlap, and know how the user usually sounds."""
        self._inputs = OverlapInputs.of(levels, since=-len(windows))
        for window in windows:
            self._advance(window, window_features(window.samples), False, levels)

    def step(self, samples: Samples, probability: float, echo: float, is_speech: bool, levels: UserLevel) -> None:
        """Add a window."""
        features = window_features(samples)
        self._advance(AudioWindow(samples, probability, features.level_db, echo), features, is_speech, levels)
        self.windows += 1
        self._echo += echo
        self._speech += is_speech
        self._voiced += features.periodicity > VOICED
        if is_speech and levels.user is not None:
            self._power += 10 ** ((features.level_db - levels.user) / 10)
        self._silent = 0 if is_speech else self._silent + 1
        if self.verdict is not OverlapVerdict.INTERRUPTION:
            self._decide()

    def _advance(self, window: AudioWindow, features: WindowFeatures, is_speech: bool, levels: UserLevel) -> None:
        inputs = self._inputs.add(window, features, is_speech, levels.user)
        rows = np.stack([inputs, without_distance(inputs)])
        self._outputs, self._state = self.classifier.network.step(self._state, rows)

    @property
    def log_probabilities(self) -> Array:
        """Of the kinds, after the last window."""
        return self._outputs[0]

    @property
    def _at_any_distance(self) -> Array:
        """The same, as if it were not known how distant the user is."""
        return self._outputs[1]

    def _decide(self) -> None:
        limits, odds = self.classifier.limits, self.odds
        is_turn = self._is_turn(odds, limits.enough)
        spoken_ms = self._speech * WINDOW_MS
        is_user = self._user_odds(self.log_probabilities) > limits.enough_user
        is_soft = self._power > 0 and self.relative_db < limits.bystander_db
        goes_on = spoken_ms >= limits.max_backchannel_ms and is_user and not is_soft
        goes_on = goes_on or (spoken_ms >= limits.max_loud_ms and self._is_loud_voice)
        if is_turn or (goes_on and self.words is None):
            self.verdict = OverlapVerdict.INTERRUPTION
        elif self.is_over or (self.lasted_ms >= limits.harmless_ms and odds < limits.harmless):
            self.verdict = VERDICTS[SoundKind(int(self.log_probabilities.argmax()))]

    def _is_turn(self, odds: float, enough: float) -> bool:
        """Whether odds pass a threshold, which is higher at first."""
        limits = self.classifier.limits
        early = max(0, limits.usual_ms - self.lasted_ms) / WINDOW_MS
        return self.lasted_ms >= limits.earliest_ms and odds > enough + limits.early_margin * early

    def goes_on(self, before: AnsweredTurn | None, ask_turn_model: AskTurnModel | None) -> bool:
        """Whether the user goes on with the turn before: less evidence is enough where it was not finished.

        A word between two pauses is too short to tell its distance, which does not count here.
        """
        limits, outputs = self.classifier.limits, self._at_any_distance
        if before is None:
            return False
        if ask_turn_model is None:
            return self._may_be_turn(outputs)
        if before.finished is None:
            ask_turn_model(before)
            return False
        return before.finished < limits.unfinished and self._is_turn(self._turn_odds(outputs), limits.enough_going_on)

    @property
    def _is_loud_voice(self) -> bool:
        """Whether it is a voice, not the echo, and on average about as loud as the user."""
        is_voice = self._voiced > VOICED_SHARE * self.windows and self._echo < MIN_ECHO * self.windows
        return is_voice and self.relative_db > self.classifier.limits.loud_db

    @property
    def relative_db(self) -> float:
        """The mean level of its speech relative to the user's, if that is known."""
        return 10 * float(np.log10(self._power / max(1, self._speech) + 1e-9))

    @property
    def bystander_odds(self) -> float:
        """Log-odds that it is another voice, or the user's own turned away."""
        return log_odds(self.log_probabilities, SoundKind.BYSTANDER)

    @property
    def odds(self) -> float:
        """Log-odds that the user takes the turn."""
        return self._turn_odds(self.log_probabilities)

    def _turn_odds(self, log_probabilities: Array) -> float:
        is_harmless = None if self.words is None else is_backchannel(self.words)
        if is_harmless is not None:
            return -WORDS_ODDS if is_harmless else WORDS_ODDS
        echo = max(0.0, self._echo / max(1, self.windows) - MIN_ECHO)
        return log_odds(log_probabilities, SoundKind.TURN) - ECHO_WEIGHT * echo

    @property
    def lasted_ms(self) -> int:
        """Duration so far."""
        return self.windows * WINDOW_MS

    @property
    def is_over(self) -> bool:
        """Whether the sound has ended."""
        return self._silent >= END_WINDOWS

    @property
    def may_be_turn(self) -> bool:
        """Whether it is rather the user who speaks than a noise, another voice or echo."""
        return self._may_be_turn(self.log_probabilities)

    def _may_be_turn(self, log_probabilities: Array) -> bool:
        limits = self.classifier.limits
        return self.lasted_ms >= limits.earliest_ms and self._user_odds(log_probabilities) > limits.enough

    def _user_odds(self, log_probabilities: Array) -> float:
        """Log-odds that it is the user's voice, whatever it says."""
        if self._echo >= ECHO_SHARE * self.windows:
            return -WORDS_ODDS
        return log_odds(log_probabilities, SoundKind.TURN, SoundKind.BACKCHANNEL)


def log_odds(log_probabilities: Array, *kinds: SoundKind) -> float:
    """Log-odds that a sound is of one of these kinds."""
    others = [kind for kind in SoundKind if kind not in kinds]
    of, against = (np.logaddexp.reduce(log_probabilities[list(each)]) for each in (kinds, others))
    return float(of - against)
