"""Training batches for ASR: windows of recordings with their tokens, and teacher batches for drafts.

Recordings are on the device as 16-bit samples; windows are cut and resampled there.
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
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.train.asr import LANGUAGE, Vocabulary
from vivavoce.train.augment import AcousticAugmentation, mask_mel, warp_bands
from vivavoce.train.corpus import Corpus
from vivavoce.train.front_desk.answers import normalise
from vivavoce.train.loop import Batch

RATE = 16_000
IGNORED = -100  # label without loss


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
        """A subset that shares the samples."""
        index = torch.as_tensor(chosen, dtype=torch.long)
        return Recordings(self.samples, self.starts[index], self.lengths[index], [self.texts[i] for i in chosen])

    @classmethod
    def of_corpus(cls, corpus: Corpus) -> "Recordings":
        """A corpus with normalised texts; recordings without words are left out."""
        starts = torch.from_numpy(np.asarray(corpus.starts, dtype=np.int64))
        texts = [normalise(text) for text in corpus.texts]
        whole = cls(torch.from_numpy(np.asarray(corpus.samples)), starts[:-1], starts.diff(), texts)
        return whole.of([index for index, text in enumerate(texts) if text])

    @classmethod
    def joined(cls, sets: "Sequence[Recordings]") -> "Recordings":
        """All recordings of several sets."""
        if len(sets) == 1:
            return sets[0]
        offsets = np.cumsum([0, *(len(each.samples) for each in sets[:-1])]).tolist()
        starts = [each.starts + offset for each, offset in zip(sets, offsets, strict=True)]
        samples, lengths = torch.cat([each.samples for each in sets]), torch.cat([each.lengths for each in sets])
        return cls(samples, torch.cat(starts), lengths, [text for each in sets for text in each.texts])

    def to(self, device: torch.device | str) -> "Recordings":
        """Move the samples to a device; starts and lengths stay on the host, where batches are planned."""
        return Recordings(self.samples.to(device), self.starts, self.lengths, self.texts)


@dataclass(frozen=True)
class WindowShape:
    """Fixed sizes of a batch, so that a captured CUDA graph can be replayed."""

    seconds: float
    batch: int
    max_recordings: int
    positions: int  # token positions

    @property
    def samples(self) -> int:
        return round(self.seconds * RATE)


@dataclass(frozen=True)
class WindowOptions:
    """How recordings are placed in windows and transcribed."""

    rates: tuple[float, float] = (0.76, 1.3)  # playback speed: tempo, pitch and formants change together
    share_as_recorded: float = 0.2
    max_gap: float = 1.2
    share_with_times: float = 0.4
    share_after_earlier: float = 0.08
    share_of_silence: float = 0.02
    merge_dropout: float = 0.05
    variants: int = 3


class WindowMaker:
    """Batches of windows with tokens, labels and the targets of the auxiliary CTC loss."""

    def __init__(
        self,
        recordings: Recordings,
        vocabulary: Vocabulary,
        options: WindowOptions | None = None,
        seed: int = 0,
    ) -> None:
        self.recordings, self.options = recordings, options or WindowOptions()
        self.tokens: WhisperTokens = vocabulary.tokens
        source = random.Random(seed)
        encoded = [[vocabulary.encode(text) for text in recordings.texts]]
        for _ in range(self.options.variants - 1):
            dropout = self.options.merge_dropout
            encoded.append([vocabulary.encode(text, dropout, source) for text in recordings.texts])
        self._encoded = encoded
        self._lengths: list[int] = recordings.lengths.tolist()
        self._starts: list[int] = recordings.starts.tolist()
        self._by_length = sorted(range(len(recordings)), key=self._lengths.__getitem__)
        self._sorted_lengths = [self._lengths[index] for index in self._by_length]

    def make(self, shape: WindowShape, seed: int) -> dict[str, Tensor]:
        """A batch, deterministic for a seed.

        # samples [row, time]; tokens and labels [row, position]; pieces [row, position], piece_counts [row]
        """
        return self.on_device(self.plan(shape, seed), shape)

    def on_device(self, plan: dict[str, Tensor], shape: WindowShape) -> dict[str, Tensor]:
        """The batch of a plan; samples are cut on the device."""
        device = self.recordings.samples.device
        if device.type == "cuda":  # a copy from pageable memory would synchronise with the device
            plan = {name: tensor.pin_memory() for name, tensor in plan.items()}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in plan.items()}
        return {"samples": self._cut(moved.pop("cuts"), shape.samples), **moved}

    def plan(self, shape: WindowShape, seed: int) -> dict[str, Tensor]:
        """All tensors of a batch but the samples, described by `cuts`. Host only, so it can run in another thread."""
        positions = shape.positions
        source = random.Random(seed)
        tokens = np.full((shape.batch, positions), self.tokens.endoftext)
        labels = np.full((shape.batch, positions), IGNORED)
        pieces = np.zeros((shape.batch, positions), dtype=np.int64)
        counts = np.zeros(shape.batch, dtype=np.int64)
        cuts = np.zeros((shape.batch, shape.max_recordings, 4))
        for row in range(shape.batch):
            placed = [] if source.random() < self.options.share_of_silence else self._place(shape, source)
            for slot, (index, begin, rate) in enumerate(placed):
                samples_read = self._samples_read(index, rate)
                cuts[row, slot] = self._starts[index], begin, samples_read, rate
            earlier, written, pieces_of_text = self._write(placed, positions, source)
            context_length = len(earlier)
            sequence = [*earlier, *written][: positions + 1]
            tokens[row, : len(sequence) - 1] = sequence[:-1]
            labels[row, context_length : len(sequence) - 1] = sequence[context_length + 1 :]
            counts[row] = len(pieces_of_text)
            pieces[row, : len(pieces_of_text)] = pieces_of_text
        planned = {"cuts": cuts, "tokens": tokens, "labels": labels, "pieces": pieces, "piece_counts": counts}
        return {name: torch.from_numpy(array) for name, array in planned.items()}

    def _samples_read(self, index: int, rate: float) -> int:
        return int((self._lengths[index] - 2) / rate)

    def _place(self, shape: WindowShape, source: random.Random) -> list[tuple[int, int, float]]:
        """Index, start and speed of recordings, placed one after another while they fit."""
        wanted = min(shape.max_recordings, source.choice((1, 2, 2, 3, 4)))
        placed: list[tuple[int, int, float]] = []
        cursor, length = 0, 8
        while len(placed) < wanted:
            unchanged = source.random() < self.options.share_as_recorded
            rate = 1.0 if unchanged else source.uniform(*self.options.rates)
            cursor += int(source.random() ** 2 * self.options.max_gap * RATE)
            fitting = bisect_right(self._sorted_lengths, (shape.samples - cursor) * rate)
            if fitting == 0:
                break
            index = self._by_length[source.randrange(fitting)]
            length += max(len(encoding[index]) for encoding in self._encoded) + 2
            if length > shape.positions:
                break
            placed.append((index, cursor, rate))
            cursor += self._samples_read(index, rate)
        return placed

    def _write(
        self, placed: list[tuple[int, int, float]], positions: int, source: random.Random
    ) -> tuple[list[int], list[int], list[int]]:
        """Tokens of the previous text (context without loss), tokens to predict, and the CTC targets."""
        ids = self.tokens
        if not placed:
            return [], [ids.startoftranscript, ids.nospeech, ids.endoftext], []
        times = source.random() < self.options.share_with_times
        encoding = source.choice(self._encoded)
        written, pieces_of_text = ids.prompt(LANGUAGE, timestamps=times), []
        for index, begin, rate in placed:
            end = begin + self._samples_read(index, rate)
            text = encoding[index]
            written += [ids.timestamp(begin / RATE), *text, ids.timestamp(end / RATE)] if times else text
            pieces_of_text += text
        written.append(ids.endoftext)
        earlier: list[int] = []
        if source.random() < self.options.share_after_earlier:
            text = self._encoded[0][source.randrange(len(self.recordings))]
            earlier = [ids.startofprev, *text]
            earlier = earlier if len(earlier) + len(written) <= positions else []
        return earlier, written, pieces_of_text[:positions]

    def _cut(self, cuts: Tensor, samples: int) -> Tensor:
        """Cut recordings at their speeds into windows.

        # [row, slot, (start, begin, samples_read, rate)] → [row, time]
        """
        source = self.recordings.samples
        time = torch.arange(samples, device=source.device)
        windows = torch.zeros(cuts.shape[0], samples, device=source.device)
        for slot in range(cuts.shape[1]):
            start, begin, samples_read, rate = cuts[:, slot].unbind(-1)
            elapsed = time - begin[:, None]
            inside = (elapsed >= 0) & (elapsed < samples_read[:, None])
            position = start[:, None] + elapsed.clamp(min=0) * rate[:, None]
            left = position.floor().long().clamp(0, source.shape[0] - 2)
            fraction = (position - left).float().clamp(0, 1)
            interpolated = source[left].float() * (1 - fraction) + source[left + 1].float() * fraction
            windows += torch.where(inside, interpolated / 32768.0, 0.0)
        return windows


class AudioAugmentation:
    """Augmented log-mels of windows: acoustics, vocal tract length, SpecAugment."""

    def __init__(self, bins: int, device: torch.device | str, strength: float) -> None:
        self.mel = WhisperMel(bins).to(device)
        self.acoustics = AcousticAugmentation(device, strength) if strength else None

    @torch.no_grad()
    def __call__(self, samples: Tensor, seed: int) -> Tensor:
        """Deterministic for a seed.  # [row, time] → [row, mel, frame]"""
        generator = torch.Generator(samples.device).manual_seed(seed)
        level = 10 ** (-5 + 2 * torch.rand(len(samples), 1, generator=generator, device=samples.device))
        hiss = torch.randn(samples.shape, generator=generator, device=samples.device)
        samples = samples + level * hiss  # so that the model does not rely on digital silence
        if self.acoustics is None:
            clean: Tensor = self.mel(samples)
            return clean
        lengths = torch.full((len(samples),), samples.shape[1], device=samples.device)
        mel = self.mel(torch.nan_to_num(self.acoustics(samples, lengths, seed)))
        return mask_mel(warp_bands(mel, generator), generator)


POSITIONS_STEP = 8  # texts of a batch are padded to a multiple of this
DRAFT_POSITIONS_STEP = 64  # the draft positions of a batch are padded to a multiple of this


@dataclass(frozen=True)
class DraftRecipe:
    """Hyperparameters of training a draft."""

    shapes: tuple[WindowShape, ...] = (
        WindowShape(2.0, 256, 1, 32),
        WindowShape(3.2, 192, 1, 44),
        WindowShape(6.4, 96, 2, 64),
    )
    distinct_batches: int = 240
    """Batches that the teacher transcribes; they are cached and repeated."""
    timed: int = 3
    """One batch in this many has timestamps."""
    steps: int = 6_000
    warmup: int = 100
    weight_decay: float = 0.01
    average: float = 0.995
    augmentation: float = 0.3
    log_every: int = 50

    def on(self, device: torch.device) -> "DraftRecipe":
        """The recipe for a device: smaller and fewer batches on a CPU."""
        if device.type != "cpu":
            return self
        shapes = tuple(replace(shape, batch=max(1, shape.batch // 4)) for shape in self.shapes)
        return replace(self, shapes=shapes, distinct_batches=max(1, self.distinct_batches // 3))


class TeacherBatches:
    """Batches of windows with encoder states and greedy transcripts of the frozen model, cached after the first use.

    # states [window, frame, d_model], tokens [window, position], counts [window, position] bool: whether the next
    # token is the model's; draft_positions: see `DraftBatch`; pieces [window, position], piece_counts [window]: text
    """

    def __init__(
        self, transcriber: WhisperTranscriber, maker: WindowMaker, recipe: DraftRecipe, seed: int, half: bool
    ) -> None:
        self.transcriber, self.maker, self.recipe, self.seed, self.half = transcriber, maker, recipe, seed, half
        self._augment = AudioAugmentation(
            transcriber.model.config.num_mel_bins, transcriber.device, recipe.augmentation
        )
        self._cached: dict[int, Batch] = {}

    def batch(self, step: int) -> Batch:
        """The batch of a step, cached or transcribed now."""
        number = step % self.recipe.distinct_batches
        if number not in self._cached:
            self._cached[number] = self._transcribe(number)
        return self._cached[number]

    @torch.no_grad()
    def _transcribe(self, number: int) -> Batch:
        model, tokens = self.transcriber.model, self.transcriber.tokens
        shape = self.recipe.shapes[number % len(self.recipe.shapes)]
        seed, timed = (self.seed << 32) + number, number // len(self.recipe.shapes) % self.recipe.timed == 1
        mel = self._augment(self.maker.make(shape, seed)["samples"], seed)
        with torch.autocast(mel.device.type, torch.bfloat16, enabled=self.half):
            states = model.encoder(mel)
        prompt = tokens.prompt(LANGUAGE, timestamps=timed)
        memory, max_tokens = model.decoder.cross_kv(states.float()), shape.positions - len(prompt)
        rules = self.transcriber.rules(TranscriptionOptions(language=LANGUAGE, timestamps=timed))
        texts = decode(model, tokens, memory, [prompt] * shape.batch, rules, max_tokens=max_tokens)
        return {"states": states.bfloat16(), **self._padded(prompt, texts)}

    def _padded(self, prompt: list[int], texts: Sequence[Text]) -> dict[str, Tensor]:
        """Padded texts; those that fail the transcriber's quality checks have no loss."""
        end, prompt_length = self.transcriber.tokens.endoftext, len(prompt)
        trusted = [self.transcriber.is_trusted(text) for text in texts]
        texts = [
            text if is_trusted else replace(text, tokens=[]) for text, is_trusted in zip(texts, trusted, strict=True)
        ]
        positions = -(-(prompt_length + max(len(text.tokens) for text in texts)) // POSITIONS_STEP) * POSITIONS_STEP
        tokens = torch.full((len(texts), positions), end)
        counts = torch.zeros(len(texts), positions, dtype=torch.bool)
        pieces, piece_counts = torch.zeros_like(tokens), torch.zeros(len(texts), dtype=torch.long)
        for row, text in enumerate(texts):
            length = prompt_length + len(text.tokens)
            tokens[row, :length] = torch.tensor([*prompt, *text.tokens])
            counts[row, prompt_length - 1 : length - (not text.is_ended)] = trusted[row]
            pieces_of_text = [token for token in text.tokens if token < end]
            pieces[row, : len(pieces_of_text)] = torch.tensor(pieces_of_text, dtype=torch.long)
            piece_counts[row] = len(pieces_of_text)
        is_drafted = counts.clone()
        is_drafted[:, :-1] |= counts[:, 1:]  # the token after the position before the text is the end of the prompt
        is_drafted[:, -1] = False
        draft_positions = is_drafted.view(-1).nonzero()[:, 0]
        filled = torch.zeros(
            -(-max(1, len(draft_positions)) // DRAFT_POSITIONS_STEP) * DRAFT_POSITIONS_STEP, dtype=torch.long
        )
        filled[: len(draft_positions)] = draft_positions
        tensors = {
            "tokens": tokens,
            "counts": counts,
            "draft_positions": filled,
            "pieces": pieces,
            "piece_counts": piece_counts,
        }
        return {name: tensor.to(self.transcriber.device) for name, tensor in tensors.items()}
