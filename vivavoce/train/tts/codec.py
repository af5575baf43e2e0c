"""Train the codec of `mini-tts`: `viva train tts-codec --corpus DIR --out DIR --seconds 400`.

First by mel distance alone, which is fast; then also against discriminators. With `--init` the decoder of an earlier
codec is trained further while its codes stay, so that a language model can train on them meanwhile; with `--new-codes`,
all of it.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig, QuantizerConfig, StageConfig
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.nn.modules import allocating
from vivavoce.nn.process_settings import cudnn_benchmark, torch_threads
from vivavoce.train.corpus import Corpus, sentence_bounds, split_held_out
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun, plot_curves
from vivavoce.train.losses import Discriminators, SpectralDistance, discriminator_loss, feature_distance, generator_loss
from vivavoce.train.reply_voice import reply_voice_of
from vivavoce.train.tts import (
    CodebookMeans,
    calibrate,
    codes_of,
    decode_features,
    encode_features,
    initialise,
    quantise,
    save_half,
    sounds_of,
    write_samples,
)
from vivavoce.train.tts.batches import Crops
from vivavoce.train.voices import TEACHER

RATE = 16_000  # the rate of the training voices
SHARES = {TEACHER.name: 0.4, "flite-slt-1.0": 0.25, "": 0.35}
CONTINUED_SHARES = {TEACHER.name: 0.8, "flite-slt-1.0": 0.15, "": 0.05}
MEL_WEIGHT, WAVE_WEIGHT, COMMITMENT_WEIGHT, LEFTOVER_WEIGHT = 45.0, 3.0, 1.0, 2.0
ADVERSARIAL_WEIGHT, FEATURE_WEIGHT = 3.0, 6.0


def shares_of(corpus: Corpus, shares: Mapping[str, float]) -> dict[str, float]:
    """The shares of voices with the corpus' reply voice in place of the synthesizers' one."""
    reply_voice = reply_voice_of(corpus.voices)
    return {reply_voice if voice == TEACHER.name else voice: share for voice, share in shares.items()}


def _encoder_stage(inputs: int, layers: int, seconds: float) -> StageConfig:
    return StageConfig(inputs, 128, layers, seconds, d_model=128, num_heads=4, dim_feedforward=512)


def _decoder_stage(inputs: int, outputs: int, layers: int, seconds: float) -> StageConfig:
    return StageConfig(inputs, outputs, layers, seconds, d_model=192, num_heads=6, dim_feedforward=768)


# Stages at 200, 100 and 50 positions a second; a frame of 80 ms is 16, 8 and 4 of them.
CODEC = MossAudioTokenizerConfig(
    sample_rate=RATE,
    channels=1,
    encoder=(80, _encoder_stage(80, 1, 0.64), 2, _encoder_stage(256, 1, 1.28), 2, _encoder_stage(256, 2, 2.56), 4),
    decoder=(
        4,
        _decoder_stage(128, 384, 2, 2.56),
        2,
        _decoder_stage(192, 384, 1, 1.28),
        2,
        _decoder_stage(192, 80, 3, 0.64),
        80,
    ),
    quantizer=QuantizerConfig(512, 64, 512, num_quantizers=8, codebook_size=512, codebook_dim=8),
)


def _tiny(inputs: int, outputs: int) -> StageConfig:
    return StageConfig(inputs, outputs, 1, 0.32, d_model=16, num_heads=2, dim_feedforward=32)


TINY_CODEC = MossAudioTokenizerConfig(
    sample_rate=RATE,
    channels=1,
    encoder=(80, _tiny(80, 16), 4, _tiny(64, 16), 4),
    decoder=(4, _tiny(16, 64), 4, _tiny(16, 80), 80),
    quantizer=QuantizerConfig(64, 24, 64, num_quantizers=8, codebook_size=32, codebook_dim=4),
)


@dataclass(frozen=True)
class CodecRecipe:
    """Hyperparameters."""

    config: MossAudioTokenizerConfig = CODEC
    batch: int = 32
    frames: int = 32
    """Frames per crop."""
    discriminated_frames: int = 16
    """Frames at the end of a crop that the discriminators see."""
    discriminators: tuple[tuple[int, ...], int] = ((16, 64, 128, 256, 256), 16)
    """Channels of the discriminators."""
    rate: float = 6e-4
    discriminator_rate: float = 3e-4
    discriminators_from: float = 0.25
    """Progress from which discriminators take part."""
    warmup: int = 300
    average: float | None = 0.998
    """Decay of the weight average, which is saved."""
    all_codebooks_share: float = 0.6
    """Share of crops that use all codebooks; the others use the first few."""
    learns_codes: bool = True

    def decoder_only(self) -> "CodecRecipe":
        """The recipe for training only the decoder of an earlier codec."""
        return replace(
            self, batch=max(1, self.batch // 2), discriminators_from=0.02, all_codebooks_share=1.0, learns_codes=False
        )

    def continued(self) -> "CodecRecipe":
        """The recipe for continuing an earlier codec."""
        return replace(self, batch=max(1, self.batch * 3 // 4), discriminators_from=0.02, all_codebooks_share=0.85)


TINY = CodecRecipe(
    TINY_CODEC,
    batch=4,
    frames=6,
    discriminated_frames=4,
    discriminators=((4, 8), 4),
    discriminators_from=0.5,
    warmup=5,
    average=None,
)


class CodecLosses:
    """Losses of codec and discriminators on a batch of crops."""

    def __init__(self, codec: MossAudioTokenizerNano, discriminators: Discriminators, recipe: CodecRecipe) -> None:
        device, frame = codec.device, codec.config.frame_samples
        self.codec, self.discriminators, self.recipe = codec, discriminators, recipe
        self.means = CodebookMeans(codec.config).to(device)
        self.distance = SpectralDistance(codec.config.sample_rate).to(device)
        self.tail_samples = recipe.discriminated_frames * frame
        self.generated = torch.zeros(recipe.batch, codec.config.channels, recipe.frames * frame, device=device)
        """Audio generated in the last step, for the discriminators."""

    def of_codec(self, batch: Batch) -> dict[str, Tensor]:
        """Reconstruction loss; adversarial too if `adversarial` is in the batch."""
        recorded = batch["sounds"]
        hidden = encode_features(self.codec, recorded)
        with torch.autocast(recorded.device.type, enabled=False):
            means = self.means if self.recipe.learns_codes else None
            quantised = quantise(self.codec.quantizer, hidden.float(), self._codebooks_used(recorded), means)
        generated = decode_features(self.codec, quantised.hidden)
        with torch.autocast(recorded.device.type, enabled=False):
            mel = self.distance(generated.flatten(0, 1), recorded.flatten(0, 1))
            wave = functional.l1_loss(generated, recorded)
        rounding = COMMITMENT_WEIGHT * quantised.commitment + LEFTOVER_WEIGHT * quantised.leftover
        loss = MEL_WEIGHT * mel + WAVE_WEIGHT * wave + rounding
        scalars = {"mel": mel, "wave": wave, "commitment": quantised.commitment, "leftover": quantised.leftover}
        if "adversarial" in batch:
            real, fake = self.discriminators.of_pair(self._tail(recorded), self._tail(generated))
            adversarial, features = generator_loss(fake), feature_distance(real, fake)
            loss = loss + ADVERSARIAL_WEIGHT * adversarial + FEATURE_WEIGHT * features
            scalars |= {"deceiving": adversarial, "features": features}
        self.generated.copy_(generated.detach())
        return {"loss": loss, **scalars}

    def of_discriminators(self, batch: Batch) -> dict[str, Tensor]:
        return {
            "loss": discriminator_loss(
                *self.discriminators.of_pair(self._tail(batch["sounds"]), self._tail(self.generated))
            )
        }

    def _tail(self, sounds: Tensor) -> Tensor:
        """The end of each crop, for the discriminators.  # [sound, channel, sample] → [row, sample]"""
        return sounds[..., -self.tail_samples :].flatten(0, 1)

    def _codebooks_used(self, recorded: Tensor) -> Tensor:
        codebooks, sounds = self.codec.config.quantizer.num_quantizers, recorded.shape[0]
        few = torch.randint(1, codebooks + 1, (sounds,), device=recorded.device)
        uses_all = torch.rand(sounds, device=recorded.device) < self.recipe.all_codebooks_share
        return torch.where(uses_all, codebooks, few)


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
    """Train, save and evaluate a codec; from `init`, continue with or without its codes. Returns the metrics."""
    torch.manual_seed(seed)
    with allocating(device, torch.float32):
        codec = MossAudioTokenizerNano(recipe.config)
        discriminators = Discriminators(*recipe.discriminators)
    initialise(codec, seed)
    if init is not None:
        codec.load_state_dict(MossAudioTokenizerNano.load(init, device).state_dict())
        codec.encoder.requires_grad_(new_codes)
        if not new_codes:
            codec.quantizer.requires_grad_(False)
        recipe = recipe.continued() if new_codes else recipe.decoder_only()
    losses = CodecLosses(codec, discriminators, recipe)
    if init is not None:
        losses.means.start_from(codec.quantizer, recipe.batch * recipe.frames)
    generator = Learner(
        {"codec": codec, "means": losses.means}, losses.of_codec, recipe.rate, betas=(0.8, 0.99), average=recipe.average
    )
    discriminator = Learner(
        {"judges": discriminators}, losses.of_discriminators, recipe.discriminator_rate, betas=(0.8, 0.99), clip=10.0
    )
    learn, held_out = split_held_out(corpus)
    length = recipe.frames * recipe.config.frame_samples
    crops = Crops(corpus, learn, length, shares_of(corpus, SHARES if init is None else CONTINUED_SHARES), device)
    if init is None:
        calibrate(codec, crops.batch(recipe.batch, torch.Generator(device).manual_seed(seed)))
    training_run = TrainingRun(
        out, {"generator": generator, "judge": discriminator}, budget, seed, log_every=max(1, budget.steps // 400)
    )
    adversarial_steps, head_start = 0, max(1, recipe.warmup // 5)  # steps in which only the discriminators train
    for step in training_run:
        batch = {"sounds": crops.batch(recipe.batch, step.generator(device))}
        adversarial = batch | {"adversarial": torch.ones((), device=device)}
        if adversarial_steps == head_start:
            _warm_up(generator, adversarial)
        training_run.record(generator.step(adversarial if adversarial_steps >= head_start else batch, step.rate_share))
        if step.progress >= recipe.discriminators_from:
            adversarial_steps += 1
            training_run.record(discriminator.step(batch, step.rate_share), "judge.")
        if recipe.learns_codes and step.number % 200 == 0:
            training_run.record({"codes": losses.means.perplexity().mean()})
    if generator.averaged:
        generator.swap_average()
    return finish(codec, corpus, held_out, out, {"steps": float(training_run.number), "seconds": training_run.elapsed})


def _warm_up(learner: Learner, batch: Batch) -> None:
    """Run forward and backward once: FFT plans cannot be created during graph capture."""
    with torch.autocast(learner.device.type, torch.bfloat16, enabled=learner.half):
        loss = learner.loss(batch)["loss"]
    torch.autograd.grad(loss, learner.parameters, allow_unused=True)


def finish(
    codec: MossAudioTokenizerNano, corpus: Corpus, held_out: np.ndarray, out: Path, figures: dict[str, float]
) -> dict[str, float | list[float]]:
    """Save the codec, evaluate it on held-out sentences, write samples."""
    codec.requires_grad_(False).eval()
    save_half(codec, out)
    codec.config.write(out)
    measured = {**figures, **measure(codec, corpus, held_out, out)}
    (out / "metrics.json").write_text(json.dumps(measured, indent=2), encoding="utf8")
    plot_curves(out)
    return measured


@torch.inference_mode()
def measure(
    codec: MossAudioTokenizerNano, corpus: Corpus, held_out: np.ndarray, out: Path, max_sentences: int = 48
) -> dict[str, float | list[float]]:
    """Mel distances by number of codebooks and by voice, and codes in use; writes a few samples."""
    starts, ends = sentence_bounds(corpus)
    distance = SpectralDistance(codec.config.sample_rate).to(codec.device)
    frame = codec.config.frame_samples
    shares = shares_of(corpus, SHARES)
    trained_voices = [index for index in held_out if corpus.voices[index] in shares]
    others = [index for index in held_out if corpus.voices[index] not in shares]
    by_voice: dict[str, list[float]] = {}
    by_codebooks: dict[int, list[float]] = {}
    used: list[Tensor] = []
    samples: list[tuple[str, np.ndarray]] = []
    for index in [*trained_voices[: max_sentences * 2 // 3], *others[: max_sentences // 3]]:
        count = max(2, (ends[index] - starts[index]) // frame)
        sound = torch.zeros(count * frame)
        recorded_samples = corpus.samples[starts[index] : ends[index]][: count * frame]
        sound[: len(recorded_samples)] = torch.from_numpy(recorded_samples.astype(np.float32) / 32768)
        sound = sound.to(codec.device).expand(1, codec.config.channels, -1)
        codes = codes_of(codec, sound)
        used.append(codes[0].cpu())
        for codebooks in (2, 4, codes.shape[1]):
            generated = sounds_of(codec, codes[:, :codebooks])
            mel_distance = distance(generated[:, 0], sound[:, 0]).item()
            by_codebooks.setdefault(codebooks, []).append(mel_distance)
        by_voice.setdefault(corpus.voices[index] if corpus.voices[index] in shares else "others", []).append(
            mel_distance
        )
        if len(samples) < 16:
            samples += [("given: " + corpus.texts[index], sound[0, 0].cpu().numpy())]
            samples += [("made: " + corpus.texts[index], sounds_of(codec, codes)[0, 0].cpu().numpy())]
    write_samples(out, samples, codec.config.sample_rate)
    all_codes = torch.cat(used, dim=1)
    return {
        "parameters": float(sum(each.numel() for each in codec.parameters())),
        "codes_used": [float(len(book.unique())) for book in all_codes],
        **{f"mel_distance_{codebooks}_codebooks": float(np.mean(each)) for codebooks, each in by_codebooks.items()},
        **{f"mel_distance_{voice}": float(np.mean(each)) for voice, each in by_voice.items()},
    }


@torch_threads.held(1)  # CPU work is small, and the machine may be shared
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of a corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for codec, metrics and samples")
    parser.add_argument("--seconds", type=float, default=400.0, help="seconds of training, without evaluation")
    parser.add_argument("--steps", type=int, default=30_000, help="maximum steps")
    parser.add_argument("--init", type=Path, help="folder of a codec whose decoder is trained further")
    parser.add_argument("--new-codes", action="store_true", help="with --init: train all of it further")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny codec, to test the pipeline")
    options = parser.parse_args(arguments)
    recipe = TINY if options.tiny else CodecRecipe()
    steps = min(options.steps, 12) if options.tiny else options.steps
    started = time.monotonic()
    figures = train_codec(
        Corpus.load(options.corpus),
        options.out,
        recipe,
        Budget(steps, options.seconds, recipe.warmup),
        torch.device(options.device),
        options.seed,
        options.init,
        options.new_codes,
    )
    print(json.dumps(figures | {"seconds_in_all": round(time.monotonic() - started, 1)}))


if __name__ == "__main__":
    main()
