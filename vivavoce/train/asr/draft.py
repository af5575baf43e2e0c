"""What drafts for a trained Whisper: `viva train draft --asr DIR --corpus DIR --out DIR [--layers 2 | --pieces]`.

A decoder of few layers, distilled from the model's own: it begins as some of the layers and learns what the whole
decoder finds likely. It hears through the model's encoder and shares its tables, so it adds little memory. With
`--pieces`, a few layers on the frozen encoder that guess the whole text at once, taught by CTC; they begin with the
head that the model itself was taught with, where it lies in the model's folder.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vivavoce.cpu_speed import bfloat16_is_fast_here
from vivavoce.hub import resolve
from vivavoce.models.whisper.alignment import BLANK, PieceGuesser
from vivavoce.models.whisper.drafts import PLACES, DraftLayers, WhisperHeads, distilled, load_decoder, save_decoder
from vivavoce.models.whisper.model import Whisper, WhisperDecoder, WindowMemory
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.train.asr.batches import (
    RATE,
    DraftRecipe,
    Hearings,
    Recordings,
    WindowMaker,
    WindowShape,
)
from vivavoce.train.asr.checkpoint import Vocabulary
from vivavoce.train.asr.train import FEWEST_PIECES
from vivavoce.train.corpus import Corpus
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun, plot_curves
from vivavoce.train.losses import ctc_loss

SHARPENING = 2.0  # of the model's chances: it was taught to leave some to every token, and takes the likeliest


TINY = DraftRecipe(shapes=(WindowShape(2.0, 16, 1, 32),), hearings=2, steps=4, warmup=2, average=0.5, log_every=2)


@dataclass(frozen=True)
class DraftBatch:
    """What the frozen model made of a batch."""

    states: Tensor  # [window, position, d_model]
    memory: WindowMemory
    tokens: Tensor  # [row, place]
    hidden: Tensor  # [row, place, d_model]
    chances: Tensor  # [row, place, vocabulary]: of the token behind each place
    entropy: Tensor  # [row, place]: theirs
    best: Tensor  # [row, place]: the likeliest token
    counts: Tensor  # [row, place] bool: whether that token is to be learnt
    knowing: Tensor  # [knowing]: row × places + place, where the next token is known and later ones are to be guessed


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

    def loss(self, lesson: DraftBatch, batch: Batch) -> dict[str, Tensor]:
        """Scalars by name; "loss" is minimised. Nothing in it waits for the device."""
        ...

    def save(self, folder: Path) -> None:
        """Write what was learnt."""
        ...


class DraftTraining:
    """A course of an apprentice beside a frozen Whisper, from fresh weights or from where it was stopped."""

    def __init__(
        self,
        listener: WhisperTranscriber,
        vocabulary: Vocabulary,
        apprentice: Apprentice,
        recordings: Recordings,
        folder: str | Path,
        recipe: DraftRecipe,
        until: float | None = None,
        seed: int = 0,
        report: Callable[[str], None] = print,
    ) -> None:
        self.model, self.apprentice = listener.model, apprentice
        self.half = listener.device.type == "cpu" and bfloat16_is_fast_here()  # on CUDA, the learner sees to it
        maker = WindowMaker(recordings.to(listener.device), vocabulary, seed=seed)
        self.hearings = Hearings(listener, maker, recipe, seed, self.half or listener.device.type == "cuda")
        self.learner = Learner(
            {"draft": apprentice.module},
            self._loss,
            apprentice.peak_rate,
            weight_decay=recipe.weight_decay,
            average=recipe.average,
        )
        seconds = None if until is None else max(1.0, until - time.monotonic())
        budget = Budget(recipe.steps, seconds, recipe.warmup)
        self.course = TrainingRun(folder, {"draft": self.learner}, budget, seed, recipe.log_every, report=report)

    def run(self) -> dict[str, float]:
        """Learn to the end of the budget; the averaged weights are in place afterwards. The last step's scalars."""
        last: Mapping[str, Tensor] = {}
        for step in self.course:
            last = self.learner.step(self.hearings.batch(step.number), step.rate_share)
            self.course.record(last)
        self.learner.swap_average()
        return {name: float(value) for name, value in last.items()}

    def _loss(self, batch: Batch) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            with torch.no_grad():
                lesson = self._lesson(batch)
            return self.apprentice.loss(lesson, batch)

    def _lesson(self, batch: Batch) -> DraftBatch:
        decoder, tokens = self.model.decoder, batch["tokens"]
        states = batch["states"].to(decoder.embed_tokens.weight.dtype)
        memory = decoder.remember(states)
        hidden = decoder(tokens, memory)
        chances = (SHARPENING * decoder.logits(hidden)).softmax(-1)
        entropy = torch.special.entr(chances).sum(-1)
        best = chances.argmax(-1)
        return DraftBatch(states, memory, tokens, hidden, chances, entropy, best, batch["counts"], batch["knowing"])


def mean_where(values: Tensor, counts: Tensor) -> Tensor:
    """The mean of values that count."""
    return (values * counts).sum() / counts.sum().clamp(min=1)


def distillation(
    logits: Tensor, chances: Tensor, entropy: Tensor, best: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """The divergence from the model's chances, whose entropy is known, and how often the likeliest token is its own.

    # [.., vocabulary] twice, then [..]; counts is bool: what is learnt from
    """
    made = logits.float().log_softmax(-1)
    surprise = -(chances * made).sum(-1) - entropy
    return mean_where(surprise, counts), mean_where((made.argmax(-1) == best).float(), counts)


def options(description: str) -> argparse.ArgumentParser:
    """The options that all drafts share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--asr", type=Path, required=True, help="the trained model: a folder, or a bundled name")
    parser.add_argument("--corpus", type=Path, required=True, help="a corpus, or a folder with `train` or `mixed`")
    parser.add_argument("--out", type=Path, required=True, help="for weights and metrics; a course in it goes on")
    parser.add_argument("--init", type=Path, help="folder of an earlier one, to begin as that")
    parser.add_argument("--seconds", type=float, default=90.0, help="for everything")
    parser.add_argument("--device", default=None, help="cpu, cuda, …; the GPU where there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps that teach nothing: a rehearsal")
    return parser


def train_draft(given: argparse.Namespace, make: Callable[[Whisper, Vocabulary], Apprentice]) -> None:
    """Load model and corpus, train what `make` gives, save it and its metrics."""
    began = time.monotonic()
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    given.asr = resolve(str(given.asr))
    listener, vocabulary = WhisperTranscriber.load(given.asr, device), Vocabulary.read(given.asr)
    recipe = (TINY if given.tiny else DraftRecipe()).on(device)
    recordings = _recordings(given.corpus, listener.model.config.window_seconds, given.seed)
    torch.manual_seed(given.seed)
    apprentice = make(listener.model, vocabulary)
    count = sum(p.numel() for p in apprentice.module.parameters() if p.requires_grad)
    print(f"{len(recordings)} recordings; {count / 1e6:.2f} M parameters learn on {device}", flush=True)
    until = began + given.seconds - min(3.0, 0.1 * given.seconds)
    course = given.out / "course"
    training = DraftTraining(listener, vocabulary, apprentice, recordings, course, recipe, until, given.seed)
    last = training.run()
    apprentice.save(given.out)
    plot_curves(course)
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


LAYERS = 2
PIECE_LAYERS = 2


class DecoderApprentice:
    """A small decoder that learns to write as the whole one."""

    peak_rate = 1e-3

    def __init__(self, model: Whisper, layers: int = LAYERS, begun: WhisperDecoder | None = None) -> None:
        self.model = model
        self.decoder = begun or distilled(model.decoder, layers)
        self.module = DraftLayers(self.decoder).requires_grad_(True)

    def loss(self, lesson: DraftBatch, batch: Batch) -> dict[str, Tensor]:
        """The divergence from the model's chances, and how often both would write the same."""
        hidden = self.decoder(lesson.tokens, self.decoder.remember(lesson.states))
        surprise, agreed = distillation(
            self.decoder.logits(hidden), lesson.chances, lesson.entropy, lesson.best, lesson.counts
        )
        return {"loss": surprise, "agreed": agreed}

    def save(self, folder: Path) -> None:
        """Write the layers in half precision."""
        kept = distilled(self.model.decoder, len(self.decoder.stack))
        DraftLayers(kept).load_state_dict(self.module.state_dict())
        DraftLayers(kept).half()
        save_decoder(kept, folder, self.model.config)


class PiecesApprentice:
    """A few layers that learn to read the text off the encoder's states."""

    peak_rate = 2e-3

    def __init__(self, model: Whisper, text_ids: int, begun: PieceGuesser | None = None) -> None:
        self.model = model
        config = model.config
        guesser = PieceGuesser(config.d_model, text_ids, PIECE_LAYERS, config.encoder_attention_heads)
        if begun is not None and len(begun.layers) == PIECE_LAYERS:
            guesser.load_state_dict(begun.state_dict())
        elif begun is not None:  # fresh layers change nothing: it begins as good as the one the model learnt beside
            guesser.pieces.load_state_dict(begun.pieces.state_dict())
        self.module = self.guesser = guesser.to(model.decoder.embed_tokens.weight.device)

    def loss(self, lesson: DraftBatch, batch: Batch) -> dict[str, Tensor]:
        """CTC of the pieces that are said."""
        chances = self.guesser(lesson.states).float().log_softmax(-1)
        counts = batch["piece_counts"]
        frames = torch.full_like(counts, chances.shape[1])
        losses = ctc_loss(chances, batch["pieces"] + BLANK + 1, frames, counts)
        return {"loss": (losses / counts.clamp(min=FEWEST_PIECES)).mean()}

    def save(self, folder: Path) -> None:
        """Write the layers in half precision."""
        deepcopy(self.guesser).half().save(folder, self.model.config)


FADING = 0.8  # what a place ahead counts, of the one before it: it is only reached if that one was right


class HeadsApprentice:
    """Heads that learn what the trunk will write."""

    peak_rate = 2e-3

    def __init__(self, model: Whisper, places: int = PLACES, begun: WhisperHeads | None = None) -> None:
        self.model = model
        self.module = self.heads = begun or WhisperHeads.beside(model.decoder, places)

    def loss(self, lesson: DraftBatch, batch: Batch) -> dict[str, Tensor]:
        """The divergence from the trunk at every place ahead, and how often the guess is the trunk's own."""
        decoder, places = self.model.decoder, lesson.counts.shape[1]
        row, place = lesson.knowing // places, lesson.knowing % places
        known = lesson.counts[row, place]  # the first place of a text is not: nothing was drawn from its state
        hidden = torch.where(known[:, None], lesson.hidden[row, place], self.heads.start)
        newest = decoder.embed_tokens(lesson.tokens[row, place + 1])
        states = self.heads(hidden, newest, lambda query: _look(query, lesson, row))
        total, scalars, weight = states.new_zeros((), dtype=torch.float32), {}, 1.0
        for index in range(self.heads.places):
            ahead = (place + index + 1).clamp(max=places - 1)
            counts = lesson.counts[row, ahead] & lesson.counts[row, place + 1] & (ahead == place + index + 1)
            taught = (lesson.chances[row, ahead], lesson.entropy[row, ahead], lesson.best[row, ahead])
            surprise, agreed = distillation(decoder.logits(states[:, index]), *taught, counts)
            total, weight = total + weight * surprise, weight * FADING
            scalars[f"agreed_{index + 1}"] = agreed
        return {"loss": total, **scalars}

    def save(self, folder: Path) -> None:
        """Write the heads in half precision."""
        kept = WhisperHeads.beside(self.model.decoder, self.heads.places)
        kept.load_state_dict(self.heads.state_dict())
        kept.half().save(folder, self.model.config)


def _look(query: Tensor, lesson: DraftBatch, row: Tensor) -> Tensor:
    """Every query at its row's window, through the last layer's memory.  # [knowing, place, head, head_dim]"""
    keys, values = lesson.memory.keys[-1][row], lesson.memory.values[-1][row]
    # Not by a fused attention: that would find gradients of keys and values too, which nobody learns.
    weights = query.transpose(1, 2).to(keys.dtype) @ keys.transpose(2, 3) * query.shape[-1] ** -0.5
    return (weights.softmax(-1).to(values.dtype) @ values).transpose(1, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = options("Train a draft for a frozen Whisper.")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the small decoder")
    parser.add_argument("--pieces", action="store_true", help="layers that guess whole texts at once instead")
    given = parser.parse_args(arguments)

    def make(model: Whisper, vocabulary: Vocabulary) -> DecoderApprentice | PiecesApprentice:
        if given.pieces:
            folder = given.init or given.asr / PieceGuesser.kind
            begun = PieceGuesser.load(folder, model.config) if folder.is_dir() else None
            return PiecesApprentice(model, vocabulary.tokens.endoftext, begun)
        layers = min(given.layers, model.config.decoder_layers - 1)
        return DecoderApprentice(model, layers, None if given.init is None else load_decoder(given.init, model.decoder))

    train_draft(given, make)


def medusa_main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser: argparse.ArgumentParser = options("Train Medusa heads on a frozen Whisper.")
    parser.add_argument("--places", type=int, default=PLACES, help="tokens ahead that are guessed")
    given = parser.parse_args(arguments)

    def make(model: Whisper, vocabulary: Vocabulary) -> HeadsApprentice:
        like = model.decoder.embed_tokens.weight
        begun = None if given.init is None else WhisperHeads.load(given.init, model.config, like.device)
        return HeadsApprentice(model, given.places, begun and begun.requires_grad_(True))

    train_draft(given, make)


if __name__ == "__main__":
    main()
