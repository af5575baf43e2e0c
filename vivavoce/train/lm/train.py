"""Train the miniature MOSS-Speech language model, in the three published stages.

    viva train lm --data DATA --out OUT --seconds 420

First only the text trunk; then, with the trunk frozen, the audio embedding, layers (copied from the text layers) and
head; then everything on all modes. Ends with an evaluation on held-out data.
"""

import argparse
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vivavoce.cores import usable_cores
from vivavoce.models.checkpoint import save_weights
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.train.front_desk import general_sentences
from vivavoce.train.lm.batches import FULL_MIX, TEXT_ONLY, LMBatches
from vivavoce.train.lm.corpus import HELD_OUT, TRAIN
from vivavoce.train.lm.dialogue_data import SpokenDialogues
from vivavoce.train.lm.evaluate import Evaluation
from vivavoce.train.lm.initial_model import copy_text_layers, init_fresh, init_from_earlier, take_over
from vivavoce.train.lm.loss import make_loss
from vivavoce.train.lm.recipe import TINY, LMRecipe
from vivavoce.train.lm.tool_examples import has_tools, tool_instructions
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun, plot_curves

PREFETCHED_BATCHES = 4  # of each process that makes them
CONTINUED_RATE = 0.7  # factor on the peak rate when continuing
FORMER_SETTINGS = {"exam_seconds": "evaluation_seconds"}  # still accepted by `--set`
RUN_FOLDER = "courses"  # of the stages, with logs and states


@dataclasses.dataclass(frozen=True)
class TrainingStage:
    """A training stage: trainable parts, data mix, share of the time."""

    name: str
    share: float
    mix: Mapping[str, float]
    peak_rate: float
    learns_text: bool
    learns_audio: bool

    @property
    def is_last(self) -> bool:
        return self.learns_text and self.learns_audio


STAGES = (
    TrainingStage("text", 0.08, TEXT_ONLY, 3e-3, learns_text=True, learns_audio=False),
    TrainingStage("audio", 0.12, FULL_MIX, 3e-3, learns_text=False, learns_audio=True),
    TrainingStage("both", 0.80, FULL_MIX, 2.5e-3, learns_text=True, learns_audio=True),
)


def set_trainable(model: MossSpeech, text: bool, audio: bool) -> None:
    """Unfreeze the text trunk, the audio parts, or both; freeze the rest."""
    trunk = model.model
    audio_parts: tuple[nn.Module, ...] = (trunk.audio_embed, trunk.audio_block, trunk.audio_norm, model.audio_lm_head)
    model.requires_grad_(text)
    for part in audio_parts:
        part.requires_grad_(audio)


class BatchesByStep(Dataset[Tensor]):
    """The batch of each step, which depends on the seed and the number of the step alone."""

    def __init__(self, batches: LMBatches, recipe: LMRecipe, seed: int) -> None:
        self.batches, self.recipe, self.seed = batches, recipe, seed

    def __getitem__(self, number: int) -> Tensor:
        return self.batches.batch(np.random.default_rng([self.seed, number]), self.recipe.lines, self.recipe.length)


def batches_from(first: int, by_step: BatchesByStep, device: torch.device, workers: int) -> Iterator[Batch]:
    """Batches of this step and those after it on the device; worker processes make them ahead."""
    loader = DataLoader(
        by_step,
        batch_size=None,
        sampler=range(first, first + by_step.recipe.steps[-1]),
        num_workers=workers,
        prefetch_factor=PREFETCHED_BATCHES if workers else None,
        pin_memory=device.type == "cuda",
    )
    for packed in loader:
        yield {"packed": packed.to(device, non_blocking=True)}


def train(
    recipe: LMRecipe,
    data: SpokenDialogues,
    out: Path,
    seconds: float | None,
    device: torch.device,
    seed: int = 0,
    report: Callable[[str], None] = print,
    earlier: Path | None = None,
    has_new_vocabulary: bool = False,
    has_new_codes: bool = False,
) -> tuple[MossSpeech, TextTokenizer]:
    """Train all stages, or the last from an earlier model; saves averaged weights, config and tokenizer.

    `has_new_vocabulary`: the earlier model gets a tokenizer of this data. `has_new_codes`, with it: what the earlier
    model knows of single codes is left out, since another speech encoder wrote them.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    if earlier is None or has_new_vocabulary:
        model, tokenizer = init_fresh(recipe, data, out, device, seed)
        if earlier is not None:
            take_over(model, tokenizer, earlier, has_same_codes=not has_new_codes)
    else:
        model, tokenizer = init_from_earlier(earlier, out, device)
    config = model.config
    size = sum(parameter.numel() for parameter in model.parameters())
    report(f"{size / 1e6:.2f} M parameters, {config.vocab_size} text ids, {config.audio_vocab_size} audio ids")
    other_systems = general_sentences(500, seed + 3)
    if any(map(has_tools, data.dialogues)):
        other_systems += tool_instructions(500, seed + 3)
    last = dataclasses.replace(STAGES[-1], share=1.0, peak_rate=CONTINUED_RATE * STAGES[-1].peak_rate)
    for number, stage in enumerate(STAGES) if earlier is None else [(len(STAGES) - 1, last)]:
        batches = LMBatches(config, tokenizer, data, stage.mix, other_systems)
        budget = Budget(recipe.steps[number], seconds * stage.share if seconds else None, recipe.warmup)
        _run_stage(model, stage, recipe, batches, budget, out, seed + 1000 * number, report)
        save_weights(model, out)
    return model, tokenizer


def _run_stage(
    model: MossSpeech,
    stage: TrainingStage,
    recipe: LMRecipe,
    batches: LMBatches,
    budget: Budget,
    out: Path,
    seed: int,
    report: Callable[[str], None],
) -> None:
    """Run or resume a stage."""
    if stage.learns_audio and not stage.learns_text:
        copy_text_layers(model)
    set_trainable(model, stage.learns_text, stage.learns_audio)
    learner = Learner(
        {"model": model},
        make_loss(model, recipe, recipe.dropout),
        stage.peak_rate,
        weight_decay=recipe.weight_decay,
        average=recipe.average if stage.is_last else None,
        use_graph=recipe.use_graph,
        orthogonal=True,
    )
    folder = out / RUN_FOLDER / stage.name
    training_run = TrainingRun(
        folder, {"lm": learner}, budget, seed, recipe.log_every, report=lambda line: report(f"{stage.name}: {line}")
    )
    workers = max(1, usable_cores() // 2) if learner.device.type == "cuda" else 0
    source = batches_from(training_run.number, BatchesByStep(batches, recipe, seed), learner.device, workers)
    for step in training_run:
        training_run.record(learner.step(next(source), step.rate_share))
    source.close()  # type: ignore[attr-defined]
    if stage.is_last:
        learner.swap_average()
    model.requires_grad_(False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder written by `viva train lm-data`")
    parser.add_argument("--out", type=Path, required=True, help="folder for model, metrics and curves")
    parser.add_argument("--init", type=Path, help="folder of an earlier model to start the last stage from")
    parser.add_argument("--new-vocabulary", action="store_true", help="with --init: a tokenizer of this data's texts")
    parser.add_argument("--new-codes", action="store_true", help="with --new-vocabulary: codes of another encoder")
    parser.add_argument("--seconds", type=float, help="total time, evaluation included; default: by steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="override values of the recipe")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test the pipeline")
    options = parser.parse_args(arguments)
    if options.new_codes and not options.new_vocabulary:
        parser.error("--new-codes needs --init and --new-vocabulary")
    started = time.monotonic()
    recipe = TINY if options.tiny else LMRecipe()
    changes = {
        FORMER_SETTINGS.get(name, name): json.loads(value)
        for name, value in (entry.split("=", 1) for entry in options.set)
    }
    recipe = dataclasses.replace(recipe, **changes, use_graph=not options.eager)
    data, held_out = (SpokenDialogues.load(options.data / name) for name in (TRAIN, HELD_OUT))
    left = options.seconds - recipe.evaluation_seconds - (time.monotonic() - started) if options.seconds else None
    model, tokenizer = train(
        recipe,
        data,
        options.out,
        left,
        torch.device(options.device),
        options.seed,
        _print,
        options.init,
        options.new_vocabulary,
        options.new_codes,
    )
    picture = plot_curves(options.out / RUN_FOLDER / STAGES[-1].name)
    if picture is not None:
        shutil.copy(picture, options.out / "curves.png")
    evaluate(
        model,
        tokenizer,
        held_out,
        options.out,
        {"seed": options.seed, "seconds": options.seconds, "recipe": dataclasses.asdict(recipe)},
    )


def evaluate(
    model: MossSpeech, tokenizer: TextTokenizer, data: SpokenDialogues, out: Path, run_settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Evaluate, print a summary, and write `metrics.json`."""
    started = time.monotonic()
    figures = Evaluation(model, tokenizer, data).run()
    figures |= {"run": dict(run_settings), "exam_seconds": round(time.monotonic() - started, 1)}
    (out / "metrics.json").write_text(json.dumps(figures, indent=1), encoding="utf8")
    for name, part in figures.items():
        if isinstance(part, dict):
            shown = [f"{key} {value:.3f}" for key, value in part.items() if isinstance(value, float)]
            _print(f"evaluation {name}: {'  '.join(shown)}")
    _print(f"the evaluation took {figures['exam_seconds']} s")
    return figures


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
