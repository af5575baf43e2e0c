"""Train and evaluate the speech encoder: a causal Whisper encoder with one codebook at 12.5 Hz.

Every sentence is encoded clean and augmented; a probe must read the letters from both, and the augmented codes must
match the clean ones. Rounding to codes is phased in.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig
from vivavoce.train.augment import AcousticAugmentation
from vivavoce.train.corpus import Corpus
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun, plot_curves
from vivavoce.train.losses import ctc_loss
from vivavoce.train.reply_voice import reply_voices_of
from vivavoce.train.speech_encoder import Lattice, Probe, features, new_encoder
from vivavoce.train.speech_encoder.batches import EncoderBatches, EncoderBatchOptions, EncoderBatchShape, EncoderSpeech
from vivavoce.train.speech_encoder.letters import STEPS
from vivavoce.train.speech_encoder.measure import TrainedEncoder, measure

SPREAD = 0.6  # minimum standard deviation of a bounded dimension
SATURATION = 2.5  # where tanh is nearly flat
PROBE_HEAD = 64  # size of an attention head of the probe
PROBE_SHARE = 0.1  # of the time, for the probe of an encoder that has none


@dataclass(frozen=True)
class EncoderPlan:
    """Hyperparameters; `--set` changes them, and `metrics.json` lists them as `plan`."""

    levels: tuple[int, ...] = (4, 4, 4, 4, 3, 3)
    d_model: int = 256
    layers: int = 8
    heads: int = 4
    bins: int = 80
    probe_size: int = 256
    probe_slow: int = 4
    probe_fast: int = 2
    batch_seconds: float = 240.0  # seconds of audio per batch, each clean and augmented
    seconds: tuple[float, ...] = (2.56, 4.16, 6.4)  # row lengths of single sentences
    joined_seconds: float = 12.8  # row length of joined sentences
    habits: EncoderBatchOptions = dataclasses.field(default_factory=EncoderBatchOptions)
    peak_rate: float = 2e-3
    warmup: int = 300
    average: float = 0.998
    dropout: float = 0.05
    strength: float = 1.0
    rounding_from: float = 0.2  # progress until which nothing is rounded
    rounding_to: float = 0.45  # progress from which everything is rounded
    agreement: float = 1.0  # weight of the distance between augmented and clean codes
    commitment: float = 0.1  # weight of the distance from the nearest level
    spread: float = 1.0  # weight of the penalty on low variance, correlation and saturation
    reply_mel: float = 0.3  # weight of the L1 distance of the reply voice's mel read from codes
    steps: int = 100_000

    @classmethod
    def tiny(cls) -> "EncoderPlan":
        """A run of seconds on a CPU, to test the pipeline."""
        return cls(
            levels=(3, 3, 3, 3), d_model=32, layers=2, heads=2, probe_size=32, probe_slow=1, probe_fast=1,
            batch_seconds=12.0, seconds=(1.92,), joined_seconds=4.8, warmup=2, steps=16, average=0.8, peak_rate=3e-3,
        )  # fmt: skip

    @property
    def config(self) -> SpeechEncoderConfig:
        """The encoder's sizes, by their published names."""
        return SpeechEncoderConfig(
            d_model=self.d_model,
            encoder_attention_heads=self.heads,
            encoder_ffn_dim=4 * self.d_model,
            num_mel_bins=self.bins,
            quantize_position=self.layers,
            quantize_vocab_size=Lattice(self.levels).size,
        )

    @property
    def shapes(self) -> list[EncoderBatchShape]:
        single = [EncoderBatchShape(seconds, max(1, round(self.batch_seconds / seconds))) for seconds in self.seconds]
        return [
            *single,
            EncoderBatchShape(self.joined_seconds, max(1, round(self.batch_seconds / self.joined_seconds)), 3),
        ]

    def sized_as(self, config: SpeechEncoderConfig) -> "EncoderPlan":
        """The plan with the sizes of an encoder."""
        if config.quantize_vocab_size != Lattice(self.levels).size:
            raise InputError(
                f"the speech encoder has {config.quantize_vocab_size} codes, this plan {Lattice(self.levels).size}"
            )
        sized = dataclasses.replace(
            self,
            d_model=config.d_model,
            layers=config.quantize_position,
            heads=config.encoder_attention_heads,
            bins=config.num_mel_bins,
        )
        if sized.config != config:
            raise InputError(f"no plan has the sizes of the speech encoder: {config}; the nearest are {sized.config}")
        return sized

    @property
    def begun(self) -> "EncoderPlan":
        """The plan for an encoder that was trained for something else: smaller rate, rounded earlier."""
        return dataclasses.replace(self, rounding_from=0.1, rounding_to=0.3, peak_rate=0.3 * self.peak_rate)

    @property
    def continued(self) -> "EncoderPlan":
        """The plan for continuing a trained encoder: everything rounded, smaller rate."""
        return dataclasses.replace(self, rounding_from=-1.0, rounding_to=0.0, peak_rate=0.6 * self.peak_rate)

    def rounded_share(self, progress: float) -> float:
        """Share of rows that are rounded."""
        return min(1.0, max(0.0, (progress - self.rounding_from) / (self.rounding_to - self.rounding_from)))


class EncoderLoss:
    """Loss of a batch, without host synchronisation."""

    def __init__(self, plan: EncoderPlan, encoder: SpeechEncoder, probe: Probe, lattice: Lattice) -> None:
        self.plan, self.encoder, self.probe, self.lattice = plan, encoder, probe, lattice

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Scalars of a batch of `EncoderBatches` with the share of rounded rows added."""
        plan, rows = self.plan, len(batch["codes"])
        mel = torch.cat([batch["clean"], batch["augmented"]])
        codes, starts = batch["codes"].repeat(2), batch["starts"].repeat(2)
        raw = features(self.encoder, mel, starts, plan.dropout)
        bounded = self.lattice.bounded(raw)
        rounds = (torch.rand(rows, device=mel.device) < batch["rounded"]).repeat(2)[:, None, None]
        levels = torch.where(rounds, self.lattice.straight_through(bounded), bounded)
        logits, predicted_mel = self.probe(levels, codes, plan.dropout)
        symbols, counts = batch["symbols"].repeat(2, 1), batch["counts"].repeat(2)
        letters = ctc_loss(logits.float().log_softmax(-1), symbols, STEPS * codes, counts) / counts
        is_inside = (torch.arange(levels.shape[1], device=mel.device) < batch["codes"][:, None])[..., None]
        agreement = _mean((bounded[rows:] - levels[:rows].detach()).square(), is_inside)
        commitment = _mean((bounded - self.lattice.rounded(bounded)).square(), is_inside.repeat(2, 1, 1))
        with torch.autocast(mel.device.type, enabled=False):
            spread = self._spread(raw, bounded, is_inside.repeat(2, 1, 1))
        reply_mel = self._reply_mel(predicted_mel[:rows], batch, is_inside)
        # A constant code agrees best, so agreement is only required once codes carry information.
        steadiness = plan.agreement * agreement + plan.commitment * commitment
        loss = letters.mean() + plan.reply_mel * reply_mel + batch["rounded"] * steadiness + plan.spread * spread
        return {
            "loss": loss,
            "clean_letters": letters[:rows].mean(),
            "heard_letters": letters[rows:].mean(),
            "agreement": agreement,
            "commitment": commitment,
            "spread": spread,
            "reply_mel": reply_mel,
            "same_code": self._same_code(bounded, is_inside),
        }

    def _reply_mel(self, predicted_mel: Tensor, batch: Batch, is_inside: Tensor) -> Tensor:
        """L1 distance of the probe's mel from the clean one, over rows of the reply voice."""
        counted = (
            is_inside.repeat_interleave(self.encoder.config.frames_per_code, dim=1) * batch["reply"][:, None, None]
        )
        return _mean(
            functional.l1_loss(predicted_mel.float(), batch["clean"].transpose(1, 2), reduction="none"), counted
        )

    def _spread(self, raw: Tensor, bounded: Tensor, is_inside: Tensor) -> Tensor:
        """Penalty on low variance, on correlation between dimensions, and on saturation of tanh."""
        weight = is_inside.float() / is_inside.sum()
        centred = bounded - (bounded * weight).sum((0, 1))
        covariance = (centred * weight).flatten(0, 1).T.matmul(centred.flatten(0, 1))
        deviation = covariance.diagonal().clamp(min=1e-6).sqrt()
        correlation = covariance / (deviation[:, None] * deviation)
        correlated = correlation.square().mean() - 1 / len(deviation)
        too_little = (SPREAD - deviation).clamp(min=0).square().mean()
        saturated = _mean((raw[..., : self.lattice.dimensions].abs() - SATURATION).clamp(min=0).square(), is_inside)
        return too_little + 0.2 * correlated + 0.1 * saturated

    def _same_code(self, bounded: Tensor, is_inside: Tensor) -> Tensor:
        rounded = self.lattice.rounded(bounded)
        clean, augmented = rounded.chunk(2)
        return _mean((clean == augmented).all(-1, keepdim=True).float(), is_inside)


def train(
    corpus: Corpus,
    folder: Path,
    plan: EncoderPlan,
    device: torch.device,
    seconds: float,
    seed: int,
    earlier: Path | None = None,
    reply_voices: Sequence[str] = (),
    has_codes: bool = True,
) -> TrainedEncoder:
    """Train an encoder within a time budget, from scratch or an earlier one; log and state are in the folder.

    `has_codes`: whether the codes of the earlier one mean something; then a probe that is missing is trained first.
    """
    torch.manual_seed(seed)
    lattice = Lattice(plan.levels, device)
    encoder = new_encoder(plan.config, Lattice(plan.levels)).to(device)
    heads = max(1, plan.probe_size // PROBE_HEAD)
    probe = Probe(lattice.dimensions, plan.probe_size, heads, plan.probe_slow, plan.probe_fast, plan.bins).to(device)
    has_probe = earlier is None or init_from_earlier(earlier, encoder, probe)
    loss = EncoderLoss(plan, encoder, probe, lattice)
    speech = EncoderSpeech.of(corpus, reply_voices or reply_voices_of(corpus.voices), device)
    batches = EncoderBatches(speech, plan.shapes, plan.config, AcousticAugmentation(device, plan.strength), plan.habits)
    if not has_probe and has_codes:
        encoder.requires_grad_(False)
        _learn({"probe": probe}, loss, batches, plan, folder / "probe", PROBE_SHARE * seconds, seed)
        seconds *= 1 - PROBE_SHARE
        encoder.requires_grad_(True)
        encoder.embed_positions.requires_grad_(False)
        encoder.codebook.requires_grad_(False)
    _learn({"encoder": encoder, "probe": probe}, loss, batches, plan, folder, seconds, seed)
    return TrainedEncoder(encoder.eval().requires_grad_(False), probe.eval().requires_grad_(False), lattice)


def _learn(
    modules: Mapping[str, nn.Module],
    loss: EncoderLoss,
    batches: EncoderBatches,
    plan: EncoderPlan,
    folder: Path,
    seconds: float,
    seed: int,
) -> None:
    """Train modules, which get the average of their weights in the end."""
    learner = Learner(dict(modules), loss, plan.peak_rate, average=plan.average, orthogonal=True)
    budget = Budget(plan.steps, seconds, plan.warmup)
    training_run = TrainingRun(folder, {"encoder": learner}, budget, seed, log_every=4 if plan.steps < 100 else 50)
    for step in training_run:
        rounded = torch.tensor(plan.rounded_share(step.progress), device=learner.device)
        training_run.record(learner.step(batches.batch(step.seed) | {"rounded": rounded}, step.rate_share))
    learner.swap_average()


def init_from_earlier(folder: Path, encoder: SpeechEncoder, probe: Probe) -> bool:
    """Initialise from a folder written by `save`, or from that of a codec, which has no probe; whether it has one."""
    earlier = SpeechEncoder.load(folder)
    lattice = {"codebook.weight": encoder.codebook.weight.detach().clone()}  # exact, also after packed weights
    encoder.load_state_dict({**earlier.state_dict(), **lattice})
    file = folder / "probe.safetensors"
    if file.is_file():
        probe.load_state_dict(load_file(file))
    return file.is_file()


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Masked mean; 0 if nothing is counted."""
    weight = counted.float().expand_as(values)
    return (values * weight).sum() / weight.sum().clamp(min=1.0)


def save_encoder(encoder: SpeechEncoder, lattice: Lattice, folder: Path) -> None:
    """Write an encoder in the published layout of a speech codec."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dataclasses.asdict(encoder.config)
    config |= {"pooling_position": encoder.config.quantize_position, "lattice": lattice.levels}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf8")
    tensors = {f"encoder.{name}": tensor.cpu() for name, tensor in published_tensors(encoder).items()}
    save_file(tensors, folder / "model.safetensors")


def save(trained: TrainedEncoder, folder: Path) -> None:
    """Write the encoder in the published layout of a speech codec, and the probe beside it."""
    save_encoder(trained.encoder, trained.lattice, folder)
    save_file({name: tensor.cpu() for name, tensor in trained.probe.state_dict().items()}, folder / "probe.safetensors")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train a speech encoder, evaluate it on held-out data, and write everything to a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--corpus", type=Path, required=True, nargs="+", help="one corpus or several")
    parser.add_argument("--held-out", type=Path, required=True, nargs="+", help="corpora of held-out voices")
    parser.add_argument("--reply-voice", nargs="+", help="whose mel the codes keep; default: the corpus's reply voices")
    parser.add_argument("--out", type=Path, required=True)
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--init", type=Path, help="folder of an encoder or codec to continue, with everything rounded")
    start.add_argument("--begin", type=Path, help="folder of `viva train causal-whisper`, whose codes are not trained")
    parser.add_argument("--seconds", type=float, default=400.0, help="total time, evaluation included")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="override values of the plan")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    plan = EncoderPlan.tiny() if options.tiny else EncoderPlan()
    earlier = options.init or options.begin
    if earlier is not None:
        plan = plan.sized_as(SpeechEncoderConfig.from_json(earlier / "config.json"))
        plan = plan.continued if options.init else plan.begun
    changes: dict[str, Any] = {
        name: json.loads(value) for name, value in (entry.split("=", 1) for entry in options.set)
    }
    if options.steps:
        changes["steps"] = options.steps
    plan = dataclasses.replace(plan, **changes)
    corpus, held_out = (
        Corpus.joined([Corpus.load(path) for path in paths]) for paths in (options.corpus, options.held_out)
    )
    reply_voices = options.reply_voice or reply_voices_of(corpus.voices)
    loading_seconds = time.monotonic() - started
    evaluation_seconds = min(25.0, 0.1 * options.seconds)
    device = torch.device(options.device)
    trained = train(
        corpus,
        options.out / "course",
        plan,
        device,
        options.seconds - loading_seconds - evaluation_seconds,
        options.seed,
        earlier,
        reply_voices,
        has_codes=options.begin is None,
    )
    save(trained, options.out)
    metrics = measure(trained, held_out, corpus, reply_voices, max_sentences=40 if options.tiny else 600)
    metrics |= {"plan": dataclasses.asdict(plan), "seed": options.seed, "seconds": round(time.monotonic() - started, 1)}
    (options.out / "metrics.json").write_text(json.dumps(metrics, indent=2), encoding="utf8")
    print(json.dumps({name: value for name, value in metrics.items() if name != "plan"}, indent=2))
    plot_curves(options.out / "course")
    return metrics


if __name__ == "__main__":
    main()
