"""Pauses to learn from: the sound of a turn up to a pause, and whether the turn was over there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
SILENCES = (0.06, 0.24)  # seconds between the end of speech and the question to the model
FADES = (0.004, 0.05)
TRIMMED, TRIM = 0.3, 0.05  # share of ends that are cut off by up to this many seconds: an abrupt end is no sign
TEMPOS = (0.88, 1.15)  # of speed and pitch together
PRECEDED = 0.35  # share of turns with another sentence before the last one
GAPS = (0.2, 1.0)
PAUSED = 0.35  # share of turns with a pause at a word within them, after which the speaker went on
PAUSE_SECONDS = (0.25, 1.4)
MAX_CUTS = 4  # places of a turn where such a pause may be
FLOORS_DB = (-85.0, -55.0)
KINDS = {"end": 0.5, "cut": 0.2, "drawn out": 0.1, "beginning": 0.2}


@dataclass(frozen=True)
class Pause:
    """A place in an utterance where speech stops."""

    utterance: TurnUtterance
    end: int
    is_finished: bool
    is_cut: bool = False
    """Whether the speaker goes on in the recording."""
    is_drawn_out: bool = False

    @property
    def kind(self) -> str:
        """`end`, `cut` (within fluent speech), `drawn out` (after a lengthened word) or `beginning`."""
        if self.is_cut:
            return "drawn out" if self.is_drawn_out else "cut"
        return "end" if self.is_finished else "beginning"

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
    """The end of the utterance, and the ends of words within it, where its speaker might pause."""
    samples = utterance.samples.astype(np.float32) / FULL_SCALE
    end = end_of_speech(samples)
    found = [Pause(utterance, end, utterance.is_finished)]
    for word, moment in enumerate(utterance.word_ends[:-1] if utterance.word_ends else _dips(end)):
        cut = _quietest(samples, round(moment * RATE))
        if MIN_SECONDS * RATE <= cut <= end - MIN_REST * RATE:
            found.append(Pause(utterance, cut, False, True, word == utterance.drawn_out))
    return found


def _dips(end: int) -> list[float]:
    """Every 0.3 s, for voices that do not tell the ends of words: `_quietest` moves them into a dip."""
    return [moment / RATE for moment in range(round(0.4 * RATE), end, round(0.3 * RATE))]


def _quietest(samples: Samples, near: int) -> int:
    begin = max(0, near - NEAR)
    frames = samples[begin : near + NEAR]
    frames = frames[: len(frames) // FRAME * FRAME].reshape(-1, FRAME)
    return begin + int(np.square(frames).mean(axis=1).argmin()) * FRAME if len(frames) else near


def derived(seed: int, stream: int) -> int:
    """Another seed, for random numbers that must not depend on those of the first."""
    return (seed * 6_364_136_223_846_793_005 + stream * 1_442_695_040_888_963_407) % 2**62


class Examples:
    """Random batches of windows that end at a pause, half of them at ends of turns, made on a device."""

    def __init__(
        self,
        utterances: Sequence[TurnUtterance],
        samples: int,
        device: torch.device | str = "cpu",
        strength: float = 0.8,
    ) -> None:
        self.samples, self.device = samples, torch.device(device)
        self.augmentation = AcousticAugmentation(device, strength)
        self.flat = torch.from_numpy(np.concatenate([each.samples for each in utterances])).to(device)
        starts = np.cumsum([0, *(len(each.samples) for each in utterances)])
        by_kind: dict[str, list[tuple[int, ...]]] = {kind: [] for kind in KINDS}
        for start, utterance in zip(starts.tolist(), utterances, strict=False):
            found = pauses(utterance)
            for place in found:
                cuts = [start + each.end for each in found if each.is_cut and each.end <= place.end - MIN_REST * RATE]
                chosen = (
                    [cuts[number * len(cuts) // MAX_CUTS] for number in range(MAX_CUTS)] if cuts else [0] * MAX_CUTS
                )
                by_kind[place.kind].append((start, start + place.end, *chosen))
        present = [kind for kind in KINDS if by_kind[kind]]
        self.places = {kind: torch.tensor(by_kind[kind], device=device) for kind in present}
        # A cut has less speech before it than an end, so that a pause there would tell the label.
        with_cuts = {kind: float(np.mean([row[2] > 0 for row in by_kind[kind]])) for kind in present}
        unfinished = {kind: KINDS[kind] for kind in present if kind != "end"}
        among = sum(with_cuts[kind] * share for kind, share in unfinished.items()) / max(sum(unfinished.values()), 1e-9)
        self.paused_ends = PAUSED * min(1.0, among / max(with_cuts.get("end", 0.0), 1e-9) if unfinished else 1.0)
        """The share of ends after cuts that have a pause there: then as many ends as other places have one."""

    @property
    def counts(self) -> dict[str, int]:
        """Places of each kind."""
        return {kind: len(places) for kind, places in self.places.items()}

    def batch(self, size: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> tuple[Tensor, Tensor]:
        """Windows and whether they end a turn; deterministic for a seed.  # [batch, time], [batch]"""
        return self.drawn(size, seed, kinds)[:2]

    def drawn(self, size: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> tuple[Tensor, Tensor, Tensor]:
        """As `batch`, and whether the speaker paused within the turn before.  # [batch, time], [batch], [batch]"""
        generator = torch.Generator(self.device).manual_seed(seed)
        places, labels = self._chosen(size, generator, kinds)

        def draw(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(size, 1, generator=generator, device=self.device)

        tempo, silence = draw(*TEMPOS), draw(*SILENCES) * RATE
        trimmed = (draw(0, 1) < TRIMMED) * labels[:, None] * draw(0, TRIM) * RATE
        start, end = places[:, :1], places[:, 1:2] - trimmed.long()
        back = torch.arange(self.samples - 1, -1, -1, device=self.device)[None] - silence  # samples before the end
        number = torch.randint(MAX_CUTS, (size, 1), generator=generator, device=self.device)
        cut = places.gather(1, 2 + number)
        is_paused = (draw(0, 1) < torch.where(labels[:, None] > 0, self.paused_ends, PAUSED)) & (cut > 0)
        pause, rest = is_paused * draw(*PAUSE_SECONDS) * RATE, (end - cut) / tempo
        fade = draw(*FADES) * RATE
        into = (back - rest) * is_paused  # samples before the end of the pause
        speech = self._at(end, (back - into.clamp(min=0).minimum(pause)) * tempo, start)
        edge = torch.where(into > pause, into - pause, -into).div(fade).clamp(0, 1)
        speech = speech * torch.where(is_paused, edge, 1.0) * (back / fade).clamp(0, 1)
        before, _ = self._chosen(size, generator, ("end",))
        back_before = back - (end - start) / tempo - pause - draw(*GAPS) * RATE
        preceding = self._at(before[:, 1:2], back_before * tempo, before[:, :1])
        window = speech + preceding * (draw(0, 1) < PRECEDED)
        floor = 10 ** (draw(*FLOORS_DB) / 20)
        window = window + floor * torch.randn(window.shape, generator=generator, device=self.device)
        lengths = torch.full((size,), self.samples, device=self.device)
        # A seed of its own: with the same one, room and noise would follow the choice of places, and tell the label.
        return self.augmentation(window, lengths, derived(seed, 1)), labels, is_paused[:, 0]

    def _chosen(self, size: int, generator: torch.Generator, kinds: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Random places by the shares of their kinds, and whether they are ends.  # [batch, 2 + MAX_CUTS], [batch]"""
        kinds = [kind for kind in kinds if kind in self.places]
        shares = torch.tensor([KINDS[kind] for kind in kinds], device=self.device)
        kind = torch.multinomial(shares, size, replacement=True, generator=generator)
        places = torch.empty(size, 2 + MAX_CUTS, dtype=torch.int64, device=self.device)
        for number, name in enumerate(kinds):
            rows = self.places[name]
            pick = torch.randint(len(rows), (size,), generator=generator, device=self.device)
            places = torch.where((kind == number)[:, None], rows[pick], places)
        is_end = torch.tensor([float(name == "end") for name in kinds], device=self.device)
        return places, is_end[kind]

    def _at(self, end: Tensor, back: Tensor, start: Tensor) -> Tensor:
        """Sound a number of samples before an end, interpolated; silence outside the utterance."""
        position = end - 1 - back
        whole = position.floor()
        below, fraction = whole.long(), position - whole
        inside = (below >= start) & (below < end - 1)
        last = len(self.flat) - 2
        left = self.flat[below.clamp(0, last)].float()
        right = self.flat[(below + 1).clamp(0, last)].float()
        return torch.lerp(left, right, fraction) * inside / float(FULL_SCALE)
