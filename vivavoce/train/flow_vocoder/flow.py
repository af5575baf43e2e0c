"""The flow decoder for the reply voice: `viva train flow --corpus DIR --ear DIR --out DIR --seconds 400`.

Conditional flow matching on the inference modules themselves. Sequences are a prompt and speech behind it, as in use;
most are seen under the chunk masks of a stream. Half of the times drawn are the few at which the solver will ask.
"""

import argparse
import dataclasses
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.flow.estimator import (
    EstimatorStage,
    EstimatorTransformer,
    FlowEstimator,
    FlowEstimatorConfig,
    ResidualBlock,
    cosine_times,
)
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowEncoderConfig
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.nn.attention import KeySpan
from vivavoce.nn.linear import PackedLinear
from vivavoce.nn.streaming import Silence
from vivavoce.nn.vocoder import CausalConv1d
from vivavoce.train.corpus import Corpus, split_held_out
from vivavoce.train.features import encode_corpus
from vivavoce.train.flow_vocoder.batches import (
    CodedSpeech,
    FlowBatchOptions,
    FlowBatchShape,
    Passages,
    TeacherSpeech,
    code_bias,
    keep_curves,
    measure,
    write_part,
)
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun
from vivavoce.train.voices import TEACHER


class Differentiable(Silence):
    """Attention written out: its masks may carry gradients too."""

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Attention to what is given alone."""
        keys, values = keys_values
        scores = query @ keys.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return (scores if bias is None else scores + bias).softmax(dim=-1) @ values


def features(flow: FlowDecoder, codes: Tensor, ends: Tensor, masks: tuple[Tensor, Tensor]) -> Tensor:
    """What the encoder makes of codes, of which the last are look-ahead.  # [row, code] → [row, frame, band]"""
    count, nowhere = codes.shape[1] - flow.config.lookahead, torch.zeros_like(ends)
    span = KeySpan(nowhere, count, nowhere, ends=ends)
    embedded = flow.input_embedding(codes)
    encoded = flow.encoder(embedded, span, *masks, Differentiable(), Differentiable())
    made: Tensor = flow.encoder_proj(encoded)
    return made


def velocity(flow: FlowDecoder, noisy: Tensor, times: Tensor, conditions: Tensor, mask: Tensor) -> Tensor:
    """The estimator with a time for each row.  # conditions [row, frame, 3 · band] → [row, frame, band]"""
    estimator = flow.decoder.estimator
    added = estimator.time_conditions(times).transpose(0, 1)[:, :, None]  # [stage, row, 1, channel]
    return estimator(torch.cat([noisy, conditions], dim=-1), added, mask, Differentiable())


QUIET = 0.1  # share of a branch beside the highway that is left
SLOPE = 0.8  # about what norm and Mish leave of a pair of opposite channels


@torch.no_grad()
def untaught(config: FlowConfig, mean_mel: Tensor, seed: int) -> FlowDecoder:
    """A flow decoder ready to learn, which goes from any noise towards the mean of all mels to begin with."""
    torch.manual_seed(seed)
    flow = FlowDecoder(config)
    for module in flow.modules():
        if isinstance(module, PackedLinear):
            torch.nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                module.bias.zero_()
    flow.input_embedding.weight.mul_(0.5)
    flow.encoder_proj.bias.zero_()
    estimator = flow.decoder.estimator
    assert isinstance(estimator, FlowEstimator)
    _hand_noise_through(estimator, config.mel_bands)
    assert estimator.final_proj.bias is not None
    estimator.final_proj.bias.copy_(mean_mel)
    return flow.to(mean_mel.device).requires_grad_(True)


def _hand_noise_through(estimator: FlowEstimator, bands: int) -> None:
    """Most of a velocity is the noise itself, turned around. Let it pass, and learning begins with what is left."""
    for stage in (*estimator.down_blocks, *estimator.mid_blocks, *estimator.up_blocks):
        assert isinstance(stage, EstimatorStage)
        residual, transformers, *closing = stage
        assert isinstance(residual, ResidualBlock)
        _pass_residual(residual, bands)
        for transformer in transformers:  # type: ignore[attr-defined]
            assert isinstance(transformer, EstimatorTransformer)
            for last in (transformer.attn1.to_out[0], transformer.ff.net["2"]):
                _weight(last).mul_(QUIET)
        for conv in closing:
            assert isinstance(conv, CausalConv1d)
            conv.weight.mul_(QUIET)
            conv.weight[:, :, -1] += torch.eye(conv.out_channels)
    _turn_around(estimator, bands)


def _pass_residual(block: ResidualBlock, bands: int) -> None:
    _weight(block.block2.block["2"]).fill_(QUIET)
    weight = block.res_conv.weight[..., 0]
    inputs, outputs = weight.shape[1], weight.shape[0]
    passed = min(outputs, inputs)
    if inputs % outputs:  # the first: noise comes in the first bands, the conditions behind it
        passed = min(bands, outputs)
        weight[:, :passed] = 0
        weight[:passed] = 0
    else:
        weight.zero_()
    weight[:passed, :passed] += torch.eye(passed)


def _weight(module: nn.Module) -> Tensor:
    return cast(Tensor, module.weight)


def _turn_around(estimator: FlowEstimator, bands: int) -> None:
    """Two channels a band, the one the other's opposite, are straight through a Mish that bends each."""
    conv = estimator.final_block.block["0"]
    assert isinstance(conv, CausalConv1d)
    pairs = min(bands, conv.out_channels // 2)
    there, back = slice(0, pairs), slice(pairs, 2 * pairs)
    one = torch.eye(pairs)
    conv.weight.mul_(0.3)
    conv.weight[there, there, -1] += one
    conv.weight[back, there, -1] -= one
    weight = estimator.final_proj.weight[..., 0]
    weight.mul_(0.3)
    weight[there, there] -= SLOPE * one
    weight[there, back] += SLOPE * one


SIGMA = 1e-6  # what is left of the noise at the end of the flow
SECONDS_TO_JUDGE = 35.0
FLOW_FILE = "flow-chunk-5.safetensors"


def flow_config(codes: int) -> FlowConfig:
    """The reply voice's flow, for an ear with so many codes."""
    return FlowConfig(
        vocabulary=codes,
        chunk=5,
        encoder=FlowEncoderConfig(ratio=4, dim=192, heads=3, feed_forward=512, code_layers=3, frame_layers=1),
        estimator=FlowEstimatorConfig(channels=192, middle_blocks=1, transformers=1, heads=3, head_dim=64, expansion=2),
        euler_steps=5,
    )


def tiny_config(codes: int) -> FlowConfig:
    """The same in a size that learns nothing, but quickly."""
    full = flow_config(codes)
    encoder = dataclasses.replace(full.encoder, dim=16, heads=2, feed_forward=16, code_layers=1)
    estimator = dataclasses.replace(full.estimator, channels=16, heads=2, head_dim=8)
    return dataclasses.replace(full, encoder=encoder, estimator=estimator, euler_steps=2)


@dataclass(frozen=True)
class FlowPlan:
    """How the flow learns."""

    tiny: bool = False
    shapes: tuple[FlowBatchShape, ...] = (FlowBatchShape(50, 48), FlowBatchShape(150, 16))
    habits: FlowBatchOptions = dataclasses.field(default_factory=FlowBatchOptions)
    rate: float = 1e-3
    prior: float = 0.5  # weight of: the encoder alone comes near the mel
    solver_times: float = 0.5  # share of the times drawn that are the solver's own
    most_steps: int = 1_000_000

    def config(self, codes: int) -> FlowConfig:
        """Sizes for an ear with so many codes."""
        return tiny_config(codes) if self.tiny else flow_config(codes)


TINY = FlowPlan(tiny=True, shapes=(FlowBatchShape(20, 4), FlowBatchShape(30, 2)), most_steps=12)


@dataclass(frozen=True)
class MelScale:
    """Where mels lie and how far they spread. The encoder's features are plain; to predict them raw learns slower."""

    mean: Tensor  # [band]
    deviation: Tensor  # scalar

    @classmethod
    def of(cls, mel: Tensor) -> "MelScale":
        """The scale of these mels.  # [frame, band]"""
        mean = mel.mean(0)
        return cls(mean, (mel - mean).std())

    def plain(self, mel: Tensor) -> Tensor:
        """Around 0, spread by 1."""
        return (mel - self.mean) / self.deviation


class FlowBatch:
    """What the flow is taught with one batch."""

    def __init__(self, flow: FlowDecoder, plan: FlowPlan, speaker: Tensor, mel: MelScale) -> None:
        self.flow, self.plan, self.scale = flow, plan, mel
        self.speaker = functional.normalize(speaker, dim=0)
        self.solver_times = cosine_times(flow.config.euler_steps, flow.device)[:-1]

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Flow matching behind the prompt, and the encoder's own distance to the mel."""
        flow, mel, config = self.flow, batch["mel"], self.flow.config
        count = batch["codes"].shape[1] - config.lookahead
        code_mask = code_bias(batch["left"], batch["sink"], count, config.chunk)
        frame_mask = code_mask.repeat_interleave(config.ratio, 2).repeat_interleave(config.ratio, 3)
        made = features(flow, batch["codes"], batch["ends"], (code_mask, frame_mask))
        speaker = flow.spk_embed_affine_layer(self.speaker)
        prompted = batch["prompted"][..., None]  # [row, frame, 1]
        conditions = torch.cat([made, speaker.expand_as(made), mel * prompted], dim=-1) * batch["guided"][:, None, None]
        times = batch["times"][:, None, None]
        noisy = (1 - (1 - SIGMA) * times) * batch["noise"] + times * mel
        moved = velocity(flow, noisy, batch["times"], conditions, frame_mask)
        wanted = mel - (1 - SIGMA) * batch["noise"]
        counted = (~prompted).float()
        off = ((moved.float() - wanted).square() * counted).sum() / (counted.sum() * mel.shape[-1])
        prior = ((made.float() - self.scale.plain(mel)).abs() * counted).sum() / (counted.sum() * mel.shape[-1])
        return {"loss": off + self.plan.prior * prior, "flow": off, "prior": prior * self.scale.deviation}


def teacher_vector(dim: int) -> Tensor:
    """The speaker's vector of the one reply voice: there is no other to tell it from.  # [dim]"""
    return torch.full((dim,), dim**-0.5)


def teach(
    corpus: Corpus,
    ear: SpeechEncoder,
    out: Path,
    plan: FlowPlan,
    seconds: float,
    device: str,
    seed: int,
    init: Path | None = None,
) -> FlowDecoder:
    """A flow decoder that has learned for so long; its weights, log and figures are in `out`."""
    begun = time.monotonic()
    own = np.array([voice == TEACHER.name for voice in corpus.voices])
    learned, held_out = (each[own[each]] for each in split_held_out(corpus))
    coded = encode_corpus(ear, corpus, device)
    config = plan.config(ear.config.quantize_vocab_size)
    speech = CodedSpeech.of(
        TeacherSpeech.of(corpus, learned, device), [coded[index] for index in learned], config.ratio
    )
    print(f"{speech.seconds / 3600:.2f} h of speech as codes after {time.monotonic() - begun:.0f} s", flush=True)
    scale = MelScale.of(speech.mel)
    flow = untaught(config, scale.mean, seed)
    if init is not None:
        flow.load_state_dict(FlowDecoder.load(init / FLOW_FILE, config, device).state_dict())
    speaker = teacher_vector(config.speaker_dim).to(device)
    lesson = FlowBatch(flow, plan, speaker, scale)
    learner = Learner({"flow": flow}, lesson, plan.rate, average=0.998)
    passages = Passages(speech, config, plan.shapes, plan.habits, lesson.solver_times, plan.solver_times)
    budget = Budget(plan.most_steps, max(1.0, seconds - (time.monotonic() - begun) - SECONDS_TO_JUDGE))
    course = TrainingRun(out / "course", {"flow": learner}, budget, seed, log_every=200)
    for step in course:
        batch = passages.batch(step.number, step.generator(device))
        course.record(learner.step(batch, step.rate_share))
    learner.swap_average()
    flow.requires_grad_(False).eval()
    write_part(flow, {"flow": dataclasses.asdict(flow.config)}, out / FLOW_FILE)
    keep_curves(out)
    judged = CodedSpeech.of(
        TeacherSpeech.of(corpus, held_out[:12], "cpu"), [coded[i] for i in held_out[:12]], config.ratio
    )
    figures = measure(flow.cpu(), judged, VoicePrompt(*speech.prompt(config.chunk), speaker.cpu()))
    (out / "metrics.json").write_text(json.dumps(figures, indent=2), encoding="utf8")
    print(json.dumps(figures), flush=True)
    return flow


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Teach a flow decoder the reply voice.")
    parser.add_argument("--corpus", type=Path, required=True, help="a corpus, of which the reply voice is learned")
    parser.add_argument("--ear", type=Path, required=True, help="the folder of the trained ear")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400.0, help="for everything, preparation and judging included")
    parser.add_argument("--init", type=Path, help="a folder of an earlier course to start from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model, to see that all works")
    given = parser.parse_args(arguments)
    corpus, ear = Corpus.load(given.corpus), SpeechEncoder.load(given.ear, given.device)
    plan = TINY if given.tiny else FlowPlan()
    teach(corpus, ear, given.out, plan, given.seconds, given.device, given.seed, given.init)


if __name__ == "__main__":
    main()
