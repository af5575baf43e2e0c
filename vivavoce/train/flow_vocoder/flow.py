"""Train the flow decoder of the reply voice: `viva train flow --corpus A B --speech-encoder DIR --out DIR`.

Conditional flow matching on the inference modules. Sequences are a prompt and the speech after it, mostly under the
chunk masks of a stream. Half of the flow times are those of the solver's schedule. Ends with an evaluation on held-out
sentences of the first corpus.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
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
from vivavoce.train import add_option
from vivavoce.train.corpus import Corpus, split_held_out
from vivavoce.train.flow_vocoder import copy_curves, write_part
from vivavoce.train.flow_vocoder.flow_batches import (
    FlowBatches,
    FlowBatchOptions,
    FlowBatchShape,
    code_bias,
    coded_speech,
    offsets_within_a_code,
)
from vivavoce.train.flow_vocoder.flow_mels import measure
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun
from vivavoce.train.reply_voice import reply_voices_of


class DifferentiableAttention(Silence):
    """Attention written out, for double-differentiable masks on any backend."""

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Attention without past."""
        keys, values = keys_values
        scores = query @ keys.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return (scores if bias is None else scores + bias).softmax(dim=-1) @ values


def features(flow: FlowDecoder, codes: Tensor, ends: Tensor, masks: tuple[Tensor, Tensor]) -> Tensor:
    """Encoder output for codes, the last of which are look-ahead.  # [row, code] → [row, frame, band]"""
    count, zeros = codes.shape[1] - flow.config.lookahead, torch.zeros_like(ends)
    span = KeySpan(zeros, count, zeros, ends=ends)
    embedded = flow.input_embedding(codes)
    encoded = flow.encoder(embedded, span, *masks, DifferentiableAttention(), DifferentiableAttention())
    predicted: Tensor = flow.encoder_proj(encoded)
    return predicted


def velocity(flow: FlowDecoder, noisy: Tensor, times: Tensor, conditions: Tensor, mask: Tensor) -> Tensor:
    """The estimator with a time for each row.  # conditions [row, frame, 3 · band] → [row, frame, band]"""
    estimator = flow.decoder.estimator
    added = estimator.time_conditions(times).transpose(0, 1)[:, :, None]  # [stage, row, 1, channel]
    return estimator(torch.cat([noisy, conditions], dim=-1), added, mask, DifferentiableAttention())


QUIET = 0.1  # initial scale of branches beside the residual path
SLOPE = 0.8  # approximate gain of norm and Mish on a pair of opposite channels


@torch.no_grad()
def untrained(config: FlowConfig, mean_mel: Tensor, seed: int) -> FlowDecoder:
    """An initialised flow decoder that moves any noise towards the mean mel."""
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
    _pass_noise_through(estimator, config.mel_bands)
    assert estimator.final_proj.bias is not None
    estimator.final_proj.bias.copy_(mean_mel)
    return flow.to(mean_mel.device).requires_grad_(True)


def _pass_noise_through(estimator: FlowEstimator, bands: int) -> None:
    """Initialise the estimator to pass the negated noise, which is most of the velocity."""
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
    _negate_output(estimator, bands)


def _pass_residual(block: ResidualBlock, bands: int) -> None:
    _weight(block.block2.block["2"]).fill_(QUIET)
    weight = block.res_conv.weight[..., 0]
    inputs, outputs = weight.shape[1], weight.shape[0]
    passed = min(outputs, inputs)
    if inputs % outputs:  # the first block: noise is in the first bands, then the conditions
        passed = min(bands, outputs)
        weight[:, :passed] = 0
        weight[:passed] = 0
    else:
        weight.zero_()
    weight[:passed, :passed] += torch.eye(passed)


def _weight(module: nn.Module) -> Tensor:
    return cast(Tensor, module.weight)


def _negate_output(estimator: FlowEstimator, bands: int) -> None:
    """Negate the noise by two opposite channels per band, whose difference is linear through Mish."""
    conv = estimator.final_block.block["0"]
    assert isinstance(conv, CausalConv1d)
    pairs = min(bands, conv.out_channels // 2)
    positive, negative = slice(0, pairs), slice(pairs, 2 * pairs)
    identity = torch.eye(pairs)
    conv.weight.mul_(0.3)
    conv.weight[positive, positive, -1] += identity
    conv.weight[negative, positive, -1] -= identity
    weight = estimator.final_proj.weight[..., 0]
    weight.mul_(0.3)
    weight[positive, positive] -= SLOPE * identity
    weight[positive, negative] += SLOPE * identity


SIGMA = 1e-6  # remaining noise at the end of the flow
EVALUATION_SECONDS = 40.0
EVALUATED = 12  # held-out sentences
FLOW_FILE = "flow-chunk-5.safetensors"


def flow_config(codes: int) -> FlowConfig:
    """Sizes of the reply voice's flow for this number of codes."""
    return FlowConfig(
        vocabulary=codes,
        chunk=5,
        encoder=FlowEncoderConfig(ratio=4, dim=192, heads=3, feed_forward=512, code_layers=3, frame_layers=1),
        estimator=FlowEstimatorConfig(channels=192, middle_blocks=1, transformers=1, heads=3, head_dim=64, expansion=2),
        euler_steps=5,
    )


def tiny_config(codes: int) -> FlowConfig:
    """A tiny configuration for tests."""
    full = flow_config(codes)
    encoder = dataclasses.replace(full.encoder, dim=16, heads=2, feed_forward=16, code_layers=1)
    estimator = dataclasses.replace(full.estimator, channels=16, heads=2, head_dim=8)
    return dataclasses.replace(full, encoder=encoder, estimator=estimator, euler_steps=2)


@dataclass(frozen=True)
class FlowPlan:
    """Hyperparameters."""

    tiny: bool = False
    shapes: tuple[FlowBatchShape, ...] = (FlowBatchShape(50, 48), FlowBatchShape(150, 16))
    options: FlowBatchOptions = dataclasses.field(default_factory=FlowBatchOptions)
    rate: float = 1e-3
    prior: float = 0.5  # weight of the L1 distance of the encoder output from the mel
    solver_times: float = 0.5  # share of flow times taken from the solver's schedule
    max_steps: int = 1_000_000

    def config(self, codes: int) -> FlowConfig:
        return tiny_config(codes) if self.tiny else flow_config(codes)


TINY = FlowPlan(tiny=True, shapes=(FlowBatchShape(20, 4), FlowBatchShape(30, 2)), max_steps=12)


@dataclass(frozen=True)
class MelScale:
    """Mean and deviation of mels. The encoder predicts normalised mels, which trains faster than raw ones."""

    mean: Tensor  # [band]
    deviation: Tensor  # scalar

    @classmethod
    def of(cls, mel: Tensor) -> "MelScale":
        """# [frame, band]"""
        mean = mel.mean(0)
        return cls(mean, (mel - mean).std())

    def normalised(self, mel: Tensor) -> Tensor:
        """Zero mean, unit variance."""
        return (mel - self.mean) / self.deviation


class FlowLoss:
    """Conditional flow matching loss."""

    def __init__(self, flow: FlowDecoder, plan: FlowPlan, speaker: Tensor, mel: MelScale) -> None:
        self.flow, self.plan, self.scale = flow, plan, mel
        self.speaker = functional.normalize(speaker, dim=0)
        self.solver_times = cosine_times(flow.config.euler_steps, flow.device)[:-1]

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Flow matching after the prompt, and the encoder's distance to the mel."""
        flow, mel, config = self.flow, batch["mel"], self.flow.config
        count = batch["codes"].shape[1] - config.lookahead
        code_mask = code_bias(batch["left"], batch["sink"], count, config.chunk)
        frame_mask = code_mask.repeat_interleave(config.ratio, 2).repeat_interleave(config.ratio, 3)
        predicted = features(flow, batch["codes"], batch["ends"], (code_mask, frame_mask))
        speaker = flow.spk_embed_affine_layer(self.speaker)
        prompted = batch["prompted"][..., None]  # [row, frame, 1]
        conditions = (
            torch.cat([predicted, speaker.expand_as(predicted), mel * prompted], dim=-1)
            * batch["guided"][:, None, None]
        )
        times = batch["times"][:, None, None]
        noisy = (1 - (1 - SIGMA) * times) * batch["noise"] + times * mel
        predicted_velocity = velocity(flow, noisy, batch["times"], conditions, frame_mask)
        target = mel - (1 - SIGMA) * batch["noise"]
        counted = (~prompted).float()
        flow_loss = ((predicted_velocity.float() - target).square() * counted).sum() / (counted.sum() * mel.shape[-1])
        prior = ((predicted.float() - self.scale.normalised(mel)).abs() * counted).sum() / (
            counted.sum() * mel.shape[-1]
        )
        return {"loss": flow_loss + self.plan.prior * prior, "flow": flow_loss, "prior": prior * self.scale.deviation}


def teacher_vector(dim: int) -> Tensor:
    """Constant speaker embedding of the only reply voice.  # [dim]"""
    return torch.full((dim,), dim**-0.5)


def learned_and_held_out(corpora: Sequence[Corpus]) -> tuple[Corpus, np.ndarray, np.ndarray]:
    """The joined corpora, and which utterances of the reply voice are learned and held out.

    Held out are those that the first corpus alone would hold out, as `viva train vocoder` and `assemble` do with it.
    """
    corpus = Corpus.joined(corpora)
    reply_voices = reply_voices_of(corpus.voices)
    is_teacher = np.array([voice in reply_voices for voice in corpus.voices], dtype=bool)
    _, held_out = split_held_out(corpora[0])
    held_texts = {corpus.texts[index] for index in held_out}
    is_held = np.array([text in held_texts for text in corpus.texts], dtype=bool)
    return corpus, np.flatnonzero(is_teacher & ~is_held), held_out[is_teacher[held_out]]


def train_flow(
    corpora: Sequence[Corpus],
    encoder: SpeechEncoder,
    out: Path,
    plan: FlowPlan,
    seconds: float,
    device: str,
    seed: int,
    init: Path | None = None,
) -> FlowDecoder:
    """Train a flow decoder within a time budget; weights, log and metrics are written to `out`."""
    started = time.monotonic()
    corpus, learned, held_out = learned_and_held_out(corpora)
    config = plan.config(encoder.config.quantize_vocab_size)
    offsets = offsets_within_a_code(config.ratio)
    speech = coded_speech(encoder, corpus, learned, config.ratio, device, offsets)
    hours, elapsed = speech.seconds / len(offsets) / 3600, time.monotonic() - started
    print(f"{hours:.2f} h of speech as codes at {len(offsets)} offsets after {elapsed:.0f} s", flush=True)
    scale = MelScale.of(speech.mel)
    flow = untrained(config, scale.mean, seed)
    if init is not None:
        flow.load_state_dict(FlowDecoder.load(init / FLOW_FILE, config, device).state_dict())
    speaker = teacher_vector(config.speaker_dim).to(device)
    loss = FlowLoss(flow, plan, speaker, scale)
    learner = Learner({"flow": flow}, loss, plan.rate, average=0.998)
    batches = FlowBatches(speech, config, plan.shapes, plan.options, loss.solver_times, plan.solver_times)
    budget = Budget(plan.max_steps, max(1.0, seconds - (time.monotonic() - started) - EVALUATION_SECONDS))
    training_run = TrainingRun(out / "course", {"flow": learner}, budget, seed, log_every=200)
    for step in training_run:
        batch = batches.batch(step.number, step.generator(device))
        training_run.record(learner.step(batch, step.rate_share))
    learner.swap_average()
    flow.requires_grad_(False).eval()
    write_part(flow, {"flow": dataclasses.asdict(flow.config)}, out / FLOW_FILE)
    copy_curves(out)
    evaluated, moved = (
        coded_speech(encoder, corpus, held_out[:EVALUATED], config.ratio, "cpu", [offset])
        for offset in (0, offsets[config.ratio // 2])
    )
    figures = measure(flow.cpu(), evaluated, VoicePrompt(*speech.prompt(config.chunk), speaker.cpu()), moved)
    (out / "metrics.json").write_text(json.dumps(figures, indent=2), encoding="utf8")
    print(json.dumps(figures), flush=True)
    return flow


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a flow decoder of the reply voice.")
    parser.add_argument(
        "--corpus",
        type=Path,
        nargs="+",
        required=True,
        help="corpora with the reply voice; the first has the held-out sentences",
    )
    add_option(parser, "--speech-encoder", "--ear", type=Path, required=True, help="folder of the trained encoder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400.0, help="total time, preparation and evaluation included")
    parser.add_argument("--init", type=Path, help="folder of an earlier run to initialise from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model, to test the pipeline")
    options = parser.parse_args(arguments)
    corpora = [Corpus.load(path) for path in options.corpus]
    encoder = SpeechEncoder.load(options.speech_encoder, options.device)
    plan = TINY if options.tiny else FlowPlan()
    train_flow(corpora, encoder, options.out, plan, options.seconds, options.device, options.seed, options.init)


if __name__ == "__main__":
    main()
