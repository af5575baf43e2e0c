"""A small trained network that classifies sound made over a reply, window by window: who or what makes it.

The sound after echo cancellation, as a log-mel relative to the user's usual level, what the front end knows of the
window, the usual spectrum of the user's speech, and how distant the talker is go through a linear layer and a recurrent
one; it has about 48,000 weights, runs in NumPy while sound overlaps a reply, and its state belongs to that overlap: the
answer is a function of the sound alone. `viva train barge-in` makes it. `model_barge_in.py` decides by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.mel import slaney_filters
from vivavoce.audio.vad import RATE, WINDOW
from vivavoce.dialogue.barge_in import UserLevel
from vivavoce.dialogue.front_end import AudioWindow, WindowFeatures
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.talker_distance import MAX_EVIDENCE, MIDDLE, TalkerDistance, sharpness
from vivavoce.errors import CheckpointError

Array = NDArray[np.float32]

BUNDLED = Path(__file__).parent.parent / "minis" / "barge-in" / "barge_in.safetensors"
MELS = 32
SIZE = 512  # of the Fourier transform, a window
HOP = SIZE // 2  # two frames a window
FLOOR_DB = -50.0  # relative to the user's level
USUAL_DB = -24.0  # the user's level where it is not known
SCALARS = 8
LEVEL = 5  # the scalar that is a level
DISTANCES = 3
INPUTS = 3 * MELS + SCALARS + DISTANCES
EARLIER_INPUTS = (2 * MELS + SCALARS, 3 * MELS + SCALARS)
"""Of networks that know neither the user's usual spectrum nor the distance, and of those without the distance."""
SHARPNESS = (-MIDDLE, 2 * MIDDLE)  # lowest and highest, relative to the middle: that of digital silence is lower
MIN_ECHO = 0.3  # share of echo in a window from which on it says nothing of the talker
MIN_USUAL_WINDOWS = 8
CONTEXT = 5  # windows before the first that is speech, which the network hears too
_HANN = np.hanning(SIZE).astype(np.float32)


class SoundKind(IntEnum):
    """What a sound over a reply is; the order is that of the network's outputs."""

    TURN = 0
    """The user takes the turn."""
    BACKCHANNEL = 1
    """"mm-hm", "yeah", also "um"."""
    NOISE = 2
    """A cough, a laugh, a knock."""
    BYSTANDER = 3
    """Another voice, or the user who speaks to another person."""
    ECHO = 4


@cache
def _filters() -> Array:  # [bin, mel]
    return slaney_filters(RATE, SIZE, MELS, 60.0).numpy().T.copy()


def usual_spectrum(loud: Sequence[Samples], user_db: float | None) -> Array | None:
    """The mean log-mel of the user's loud windows relative to the user's level; None: too few.  # → [MELS]

    A voice that turns away, or that another person has, differs from it in the same room and on the same line.
    """
    if user_db is None or len(loud) < MIN_USUAL_WINDOWS:
        return None
    return _relative_mel(np.stack(list(loud)), user_db).mean(axis=0)


def _relative_mel(frames: Array, usual_db: float) -> Array:
    """Log-mels relative to a level, in units of 20 dB.  # [frame, SIZE] → [frame, MELS]"""
    power = np.square(np.abs(np.fft.rfft(frames * _HANN, axis=-1))).astype(np.float32)
    levels = 10 * np.log10(power @ _filters() + 1e-9) - usual_db
    return (np.maximum(levels, FLOOR_DB) / 20).astype(np.float32)


@dataclass
class OverlapInputs:
    """Makes the network's inputs for the windows of one overlap, one after the other."""

    since: int = 0
    """Windows since the first that was speech; negative before it."""
    usual: Array | None = None
    """The user's `usual_spectrum`, if known."""
    distance: TalkerDistance = field(default_factory=TalkerDistance)
    _before: Samples = field(default_factory=lambda: np.zeros(WINDOW, np.float32), repr=False)

    @classmethod
    def of(cls, levels: UserLevel, since: int = 0) -> "OverlapInputs":
        """Those of a new overlap, with how the user usually sounds."""
        return cls(since, usual_spectrum(levels.loud, levels.user), TalkerDistance.from_usual(levels.loud))

    def add(self, window: AudioWindow, features: WindowFeatures, is_speech: bool, user_db: float | None) -> Array:
        """The inputs for the next window; `user_db`: the user's usual level, if known.  # → [INPUTS]"""
        samples = np.concatenate([self._before[-HOP:], window.samples]).astype(np.float32)
        usual = USUAL_DB if user_db is None else user_db
        mel = _relative_mel(np.stack([samples[:SIZE], samples[HOP:]]), usual)
        scalars = [
            2 * window.probability - 1,
            window.echo,
            features.periodicity,
            float(np.log2(features.pitch / 160)),
            features.flatness,
            max(features.level_db - usual, -40.0) / 10,
            float(np.log1p(max(0, self.since))) / 2,
            0.0 if user_db is None else 1.0,
        ]
        spectrum = np.zeros(MELS, np.float32) if self.usual is None else self.usual
        distances = self._distances(window, features.level_db, is_speech)
        self.since, self._before = self.since + 1, window.samples
        return np.concatenate([mel.ravel(), np.array(scalars, np.float32), spectrum, distances])

    def _distances(self, window: AudioWindow, level_db: float, is_speech: bool) -> Array:
        """The sharpness of the window and the user's usual one, and the evidence that the talker is distant."""
        sharp = float(sharpness([window.samples])[0])
        if is_speech and self.since >= 0 and window.echo < MIN_ECHO:
            self.distance.add(level_db, sharp)
        evidence = self.distance.evidence / MAX_EVIDENCE
        return np.array([np.clip(sharp - MIDDLE, *SHARPNESS), self.distance.relative_usual, evidence], np.float32)


def without_distance(inputs: Array) -> Array:
    """The same inputs as where the user's usual distance is not known."""
    changed = inputs.copy()
    changed[-DISTANCES:] = 0
    return changed


@dataclass(frozen=True)
class OverlapNetwork:
    """The weights, laid out as torch has them; `step` takes any number of overlaps at once."""

    input_weight: Array  # [hidden, INPUTS or one of EARLIER_INPUTS]
    input_bias: Array
    recurrent_input: Array  # [3 · state, hidden]: reset, update, new
    recurrent_state: Array  # [3 · state, state]
    recurrent_input_bias: Array
    recurrent_state_bias: Array
    output_weight: Array  # [kind, state]
    output_bias: Array

    def initial_state(self, rows: int = 1) -> Array:
        """# [row, state]"""
        return np.zeros((rows, self.recurrent_state.shape[1]), np.float32)

    def step(self, state: Array, inputs: Array) -> tuple[Array, Array]:
        """Log-probabilities of the kinds, and the state.  # [row, state], [row, INPUTS] → [row, kind], [row, state]"""
        hidden = np.maximum(inputs[:, : self.input_weight.shape[1]] @ self.input_weight.T + self.input_bias, 0)
        given = hidden @ self.recurrent_input.T + self.recurrent_input_bias
        kept = state @ self.recurrent_state.T + self.recurrent_state_bias
        size = state.shape[1]
        reset, update = np.split(1 / (1 + np.exp(-(given[:, : 2 * size] + kept[:, : 2 * size]))), 2, axis=1)
        new = np.tanh(given[:, 2 * size :] + reset * kept[:, 2 * size :])
        state = ((1 - update) * new + update * state).astype(np.float32)
        outputs = state @ self.output_weight.T + self.output_bias
        return (outputs - np.logaddexp.reduce(outputs, axis=1, keepdims=True)).astype(np.float32), state


def read_overlap_network(path: Path = BUNDLED) -> OverlapNetwork:
    """The network of a file that `viva train barge-in` wrote."""
    from safetensors.numpy import load_file

    try:
        stored = {name: tensor.astype(np.float32) for name, tensor in load_file(path).items()}
        network = OverlapNetwork(**{each.name: stored[each.name] for each in fields(OverlapNetwork)})
        if network.input_weight.shape[1] not in (INPUTS, *EARLIER_INPUTS):
            raise ValueError(f"it takes {network.input_weight.shape[1]} numbers a window")
        outputs, _ = network.step(network.initial_state(), np.zeros((1, INPUTS), np.float32))
        if outputs.shape != (1, len(SoundKind)) or not np.isfinite(outputs).all():
            raise ValueError(f"it gives {outputs.shape[1]} numbers a window")
    except Exception as error:  # safetensors and NumPy have exceptions of their own for a damaged or a wrong file
        raise CheckpointError(f"{path} is not a barge-in model ({error}); `viva train barge-in` makes one") from error
    return network
