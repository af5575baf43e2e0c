"""Windows of speech for a Whisper to learn from: recordings cut, sped up and set side by side, with what is to be
written of them. The recordings lie on the device as 16-bit samples; a batch is cut there.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.models.whisper.config import WhisperTokens
from vivavoce.train.asr.checkpoint import LANGUAGE, Vocabulary
from vivavoce.train.corpus import Corpus
from vivavoce.train.front_desk.answers import normalise

RATE = 16_000
IGNORED = -100  # a label that teaches nothing


@dataclass(frozen=True)
class Recordings:
    """Recordings with their texts.  # samples [time] int16, starts and lengths [recording]"""

    samples: Tensor
    starts: Tensor
    lengths: Tensor
    texts: list[str]

    def __post_init__(self) -> None:
        if not len(self.texts) == len(self.starts) == len(self.lengths):
            raise InputError(f"{len(self.texts)} texts do not fit {len(self.starts)} recordings")

    def __len__(self) -> int:
        return len(self.texts)

    def of(self, chosen: Sequence[int]) -> "Recordings":
        """Some of the recordings, over the same samples."""
        index = torch.as_tensor(chosen, dtype=torch.long)
        return Recordings(self.samples, self.starts[index], self.lengths[index], [self.texts[i] for i in chosen])

    @classmethod
    def of_corpus(cls, corpus: Corpus) -> "Recordings":
        """A corpus with its texts as plain words; recordings without any are left out."""
        starts = torch.from_numpy(np.asarray(corpus.starts, dtype=np.int64))
        texts = [normalise(text) for text in corpus.texts]
        whole = cls(torch.from_numpy(np.asarray(corpus.samples)), starts[:-1], starts.diff(), texts)
        return whole.of([index for index, text in enumerate(texts) if text])

    def to(self, device: torch.device | str) -> "Recordings":
        """The same with samples on a device; starts and lengths stay with those who plan."""
        return Recordings(self.samples.to(device), self.starts, self.lengths, self.texts)


@dataclass(frozen=True)
class WindowShape:
    """The fixed sizes of a batch: a graph that was captured for it can be replayed."""

    seconds: float
    batch: int
    most_recordings: int
    places: int  # for tokens

    @property
    def samples(self) -> int:
        return round(self.seconds * RATE)


@dataclass(frozen=True)
class WindowHabits:
    """How windows are filled."""

    rates: tuple[float, float] = (0.76, 1.3)  # a recording is read this much faster: tempo, pitch and formants
    share_as_recorded: float = 0.2
    longest_gap: float = 1.2
    share_with_times: float = 0.4
    share_after_earlier: float = 0.08
    share_of_silence: float = 0.02
    merge_dropout: float = 0.05
    variants: int = 3


class WindowMaker:
    """Batches of windows with tokens, labels and the targets of an auxiliary CTC."""

    def __init__(
        self,
        recordings: Recordings,
        vocabulary: Vocabulary,
        habits: WindowHabits | None = None,
        seed: int = 0,
    ) -> None:
        self.recordings, self.habits = recordings, habits or WindowHabits()
        self.tokens: WhisperTokens = vocabulary.tokens
        chance = random.Random(seed)
        spelt = [[vocabulary.encode(text) for text in recordings.texts]]
        for _ in range(self.habits.variants - 1):
            dropout = self.habits.merge_dropout
            spelt.append([vocabulary.encode(text, dropout, chance) for text in recordings.texts])
        self._spelt = spelt
        self._lengths: list[int] = recordings.lengths.tolist()
        self._starts: list[int] = recordings.starts.tolist()
        self._by_length = sorted(range(len(recordings)), key=self._lengths.__getitem__)
        self._sorted_lengths = [self._lengths[index] for index in self._by_length]

    def make(self, shape: WindowShape, seed: int) -> dict[str, Tensor]:
        """A batch: the same for the same seed.

        # samples [row, time]; tokens and labels [row, place]; pieces [row, place], piece_counts [row]
        """
        return self.on_device(self.plan(shape, seed), shape)

    def on_device(self, plan: dict[str, Tensor], shape: WindowShape) -> dict[str, Tensor]:
        """The batch of a plan, its samples cut on the device."""
        device = self.recordings.samples.device
        if device.type == "cuda":  # a copy from other memory would wait for all that the device still has to do
            plan = {name: tensor.pin_memory() for name, tensor in plan.items()}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in plan.items()}
        return {"samples": self._cut(moved.pop("cuts"), shape.samples), **moved}

    def plan(self, shape: WindowShape, seed: int) -> dict[str, Tensor]:
        """Everything of a batch but its samples, whose `cuts` it holds; touches no device, so any thread may plan."""
        places = shape.places
        chance = random.Random(seed)
        tokens = np.full((shape.batch, places), self.tokens.endoftext)
        labels = np.full((shape.batch, places), IGNORED)
        pieces = np.zeros((shape.batch, places), dtype=np.int64)
        counts = np.zeros(shape.batch, dtype=np.int64)
        cuts = np.zeros((shape.batch, shape.most_recordings, 4))
        for row in range(shape.batch):
            placed = [] if chance.random() < self.habits.share_of_silence else self._place(shape, chance)
            for slot, (index, begin, rate) in enumerate(placed):
                reading = self._reading(index, rate)
                cuts[row, slot] = self._starts[index], begin, reading, rate
            earlier, written, said = self._write(placed, places, chance)
            known = len(earlier)
            sequence = [*earlier, *written][: places + 1]
            tokens[row, : len(sequence) - 1] = sequence[:-1]
            labels[row, known : len(sequence) - 1] = sequence[known + 1 :]
            counts[row] = len(said)
            pieces[row, : len(said)] = said
        planned = {"cuts": cuts, "tokens": tokens, "labels": labels, "pieces": pieces, "piece_counts": counts}
        return {name: torch.from_numpy(array) for name, array in planned.items()}

    def _reading(self, index: int, rate: float) -> int:
        return int((self._lengths[index] - 2) / rate)

    def _place(self, shape: WindowShape, chance: random.Random) -> list[tuple[int, int, float]]:
        """Which recordings stand where and how fast they are read: one after another while one fits."""
        wanted = min(shape.most_recordings, chance.choice((1, 2, 2, 3, 4)))
        placed: list[tuple[int, int, float]] = []
        at, length = 0, 8
        while len(placed) < wanted:
            kept = chance.random() < self.habits.share_as_recorded
            rate = 1.0 if kept else chance.uniform(*self.habits.rates)
            at += int(chance.random() ** 2 * self.habits.longest_gap * RATE)
            fitting = bisect_right(self._sorted_lengths, (shape.samples - at) * rate)
            if fitting == 0:
                break
            index = self._by_length[chance.randrange(fitting)]
            length += max(len(spelling[index]) for spelling in self._spelt) + 2
            if length > shape.places:
                break
            placed.append((index, at, rate))
            at += self._reading(index, rate)
        return placed

    def _write(
        self, placed: list[tuple[int, int, float]], places: int, chance: random.Random
    ) -> tuple[list[int], list[int], list[int]]:
        """What stood before (to be read, not learnt), what is to be written, and its pieces of words alone."""
        ids = self.tokens
        if not placed:
            return [], [ids.startoftranscript, ids.nospeech, ids.endoftext], []
        times = chance.random() < self.habits.share_with_times
        spelling = chance.choice(self._spelt)
        written, said = ids.prompt(LANGUAGE, timestamps=times), []
        for index, begin, rate in placed:
            end = begin + self._reading(index, rate)
            text = spelling[index]
            written += [ids.timestamp(begin / RATE), *text, ids.timestamp(end / RATE)] if times else text
            said += text
        written.append(ids.endoftext)
        earlier: list[int] = []
        if chance.random() < self.habits.share_after_earlier:
            text = self._spelt[0][chance.randrange(len(self.recordings))]
            earlier = [ids.startofprev, *text]
            earlier = earlier if len(earlier) + len(written) <= places else []
        return earlier, written, said[:places]

    def _cut(self, cuts: Tensor, samples: int) -> Tensor:
        """Recordings read at their rates into windows.  # [row, slot, (start, begin, reading, rate)] → [row, time]"""
        source = self.recordings.samples
        time = torch.arange(samples, device=source.device)
        windows = torch.zeros(cuts.shape[0], samples, device=source.device)
        for slot in range(cuts.shape[1]):
            start, begin, reading, rate = cuts[:, slot].unbind(-1)
            since = time - begin[:, None]
            inside = (since >= 0) & (since < reading[:, None])
            place = start[:, None] + since.clamp(min=0) * rate[:, None]
            left = place.floor().long().clamp(0, source.shape[0] - 2)
            share = (place - left).float().clamp(0, 1)
            read = source[left].float() * (1 - share) + source[left + 1].float() * share
            windows += torch.where(inside, read / 32768.0, 0.0)
        return windows
