"""HiFT for the reply voice: `viva train vocoder --corpus DIR --out DIR --seconds 400`.

First the spectrum alone is learned, then judges of sound join. The f0 predictor learns from measured pitch; the
excitation is made of measured pitch at first and of predicted pitch, as in use, more and more.
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
from vivavoce.train.corpus import Corpus, split_held_out
from vivavoce.train.features import encode_corpus
from vivavoce.train.flow_vocoder.batches import (
    CodedSpeech,
    TeacherSpeech,
    flow_mels,
    keep_curves,
    segment_starts,
    with_flow_mels,
    write_part,
)
from vivavoce.train.flow_vocoder.flow import FLOW_FILE, teacher_vector
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun
from vivavoce.train.losses import (
    Discriminators,
    HarmonicDistance,
    SpectralDistance,
    deceiving_loss,
    feature_distance,
    judging_loss,
)
from vivavoce.train.voices import TEACHER

QUIET = 0.1  # share of a branch beside the excitation's way that is left
LOUDNESS = 0.2  # of the excitation, before anything is learned


@torch.no_grad()
def untaught(config: HiFTConfig, device: torch.device | str, seed: int) -> HiFT:
    """A vocoder ready to learn."""
    torch.manual_seed(seed)
    hift = HiFT(config)
    assert hift.conv_post.bias is not None
    hift.f0_predictor.classifier.weight.mul_(50.0)
    hift.f0_predictor.classifier.bias.fill_(60.0)
    hift.conv_post.weight.mul_(QUIET)
    if config.plain_spectrum:
        hand_excitation_through(hift)
    else:
        hift.conv_post.bias[: len(hift.conv_post.bias) // 2] = -4.0
    hift.to(device).requires_grad_(True)
    keep_excited(hift)
    return hift


@torch.no_grad()
def keep_excited(hift: HiFT) -> None:
    """Mix all harmonics alike, for good: a mixture that learns dies before the network has learned to use it."""
    mixture = hift.m_source.l_linear.requires_grad_(False)
    mixture.weight.fill_(1.0)
    mixture.bias.zero_()


@torch.no_grad()
def hand_excitation_through(hift: HiFT) -> None:
    """Let the low bins of the excitation's spectrum pass to the sound's, so that its harmonics stay what they are.

    What is left to learn is how loud which of them is. Two channels of the last stage carry a value, the one the
    other's opposite, so that it is straight behind a rectifier that bends each.
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
    for place, value in enumerate(values):
        for channel, sign in ((2 * place, 1.0), (2 * place + 1, -1.0)):
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
EAGER_STEPS = 3  # of a step that has changed, before it is captured anew
BETAS, CLIP = (0.8, 0.99), 500.0  # for adversaries: a short memory, and a clip for accidents alone
SECONDS_TO_JUDGE = 15.0
VOCODER_FILE = "hift.safetensors"


@dataclass(frozen=True)
class VocoderPlan:
    """How the vocoder learns."""

    config: HiFTConfig = VOCODER
    period_channels: tuple[int, ...] = (16, 64, 128, 256, 256)
    spectrum_channels: int = 16
    frames: int = 40
    batch: int = 16
    rate: float = 5e-4
    judge_rate: float = 3e-4
    average: float = 0.995
    judges_from: float = 0.2  # share of the course
    trust_from: float = 0.2  # from here on all excitation is made of predicted pitch
    other_voices: float = 0.1
    made_mels: float = 0.6  # share of mels that the flow made, where there is a flow
    most_steps: int = 1_000_000
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

    def trusting(self) -> "VocoderPlan":
        """How one learns that can already tell pitch."""
        return dataclasses.replace(self, trust_from=1e-9)

    def refining(self) -> "VocoderPlan":
        """How one learns on that can already speak."""
        return dataclasses.replace(self.trusting(), rate=0.5 * self.rate, judges_from=0.05)


TINY = VocoderPlan(
    config=dataclasses.replace(VOCODER, channels=32, f0_channels=16),
    period_channels=(4, 8, 8),
    spectrum_channels=4,
    frames=16,
    batch=4,
    most_steps=8,
)


class VocoderBatch:
    """What vocoder and judges are taught with one batch."""

    def __init__(self, hift: HiFT, judges: Discriminators, plan: VocoderPlan, device: torch.device | str) -> None:
        self.hift, self.judges, self.plan = hift, judges, plan
        self.mel = VocoderMel(MATCHA_24KHZ).to(device)
        self.spectrum = SpectralDistance(MATCHA_24KHZ.rate).to(device)
        self.harmonics = HarmonicDistance(MATCHA_24KHZ.rate).to(device)
        self.made = torch.zeros(plan.batch, plan.frames * MATCHA_24KHZ.hop, device=device)
        """The sounds of the last step, for the judges to learn from."""

    def spoken(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sound of a batch's mels as in use, not limited, and its f0.  # [batch, sample], [batch, frame]"""
        mel = batch["mel"].transpose(1, 2)
        f0 = self.hift.f0_predictor(mel)
        used = torch.where(batch["trusted"][:, None], f0.detach(), batch["f0"])
        start = SourceStart(None, torch.zeros_like(batch["seed"]), batch["seed"])
        return self.hift.decode(mel, self.hift.m_source(used, start)), f0

    def speaking(self, batch: Batch) -> dict[str, Tensor]:
        """What the vocoder minimises; the judges have part in it where the batch says so."""
        made, f0 = self.spoken(batch)
        given = batch["sound"]
        parts = {
            "mel": functional.l1_loss(self.mel(made), self.mel(given)),
            "spectrum": self.spectrum(made, given),
            "harmonics": self.harmonics(made, given),
            "f0": functional.l1_loss(f0, batch["f0"]),
        }
        if "judged" in batch:
            with torch.autocast("cuda", torch.bfloat16, enabled=made.is_cuda, cache_enabled=False):
                recorded, deceived = self.judges.of_pair(given, made)
            parts["deceiving"] = deceiving_loss(deceived)
            parts["features"] = feature_distance(recorded, deceived)
        self.made.copy_(made.detach())
        total = torch.stack([self.plan.weights[name] * part for name, part in parts.items()]).sum()
        return {"loss": total, **parts}

    def judging(self, batch: Batch) -> dict[str, Tensor]:
        """What the judges minimise."""
        recorded, deceived = self.judges.of_pair(batch["sound"], self.made)
        scores = torch.stack([one.score.float().mean() for one in deceived])
        return {"loss": judging_loss(recorded, deceived), "made": scores.mean()}


class Segments:
    """Batches of short segments; most of the reply voice, some of others where the corpus has them."""

    def __init__(
        self, speech: TeacherSpeech, is_teacher: Tensor, plan: VocoderPlan, made: Tensor | None = None
    ) -> None:
        self.speech, self.plan, self.made = speech, plan, made
        utterances = torch.arange(len(speech))
        self.own = segment_starts(speech, plan.frames, utterances[is_teacher])
        self.others = segment_starts(speech, plan.frames, utterances[~is_teacher])

    def batch(self, generator: torch.Generator, progress: float) -> dict[str, Tensor]:
        """A batch of this moment of the course."""
        rows, device = self.plan.batch, self.speech.mel.device

        def chance() -> Tensor:
            return torch.rand(rows, generator=generator, device=device)

        begins = self.own[(chance() * len(self.own)).long()]
        if len(self.others):
            foreign = self.others[(chance() * len(self.others)).long()]
            begins = torch.where(chance() < self.plan.other_voices, foreign, begins)
        frames = begins[:, None] + torch.arange(self.plan.frames, device=device)
        mel = self.speech.mel[frames]
        if self.made is not None:
            mel = torch.where((chance() < self.plan.made_mels)[:, None, None], self.made[frames], mel)
        return {
            "mel": mel,
            "f0": self.speech.f0[frames],
            "sound": self.speech.sound(frames),
            "trusted": chance() < progress / self.plan.trust_from,
            "seed": torch.randint(2**31, (rows,), generator=generator, device=device),
        }


@dataclass(frozen=True)
class Origins:
    """What a vocoder may start from: an earlier course, or its f0 alone; the ear and the flow whose mels it speaks."""

    vocoder: Path | None = None
    f0: Path | None = None
    ear: Path | None = None
    flow: Path | None = None


@cudnn_benchmark.held(True)
def teach(
    corpus: Corpus, out: Path, plan: VocoderPlan, seconds: float, device: str, seed: int, origins: Origins
) -> HiFT:
    """A vocoder that has learned for so long; its weights, log and figures are in `out`."""
    begun = time.monotonic()
    learned, held_out = split_held_out(corpus)
    segments = _segments(corpus, learned, plan, device, origins)
    hift = untaught(plan.config, device, seed)
    if origins.vocoder is not None:
        earlier = _earlier(origins.vocoder, device)
        hift.load_state_dict(earlier.state_dict())
        keep_excited(hift)
        if earlier.config.plain_spectrum == plan.config.plain_spectrum:
            plan = plan.refining()
        else:  # its last layers said magnitudes and angles
            hand_excitation_through(hift)
            plan = plan.trusting()
    elif origins.f0 is not None:
        hift.f0_predictor.load_state_dict(_earlier(origins.f0, device).f0_predictor.state_dict())
        plan = plan.trusting()
    judges = Discriminators(plan.period_channels, plan.spectrum_channels).to(device)
    lesson = VocoderBatch(hift, judges, plan, device)
    speaker = Learner(
        {"hift": hift}, lesson.speaking, plan.rate, betas=BETAS, clip=CLIP, average=plan.average, half=False
    )
    judging = Learner({"judges": judges}, lesson.judging, plan.judge_rate, betas=BETAS, clip=CLIP)
    print(f"{segments.speech.seconds / 3600:.2f} h of speech after {time.monotonic() - begun:.0f} s", flush=True)
    left = seconds - (time.monotonic() - begun) - SECONDS_TO_JUDGE
    _run_course(out, plan, segments, speaker, judging, Budget(plan.most_steps, max(1.0, left), warmup=100), seed)
    speaker.swap_average()
    hift.requires_grad_(False).eval()
    write_part(hift, {"vocoder": dataclasses.asdict(hift.config)}, out / VOCODER_FILE)
    keep_curves(out)
    judged = [index for index in held_out.tolist() if corpus.voices[index] == TEACHER.name] or held_out.tolist()
    figures = measure(hift, TeacherSpeech.of(corpus, np.array(judged[:24]), device))
    (out / "metrics.json").write_text(json.dumps(figures, indent=2), encoding="utf8")
    print(json.dumps(figures), flush=True)
    return hift


def _earlier(folder: Path, device: str) -> HiFT:
    config = read_sizes(folder / "sizes.json").vocoder
    if config is None:
        raise InputError(f"{folder} is not the folder of a vocoder: its sizes.json has none")
    return HiFT.load(folder / VOCODER_FILE, device, config)


def _segments(corpus: Corpus, learned: np.ndarray, plan: VocoderPlan, device: str, origins: Origins) -> Segments:
    speech = TeacherSpeech.of(corpus, learned, device)
    is_teacher = torch.tensor([corpus.voices[index] == TEACHER.name for index in learned.tolist()])
    if not is_teacher.any():
        raise InputError(f"the corpus has nothing in the voice {TEACHER.name}, which the vocoder is to learn")
    if origins.ear is None or origins.flow is None:
        return Segments(speech, is_teacher, plan)
    config = read_sizes(origins.flow / "sizes.json").flow
    if config is None:
        raise InputError(f"{origins.flow} is not the folder of a flow: its sizes.json has none")
    flow = FlowDecoder.load(origins.flow / FLOW_FILE, config, device)
    coded = encode_corpus(SpeechEncoder.load(origins.ear, device), corpus, device)
    own = learned[is_teacher.numpy()]
    codes = CodedSpeech.of(TeacherSpeech.of(corpus, own, device), [coded[index] for index in own], config.ratio)
    prompt = VoicePrompt(*codes.prompt(config.chunk), teacher_vector(config.speaker_dim))
    mels = flow_mels(flow, codes, prompt)
    print(f"mels of the flow are {float((mels - codes.mel).abs().mean()):.3f} from recorded ones", flush=True)
    return Segments(speech, is_teacher, plan, with_flow_mels(speech, is_teacher.nonzero()[:, 0], codes, mels))


def _run_course(
    out: Path,
    plan: VocoderPlan,
    segments: Segments,
    speaker: Learner,
    judging: Learner,
    budget: Budget,
    seed: int,
) -> None:
    course = TrainingRun(out / "course", {"speaker": speaker, "judging": judging}, budget, seed, log_every=200)
    captures, judged_steps, device = speaker.use_graph, 0, speaker.device
    for step in course:
        batch = segments.batch(step.generator(device), step.progress)
        is_judged = step.progress >= plan.judges_from
        if is_judged:
            judged_steps += 1
            speaker.use_graph = captures and judged_steps > EAGER_STEPS
        judged = batch | {"judged": torch.ones((), device=device)} if is_judged else batch
        course.record(speaker.step(judged, step.rate_share))
        if is_judged:
            course.record(judging.step(batch, step.rate_share), "judge_")


@torch.no_grad()
def measure(hift: HiFT, speech: TeacherSpeech) -> dict[str, float]:
    """How near the vocoder comes to speech it did not learn from, offline and as a stream of hops of 0.4 s."""
    analysis = VocoderMel(MATCHA_24KHZ).to(speech.mel.device)
    stream = HiFTStream(hift)
    figures: dict[str, list[float]] = {"mel_l1": [], "mel_l1_stream": [], "f0_error_hz": [], "voicing_error": []}
    for begin, end in zip(speech.starts[:-1].tolist(), speech.starts[1:].tolist(), strict=True):
        given, f0 = speech.mel[begin:end].T[None], speech.f0[begin:end]
        state, pieces = stream.initial_state(0), []
        for first in range(0, end - begin, 20):
            sound, state = stream.step(state, given[..., first : first + 20], final=first + 20 >= end - begin)
            pieces.append(sound)
        for name, sound in (("mel_l1", hift(given)), ("mel_l1_stream", torch.cat(pieces, dim=1))):
            figures[name].append(float(functional.l1_loss(analysis(sound), given)))
        predicted = hift.f0_predictor(given)[0]
        voiced, heard = f0 > 0, predicted > hift.m_source.voiced_above
        both = voiced & heard
        figures["voicing_error"].append(float((voiced != heard).float().mean()))
        if both.any():
            figures["f0_error_hz"].append(float((predicted - f0)[both].abs().mean()))
    return {name: round(float(np.mean(values)), 4) for name, values in figures.items() if values}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Teach a HiFT vocoder the reply voice.")
    parser.add_argument("--corpus", type=Path, required=True, help="a corpus folder, most of it in the reply voice")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400.0, help="for everything, preparation and judging included")
    parser.add_argument("--init", type=Path, help="the folder of an earlier course, to learn on")
    parser.add_argument("--f0", type=Path, help="the folder of an earlier course, whose f0 predictor to begin with")
    parser.add_argument("--ear", type=Path, help="with --flow: learn to speak the mels that this flow makes, too")
    parser.add_argument("--flow", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model, to see that all works")
    given = parser.parse_args(arguments)
    plan = TINY if given.tiny else VocoderPlan()
    origins = Origins(given.init, given.f0, given.ear, given.flow)
    teach(Corpus.load(given.corpus), given.out, plan, given.seconds, given.device, given.seed, origins)


if __name__ == "__main__":
    main()
