"""Train `mini-asr`, a small Whisper, on synthetic voices.

Log-mels are computed and augmented on the device (SpecAugment). The decoder trains on the text, the encoder also on an
auxiliary CTC loss, which lets attention align early. The averaged weights are saved. The encoder can start from the
lower layers of a speech encoder, the model from an earlier one with fewer layers. In the second half of the run
matrices are quantised as they will be packaged (quantisation-aware training).
"""

import argparse
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from vivavoce.errors import InputError
from vivavoce.models.quantised import is_matrix, rounded
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.drafts import PieceGuesser
from vivavoce.models.whisper.model import Whisper
from vivavoce.train import add_option
from vivavoce.train.asr import (
    Vocabulary,
    init_from_earlier,
    init_from_speech_encoder,
    initialise,
    load_ctc_head,
    save_whisper,
    write_json,
)
from vivavoce.train.asr.batches import (
    IGNORED,
    RATE,
    AudioAugmentation,
    Recordings,
    WindowMaker,
    WindowOptions,
    WindowShape,
)
from vivavoce.train.asr.evaluate import CONDITIONS, RecognitionScores, score_texts, timing_heads, transcribe_all
from vivavoce.train.corpus import Corpus
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun, TrainingStep, plot_curves
from vivavoce.train.losses import BLANK, ctc_loss

MIN_SECONDS = 2.0  # shortest training window
ALIGNMENT_RECORDINGS = 25  # recordings used to choose the alignment heads
MIN_PIECES = 4  # minimum divisor of a row's CTC loss, so that silence does not dominate
SECONDS_AFTER_TRAINING = 35.0  # reserved for evaluation and saving


@dataclass(frozen=True)
class ASRRecipe:
    """Hyperparameters."""

    config: WhisperConfig = WhisperConfig(  # noqa: RUF009 - frozen
        d_model=256,
        encoder_layers=5,
        encoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_layers=8,
        decoder_attention_heads=4,
        decoder_ffn_dim=256,
        max_source_positions=500,
        max_target_positions=192,
    )
    merges: int = 256
    shapes: tuple[WindowShape, ...] = (  # used in turn
        WindowShape(MIN_SECONDS, 256, 1, 32),
        WindowShape(3.2, 192, 1, 44),
        WindowShape(6.4, 96, 2, 64),
        WindowShape(10.0, 64, 4, 96),
    )
    steps: int = 20_000
    warmup: int = 300
    peak_rate: float = 1.5e-3
    weight_decay: float = 0.05
    dropout: float = 0.1
    smoothing: float = 0.1
    average: float = 0.998
    ctc_shares: tuple[float, float] | None = (0.6, 0.3)
    """Weight of the CTC loss at the start and from the middle on; None: it is not computed."""
    wrong_tokens: float = 0.06  # share of decoder inputs replaced at random, so that it relies on the audio
    augmentation: float = 1.0
    windows: WindowOptions = WindowOptions()  # noqa: RUF009 - frozen
    bits: int = 5  # of the packaged matrices
    rounded_from: float = 0.5  # progress from which matrices are quantised
    evaluated: int = 400
    log_every: int = 50

    def fine_tuning(self, initial: Path) -> "ASRRecipe":
        """The recipe for a model that recognises speech already: its sizes, gentler steps, milder augmentation."""
        config = WhisperConfig.read(initial)
        shapes = tuple(shape for shape in self.shapes if shape.seconds <= config.window_seconds)
        if not shapes:
            raise InputError(f"the windows of {initial} are shorter than {self.shapes[0].seconds} s")
        return replace(
            self,
            config=config,
            shapes=shapes,
            peak_rate=1e-4,
            weight_decay=0.0,
            dropout=0.0,
            smoothing=0.0,
            average=0.999,
            ctc_shares=None,
            augmentation=min(0.8, self.augmentation),
            windows=replace(self.windows, rates=(0.85, 1.18), variants=1),
        )


TINY = ASRRecipe(
    config=WhisperConfig(
        d_model=32,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        max_source_positions=150,
        max_target_positions=64,
    ),
    merges=32,
    shapes=(WindowShape(2.0, 4, 1, 32), WindowShape(3.0, 3, 2, 48)),
    steps=6,
    warmup=2,
    average=0.5,
    evaluated=4,
    log_every=2,
)


class Rounding:
    """Quantisation-aware training: the rounded matrices of a module, with straight-through gradients."""

    def __init__(self, module: nn.Module, bits: int, excluded: str | None = None) -> None:
        self.bits = bits
        named = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and is_matrix(parameter) and not (excluded and re.search(excluded, name))
        ]
        by_shape: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, parameter in named:
            # Matrices of one shape are rounded in one call; convolution kernels have other rows.
            by_shape[tuple(parameter.shape) if parameter.ndim == 2 else (len(by_shape),)].append((name, parameter))
        self._by_shape = list(by_shape.values())

    def __call__(self, share: Tensor) -> dict[str, Tensor]:
        """Matrices by name, interpolated by this share towards their rounded values."""
        matrices: dict[str, Tensor] = {}
        for group in self._by_shape:
            stacked = torch.cat([parameter for _, parameter in group])
            changed = stacked + share * (rounded(stacked.detach(), self.bits) - stacked.detach())
            matrices.update(zip((name for name, _ in group), changed.split(len(group[0][1])), strict=True))
        return matrices


class ASRModule(nn.Module):
    """A Whisper with an auxiliary CTC head, and its loss."""

    def __init__(self, recipe: ASRRecipe, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.recipe = recipe
        self.text_ids = vocabulary.tokens.endoftext
        self.model = Whisper(replace(recipe.config, vocab_size=vocabulary.size))
        self.pieces = nn.Linear(recipe.config.d_model, self.text_ids + 1)
        initialise(self.model)
        add_dropout(self.model, recipe.dropout)
        self.rounding = Rounding(self, recipe.bits, excluded=r"^pieces")

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The loss with weights quantised to the degree that the batch asks for; no host synchronisation."""
        losses: dict[str, Tensor] = functional_call(self, self.rounding(batch["roundness"]), (batch,))
        return losses

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The loss without quantisation of the weights."""
        states = self.model.encoder(batch["mel"])
        if self.recipe.ctc_shares is None:
            text_loss = self._text_loss(states, batch)
            return {"loss": text_loss, "text": text_loss}
        ctc_loss_mean = self._ctc(states, batch)
        text_loss = self._text_loss(states, batch)
        share = batch["ctc_share"]
        return {"loss": (1 - share) * text_loss + share * ctc_loss_mean, "text": text_loss, "ctc": ctc_loss_mean}

    def _ctc(self, states: Tensor, batch: Batch) -> Tensor:
        """CTC on pairs of encoder states: enough for word pieces, at half the cost."""
        pooled = functional.avg_pool1d(states.transpose(1, 2), 2).transpose(1, 2)
        log_probs = self.pieces(pooled).float().log_softmax(-1)
        counts = batch["piece_counts"]
        frames = torch.full_like(counts, log_probs.shape[1])
        losses = ctc_loss(log_probs, batch["pieces"] + BLANK + 1, frames, counts)
        return (losses / counts.clamp(min=MIN_PIECES)).mean()

    def _text_loss(self, states: Tensor, batch: Batch) -> Tensor:
        tokens, decoder = batch["tokens"], self.model.decoder
        wrong = (torch.rand(tokens.shape, device=tokens.device) < self.recipe.wrong_tokens) & (tokens < self.text_ids)
        tokens = torch.where(wrong, torch.randint_like(tokens, self.text_ids), tokens)
        logits = decoder.logits(decoder(tokens, decoder.cross_kv(states)))
        return functional.cross_entropy(
            logits.flatten(0, 1),
            batch["labels"].flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.recipe.smoothing,
        )


def add_dropout(model: Whisper, share: float) -> None:
    """Dropout on the output of every sublayer in training mode."""

    def drop_output(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        return functional.dropout(out, share, module.training)

    for name, module in model.named_modules():
        if name.endswith(("out_proj", "fc2")):
            module.register_forward_hook(drop_output)


class Training:
    """Trains `mini-asr` on recordings; resumes if interrupted.

    Ends at the recipe's last step, or at `until` on the monotonic clock.
    """

    def __init__(
        self,
        recordings: Recordings,
        folder: str | Path,
        recipe: ASRRecipe | None = None,
        until: float | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        report: Callable[[str], None] = print,
        encoder: SpeechEncoder | None = None,
        initial: Path | None = None,
    ) -> None:
        self.recipe, self.seed = recipe or ASRRecipe(), seed
        recipe = self.recipe
        self.vocabulary = (
            Vocabulary.learn(recordings.texts, recipe.merges, recipe.config.window_seconds)
            if initial is None
            else Vocabulary.read(initial)
        )
        torch.manual_seed(seed)
        self.module = ASRModule(recipe, self.vocabulary)
        if encoder is not None:
            init_from_speech_encoder(self.module.model, encoder)
        if initial is not None:
            copied = init_from_earlier(self.module.model, Whisper.load(initial))
            report(f"{copied} % of the weights were copied from {initial}")
            self.module.pieces.load_state_dict(load_ctc_head(initial, self.module.pieces))
        self.module.to(device)
        self.augmentation = AudioAugmentation(recipe.config.num_mel_bins, device, recipe.augmentation)
        self.maker = WindowMaker(recordings.to(device), self.vocabulary, recipe.windows, seed)
        self.learner = Learner(
            {"hearing": self.module},
            self.module.loss,
            recipe.peak_rate,
            weight_decay=recipe.weight_decay,
            average=recipe.average,
            orthogonal=True,
        )
        seconds = None if until is None else max(1.0, until - time.monotonic())
        budget = Budget(recipe.steps, seconds, recipe.warmup)
        self.training_run = TrainingRun(folder, {"asr": self.learner}, budget, seed, recipe.log_every, report=report)

    def run(self) -> None:
        """Train to the end of the budget and load the averaged weights."""
        self.module.train()
        with ThreadPoolExecutor(1) as executor:
            planned = executor.submit(self._plan, self.training_run.number)
            for step in self.training_run:
                plan, planned = planned.result(), executor.submit(self._plan, step.number + 1)
                self.training_run.record(self.learner.step(self._batch(plan, step), step.rate_share))
        self.learner.swap_average()
        self.module.eval()

    def _plan(self, number: int) -> dict[str, Tensor]:
        """The batch of a step without samples, planned in a thread during the step before."""
        return self.maker.plan(self._shape(number), (self.seed << 32) + number)

    def _shape(self, number: int) -> WindowShape:
        return self.recipe.shapes[number % len(self.recipe.shapes)]

    def _batch(self, plan: dict[str, Tensor], step: TrainingStep) -> Batch:
        batch = self.maker.on_device(plan, self._shape(step.number))
        mel = self.augmentation(batch.pop("samples"), step.seed)
        shares = {"ctc_share": self._ctc_share(step.progress), "roundness": float(self._is_rounded(step.progress))}
        set_by_step = {name: torch.full((), share, device=self.learner.device) for name, share in shares.items()}
        return {**batch, "mel": mel, **set_by_step}

    def _ctc_share(self, progress: float) -> float:
        first, last = self.recipe.ctc_shares or (0.0, 0.0)
        return first + (last - first) * min(1.0, 2 * progress)

    def _is_rounded(self, progress: float) -> bool:
        return progress >= self.recipe.rounded_from

    def save(self, folder: str | Path) -> None:
        """Save a float16 Whisper checkpoint in Hugging Face's layout, with a trained CTC head in `pieces`."""
        recordings = self.maker.recordings.of(range(min(ALIGNMENT_RECORDINGS, len(self.maker.recordings))))
        heads = timing_heads(self.module.model, self.vocabulary, recordings)
        save_whisper(self.module.model, self.vocabulary, Path(folder), heads)
        if self.recipe.ctc_shares is None:
            return
        config = self.module.model.config
        guesser = PieceGuesser(config.d_model, self.module.text_ids, layers=0, heads=config.encoder_attention_heads)
        guesser.pieces.load_state_dict(self.module.pieces.state_dict())
        guesser.half().save(Path(folder) / "pieces", config)

    def evaluate(
        self, sets: dict[str, Recordings], report: Callable[[str], None] = print
    ) -> dict[str, RecognitionScores]:
        """Word error rates on sets of recordings under every condition."""
        evaluated = {}
        for name, recordings in sets.items():
            for condition, padding, decibels in CONDITIONS:
                texts = transcribe_all(self.module.model, self.vocabulary, recordings, padding, decibels)
                evaluated[f"{name}, {condition}"] = score_texts(texts, recordings.texts)
                report(f"{name}, {condition}: {evaluated[f'{name}, {condition}'].line()}")
        return evaluated


def main(arguments: Sequence[str] | None = None) -> None:
    """`viva train asr --corpus DIR --out DIR`: train, save, evaluate."""
    started = time.monotonic()
    options = _options(arguments)
    recipe = _recipe(options)
    training_set, held_out = _recordings(options, recipe)
    sizes = ", ".join(f"{name} {len(recordings)}" for name, recordings in held_out.items())
    print(f"{len(training_set)} training recordings; held out: {sizes}", flush=True)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    until = started + options.seconds - min(SECONDS_AFTER_TRAINING, 0.1 * options.seconds)
    encoder = None if options.speech_encoder is None else SpeechEncoder.load(options.speech_encoder)
    training = Training(
        training_set, options.out / "course", recipe, until, device, options.seed, encoder=encoder, initial=options.init
    )
    count = sum(p.numel() for p in training.module.model.parameters())
    print(f"{count / 1e6:.2f} M parameters, vocabulary {training.vocabulary.size}, on {device}", flush=True)
    training.run()
    training.save(options.out)
    plot_curves(options.out / "course")
    metrics: dict[str, Any] = {
        "parameters": count,
        "steps": training.training_run.number,
        "training_seconds": round(training.training_run.elapsed, 1),
        "seed": options.seed,
        "recordings": len(training_set),
    }
    write_json(options.out / "metrics.json", metrics)
    evaluated = training.evaluate({name: recordings.to(device) for name, recordings in held_out.items()})
    metrics["judged"] = {name: scores.as_dict() for name, scores in evaluated.items()}
    write_json(options.out / "metrics.json", metrics)


def _recipe(options: argparse.Namespace) -> ASRRecipe:
    recipe = TINY if options.tiny else ASRRecipe()
    if options.fine_tune:
        if options.init is None:
            raise InputError("--fine-tune needs --init, the model to fine-tune")
        recipe = recipe.fine_tuning(options.init)
    chosen = {"peak_rate": options.rate, "bits": options.bits, "steps": options.steps}
    return replace(recipe, **{name: value for name, value in chosen.items() if value is not None})


def _recordings(options: argparse.Namespace, recipe: ASRRecipe) -> tuple[Recordings, dict[str, Recordings]]:
    """Training recordings, and held-out ones: of the same voices, and of held-out voices."""
    corpora, held_out_corpus = _corpora(options)
    all_recordings = Recordings.joined([Recordings.of_corpus(Corpus.load(corpus)) for corpus in corpora])
    order = random.Random(options.seed).sample(range(len(all_recordings)), len(all_recordings))
    held_out_indices = order[: max(1, min(recipe.evaluated, len(order) // 20))]
    held_out = {"known voices": all_recordings.of(held_out_indices)}
    if held_out_corpus is not None:
        held_out_recordings = Recordings.of_corpus(Corpus.load(held_out_corpus))
        held_out["held-out voices"] = held_out_recordings.of(range(min(recipe.evaluated, len(held_out_recordings))))
    held_out_texts = {all_recordings.texts[index] for index in held_out_indices}
    training = [index for index in order if all_recordings.texts[index] not in held_out_texts]
    max_samples = int(recipe.config.window_seconds * RATE)
    return all_recordings.of(
        [index for index in training if int(all_recordings.lengths[index]) < max_samples]
    ), held_out


def _corpora(options: argparse.Namespace) -> tuple[list[Path], Path | None]:
    """The named corpora, or `train` and `held_out` of a folder."""
    first, *others = options.corpus
    if not first.is_dir():
        return options.corpus, options.held_out
    default = first / "held_out"
    held_out = options.held_out or (default if default.with_suffix(".npz").is_file() else None)
    return [first / "train", *others], held_out


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train mini-asr.")
    parser.add_argument(
        "--corpus", type=Path, required=True, nargs="+", help="corpora, or a folder with `train` and `held_out`"
    )
    parser.add_argument("--held-out", type=Path, default=None, help="a corpus of held-out voices for evaluation")
    parser.add_argument("--out", type=Path, required=True, help="for checkpoint and metrics; a run in it is resumed")
    add_option(parser, "--speech-encoder", "--ear", type=Path, help="folder of a speech encoder to initialise from")
    parser.add_argument("--init", type=Path, default=None, help="folder of an earlier ASR model to initialise from")
    parser.add_argument(
        "--fine-tune", action="store_true", help="keep the sizes of --init, which recognises speech already"
    )
    parser.add_argument("--rate", type=float, default=None, help="peak learning rate")
    parser.add_argument("--bits", type=int, default=None, help="of the packaged matrices; they are rounded in training")
    parser.add_argument("--steps", type=int, default=None, help="end after so many steps")
    parser.add_argument("--seconds", type=float, default=400.0, help="total time, evaluation included")
    parser.add_argument("--device", default=None, help="cpu, cuda, …; default: the GPU if there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model for a few seconds, to test the pipeline")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
