"""Windows of speech for a Whisper to learn from: recordings cut, sped up and set side by side, with what is to be
written of them. The recordings lie on the device as 16-bit samples; a batch is cut there.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import InputError
from vivavoce.models.whisper.config import WhisperTokens
from vivavoce.models.whisper.decoding import Text, decode
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.models.whisper.windows import TranscriptionOptions
from vivavoce.train.asr.checkpoint import (
    LANGUAGE,
    Vocabulary,
)
from vivavoce.train.augment import mask_mel
from vivavoce.train.corpus import Corpus
from vivavoce.train.front_desk.answers import normalise
from vivavoce.train.loop import Batch
from vivavoce.train.speech_encoder.batches import AcousticAugmentation, warp_bands

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


class AudioAugmentation:
    """Windows to the log-mels that are learnt from: elsewhere, in another throat, with parts hidden (SpecAugment)."""

    def __init__(self, bins: int, device: torch.device | str, strength: float) -> None:
        self.mel = WhisperMel(bins).to(device)
        self.surroundings = AcousticAugmentation(device, strength) if strength else None

    @torch.no_grad()
    def __call__(self, samples: Tensor, seed: int) -> Tensor:
        """The same for the same seed.  # [row, time] → [row, mel, frame]"""
        generator = torch.Generator(samples.device).manual_seed(seed)
        level = 10 ** (-5 + 2 * torch.rand(len(samples), 1, generator=generator, device=samples.device))
        rush = torch.randn(samples.shape, generator=generator, device=samples.device)
        samples = samples + level * rush  # so that nothing rests on digital silence
        if self.surroundings is None:
            clean: Tensor = self.mel(samples)
            return clean
        lengths = torch.full((len(samples),), samples.shape[1], device=samples.device)
        mel = self.mel(torch.nan_to_num(self.surroundings(samples, lengths, seed)))
        return mask_mel(warp_bands(mel, generator), generator)


PLACES_STEP = 8  # texts of a batch are filled up to a multiple of so many places
KNOWING_STEP = 64  # and the places of a batch from which something is to be guessed, to a multiple of so many


@dataclass(frozen=True)
class DraftRecipe:
    """What a course of a draft may change."""

    shapes: tuple[WindowShape, ...] = (
        WindowShape(2.0, 256, 1, 32),
        WindowShape(3.2, 192, 1, 44),
        WindowShape(6.4, 96, 2, 64),
    )
    hearings: int = 240
    """Batches that are heard and kept."""
    timed: int = 3
    """One batch in so many is written with times."""
    steps: int = 6_000
    warmup: int = 100
    weight_decay: float = 0.01
    average: float = 0.995
    augmentation: float = 0.3
    log_every: int = 50

    def on(self, device: torch.device) -> "DraftRecipe":
        """The recipe for a device: a CPU takes more steps of fewer windows, and hears fewer of them."""
        if device.type != "cpu":
            return self
        shapes = tuple(replace(shape, batch=max(1, shape.batch // 4)) for shape in self.shapes)
        return replace(self, shapes=shapes, hearings=max(1, self.hearings // 3))


class Hearings:
    """Batches of windows as the frozen model hears and writes them; each is heard once.

    # states [window, position, d_model], tokens [window, place], counts [window, place] bool: whether the token
    # behind a place is the model's; knowing: see `DraftBatch`; pieces [window, place], piece_counts [window]: text
    """

    def __init__(
        self, listener: WhisperTranscriber, maker: WindowMaker, recipe: DraftRecipe, seed: int, half: bool
    ) -> None:
        self.listener, self.maker, self.recipe, self.seed, self.half = listener, maker, recipe, seed, half
        self._augment = AudioAugmentation(listener.model.config.num_mel_bins, listener.device, recipe.augmentation)
        self._kept: dict[int, Batch] = {}

    def batch(self, step: int) -> Batch:
        """The batch of a step: the same whether or not it was heard before."""
        number = step % self.recipe.hearings
        if number not in self._kept:
            self._kept[number] = self._hear(number)
        return self._kept[number]

    @torch.no_grad()
    def _hear(self, number: int) -> Batch:
        model, tokens = self.listener.model, self.listener.tokens
        shape = self.recipe.shapes[number % len(self.recipe.shapes)]
        seed, timed = (self.seed << 32) + number, number // len(self.recipe.shapes) % self.recipe.timed == 1
        mel = self._augment(self.maker.make(shape, seed)["samples"], seed)
        with torch.autocast(mel.device.type, torch.bfloat16, enabled=self.half):
            states = model.encoder(mel)
        prompt = tokens.prompt(LANGUAGE, timestamps=timed)
        memory, most = model.decoder.remember(states.float()), shape.places - len(prompt)
        rules = self.listener.rules(TranscriptionOptions(language=LANGUAGE, timestamps=timed))
        texts = decode(model, tokens, memory, [prompt] * shape.batch, rules, most=most)
        return {"states": states.bfloat16(), **self._laid_out(prompt, texts)}

    def _laid_out(self, prompt: list[int], texts: Sequence[Text]) -> dict[str, Tensor]:
        """Texts side by side; of those that would not be trusted, nothing is learnt."""
        end, known = self.listener.tokens.endoftext, len(prompt)
        trusted = [self.listener.is_trusted(text) for text in texts]
        texts = [text if trust else replace(text, tokens=[]) for text, trust in zip(texts, trusted, strict=True)]
        places = -(-(known + max(len(text.tokens) for text in texts)) // PLACES_STEP) * PLACES_STEP
        tokens = torch.full((len(texts), places), end)
        counts = torch.zeros(len(texts), places, dtype=torch.bool)
        pieces, piece_counts = torch.zeros_like(tokens), torch.zeros(len(texts), dtype=torch.long)
        for row, text in enumerate(texts):
            written = known + len(text.tokens)
            tokens[row, :written] = torch.tensor([*prompt, *text.tokens])
            counts[row, known - 1 : written - (not text.is_ended)] = trusted[row]
            said = [token for token in text.tokens if token < end]
            pieces[row, : len(said)] = torch.tensor(said, dtype=torch.long)
            piece_counts[row] = len(said)
        knows = counts.clone()
        knows[:, :-1] |= counts[:, 1:]  # behind the place before those that count stands the prompt's end
        knows[:, -1] = False
        knowing = knows.view(-1).nonzero()[:, 0]
        filled = torch.zeros(-(-max(1, len(knowing)) // KNOWING_STEP) * KNOWING_STEP, dtype=torch.long)
        filled[: len(knowing)] = knowing
        made = {"tokens": tokens, "counts": counts, "knowing": filled, "pieces": pieces, "piece_counts": piece_counts}
        return {name: tensor.to(self.listener.device) for name, tensor in made.items()}
