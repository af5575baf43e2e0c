"""Train the codec of `mini-tts`: `viva train tts-codec --corpus DIR --out DIR --seconds 400`.

First by mel distance alone, which is fast; then against discriminators, which makes it sound like speech. With
`--init` a codec learns on to speak, while its codes stay what they are: a language model may learn them meanwhile. With
`--new-codes` too it learns on as a whole.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.nn.modules import allocating
from vivavoce.nn.process_settings import cudnn_benchmark, torch_threads
from vivavoce.train.corpus import Corpus, sentence_bounds, split_held_out
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun, plot_curves
from vivavoce.train.losses import Discriminators, SpectralDistance, deceiving_loss, feature_distance, judging_loss
from vivavoce.train.tts.batches import Crops
from vivavoce.train.tts.config import CODEC, TINY_CODEC
from vivavoce.train.tts.model import (
    CodebookMeans,
    analyse,
    calibrate,
    codes_of,
    initialise,
    quantise,
    save_half,
    sounds_of,
    synthesise,
    write_samples,
)
from vivavoce.train.voices import TEACHER

SHARES = {TEACHER.name: 0.4, "flite-slt-1.0": 0.25, "": 0.35}
SHARES_OF_LEARNING_ON = {TEACHER.name: 0.8, "flite-slt-1.0": 0.15, "": 0.05}
MEL_WEIGHT, WAVE_WEIGHT, COMMITMENT_WEIGHT, LEFTOVER_WEIGHT = 45.0, 3.0, 1.0, 2.0
DECEIVING_WEIGHT, FEATURE_WEIGHT = 3.0, 6.0


@dataclass(frozen=True)
class CodecRecipe:
    """What is trained, on how much a step, and how."""

    config: MossAudioTokenizerConfig = CODEC
    batch: int = 32
    frames: int = 32
    """Frames of a crop."""
    judged_frames: int = 16
    """Frames at the end of a crop that the discriminators see."""
    judges: tuple[tuple[int, ...], int] = ((16, 64, 128, 256, 256), 16)
    """Channels of the discriminators."""
    rate: float = 6e-4
    judge_rate: float = 3e-4
    judged_from: float = 0.25
    """How far the course is when the discriminators come in."""
    warmup: int = 300
    average: float | None = 0.998
    """Share of the averaged weights that stays after a step; they are the ones kept."""
    all_codebooks_share: float = 0.6
    """How often every codebook is used; else the first few."""
    learns_codes: bool = True

    def refining(self) -> "CodecRecipe":
        """How one learns to speak better that has its codes."""
        return replace(
            self, batch=max(1, self.batch // 2), judged_from=0.02, all_codebooks_share=1.0, learns_codes=False
        )

    def continuing(self) -> "CodecRecipe":
        """How one learns on as a whole."""
        return replace(self, batch=max(1, self.batch * 3 // 4), judged_from=0.02, all_codebooks_share=0.85)


TINY = CodecRecipe(
    TINY_CODEC,
    batch=4,
    frames=6,
    judged_frames=4,
    judges=((4, 8), 4),
    judged_from=0.5,
    warmup=5,
    average=None,
)


class CodecLosses:
    """What codec and discriminators minimise, on the same batch of crops."""

    def __init__(self, codec: MossAudioTokenizerNano, judges: Discriminators, recipe: CodecRecipe) -> None:
        device, frame = codec.device, codec.config.frame_samples
        self.codec, self.judges, self.recipe = codec, judges, recipe
        self.means = CodebookMeans(codec.config).to(device)
        self.distance = SpectralDistance(codec.config.sample_rate).to(device)
        self.judged = recipe.judged_frames * frame
        self.made = torch.zeros(recipe.batch, codec.config.channels, recipe.frames * frame, device=device)
        """The sounds of the last step, for the discriminators to learn from."""

    def of_codec(self, batch: Batch) -> dict[str, Tensor]:
        """How far the codec's sounds are from the given; if `judged` is in the batch, also by the discriminators."""
        given = batch["sounds"]
        hidden = analyse(self.codec, given)
        with torch.autocast(given.device.type, enabled=False):
            means = self.means if self.recipe.learns_codes else None
            quantised = quantise(self.codec.quantizer, hidden.float(), self._codebooks_used(given), means)
        made = synthesise(self.codec, quantised.hidden)
        with torch.autocast(given.device.type, enabled=False):
            mel = self.distance(made.flatten(0, 1), given.flatten(0, 1))
            wave = functional.l1_loss(made, given)
        rounding = COMMITMENT_WEIGHT * quantised.commitment + LEFTOVER_WEIGHT * quantised.leftover
        loss = MEL_WEIGHT * mel + WAVE_WEIGHT * wave + rounding
        scalars = {"mel": mel, "wave": wave, "commitment": quantised.commitment, "leftover": quantised.leftover}
        if "judged" in batch:
            recorded, copied = self.judges.of_pair(self._judged(given), self._judged(made))
            deceiving, features = deceiving_loss(copied), feature_distance(recorded, copied)
            loss = loss + DECEIVING_WEIGHT * deceiving + FEATURE_WEIGHT * features
            scalars |= {"deceiving": deceiving, "features": features}
        self.made.copy_(made.detach())
        return {"loss": loss, **scalars}

    def of_judges(self, batch: Batch) -> dict[str, Tensor]:
        """How well the discriminators tell given sounds from made ones."""
        return {"loss": judging_loss(*self.judges.of_pair(self._judged(batch["sounds"]), self._judged(self.made)))}

    def _judged(self, sounds: Tensor) -> Tensor:
        """What the discriminators hear of sounds.  # [sound, channel, sample] → [row, sample]"""
        return sounds[..., -self.judged :].flatten(0, 1)

    def _codebooks_used(self, given: Tensor) -> Tensor:
        most, sounds = self.codec.config.quantizer.num_quantizers, given.shape[0]
        few = torch.randint(1, most + 1, (sounds,), device=given.device)
        uses_all = torch.rand(sounds, device=given.device) < self.recipe.all_codebooks_share
        return torch.where(uses_all, most, few)


@cudnn_benchmark.held(True)
def train_codec(
    corpus: Corpus,
    out: Path,
    recipe: CodecRecipe,
    budget: Budget,
    device: torch.device,
    seed: int = 0,
    init: Path | None = None,
    new_codes: bool = False,
) -> dict[str, float | list[float]]:
    """Train, save and judge a codec, or train on the one in `init`, its codes too or its decoder alone; its figures."""
    torch.manual_seed(seed)
    with allocating(device, torch.float32):
        codec = MossAudioTokenizerNano(recipe.config)
        judges = Discriminators(*recipe.judges)
    initialise(codec, seed)
    if init is not None:
        codec.load_state_dict(MossAudioTokenizerNano.load(init, device).state_dict())
        codec.encoder.requires_grad_(new_codes)
        if not new_codes:
            codec.quantizer.requires_grad_(False)
        recipe = recipe.continuing() if new_codes else recipe.refining()
    losses = CodecLosses(codec, judges, recipe)
    if init is not None:
        losses.means.begin(codec.quantizer, recipe.batch * recipe.frames)
    generator = Learner(
        {"codec": codec, "means": losses.means}, losses.of_codec, recipe.rate, betas=(0.8, 0.99), average=recipe.average
    )
    judge = Learner({"judges": judges}, losses.of_judges, recipe.judge_rate, betas=(0.8, 0.99), clip=10.0)
    learn, held_out = split_held_out(corpus)
    length = recipe.frames * recipe.config.frame_samples
    crops = Crops(corpus, learn, length, SHARES if init is None else SHARES_OF_LEARNING_ON, device)
    if init is None:
        calibrate(codec, crops.batch(recipe.batch, torch.Generator(device).manual_seed(seed)))
    course = TrainingRun(
        out, {"generator": generator, "judge": judge}, budget, seed, log_every=max(1, budget.steps // 400)
    )
    judged_steps, judges_alone = 0, max(1, recipe.warmup // 5)  # before the codec listens to what judges say
    for step in course:
        batch = {"sounds": crops.batch(recipe.batch, step.generator(device))}
        listened = batch | {"judged": torch.ones((), device=device)}
        if judged_steps == judges_alone:
            _rehearse(generator, listened)
        course.record(generator.step(listened if judged_steps >= judges_alone else batch, step.rate_share))
        if step.progress >= recipe.judged_from:
            judged_steps += 1
            course.record(judge.step(batch, step.rate_share), "judge.")
        if recipe.learns_codes and step.number % 200 == 0:
            course.record({"codes": losses.means.perplexity().mean()})
    if generator.averaged:
        generator.swap_average()
    return finish(codec, corpus, held_out, out, {"steps": float(course.number), "seconds": course.elapsed})


def _rehearse(learner: Learner, batch: Batch) -> None:
    """Run a loss and its gradients once: Fourier transforms are planned then, which must not happen in a graph."""
    with torch.autocast(learner.device.type, torch.bfloat16, enabled=learner.half):
        loss = learner.loss(batch)["loss"]
    torch.autograd.grad(loss, learner.parameters, allow_unused=True)


def finish(
    codec: MossAudioTokenizerNano, corpus: Corpus, held_out: np.ndarray, out: Path, figures: dict[str, float]
) -> dict[str, float | list[float]]:
    """Save the codec, measure it on sentences it has not learned from, write samples."""
    codec.requires_grad_(False).eval()
    save_half(codec, out)
    codec.config.write(out)
    measured = {**figures, **measure(codec, corpus, held_out, out)}
    (out / "metrics.json").write_text(json.dumps(measured, indent=2), encoding="utf8")
    plot_curves(out)
    return measured


@torch.inference_mode()
def measure(
    codec: MossAudioTokenizerNano, corpus: Corpus, held_out: np.ndarray, out: Path, most: int = 48
) -> dict[str, float | list[float]]:
    """Mel distances by number of codebooks and by voice, and codes in use; writes a few sounds before and after."""
    starts, ends = sentence_bounds(corpus)
    distance = SpectralDistance(codec.config.sample_rate).to(codec.device)
    frame = codec.config.frame_samples
    favourites = [index for index in held_out if corpus.voices[index] in SHARES]
    others = [index for index in held_out if corpus.voices[index] not in SHARES]
    by_voice: dict[str, list[float]] = {}
    by_codebooks: dict[int, list[float]] = {}
    used: list[Tensor] = []
    samples: list[tuple[str, np.ndarray]] = []
    for index in [*favourites[: most * 2 // 3], *others[: most // 3]]:
        count = max(2, (ends[index] - starts[index]) // frame)
        sound = torch.zeros(count * frame)
        here = corpus.samples[starts[index] : ends[index]][: count * frame]
        sound[: len(here)] = torch.from_numpy(here.astype(np.float32) / 32768)
        sound = sound.to(codec.device).expand(1, codec.config.channels, -1)
        codes = codes_of(codec, sound)
        used.append(codes[0].cpu())
        for codebooks in (2, 4, codes.shape[1]):
            made = sounds_of(codec, codes[:, :codebooks])
            apart = distance(made[:, 0], sound[:, 0]).item()
            by_codebooks.setdefault(codebooks, []).append(apart)
        by_voice.setdefault(corpus.voices[index] if corpus.voices[index] in SHARES else "others", []).append(apart)
        if len(samples) < 16:
            samples += [("given: " + corpus.texts[index], sound[0, 0].cpu().numpy())]
            samples += [("made: " + corpus.texts[index], sounds_of(codec, codes)[0, 0].cpu().numpy())]
    write_samples(out, samples, codec.config.sample_rate)
    together = torch.cat(used, dim=1)
    return {
        "parameters": float(sum(each.numel() for each in codec.parameters())),
        "codes_used": [float(len(book.unique())) for book in together],
        **{f"mel_distance_{codebooks}_codebooks": float(np.mean(each)) for codebooks, each in by_codebooks.items()},
        **{f"mel_distance_{voice}": float(np.mean(each)) for voice, each in by_voice.items()},
    }


@torch_threads.held(1)  # what runs on the CPU is small, and others may be at work there
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of a corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for the codec, its figures and samples")
    parser.add_argument("--seconds", type=float, default=400.0, help="of training; measuring comes after")
    parser.add_argument("--steps", type=int, default=30_000, help="at most")
    parser.add_argument("--init", type=Path, help="folder of a codec, whose decoder is to learn on")
    parser.add_argument("--new-codes", action="store_true", help="with --init: all of it is to learn on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny codec, to try the recipe out")
    given = parser.parse_args(arguments)
    recipe = TINY if given.tiny else CodecRecipe()
    steps = min(given.steps, 12) if given.tiny else given.steps
    started = time.monotonic()
    figures = train_codec(
        Corpus.load(given.corpus),
        given.out,
        recipe,
        Budget(steps, given.seconds, recipe.warmup),
        torch.device(given.device),
        given.seed,
        given.init,
        given.new_codes,
    )
    print(json.dumps(figures | {"seconds_in_all": round(time.monotonic() - started, 1)}))


if __name__ == "__main__":
    main()
