"""Train the miniature MOSS-Speech language model, in the three published stages.

    viva train lm --data DATA --out OUT --seconds 420

First only the text trunk; then, with the trunk frozen, the audio embedding, layers (copied from the text layers) and
head; then everything on all modes. Ends with an evaluation on held-out data.
"""

import argparse
import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from vivavoce.cores import usable_cores
from vivavoce.errors import InputError
from vivavoce.models.checkpoint import save_weights
from vivavoce.models.moss_speech.model import AUDIO, TEXT, MossSpeech, MossSpeechConfig
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.train.front_desk import general_sentences
from vivavoce.train.lm import (
    MODALITY_PAD,
    PAD,
    SPARE,
    SPEECH_START,
    TURN_END,
    CodeJitter,
    hidden_states,
    train_tokenizer,
    within_segments,
)
from vivavoce.train.lm.batches import (
    FULL_MIX,
    READ,
    REPLY_SPEECH,
    REPLY_SPEECH_CONTEXT,
    REPLY_TEXT,
    SYSTEMS,
    TEXT_ONLY,
    TRANSCRIBE,
    USER_SPEECH,
    LMBatches,
)
from vivavoce.train.lm.corpus import HELD_OUT, TRAIN
from vivavoce.train.lm.dialogue_data import SpokenDialogues
from vivavoce.train.lm.evaluate import Evaluation
from vivavoce.train.lm.tool_examples import Offers, has_tools, tool_instructions
from vivavoce.train.loop import Batch, Budget, Learner, LossFunction, TrainingRun, plot_curves

PREFETCHED_BATCHES = 4  # of each process that makes them
CONTINUED_RATE = 0.7  # factor on the peak rate when continuing
FORMER_SETTINGS = {"exam_seconds": "evaluation_seconds"}  # still accepted by `--set`
TOKENIZER_OFFERS = 12  # lists of tools that its vocabulary is learned from
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


@dataclasses.dataclass(frozen=True)
class LMRecipe:
    """Hyperparameters; `--set` changes them, and `metrics.json` lists them."""

    hidden: int = 320
    inner: int = 640
    shared_layers: int = 5
    modality_layers: int = 2
    heads: int = 5
    kv_heads: int = 1
    head_dim: int = 64
    text_entries: int = 1024
    lines: int = 16
    length: int = 1024
    dropout: float = 0.15
    heard_noise: float = 0.15
    """Maximum share of user codes replaced or masked, drawn for each line."""
    heard_stray: float = 0.06
    """Maximum probability that a dimension of a user code moves one step, per row and per voice."""
    lattice: tuple[int, ...] = (4, 4, 4, 4, 3, 3)
    """Levels of the encoder's lattice; codebooks of another size have no jitter."""
    said_noise: float = 0.03
    heard_weight: float = 0.1
    weight_decay: float = 0.05
    average: float = 0.998
    """Decay of the weight average of the last stage."""
    warmup: int = 200
    log_every: int = 100
    use_graph: bool = True
    evaluation_seconds: float = 45.0
    steps: tuple[int, int, int] = (100_000, 100_000, 1_000_000)
    """Maximum steps of each stage."""


TINY = LMRecipe(
    hidden=64, inner=128, shared_layers=1, modality_layers=1, heads=2, head_dim=32, text_entries=320, lines=4,
    length=256, average=0.8, dropout=0.0, heard_noise=0.0, said_noise=0.0, heard_stray=0.0, warmup=5, log_every=10,
    evaluation_seconds=0.0, steps=(40, 20, 120),
)  # fmt: skip


def make_config(recipe: LMRecipe, tokenizer: TextTokenizer, entries: int, code_count: int) -> MossSpeechConfig:
    """Config from recipe and tokenizer. Unlike the published one, the audio padding id is not a code."""
    ids = {token: tokenizer.id_of(token) for token in (PAD, TURN_END, SPEECH_START, MODALITY_PAD)}
    return MossSpeechConfig(
        vocab_size=-(-(entries + SPARE) // 8) * 8,
        audio_vocab_size=code_count + 8,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.inner,
        num_shared_layers=recipe.shared_layers,
        num_modality_layers=recipe.modality_layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
        pad_token_id=ids[PAD] or 0,
        eos_token_id=ids[TURN_END] or 0,
        sosp_token_id=ids[SPEECH_START] or 0,
        modality_pad_token_id=ids[MODALITY_PAD] or 0,
        eosp_token_id=code_count,
        audio_pad_token_id=code_count + 1,
    )


@torch.no_grad()
def initialise(model: MossSpeech, seed: int) -> None:
    """Initial weights: normal, outputs to the residual stream scaled by depth, norms 1."""
    generator = torch.Generator(model.text_lm_head.weight.device).manual_seed(seed)
    layers = model.config.num_shared_layers + model.config.num_modality_layers
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        parameter.normal_(0.0, 0.02 / (2 * layers) ** 0.5 if into_residual else 0.02, generator=generator)


@torch.no_grad()
def copy_text_layers(model: MossSpeech) -> None:
    """Initialise the audio layers as copies of the text layers."""
    trunk = model.model
    pairs = ((trunk.audio_block, trunk.text_block), (trunk.audio_norm, trunk.text_norm))
    for audio, text in pairs:
        for target, source in zip(audio.parameters(), text.parameters(), strict=True):
            target.copy_(source)


def set_trainable(model: MossSpeech, text: bool, audio: bool) -> None:
    """Unfreeze the text trunk, the audio parts, or both; freeze the rest."""
    trunk = model.model
    audio_parts: tuple[nn.Module, ...] = (trunk.audio_embed, trunk.audio_block, trunk.audio_norm, model.audio_lm_head)
    model.requires_grad_(text)
    for part in audio_parts:
        part.requires_grad_(audio)


def make_loss(model: MossSpeech, recipe: LMRecipe, dropout: float) -> LossFunction:
    """Next-row loss of a packed batch: reply text, reply speech, and user speech with a small weight."""

    is_lattice = math.prod(recipe.lattice) == model.config.eosp_token_id
    jitter = CodeJitter(recipe.lattice, model.text_lm_head.weight.device) if is_lattice else None

    def loss(batch: Batch) -> dict[str, Tensor]:
        packed = batch["packed"].long()
        rows, positions, segments, kinds = packed[..., :2], packed[..., 2], packed[..., 3], packed[..., 4]
        inputs = rows if jitter is None else jittered(jitter, rows, kinds, recipe.heard_stray)
        inputs = corrupted_codes(model.config, inputs, kinds, recipe.heard_noise, recipe.said_noise)
        text, audio = hidden_states(model, inputs, positions, within_segments(segments), dropout)
        following, kind = rows[:, 1:], kinds[:, 1:]
        written = _cross_entropy(model.text_lm_head(text[:, :-1]), following[..., TEXT])
        spoken, is_right = _audio_cross_entropy(model.audio_lm_head(audio[:, :-1]), following[..., AUDIO])
        parts = {
            "text": _mean(written, kind == REPLY_TEXT),
            "speech": _mean(spoken, kind == REPLY_SPEECH),
            "heard": _mean(spoken, kind == USER_SPEECH),
        }
        total = parts["text"] + parts["speech"] + recipe.heard_weight * parts["heard"]
        return {"loss": total, **parts, "speech_right": _mean(is_right.float(), kind == REPLY_SPEECH)}

    return loss


def jittered(jitter: CodeJitter, rows: Tensor, kinds: Tensor, max_probability: float) -> Tensor:
    """Rows with jitter on user codes.  # [line, row, 2]"""
    if not max_probability:
        return rows
    audio, text = rows[..., AUDIO], rows[..., TEXT]
    near = jitter(audio.clamp(max=jitter.size - 1), max_probability * torch.rand(rows.shape[0], 1, device=rows.device))
    return torch.stack([text, torch.where((kinds == USER_SPEECH) & (audio < jitter.size), near, audio)], dim=-1)


def corrupted_codes(
    config: MossSpeechConfig, rows: Tensor, kinds: Tensor, user_share: float, reply_share: float
) -> Tensor:
    """Rows with some codes masked or replaced.  # [line, row, 2]"""
    if not user_share and not reply_share:
        return rows
    audio, text = rows[..., AUDIO], rows[..., TEXT]
    share = torch.rand(rows.shape[0], 1, device=rows.device)
    is_reply = (kinds == REPLY_SPEECH) | (kinds == REPLY_SPEECH_CONTEXT)
    rate = torch.where(kinds == USER_SPEECH, user_share, torch.where(is_reply, reply_share, 0.0)) * share
    rate = rate.masked_fill(audio == config.eosp_token_id, 0.0)
    drawn = torch.rand(audio.shape, device=rows.device)
    others = torch.randint(0, config.eosp_token_id, audio.shape, device=rows.device)
    replacement = torch.where(drawn < rate * 0.5, config.audio_pad_token_id, others)
    return torch.stack([text, torch.where(drawn < rate, replacement, audio)], dim=-1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def _audio_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return _cross_entropy(logits, targets), logits.detach().argmax(-1) == targets


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    return (values * chosen).sum() / chosen.sum().clamp(min=1)


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
    other_systems = [*general_sentences(500, seed + 3), *tool_instructions(500, seed + 3)]
    last = dataclasses.replace(STAGES[-1], share=1.0, peak_rate=CONTINUED_RATE * STAGES[-1].peak_rate)
    for number, stage in enumerate(STAGES) if earlier is None else [(len(STAGES) - 1, last)]:
        batches = LMBatches(config, tokenizer, data, stage.mix, other_systems)
        budget = Budget(recipe.steps[number], seconds * stage.share if seconds else None, recipe.warmup)
        _run_stage(model, stage, recipe, batches, budget, out, seed + 1000 * number, report)
        save_weights(model, out)
    return model, tokenizer


def init_fresh(
    recipe: LMRecipe, data: SpokenDialogues, out: Path, device: torch.device, seed: int
) -> tuple[MossSpeech, TextTokenizer]:
    """Initial weights, and a tokenizer trained on the data's texts."""
    frames = [f"{role}\n" for role in ("system", "user", "assistant")]
    frames += [TRANSCRIBE, READ, *(text for texts in SYSTEMS.values() for text in texts)]
    if any(map(has_tools, data.dialogues)):
        frames += Offers(count=TOKENIZER_OFFERS).texts
    backend = train_tokenizer([*data.written, *frames * 200], recipe.text_entries)
    backend.save(str(out / "tokenizer.json"))
    tokenizer = TextTokenizer(backend)
    config = make_config(recipe, tokenizer, backend.get_vocab_size(), data.code_count)
    config.write(out)
    model = MossSpeech.random(config, device=device, seed=seed)
    initialise(model, seed)
    return model, tokenizer


@torch.no_grad()
def take_over(model: MossSpeech, tokenizer: TextTokenizer, folder: Path, has_same_codes: bool = True) -> None:
    """Take the weights of an earlier model with another tokenizer, and perhaps with codes of another encoder.

    A text entry gets the mean of those that the earlier tokenizer writes it with.
    """
    earlier, former = MossSpeech.load(folder, device="cpu", dtype=torch.float32), TextTokenizer.load(folder)
    tables = {"model.embed_tokens.weight", "text_lm_head.weight"}
    weights, mine = earlier.state_dict(), model.state_dict()
    of_codes = set() if has_same_codes else {"model.audio_embed.weight", "audio_lm_head.weight"}
    taken = weights.keys() - tables - of_codes
    if any(weights[name].shape != mine[name].shape for name in taken):
        raise InputError(f"the language model in {folder} has other sizes than this recipe")
    for name in taken:
        mine[name].copy_(weights[name])
    for entry in range(model.config.vocab_size):
        ids = former.encode(tokenizer.bytes_of(entry).decode(errors="ignore"))
        for name in tables if ids else ():
            mine[name][entry] = weights[name][ids].to(mine[name]).mean(0)


def init_from_earlier(folder: Path, out: Path, device: torch.device) -> tuple[MossSpeech, TextTokenizer]:
    """Load an earlier model, whose speech encoder has the same or a continued codebook."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy2(folder / name, out / name)
    return MossSpeech.load(folder, device=device, dtype=torch.float32), TextTokenizer.load(folder)


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
