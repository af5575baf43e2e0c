"""Pauses to learn from: the sound of a turn up to a pause, and whether the turn was over there."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.audio.stretch import TimeStretch
from vivavoce.audio.turn_model import last_seconds
from vivavoce.train.augment import AcousticAugmentation
from vivavoce.train.corpus import FULL_SCALE
from vivavoce.train.turn_end.corpus import TurnUtterance
from vivavoce.train.voices import RATE

Samples = NDArray[np.float32]
FRAME = RATE // 200
QUIET_DB = -38.0  # relative to the loudest frame: what is quieter at the end of an utterance is not speech
MIN_SECONDS = 0.25  # of speech before a pause
MIN_REST = 0.3  # seconds of speech after an unfinished place
NEAR = RATE // 20  # a cut is made at the quietest place this far around the end of a word
SILENCES = (0.06, 0.22)  # seconds between the end of speech and the question to the model
FADES = (0.004, 0.05)
TEMPOS = (0.88, 1.15)  # of speed and pitch together
LENGTHENED, LENGTHENED_SECONDS = 0.2, 0.35  # share of unfinished places with a drawn-out last syllable, its length
PRECEDED = 0.3  # share of turns with another sentence before the last one
FLOORS_DB = (-85.0, -55.0)
CUT = 0.55  # share of unfinished places that are cut within fluent speech, the rest being spoken as beginnings


@dataclass(frozen=True)
class Pause:
    """A place in an utterance where speech stops."""

    utterance: TurnUtterance
    end: int
    is_finished: bool
    is_cut: bool = False
    """Whether the speaker goes on in the recording, without a hesitation."""

    def sound(self) -> Samples:
        """The speech before the pause."""
        return self.utterance.samples[: self.end].astype(np.float32) / FULL_SCALE


def end_of_speech(samples: Samples) -> int:
    """The end of the last frame that is speech."""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    level = np.sqrt(np.square(frames).mean(axis=1))
    loud = np.flatnonzero(level > 10 ** (QUIET_DB / 20) * level.max(initial=1e-6))
    return int(loud[-1] + 1) * FRAME if len(loud) else len(samples)


def pauses(utterance: TurnUtterance) -> list[Pause]:
    """The end of the utterance, and the places within it where its speaker might pause."""
    samples = utterance.samples.astype(np.float32) / FULL_SCALE
    end = end_of_speech(samples)
    found = [Pause(utterance, end, utterance.is_finished)]
    for moment in utterance.word_ends[:-1] or _dips(samples, end):
        cut = _quietest(samples, round(moment * RATE))
        if MIN_SECONDS * RATE <= cut <= end - MIN_REST * RATE:
            found.append(Pause(utterance, cut, False, True))
    return found


def _dips(samples: Samples, end: int) -> list[float]:
    """Every 0.3 s, for voices that do not tell the ends of words: `_quietest` moves them into a dip."""
    return [moment / RATE for moment in range(round(0.4 * RATE), end, round(0.3 * RATE))]


def _quietest(samples: Samples, near: int) -> int:
    begin = max(0, near - NEAR)
    frames = samples[begin : near + NEAR]
    frames = frames[: len(frames) // FRAME * FRAME].reshape(-1, FRAME)
    return begin + int(np.square(frames).mean(axis=1).argmin()) * FRAME if len(frames) else near


class Examples:
    """Random batches of windows that end at a pause, half of them at ends of turns."""

    def __init__(self, utterances: Sequence[TurnUtterance], seed: int, strength: float = 0.8) -> None:
        places = [place for utterance in utterances for place in pauses(utterance)]
        self.ends = [place for place in places if place.is_finished]
        self.cuts = [place for place in places if place.is_cut]
        self.beginnings = [place for place in places if not place.is_finished and not place.is_cut]
        self.source = random.Random(f"turn end examples {seed}")
        self.augmentation = AcousticAugmentation("cpu", strength)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """# [batch, time], [batch]"""
        chosen = [self._choose(index % 2 == 0) for index in range(size)]
        windows = torch.from_numpy(np.stack([self.window(place) for place in chosen]))
        lengths = torch.full((size,), windows.shape[1])
        sounds = self.augmentation(windows, lengths, self.source.randrange(2**31))
        return sounds, torch.tensor([float(place.is_finished) for place in chosen])

    def _choose(self, is_finished: bool) -> Pause:
        if is_finished:
            return self.source.choice(self.ends)
        return self.source.choice(self.cuts if self.source.random() < CUT else self.beginnings)

    def window(self, place: Pause) -> Samples:
        """The last seconds before the model is asked about a pause, with random tempo, ending and silence."""
        source = self.source
        speech = self._faded(place)
        if not place.is_finished and source.random() < LENGTHENED:
            speech = _drawn_out(speech, source.uniform(0.55, 0.8))
        tempo = source.uniform(*TEMPOS)
        speech = np.interp(np.arange(0, len(speech), tempo), np.arange(len(speech)), speech).astype(np.float32)
        before = np.zeros(0, np.float32)
        if source.random() < PRECEDED:
            gap = np.zeros(round(source.uniform(0.2, 1.0) * RATE), np.float32)
            before = np.concatenate([source.choice(self.ends).sound(), gap])
        silence = np.zeros(round(source.uniform(*SILENCES) * RATE), np.float32)
        window = last_seconds(np.concatenate([before, speech, silence]))
        floor = 10 ** (source.uniform(*FLOORS_DB) / 20)
        return window + np.random.default_rng(source.randrange(2**31)).normal(0, floor, len(window)).astype(np.float32)

    def _faded(self, place: Pause) -> Samples:
        """The speech with a random fade: an abrupt end must not tell a cut from an end."""
        speech = place.sound()
        if place.is_finished and self.source.random() < 0.3:
            speech = speech[: max(FRAME, len(speech) - round(self.source.uniform(0.0, 0.05) * RATE))]
        ramp = np.linspace(1, 0, min(len(speech), round(self.source.uniform(*FADES) * RATE)), dtype=np.float32)
        speech[len(speech) - len(ramp) :] *= ramp
        return speech


def _drawn_out(speech: Samples, speed: float) -> Samples:
    """The last syllable lengthened."""
    split = max(0, len(speech) - round(LENGTHENED_SECONDS * RATE))
    stretch = TimeStretch(RATE, speed)
    made, state = stretch.step(stretch.initial_state(), speech[None, split:])
    rest = stretch.flush(state)
    return np.concatenate([speech[:split], made[0], rest[0]])
