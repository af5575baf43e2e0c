"""Train the HiFT vocoder of the reply voice: `viva train vocoder --corpus DIR --out DIR --seconds 400`.

Spectral losses first, then adversarial ones too. The f0 predictor trains on measured pitch; the excitation uses
measured pitch at first and increasingly predicted pitch, as in inference.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel import MATCHA_24KHZ, VocoderMel
from vivavoce.errors import InputError
from vivavoce.models.flow.model import FlowDecoder
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.hift.model import HiFT, HiFTConfig, ResBlock
from vivavoce.models.hift.stream import HiFTStream
from vivavoce.models.moss_speech.codec import read_sizes
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.nn.process_settings import cudnn_benchmark
from vivavoce.nn.vocoder import SourceStart
from vivavoce.train import add_option
from vivavoce.train.corpus import Corpus, split_held_out
from vivavoce.train.flow_vocoder import TeacherSpeech, copy_curves, segment_starts, write_part
from vivavoce.train.flow_vocoder.flow import FLOW_FILE, teacher_vector
from vivavoce.train.flow_vocoder.flow_batches import coded_speech
from vivavoce.train.flow_vocoder.flow_mels import flow_mels, with_flow_mels
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun
from vivavoce.train.losses import (
    Discriminators,
    HarmonicDistance,
    SpectralDistance,
    discriminator_loss,
    feature_distance,
    generator_loss,
)
from vivavoce.train.reply_voice import reply_voices_of

QUIET = 0.1  # initial scale of branches beside the excitation's path
LOUDNESS = 0.2  # initial gain of the excitation


@torch.no_grad()
def untrained(config: HiFTConfig, device: torch.device | str, seed: int) -> HiFT:
    """An initialised vocoder."""
    torch.manual_seed(seed)
    hift = HiFT(config)
    assert hift.conv_post.bias is not None
    hift.f0_predictor.classifier.weight.mul_(50.0)
    hift.f0_predictor.classifier.bias.fill_(60.0)
    hift.conv_post.weight.mul_(QUIET)
    if config.plain_spectrum:
        pass_excitation_through(hift)
    else:
        hift.conv_post.bias[: len(hift.conv_post.bias) // 2] = -4.0
    hift.to(device).requires_grad_(True)
    freeze_source_mixture(hift)
    return hift


@torch.no_grad()
def freeze_source_mixture(hift: HiFT) -> None:
    """Fix equal weights of all harmonics: a trainable mixture collapses before the network uses it."""
    mixture = hift.m_source.l_linear.requires_grad_(False)
    mixture.weight.fill_(1.0)
    mixture.bias.zero_()


@torch.no_grad()
def pass_excitation_through(hift: HiFT) -> None:
    """Initialise the low bins of the excitation's spectrum to pass to the output, so that its harmonics are preserved.

    Training then adjusts the level of each. A value is carried by two opposite channels of the last stage, whose
    difference is linear through the leaky ReLU.
    """
    down, up, post = hift.source_downs[-1], hift.ups[-1], hift.conv_post
    assert isinstance(down, nn.Conv1d)
    assert isinstance(up, nn.ConvTranspose1d)
    assert down.bias is not None
    assert up.bias is not None
    assert post.bias is not None
    bins, highest = hift.config.n_fft // 2 + 1, max(0, (down.out_channels // 4 - 1) // 2)
    values = [*range(highest + 1), *range(bins + 1, bins + highest + 1)]  # real parts, and imaginary from bin 1
    used = slice(0, 2 * len(values))
    nn.init.normal_(down.weight, 0.0, 0.05)
    down.bias.zero_()
    nn.init.normal_(post.weight, 0.0, 0.01)
    post.bias.zero_()
    down.weight[used] = 0
    up.weight[:, used] *= QUIET
    up.bias[used] *= QUIET
    for index, value in enumerate(values):
        for channel, sign in ((2 * index, 1.0), (2 * index + 1, -1.0)):
            down.weight[channel, value, 0] = sign
            post.weight[value, channel, post.kernel_size[0] // 2] += LOUDNESS * sign
    mixing = list(hift.resblocks)[-len(hift.config.resblock_kernels) :]
    for block in (hift.source_resblocks[-1], *mixing):
        assert isinstance(block, ResBlock)
        for conv in block.convs2:
            assert isinstance(conv, nn.Conv1d)
            assert conv.bias is not None
            conv.weight.mul_(QUIET)
            conv.bias.zero_()


VOCODER = HiFTConfig(
    channels=256,
    overtones=24,
    f0_channels=128,
    resblock_kernels=(3, 7),
    source_resblock_kernels=(3, 3, 3),
    dilations=(1, 3),
    plain_spectrum=True,
)
EAGER_STEPS = 3  # eager steps after the loss changes, before capture
BETAS, CLIP = (0.8, 0.99), 500.0  # adversarial training: low momentum, and clipping only of outliers
EVALUATION_SECONDS = 15.0
VOCODER_FILE = "hift.safetensors"


@dataclass(frozen=True)
class VocoderPlan:
    """Hyperparameters."""

    config: HiFTConfig = VOCODER
    period_channels: tuple[int, ...] = (16, 64, 128, 256, 256)
    spectrum_channels: int = 16
    frames: int = 40
    batch: int = 16
    rate: float = 5e-4
    discriminator_rate: float = 3e-4
    average: float = 0.995
    discriminators_from: float = 0.2  # progress from which discriminators take part
    trust_from: float = 0.2  # progress from which all excitation uses predicted pitch
    other_voices: float = 0.1
    flow_mel_share: float = 0.6  # share of mels generated by the flow, if one is given
    max_steps: int = 1_000_000
    weights: Mapping[str, float] = field(
        default_factory=lambda: {
            "mel": 15.0,
            "spectrum": 15.0,
            "harmonics": 15.0,
            "f0": 0.1,
            "deceiving": 3.0,
            "features": 10.0,
        }
    )

    def with_predicted_pitch(self) -> "VocoderPlan":
        """The plan for a vocoder whose f0 predictor is trained."""
        return dataclasses.replace(self, trust_from=1e-9)

    def continued(self) -> "VocoderPlan":
        """The plan for continuing a trained vocoder."""
        return dataclasses.replace(self.with_predicted_pitch(), rate=0.5 * self.rate, discriminators_from=0.05)


TINY = VocoderPlan(
    config=dataclasses.replace(VOCODER, channels=32, f0_channels=16),
    period_channels=(4, 8, 8),
    spectrum_channels=4,
    frames=16,
    batch=4,
    max_steps=8,
)


class VocoderLosses:
    """Losses of vocoder and discriminators."""

    def __init__(
        self, hift: HiFT, discriminators: Discriminators, plan: VocoderPlan, device: torch.device | str
    ) -> None:
        self.hift, self.discriminators, self.plan = hift, discriminators, plan
        self.mel = VocoderMel(MATCHA_24KHZ).to(device)
        self.spectrum = SpectralDistance(MATCHA_24KHZ.rate).to(device)
        self.harmonics = HarmonicDistance(MATCHA_24KHZ.rate).to(device)
        self.generated = torch.zeros(plan.batch, plan.frames * MATCHA_24KHZ.hop, device=device)
        """Audio generated in the last step, for the discriminators."""

    def synthesize(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Unclipped audio and f0 of a batch's mels, as in inference.  # [batch, sample], [batch, frame]"""
        mel = batch["mel"].transpose(1, 2)
        f0 = self.hift.f0_predictor(mel)
        used = torch.where(batch["trusted"][:, None], f0.detach(), batch["f0"])
        start = SourceStart(None, torch.zeros_like(batch["seed"]), batch["seed"])
        return self.hift.decode(mel, self.hift.m_source(used, start)), f0

    def of_vocoder(self, batch: Batch) -> dict[str, Tensor]:
        """The vocoder's loss; adversarial if the batch has `adversarial`."""
        generated, f0 = self.synthesize(batch)
        recorded = batch["sound"]
        parts = {
            "mel": functional.l1_loss(self.mel(generated), self.mel(recorded)),
            "spectrum": self.spectrum(generated, recorded),
            "harmonics": self.harmonics(generated, recorded),
            "f0": functional.l1_loss(f0, batch["f0"]),
        }
        if "adversarial" in batch:
            with torch.autocast("cuda", torch.bfloat16, enabled=generated.is_cuda, cache_enabled=False):
                real_scores, generated_scores = self.discriminators.of_pair(recorded, generated)
            parts["deceiving"] = generator_loss(generated_scores)
            parts["features"] = feature_distance(real_scores, generated_scores)
        self.generated.copy_(generated.detach())
        total = torch.stack([self.plan.weights[name] * part for name, part in parts.items()]).sum()
        return {"loss": total, **parts}

    def of_discriminators(self, batch: Batch) -> dict[str, Tensor]:
        """The discriminators' loss."""
        real_scores, generated_scores = self.discriminators.of_pair(batch["sound"], self.generated)
        scores = torch.stack([one.score.float().mean() for one in generated_scores])
        return {"loss": discriminator_loss(real_scores, generated_scores), "made": scores.mean()}


class Segments:
    """Batches of short segments, mostly of the reply voice, some of others if the corpus has them."""

    def __init__(
        self, speech: TeacherSpeech, is_teacher: Tensor, plan: VocoderPlan, flow_mel: Tensor | None = None
    ) -> None:
        self.speech, self.plan, self.flow_mel = speech, plan, flow_mel
        utterances = torch.arange(len(speech))
        self.teacher_starts = segment_starts(speech, plan.frames, utterances[is_teacher])
        self.other_starts = segment_starts(speech, plan.frames, utterances[~is_teacher])

    def batch(self, generator: torch.Generator, progress: float) -> dict[str, Tensor]:
        """A batch; `progress` decides how many rows use predicted pitch."""
        rows, device = self.plan.batch, self.speech.mel.device

        def uniform() -> Tensor:
            return torch.rand(rows, generator=generator, device=device)

        begins = self.teacher_starts[(uniform() * len(self.teacher_starts)).long()]
        if len(self.other_starts):
            other_begins = self.other_starts[(uniform() * len(self.other_starts)).long()]
            begins = torch.where(uniform() < self.plan.other_voices, other_begins, begins)
        frames = begins[:, None] + torch.arange(self.plan.frames, device=device)
        mel = self.speech.mel[frames]
        if self.flow_mel is not None:
            mel = torch.where((uniform() < self.plan.flow_mel_share)[:, None, None], self.flow_mel[frames], mel)
        return {
            "mel": mel,
            "f0": self.speech.f0[frames],
            "sound": self.speech.sound(frames),
            "trusted": uniform() < progress / self.plan.trust_from,
            "seed": torch.randint(2**31, (rows,), generator=generator, device=device),
        }


@dataclass(frozen=True)
class StartingPoints:
    """Folders to start from: an earlier vocoder or only its f0 predictor; encoder and flow that generate mels."""

    vocoder: Path | None = None
    f0: Path | None = None
    speech_encoder: Path | None = None
    flow: Path | None = None
    is_new_voice: bool = False
    """Whether the earlier vocoder has another voice: then its weights are a beginning, and nothing is continued."""


@cudnn_benchmark.held(True)
def train_vocoder(
    corpus: Corpus,
    out: Path,
    plan: VocoderPlan,
    seconds: float,
    device: str,
    seed: int,
    start: StartingPoints,
) -> HiFT:
    """Train a vocoder within a time budget; weights, log and metrics are written to `out`."""
    started = time.monotonic()
    learned, held_out = split_held_out(corpus)
    segments = _segments(corpus, learned, plan, device, start)
    hift = untrained(plan.config, device, seed)
    if start.vocoder is not None:
        earlier = _load_vocoder(start.vocoder, device)
        hift.load_state_dict(earlier.state_dict())
        freeze_source_mixture(hift)
        if earlier.config.plain_spectrum == plan.config.plain_spectrum:
            plan = plan if start.is_new_voice else plan.continued()
        else:  # its last layers predict magnitude and phase
            pass_excitation_through(hift)
            plan = plan.with_predicted_pitch()
    elif start.f0 is not None:
        hift.f0_predictor.load_state_dict(_load_vocoder(start.f0, device).f0_predictor.state_dict())
        plan = plan.with_predicted_pitch()
    discriminators = Discriminators(plan.period_channels, plan.spectrum_channels).to(device)
    losses = VocoderLosses(hift, discriminators, plan, device)
    generator = Learner(
        {"hift": hift}, losses.of_vocoder, plan.rate, betas=BETAS, clip=CLIP, average=plan.average, half=False
    )
    discriminator = Learner(
        {"judges": discriminators}, losses.of_discriminators, plan.discriminator_rate, betas=BETAS, clip=CLIP
    )
    print(f"{segments.speech.seconds / 3600:.2f} h of speech after {time.monotonic() - started:.0f} s", flush=True)
    left = seconds - (time.monotonic() - started) - EVALUATION_SECONDS
    _run_training(
        out,
        plan,
        segments,
        generator,
        discriminator,
        Budget(plan.max_steps, max(1.0, left), warmup=100),
        seed,
    )
    generator.swap_average()
    hift.requires_grad_(False).eval()
    write_part(hift, {"vocoder": dataclasses.asdict(hift.config)}, out / VOCODER_FILE)
    copy_curves(out)
    reply_voices = reply_voices_of(corpus.voices)
    evaluated = [index for index in held_out.tolist() if corpus.voices[index] in reply_voices] or held_out.tolist()
    figures = measure(hift, TeacherSpeech.of(corpus, np.array(evaluated[:24]), device))
    (out / "metrics.json").write_text(json.dumps(figures, indent=2), encoding="utf8")
    print(json.dumps(figures), flush=True)
    return hift


def _load_vocoder(folder: Path, device: str) -> HiFT:
    config = read_sizes(folder / "sizes.json").vocoder
    if config is None:
        raise InputError(f"{folder} is not the folder of a vocoder: its sizes.json has no sizes of one")
    return HiFT.load(folder / VOCODER_FILE, device, config)


def _segments(corpus: Corpus, learned: np.ndarray, plan: VocoderPlan, device: str, start: StartingPoints) -> Segments:
    speech = TeacherSpeech.of(corpus, learned, device)
    reply_voices = reply_voices_of(corpus.voices)
    is_teacher = torch.tensor([corpus.voices[index] in reply_voices for index in learned.tolist()])
    if not is_teacher.any():
        raise InputError(f"the corpus has no utterance of the voice {reply_voices[0]}, on which the vocoder is trained")
    if start.speech_encoder is None or start.flow is None:
        return Segments(speech, is_teacher, plan)
    config = read_sizes(start.flow / "sizes.json").flow
    if config is None:
        raise InputError(f"{start.flow} is not the folder of a flow decoder: its sizes.json has no sizes of one")
    flow = FlowDecoder.load(start.flow / FLOW_FILE, config, device)
    encoder = SpeechEncoder.load(start.speech_encoder, device)
    codes = coded_speech(encoder, corpus, learned[is_teacher.numpy()], config.ratio, device)
    prompt = VoicePrompt(*codes.prompt(config.chunk), teacher_vector(config.speaker_dim))
    mels = flow_mels(flow, codes, prompt)
    print(f"mels of the flow are {float((mels - codes.mel).abs().mean()):.3f} from recorded ones", flush=True)
    return Segments(speech, is_teacher, plan, with_flow_mels(speech, is_teacher.nonzero()[:, 0], codes, mels))


def _run_training(
    out: Path,
    plan: VocoderPlan,
    segments: Segments,
    generator: Learner,
    discriminator: Learner,
    budget: Budget,
    seed: int,
) -> None:
    training_run = TrainingRun(
        out / "course", {"speaker": generator, "judging": discriminator}, budget, seed, log_every=200
    )
    captures, adversarial_steps, device = generator.use_graph, 0, generator.device
    for step in training_run:
        batch = segments.batch(step.generator(device), step.progress)
        is_adversarial = step.progress >= plan.discriminators_from
        if is_adversarial:
            adversarial_steps += 1
            generator.use_graph = captures and adversarial_steps > EAGER_STEPS
        adversarial = batch | {"adversarial": torch.ones((), device=device)} if is_adversarial else batch
        training_run.record(generator.step(adversarial, step.rate_share))
        if is_adversarial:
            training_run.record(discriminator.step(batch, step.rate_share), "judge_")


@torch.no_grad()
def measure(hift: HiFT, speech: TeacherSpeech) -> dict[str, float]:
    """Distance to held-out speech, offline and streamed in hops of 0.4 s."""
    analysis = VocoderMel(MATCHA_24KHZ).to(speech.mel.device)
    stream = HiFTStream(hift)
    figures: dict[str, list[float]] = {"mel_l1": [], "mel_l1_stream": [], "f0_error_hz": [], "voicing_error": []}
    for begin, end in zip(speech.starts[:-1].tolist(), speech.starts[1:].tolist(), strict=True):
        mel, f0 = speech.mel[begin:end].T[None], speech.f0[begin:end]
        state, pieces = stream.initial_state(0), []
        for first in range(0, end - begin, 20):
            sound, state = stream.step(state, mel[..., first : first + 20], final=first + 20 >= end - begin)
            pieces.append(sound)
        for name, sound in (("mel_l1", hift(mel)), ("mel_l1_stream", torch.cat(pieces, dim=1))):
            figures[name].append(float(functional.l1_loss(analysis(sound), mel)))
        predicted = hift.f0_predictor(mel)[0]
        voiced, predicted_voiced = f0 > 0, predicted > hift.m_source.voiced_above
        both = voiced & predicted_voiced
        figures["voicing_error"].append(float((voiced != predicted_voiced).float().mean()))
        if both.any():
            figures["f0_error_hz"].append(float((predicted - f0)[both].abs().mean()))
    return {name: round(float(np.mean(values)), 4) for name, values in figures.items() if values}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a HiFT vocoder of the reply voice.")
    parser.add_argument("--corpus", type=Path, required=True, help="a corpus, mostly in the reply voice")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400.0, help="total time, preparation and evaluation included")
    parser.add_argument("--init", type=Path, help="folder of an earlier run to continue")
    parser.add_argument("--new-voice", action="store_true", help="with --init: that run had another voice")
    parser.add_argument("--f0", type=Path, help="folder of an earlier run with the f0 predictor to start from")
    add_option(parser, "--speech-encoder", "--ear", type=Path, help="with --flow: train on mels of that flow, too")
    parser.add_argument("--flow", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model, to test the pipeline")
    options = parser.parse_args(arguments)
    plan = TINY if options.tiny else VocoderPlan()
    start = StartingPoints(options.init, options.f0, options.speech_encoder, options.flow, options.new_voice)
    train_vocoder(Corpus.load(options.corpus), options.out, plan, options.seconds, options.device, options.seed, start)


if __name__ == "__main__":
    main()
