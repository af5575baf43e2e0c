"""`mini-asr`: a small Whisper taught to write what many synthetic voices say.

The window's log-mel is made on the device; parts of it are hidden (SpecAugment). The decoder learns the text, the
encoder beside it by CTC, which shows attention early where the words are. What is kept are the averaged weights. The
encoder may begin as the lower layers of an ear, which has the same shapes and has already met many voices; all of it as
an earlier recogniser, even with more layers. From half of the course on, matrices are rounded as they will be shipped.
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

from vivavoce.models.quantised import is_matrix, rounded
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.models.whisper.alignment import PieceGuesser
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.model import Whisper
from vivavoce.train.asr.batches import IGNORED, RATE, AudioAugmentation, Recordings, WindowMaker, WindowShape
from vivavoce.train.asr.checkpoint import (
    Vocabulary,
    begin_as,
    begin_as_ear,
    initialise,
    known_pieces,
    save_whisper,
    write_json,
)
from vivavoce.train.asr.evaluate import WAYS_TO_JUDGE, RecognitionScores, judge_texts, timing_heads, transcribe_all
from vivavoce.train.corpus import Corpus
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun, TrainingStep, plot_curves
from vivavoce.train.losses import BLANK, ctc_loss

SHORTEST_WINDOW = 2.0  # seconds it is taught to hear at once
TIMED_BY = 25  # recordings by which the heads are chosen that tell when words were said
FEWEST_PIECES = 4  # by which a row's CTC is divided: silence would else outweigh all speech
SECONDS_AFTER_TRAINING = 35.0  # for judging and writing, out of the seconds a caller grants


@dataclass(frozen=True)
class ASRRecipe:
    """Everything about a course that one may want to change."""

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
    shapes: tuple[WindowShape, ...] = (  # taken in turn
        WindowShape(SHORTEST_WINDOW, 256, 1, 32),
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
    ctc_shares: tuple[float, float] = (0.6, 0.3)  # of the loss, at the beginning and from half of the course on
    wrong_tokens: float = 0.06  # share of the decoder's inputs that are replaced, so that it listens
    augmentation: float = 1.0
    bits: int = 5  # of the matrices that are shipped
    rounded_from: float = 0.5  # of the course
    judged: int = 400
    log_every: int = 50


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
    judged=4,
    log_every=2,
)


class Rounding:
    """The matrices of a module, rounded; what learns gets the gradient as if nothing had been."""

    def __init__(self, module: nn.Module, bits: int, wide: str | None = None) -> None:
        self.bits = bits
        named = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and is_matrix(parameter) and not (wide and re.search(wide, name))
        ]
        alike: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, parameter in named:
            # Matrices of one shape are rounded together; kernels of a convolution have rows of another kind.
            alike[tuple(parameter.shape) if parameter.ndim == 2 else (len(alike),)].append((name, parameter))
        self._alike = list(alike.values())

    def __call__(self, share: Tensor) -> dict[str, Tensor]:
        """By name, the matrices moved by this share of the way to what they are rounded to."""
        moved: dict[str, Tensor] = {}
        for group in self._alike:
            whole = torch.cat([parameter for _, parameter in group])
            changed = whole + share * (rounded(whole.detach(), self.bits) - whole.detach())
            moved.update(zip((name for name, _ in group), changed.split(len(group[0][1])), strict=True))
        return moved


class RecogniserInput(nn.Module):
    """A Whisper with its auxiliary head, and the loss of a batch."""

    def __init__(self, recipe: ASRRecipe, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.recipe = recipe
        self.text_ids = vocabulary.tokens.endoftext
        self.model = Whisper(replace(recipe.config, vocab_size=vocabulary.size))
        self.pieces = nn.Linear(recipe.config.d_model, self.text_ids + 1)
        initialise(self.model)
        add_dropout(self.model, recipe.dropout)
        self.rounding = Rounding(self, recipe.bits, wide=r"^pieces")

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """What is minimised, and its parts, by weights as round as the batch says; nothing waits for the device."""
        found: dict[str, Tensor] = functional_call(self, self.rounding(batch["roundness"]), (batch,))
        return found

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The loss by the weights as they are."""
        states = self.model.encoder(batch["mel"])
        spelt = self._ctc(states, batch)
        written = self._written(states, batch)
        share = batch["ctc_share"]
        return {"loss": (1 - share) * written + share * spelt, "text": written, "ctc": spelt}

    def _ctc(self, states: Tensor, batch: Batch) -> Tensor:
        """Pairs of encoder states are enough for pieces of words, at half the cost."""
        pooled = functional.avg_pool1d(states.transpose(1, 2), 2).transpose(1, 2)
        chances = self.pieces(pooled).float().log_softmax(-1)
        counts = batch["piece_counts"]
        frames = torch.full_like(counts, chances.shape[1])
        losses = ctc_loss(chances, batch["pieces"] + BLANK + 1, frames, counts)
        return (losses / counts.clamp(min=FEWEST_PIECES)).mean()

    def _written(self, states: Tensor, batch: Batch) -> Tensor:
        tokens, decoder = batch["tokens"], self.model.decoder
        wrong = (torch.rand(tokens.shape, device=tokens.device) < self.recipe.wrong_tokens) & (tokens < self.text_ids)
        tokens = torch.where(wrong, torch.randint_like(tokens, self.text_ids), tokens)
        logits = decoder.logits(decoder(tokens, decoder.remember(states)))
        return functional.cross_entropy(
            logits.flatten(0, 1),
            batch["labels"].flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.recipe.smoothing,
        )


def add_dropout(model: Whisper, share: float) -> None:
    """While the model trains, drop a share of what each sublayer adds to the residual stream."""

    def dropped(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        return functional.dropout(out, share, module.training)

    for name, module in model.named_modules():
        if name.endswith(("out_proj", "fc2")):
            module.register_forward_hook(dropped)


class Training:
    """A course of `mini-asr` on recordings, from fresh weights or from where it was stopped.

    It is over at the recipe's last step, or at the moment `until` of the monotonic clock.
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
        ear: SpeechEncoder | None = None,
        earlier: Path | None = None,
    ) -> None:
        self.recipe, self.seed = recipe or ASRRecipe(), seed
        recipe = self.recipe
        self.vocabulary = (
            Vocabulary.learn(recordings.texts, recipe.merges, recipe.config.window_seconds)
            if earlier is None
            else Vocabulary.read(earlier)
        )
        torch.manual_seed(seed)
        self.hearing = RecogniserInput(recipe, self.vocabulary)
        if ear is not None:
            begin_as_ear(self.hearing.model, ear)
        if earlier is not None:
            report(f"{begin_as(self.hearing.model, Whisper.load(earlier))} % of the weights are those of {earlier}")
            self.hearing.pieces.load_state_dict(known_pieces(earlier, self.hearing.pieces))
        self.hearing.to(device)
        self.listening = AudioAugmentation(recipe.config.num_mel_bins, device, recipe.augmentation)
        self.maker = WindowMaker(recordings.to(device), self.vocabulary, seed=seed)
        self.learner = Learner(
            {"hearing": self.hearing},
            self.hearing.loss,
            recipe.peak_rate,
            weight_decay=recipe.weight_decay,
            average=recipe.average,
            orthogonal=True,
        )
        seconds = None if until is None else max(1.0, until - time.monotonic())
        budget = Budget(recipe.steps, seconds, recipe.warmup)
        self.course = TrainingRun(folder, {"asr": self.learner}, budget, seed, recipe.log_every, report=report)

    def run(self) -> None:
        """Learn to the end of the budget; the averaged weights are in place afterwards."""
        self.hearing.train()
        with ThreadPoolExecutor(1) as beside:
            planned = beside.submit(self._plan, self.course.number)
            for step in self.course:
                plan, planned = planned.result(), beside.submit(self._plan, step.number + 1)
                self.course.record(self.learner.step(self._batch(plan, step), step.rate_share))
        self.learner.swap_average()
        self.hearing.eval()

    def _plan(self, number: int) -> dict[str, Tensor]:
        """The batch of a step but for its samples: made beside the step before it."""
        return self.maker.plan(self._shape(number), (self.seed << 32) + number)

    def _shape(self, number: int) -> WindowShape:
        return self.recipe.shapes[number % len(self.recipe.shapes)]

    def _batch(self, plan: dict[str, Tensor], step: TrainingStep) -> Batch:
        batch = self.maker.on_device(plan, self._shape(step.number))
        mel = self.listening(batch.pop("samples"), step.seed)
        shares = {"ctc_share": self._ctc_share(step.progress), "roundness": float(self._is_rounded(step.progress))}
        set_by_step = {name: torch.full((), share, device=self.learner.device) for name, share in shares.items()}
        return {**batch, "mel": mel, **set_by_step}

    def _ctc_share(self, progress: float) -> float:
        first, last = self.recipe.ctc_shares
        return first + (last - first) * min(1.0, 2 * progress)

    def _is_rounded(self, progress: float) -> bool:
        return progress >= self.recipe.rounded_from

    def save(self, folder: str | Path) -> None:
        """The model as a Whisper checkpoint in Hugging Face's layout, in half precision; `pieces` has its CTC head."""
        spoken = self.maker.recordings.of(range(min(TIMED_BY, len(self.maker.recordings))))
        heads = timing_heads(self.hearing.model, self.vocabulary, spoken)
        save_whisper(self.hearing.model, self.vocabulary, Path(folder), heads)
        config = self.hearing.model.config
        guesser = PieceGuesser(config.d_model, self.hearing.text_ids, layers=0, heads=config.encoder_attention_heads)
        guesser.pieces.load_state_dict(self.hearing.pieces.state_dict())
        guesser.half().save(Path(folder) / "pieces", config)

    def judge(self, sets: dict[str, Recordings], report: Callable[[str], None] = print) -> dict[str, RecognitionScores]:
        """Word error rates on sets of recordings: in whole windows, in trimmed ones, and over noise."""
        judged = {}
        for name, recordings in sets.items():
            for way, padding, decibels in WAYS_TO_JUDGE:
                texts = transcribe_all(self.hearing.model, self.vocabulary, recordings, padding, decibels)
                judged[f"{name}, {way}"] = judge_texts(texts, recordings.texts)
                report(f"{name}, {way}: {judged[f'{name}, {way}'].line()}")
        return judged


def main(arguments: Sequence[str] | None = None) -> None:
    """`viva train asr --corpus DIR --out DIR`: train, save, judge."""
    began = time.monotonic()
    options = _options(arguments)
    recipe = TINY if options.tiny else ASRRecipe()
    learning, held_out = _recordings(options, recipe)
    sizes = ", ".join(f"{name} {len(recordings)}" for name, recordings in held_out.items())
    print(f"{len(learning)} recordings to learn from; held out: {sizes}", flush=True)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    until = began + options.seconds - min(SECONDS_AFTER_TRAINING, 0.1 * options.seconds)
    ear = None if options.ear is None else SpeechEncoder.load(options.ear)
    training = Training(
        learning, options.out / "course", recipe, until, device, options.seed, ear=ear, earlier=options.init
    )
    count = sum(p.numel() for p in training.hearing.model.parameters())
    print(f"{count / 1e6:.2f} M parameters, vocabulary {training.vocabulary.size}, on {device}", flush=True)
    training.run()
    training.save(options.out)
    plot_curves(options.out / "course")
    metrics: dict[str, Any] = {
        "parameters": count,
        "steps": training.course.number,
        "training_seconds": round(training.course.elapsed, 1),
        "seed": options.seed,
        "recordings": len(learning),
    }
    write_json(options.out / "metrics.json", metrics)
    judged = training.judge({name: recordings.to(device) for name, recordings in held_out.items()})
    metrics["judged"] = {name: judgement.as_dict() for name, judgement in judged.items()}
    write_json(options.out / "metrics.json", metrics)


def _recordings(options: argparse.Namespace, recipe: ASRRecipe) -> tuple[Recordings, dict[str, Recordings]]:
    """What is learnt from, and what is judged by: other voices with other words, and the same voices again."""
    corpus, strange = _corpora(options)
    everything = Recordings.of_corpus(Corpus.load(corpus))
    order = random.Random(options.seed).sample(range(len(everything)), len(everything))
    kept = order[: max(1, min(recipe.judged, len(order) // 20))]
    held_out = {"known voices": everything.of(kept)}
    if strange is not None:
        strangers = Recordings.of_corpus(Corpus.load(strange))
        held_out["held-out voices"] = strangers.of(range(min(recipe.judged, len(strangers))))
    kept_texts = {everything.texts[index] for index in kept}
    learning = [index for index in order if everything.texts[index] not in kept_texts]
    longest = int(recipe.config.window_seconds * RATE)
    return everything.of([index for index in learning if int(everything.lengths[index]) < longest]), held_out


def _corpora(options: argparse.Namespace) -> tuple[Path, Path | None]:
    """The corpora that are named, or those of a folder: `train`, and `held_out` beside it."""
    if not options.corpus.is_dir():
        return options.corpus, options.held_out
    beside = options.corpus / "held_out"
    return options.corpus / "train", options.held_out or (beside if beside.with_suffix(".npz").is_file() else None)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train mini-asr.")
    parser.add_argument("--corpus", type=Path, required=True, help="a corpus, or a folder with `train` and `held_out`")
    parser.add_argument("--held-out", type=Path, default=None, help="a corpus of voices and words to be judged by")
    parser.add_argument("--out", type=Path, required=True, help="for checkpoint and metrics; a course in it goes on")
    parser.add_argument("--ear", type=Path, default=None, help="folder of a trained ear, for the encoder to begin with")
    parser.add_argument("--init", type=Path, default=None, help="folder of an earlier recogniser, to begin with")
    parser.add_argument("--seconds", type=float, default=400.0, help="for everything, judging included")
    parser.add_argument("--device", default=None, help="cpu, cuda, …; the GPU where there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a model that learns nothing in a few seconds: a rehearsal")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
