"""What guesses ahead of a trained Whisper is trained here: the model stays as it is and teaches what it would write.

The windows are those the model itself was taught with. On them the frozen model runs once; its states and what it finds
likely at every place are given to the apprentice's loss. All of it is one step of a `Course`, which can be stopped and
gone on with.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vivavoce.models.whisper import Whisper, WindowMemory
from vivavoce.train.corpus import Corpus
from vivavoce.train.loop import Batch, Budget, Course, Learner, plot_curves
from vivavoce.train.recogniser.asr import Listening
from vivavoce.train.recogniser.vocabulary import Vocabulary
from vivavoce.train.recogniser.windows import IGNORED, RATE, Recordings, WindowMaker, WindowShape


@dataclass(frozen=True)
class DraftRecipe:
    """What a course of a draft may change."""

    shapes: tuple[WindowShape, ...] = (WindowShape(3.2, 192, 1, 44), WindowShape(6.4, 96, 2, 64))
    steps: int = 6_000
    warmup: int = 100
    weight_decay: float = 0.01
    average: float = 0.995
    augmentation: float = 0.5
    log_every: int = 50


TINY = DraftRecipe(shapes=(WindowShape(2.0, 4, 1, 32),), steps=4, warmup=2, average=0.5, log_every=2)


@dataclass(frozen=True)
class Lesson:
    """What the frozen model made of a batch."""

    states: Tensor  # [window, position, d_model]
    memory: WindowMemory
    tokens: Tensor  # [row, place]
    hidden: Tensor  # [row, place, d_model]
    chances: Tensor  # [row, place, vocabulary]: of the token behind each place
    counts: Tensor  # [row, place] bool: whether that token is to be learnt

    def shifted(self, places: int) -> tuple[Tensor, Tensor]:
        """Chances and counts of so many places on, beside the places that have them."""
        return self.chances[:, places:], self.counts[:, places:] & self.counts[:, : self.counts.shape[1] - places]


class Apprentice(Protocol):
    """Something that learns to guess."""

    @property
    def module(self) -> nn.Module:
        """What learns."""
        ...

    @property
    def peak_rate(self) -> float:
        """How fast."""
        ...

    def loss(self, lesson: Lesson, batch: Batch) -> dict[str, Tensor]:
        """Scalars by name; "loss" is minimised. Nothing in it waits for the device."""
        ...

    def save(self, folder: Path) -> None:
        """Write what was learnt."""
        ...


class DraftTraining:
    """A course of an apprentice beside a frozen Whisper, from fresh weights or from where it was stopped."""

    def __init__(
        self,
        model: Whisper,
        vocabulary: Vocabulary,
        apprentice: Apprentice,
        recordings: Recordings,
        folder: str | Path,
        recipe: DraftRecipe,
        until: float | None = None,
        seed: int = 0,
        report: Callable[[str], None] = print,
    ) -> None:
        self.model, self.apprentice, self.recipe, self.seed = model, apprentice, recipe, seed
        device = model.decoder.embed_tokens.weight.device
        self.listening = Listening(model.config.num_mel_bins, device, recipe.augmentation)
        self.maker = WindowMaker(recordings.to(device), vocabulary, seed=seed)
        self.learner = Learner(
            {"draft": apprentice.module},
            self._loss,
            apprentice.peak_rate,
            weight_decay=recipe.weight_decay,
            average=recipe.average,
        )
        seconds = None if until is None else max(1.0, until - time.monotonic())
        budget = Budget(recipe.steps, seconds, recipe.warmup)
        self.course = Course(folder, {"draft": self.learner}, budget, seed, recipe.log_every, report=report)

    def run(self) -> dict[str, float]:
        """Learn to the end of the budget; the averaged weights are in place afterwards. The last step's scalars."""
        last: Mapping[str, Tensor] = {}
        with ThreadPoolExecutor(1) as beside:
            planned = beside.submit(self._plan, self.course.number)
            for step in self.course:
                plan, planned = planned.result(), beside.submit(self._plan, step.number + 1)
                batch = self.maker.on_device(plan, self._shape(step.number))
                mel = self.listening(batch.pop("samples"), step.seed)
                last = self.learner.step({**batch, "mel": mel}, step.rate_share)
                self.course.record(last)
        self.learner.swap_average()
        return {name: float(value) for name, value in last.items()}

    def _plan(self, number: int) -> dict[str, Tensor]:
        return self.maker.plan(self._shape(number), (self.seed << 32) + number)

    def _shape(self, number: int) -> WindowShape:
        return self.recipe.shapes[number % len(self.recipe.shapes)]

    def _loss(self, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            lesson = self._lesson(batch)
        return self.apprentice.loss(lesson, batch)

    def _lesson(self, batch: Batch) -> Lesson:
        decoder, tokens = self.model.decoder, batch["tokens"]
        states = self.model.encoder(batch["mel"])
        memory = decoder.remember(states)
        hidden = decoder(tokens, memory)
        chances = decoder.logits(hidden).softmax(-1)
        return Lesson(states, memory, tokens, hidden, chances, batch["labels"] != IGNORED)


def mean_where(values: Tensor, counts: Tensor) -> Tensor:
    """The mean of values that count."""
    return (values * counts).sum() / counts.sum().clamp(min=1)


def distillation(logits: Tensor, chances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The divergence from the model's chances, and how often the likeliest token is the model's own."""
    surprise = -(chances * logits.float().log_softmax(-1)).sum(-1) - torch.special.entr(chances).sum(-1)
    agrees = logits.argmax(-1) == chances.argmax(-1)
    return mean_where(surprise, counts), mean_where(agrees.float(), counts)


def options(description: str) -> argparse.ArgumentParser:
    """The options that all drafts share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--asr", type=Path, required=True, help="folder of the trained model")
    parser.add_argument("--corpus", type=Path, required=True, help="a corpus, or a folder with `train` or `mixed`")
    parser.add_argument("--out", type=Path, required=True, help="for weights and metrics; a course in it goes on")
    parser.add_argument("--seconds", type=float, default=90.0, help="for everything")
    parser.add_argument("--device", default=None, help="cpu, cuda, …; the GPU where there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps that teach nothing: a rehearsal")
    return parser


def train_draft(given: argparse.Namespace, make: Callable[[Whisper, Vocabulary], Apprentice]) -> None:
    """Load model and corpus, train what `make` gives, save it and its metrics."""
    began = time.monotonic()
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, vocabulary = Whisper.load(given.asr, device), Vocabulary.read(given.asr)
    recipe = TINY if given.tiny else DraftRecipe()
    recordings = _recordings(given.corpus, model.config.window_seconds, given.seed)
    torch.manual_seed(given.seed)
    apprentice = make(model, vocabulary)
    count = sum(p.numel() for p in apprentice.module.parameters() if p.requires_grad)
    print(f"{len(recordings)} recordings; {count / 1e6:.2f} M parameters learn on {device}", flush=True)
    until = began + given.seconds - min(3.0, 0.1 * given.seconds)
    training = DraftTraining(model, vocabulary, apprentice, recordings, given.out / "course", recipe, until, given.seed)
    last = training.run()
    apprentice.save(given.out)
    plot_curves(given.out / "course")
    metrics: dict[str, Any] = {
        "parameters": count,
        "steps": training.course.number,
        "training_seconds": round(training.course.elapsed, 1),
        "last_step": {name: round(value, 4) for name, value in last.items()},
    }
    (given.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf8")
    print(json.dumps(metrics), flush=True)


def _recordings(corpus: Path, window_seconds: float, seed: int) -> Recordings:
    """The recordings of a corpus that fit a window."""
    named: Sequence[Path] = [corpus / name for name in ("train", "mixed")] if corpus.is_dir() else [corpus]
    found = next((path for path in named if path.with_suffix(".npz").is_file()), named[0])
    everything = Recordings.of_corpus(Corpus.load(found))
    longest = int(window_seconds * RATE)
    order = random.Random(seed).sample(range(len(everything)), len(everything))
    return everything.of([index for index in order if int(everything.lengths[index]) < longest])
