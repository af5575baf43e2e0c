"""Drafts for speculative decoding of a trained Whisper, which stays frozen.

`viva train draft` distils a decoder of few layers, initialised from layers of the model, whose encoder and embeddings
it shares. With `--pieces` it trains CTC layers on the encoder instead, starting from the CTC head in the model's
folder if there is one. `viva train medusa` trains heads that predict several tokens ahead.
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

from vivavoce.cpu_speed import is_bfloat16_fast
from vivavoce.hub import resolve
from vivavoce.models.whisper.drafts import (
    CTC_BLANK,
    PLACES,
    DraftLayers,
    PieceGuesser,
    WhisperHeads,
    distilled,
    load_decoder,
    save_decoder,
)
from vivavoce.models.whisper.model import Whisper, WhisperDecoder, WindowMemory
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.train import add_option
from vivavoce.train.asr import Vocabulary
from vivavoce.train.asr.batches import (
    RATE,
    DraftRecipe,
    Recordings,
    TeacherBatches,
    WindowMaker,
    WindowShape,
)
from vivavoce.train.asr.train import MIN_PIECES
from vivavoce.train.corpus import Corpus
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun, plot_curves
from vivavoce.train.losses import ctc_loss

SHARPENING = 2.0  # inverse temperature of the teacher, which was trained with label smoothing and decodes greedily


TINY = DraftRecipe(
    shapes=(WindowShape(2.0, 16, 1, 32),), distinct_batches=2, steps=4, warmup=2, average=0.5, log_every=2
)


@dataclass(frozen=True)
class DraftBatch:
    """Outputs of the frozen teacher for a batch."""

    states: Tensor  # [window, position, d_model]
    memory: WindowMemory
    tokens: Tensor  # [row, position]
    hidden: Tensor  # [row, position, d_model]
    probabilities: Tensor  # [row, position, vocabulary]: of the next token
    entropy: Tensor  # [row, position]: of the probabilities
    best: Tensor  # [row, position]: the most likely token
    counts: Tensor  # [row, position] bool: whether that token has a loss
    draft_positions: Tensor  # [draft]: row × positions + position, where the next token is known, later ones drafted


class Student(Protocol):
    """A draft model in training."""

    @property
    def module(self) -> nn.Module:
        """The trained module."""
        ...

    @property
    def peak_rate(self) -> float: ...

    def loss(self, teacher: DraftBatch, batch: Batch) -> dict[str, Tensor]:
        """Scalars by name; "loss" is minimised. No host synchronisation."""
        ...

    def save(self, folder: Path) -> None: ...


class DraftTraining:
    """Trains a student on the outputs of a frozen Whisper; resumes if interrupted."""

    def __init__(
        self,
        transcriber: WhisperTranscriber,
        vocabulary: Vocabulary,
        student: Student,
        recordings: Recordings,
        folder: str | Path,
        recipe: DraftRecipe,
        until: float | None = None,
        seed: int = 0,
        report: Callable[[str], None] = print,
    ) -> None:
        self.model, self.student = transcriber.model, student
        self.half = transcriber.device.type == "cpu" and is_bfloat16_fast()  # on CUDA the Learner enables autocast
        maker = WindowMaker(recordings.to(transcriber.device), vocabulary, seed=seed)
        self.batches = TeacherBatches(transcriber, maker, recipe, seed, self.half or transcriber.device.type == "cuda")
        self.learner = Learner(
            {"draft": student.module},
            self._loss,
            student.peak_rate,
            weight_decay=recipe.weight_decay,
            average=recipe.average,
        )
        seconds = None if until is None else max(1.0, until - time.monotonic())
        budget = Budget(recipe.steps, seconds, recipe.warmup)
        self.training_run = TrainingRun(folder, {"draft": self.learner}, budget, seed, recipe.log_every, report=report)

    def run(self) -> dict[str, float]:
        """Train to the end of the budget and load the averaged weights; returns the scalars of the last step."""
        last: Mapping[str, Tensor] = {}
        for step in self.training_run:
            last = self.learner.step(self.batches.batch(step.number), step.rate_share)
            self.training_run.record(last)
        self.learner.swap_average()
        return {name: float(value) for name, value in last.items()}

    def _loss(self, batch: Batch) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            with torch.no_grad():
                teacher = self._teacher_outputs(batch)
            return self.student.loss(teacher, batch)

    def _teacher_outputs(self, batch: Batch) -> DraftBatch:
        decoder, tokens = self.model.decoder, batch["tokens"]
        states = batch["states"].to(decoder.embed_tokens.weight.dtype)
        memory = decoder.cross_kv(states)
        hidden = decoder(tokens, memory)
        probabilities = (SHARPENING * decoder.logits(hidden)).softmax(-1)
        entropy = torch.special.entr(probabilities).sum(-1)
        best = probabilities.argmax(-1)
        return DraftBatch(
            states, memory, tokens, hidden, probabilities, entropy, best, batch["counts"], batch["draft_positions"]
        )


def masked_mean(values: Tensor, counts: Tensor) -> Tensor:
    return (values * counts).sum() / counts.sum().clamp(min=1)


def distillation(
    logits: Tensor, probabilities: Tensor, entropy: Tensor, best: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """KL divergence from the teacher's probabilities, whose entropy is given, and how often the greedy tokens agree.

    # [.., vocabulary] twice, then [..]; counts is a bool mask
    """
    log_probs = logits.float().log_softmax(-1)
    divergence = -(probabilities * log_probs).sum(-1) - entropy
    return masked_mean(divergence, counts), masked_mean((log_probs.argmax(-1) == best).float(), counts)


def draft_parser(description: str) -> argparse.ArgumentParser:
    """Command-line options common to all drafts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--asr", type=Path, required=True, help="the trained model: a folder, or a bundled name")
    parser.add_argument("--corpus", type=Path, required=True, help="a corpus, or a folder with `train` or `mixed`")
    parser.add_argument("--out", type=Path, required=True, help="for weights and metrics; a run in it is resumed")
    parser.add_argument("--init", type=Path, help="folder of an earlier draft to initialise from")
    parser.add_argument("--seconds", type=float, default=90.0, help="total time, loading included")
    parser.add_argument("--device", default=None, help="cpu, cuda, …; default: the GPU if there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps, to test the pipeline")
    return parser


def train_draft(options: argparse.Namespace, make: Callable[[Whisper, Vocabulary], Student]) -> None:
    """Load model and corpus, train the student that `make` returns, save it and its metrics."""
    started = time.monotonic()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options.asr = resolve(str(options.asr))
    transcriber, vocabulary = WhisperTranscriber.load(options.asr, device), Vocabulary.read(options.asr)
    recipe = (TINY if options.tiny else DraftRecipe()).on(device)
    recordings = _recordings(options.corpus, transcriber.model.config.window_seconds, options.seed)
    torch.manual_seed(options.seed)
    student = make(transcriber.model, vocabulary)
    count = sum(p.numel() for p in student.module.parameters() if p.requires_grad)
    print(f"{len(recordings)} recordings; {count / 1e6:.2f} M trainable parameters on {device}", flush=True)
    until = started + options.seconds - min(3.0, 0.1 * options.seconds)
    folder = options.out / "course"
    training = DraftTraining(transcriber, vocabulary, student, recordings, folder, recipe, until, options.seed)
    last = training.run()
    student.save(options.out)
    plot_curves(folder)
    metrics: dict[str, Any] = {
        "parameters": count,
        "steps": training.training_run.number,
        "training_seconds": round(training.training_run.elapsed, 1),
        "last_step": {name: round(value, 4) for name, value in last.items()},
    }
    (options.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf8")
    print(json.dumps(metrics), flush=True)


def _recordings(corpus: Path, window_seconds: float, seed: int) -> Recordings:
    """The recordings of a corpus that fit in a window."""
    candidates: Sequence[Path] = [corpus / name for name in ("train", "mixed")] if corpus.is_dir() else [corpus]
    path = next((path for path in candidates if path.with_suffix(".npz").is_file()), candidates[0])
    recordings = Recordings.of_corpus(Corpus.load(path))
    max_samples = int(window_seconds * RATE)
    order = random.Random(seed).sample(range(len(recordings)), len(recordings))
    return recordings.of([index for index in order if int(recordings.lengths[index]) < max_samples])


LAYERS = 2
PIECE_LAYERS = 2


class DecoderStudent:
    """A decoder with fewer layers, distilled from the full one."""

    peak_rate = 1e-3

    def __init__(self, model: Whisper, layers: int = LAYERS, initial: WhisperDecoder | None = None) -> None:
        self.model = model
        self.decoder = initial or distilled(model.decoder, layers)
        self.module = DraftLayers(self.decoder).requires_grad_(True)

    def loss(self, teacher: DraftBatch, batch: Batch) -> dict[str, Tensor]:
        """KL divergence from the teacher, and how often the greedy tokens agree."""
        hidden = self.decoder(teacher.tokens, self.decoder.cross_kv(teacher.states))
        divergence, agreed = distillation(
            self.decoder.logits(hidden), teacher.probabilities, teacher.entropy, teacher.best, teacher.counts
        )
        return {"loss": divergence, "agreed": agreed}

    def save(self, folder: Path) -> None:
        """Write the layers in float16."""
        half = distilled(self.model.decoder, len(self.decoder.stack))
        DraftLayers(half).load_state_dict(self.module.state_dict())
        DraftLayers(half).half()
        save_decoder(half, folder, self.model.config)


class PiecesStudent:
    """CTC layers on the encoder's states."""

    peak_rate = 2e-3

    def __init__(self, model: Whisper, text_ids: int, initial: PieceGuesser | None = None) -> None:
        self.model = model
        config = model.config
        guesser = PieceGuesser(config.d_model, text_ids, PIECE_LAYERS, config.encoder_attention_heads)
        if initial is not None and len(initial.layers) == PIECE_LAYERS:
            guesser.load_state_dict(initial.state_dict())
        elif initial is not None:  # fresh layers are the identity: the initial output is the CTC head's
            guesser.pieces.load_state_dict(initial.pieces.state_dict())
        self.module = self.guesser = guesser.to(model.decoder.embed_tokens.weight.device)

    def loss(self, teacher: DraftBatch, batch: Batch) -> dict[str, Tensor]:
        """CTC loss of the teacher's text."""
        probabilities = self.guesser(teacher.states).float().log_softmax(-1)
        counts = batch["piece_counts"]
        frames = torch.full_like(counts, probabilities.shape[1])
        losses = ctc_loss(probabilities, batch["pieces"] + CTC_BLANK + 1, frames, counts)
        return {"loss": (losses / counts.clamp(min=MIN_PIECES)).mean()}

    def save(self, folder: Path) -> None:
        """Write the layers in float16."""
        deepcopy(self.guesser).half().save(folder, self.model.config)


HEAD_LOSS_DECAY = 0.8  # loss weight of each head relative to the previous one, without which it is unused


class HeadsStudent:
    """Medusa heads, distilled from the predictions of the model."""

    peak_rate = 2e-3

    def __init__(self, model: Whisper, places: int = PLACES, initial: WhisperHeads | None = None) -> None:
        self.model = model
        self.module = self.heads = initial or WhisperHeads.for_decoder(model.decoder, places)

    def loss(self, teacher: DraftBatch, batch: Batch) -> dict[str, Tensor]:
        """KL divergence from the model at every position ahead, and how often the greedy tokens agree."""
        decoder, length = self.model.decoder, teacher.counts.shape[1]
        row, position = teacher.draft_positions // length, teacher.draft_positions % length
        # The first position of a text has no state that a token was sampled from.
        known = teacher.counts[row, position]
        hidden = torch.where(known[:, None], teacher.hidden[row, position], self.heads.start)
        newest = decoder.embed_tokens(teacher.tokens[row, position + 1])
        states = self.heads(hidden, newest, lambda query: _attend_to_window(query, teacher, row))
        total, scalars, weight = states.new_zeros((), dtype=torch.float32), {}, 1.0
        for index in range(self.heads.places):
            target_position = (position + index + 1).clamp(max=length - 1)
            counts = (
                teacher.counts[row, target_position]
                & teacher.counts[row, position + 1]
                & (target_position == position + index + 1)
            )
            target = (
                teacher.probabilities[row, target_position],
                teacher.entropy[row, target_position],
                teacher.best[row, target_position],
            )
            divergence, agreed = distillation(decoder.logits(states[:, index]), *target, counts)
            total, weight = total + weight * divergence, weight * HEAD_LOSS_DECAY
            scalars[f"agreed_{index + 1}"] = agreed
        return {"loss": total, **scalars}

    def save(self, folder: Path) -> None:
        """Write the heads in float16."""
        half = WhisperHeads.for_decoder(self.model.decoder, self.heads.places)
        half.load_state_dict(self.heads.state_dict())
        half.half().save(folder, self.model.config)


def _attend_to_window(query: Tensor, teacher: DraftBatch, row: Tensor) -> Tensor:
    """Cross-attention of every query to its row's window in the last layer.  # [draft, position, head, head_dim]"""
    keys, values = teacher.memory.keys[-1][row], teacher.memory.values[-1][row]
    # Not a fused attention, which would compute unused gradients of keys and values.
    weights = query.transpose(1, 2).to(keys.dtype) @ keys.transpose(2, 3) * query.shape[-1] ** -0.5
    return (weights.softmax(-1).to(values.dtype) @ values).transpose(1, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = draft_parser("Train a draft for a frozen Whisper.")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the small decoder")
    parser.add_argument("--pieces", action="store_true", help="train a CTC draft instead")
    options = parser.parse_args(arguments)

    def make(model: Whisper, vocabulary: Vocabulary) -> DecoderStudent | PiecesStudent:
        if options.pieces:
            folder = options.init or options.asr / PieceGuesser.kind
            initial = PieceGuesser.load(folder, model.config) if folder.is_dir() else None
            return PiecesStudent(model, vocabulary.tokens.endoftext, initial)
        layers = min(options.layers, model.config.decoder_layers - 1)
        return DecoderStudent(
            model, layers, None if options.init is None else load_decoder(options.init, model.decoder)
        )

    train_draft(options, make)


def medusa_main(arguments: Sequence[str] | None = None) -> None:
    parser: argparse.ArgumentParser = draft_parser("Train Medusa heads on a frozen Whisper.")
    add_option(parser, "--heads", "--places", type=int, default=PLACES, help="number of tokens predicted ahead")
    options = parser.parse_args(arguments)

    def make(model: Whisper, vocabulary: Vocabulary) -> HeadsStudent:
        like = model.decoder.embed_tokens.weight
        initial = None if options.init is None else WhisperHeads.load(options.init, model.config, like.device)
        return HeadsStudent(model, options.heads, initial and initial.requires_grad_(True))

    train_draft(options, make)


if __name__ == "__main__":
    main()
