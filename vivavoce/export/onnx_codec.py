"""The codecs of MOSS-Speech and CosyVoice as ONNX graphs: speech encoder, flow in two parts, and vocoder.

The Euler loop of the flow is left to the caller, so that the estimator is exported once and not once per step:
`flow_conditions` runs once per reply, `flow_step` once per Euler step, with the step's number.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.export.onnx_graph import OnnxExport
from vivavoce.models.cosyvoice.dit import CosyVoice3Flow, RotatedPast, rotary_angles
from vivavoce.models.flow.estimator import GUIDANCE_ROWS, cosine_times, fixed_noise
from vivavoce.models.flow.model import FlowDecoder, FlowSpeech
from vivavoce.models.flow.stream import StreamingFlow
from vivavoce.models.hift.causal import CausalHiFT, Contexts
from vivavoce.models.hift.model import DecodePlan, HiFT, StagePlan, polar_to_rectangular
from vivavoce.models.hift.model import SampleSpan as TimeSpan
from vivavoce.models.hift.stream import HiFTStream
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.nn.attention import KeySpan
from vivavoce.nn.streaming import Past, Silence
from vivavoce.nn.vocoder import SourceStart

CODE_TOLERANCE = 0.01  # share of codes that may differ, as two may be equally near
SOUND_TOLERANCE = 2e-3
ENDLESS = TimeSpan(0, 1 << 40)  # slices end at the end of the axis, so the graph has no length arithmetic


class SpeechEncoderGraph(nn.Module):
    """Log-mel frames of one segment (at most 30 s) to codes."""

    def __init__(self, encoder: SpeechEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, mel: Tensor) -> Tensor:
        """# [batch, mel, frame] → [batch, ceil(frame / 8)]"""
        return self.encoder.nearest(self.encoder.features(mel))


class FlowConditions(nn.Module):
    """Inputs shared by the Euler steps of a reply."""

    published_noise: Tensor

    def __init__(self, flow: StreamingFlow) -> None:
        super().__init__()
        self.flow = flow
        self.register_buffer("published_noise", fixed_noise(flow.config.mel_bands, flow.device))

    def forward(self, codes: Tensor, speaker: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features, speaker embedding, and the initial noise.

        # [stream, code] prompt and reply, [stream, 192] → [stream, frame, band], [stream, band], [stream, frame, band]
        """
        flow = self.flow
        features = _features(flow, codes)
        voice = flow.spk_embed_affine_layer(functional.normalize(speaker, dim=-1))
        noise = self.published_noise[: features.shape[1]].expand_as(features)
        return features, voice, noise


class FlowStep(nn.Module):
    """One Euler step with classifier-free guidance."""

    lengths: Tensor
    time_conditions: Tensor

    def __init__(self, flow: FlowDecoder | CosyVoice3Flow) -> None:
        super().__init__()
        self.flow = flow
        times = cosine_times(flow.config.euler_steps, flow.device)
        self.register_buffer("lengths", times.diff())
        self.register_buffer("time_conditions", flow.decoder.estimator.time_conditions(times[:-1]))

    def forward(self, x: Tensor, features: Tensor, voice: Tensor, prompt_mel: Tensor, step: Tensor) -> Tensor:
        """The mel after one more step; `prompt_mel` is zero after the prompt.

        # three [stream, frame, band] and [stream, band], [] → [stream, frame, band]
        """
        flow = self.flow
        conditions = torch.cat([features, voice[:, None].expand_as(features), prompt_mel], dim=-1)
        guided = torch.stack([conditions, torch.zeros_like(conditions)], dim=1)
        noisy = x[:, None].expand(-1, GUIDANCE_ROWS, -1, -1)
        rows = torch.cat([noisy, guided], dim=-1).flatten(0, 1)
        bias = _chunk_bias(flow, x.shape[1], flow.config.ratio)
        past = _past(flow, x.shape[1])
        velocity = flow.decoder.estimator(rows, self.time_conditions[step], bias, past)
        with_conditions, without = velocity.unflatten(0, (-1, GUIDANCE_ROWS)).unbind(1)
        strength = flow.decoder.guidance
        return x + self.lengths[step] * ((1 + strength) * with_conditions - strength * without)


class VocoderGraph(nn.Module):
    """Mel to audio. The excitation noise is generated from `seed`, as in the torch model."""

    def __init__(self, hift: HiFT) -> None:
        super().__init__()
        self.hift = hift
        stages = (StagePlan(ENDLESS, ENDLESS, ENDLESS) for _ in hift.config.upsample_rates)
        self.everything = DecodePlan(tuple(stages), ENDLESS)

    def forward(self, mel: Tensor, seed: Tensor) -> Tensor:
        """# [batch, mel, frame], [batch] → [batch, frame · 480]"""
        hift, half = self.hift, self.hift.config.n_fft // 2
        source = hift.m_source(hift.f0_predictor(mel), SourceStart(None, torch.zeros_like(seed), seed))
        spectrum = hift._spectrum(mel, hift.fourier(source), self.everything)
        sound = hift.fourier.inverse(polar_to_rectangular(spectrum, hift.config.plain_spectrum))
        return hift.limit(sound[:, half:-half])


class CausalVocoder(nn.Module):
    """CosyVoice 3's vocoder on whole mels. f0 is in float32, for runtimes without float64 convolutions."""

    def __init__(self, hift: CausalHiFT) -> None:
        super().__init__()
        self.hift = hift
        hift.f0_predictor.float()

    def forward(self, mel: Tensor, seed: Tensor) -> Tensor:
        """# [batch, mel, frame], [batch] → [batch, frame · 480]"""
        hift, half = self.hift, self.hift.config.n_fft // 2
        f0 = hift.f0_predictor(functional.pad(mel, (0, hift.config.f0_look_right)), FromSilence())
        excitation = hift.fourier(hift.m_source(f0, SourceStart(None, torch.zeros_like(seed), seed)))
        strides = (hift.config.source_stride(stage) for stage in range(len(hift.ups)))
        excitations = tuple(functional.pad(excitation, (stride - 1, 0)) for stride in strides)
        known = hift.conv_pre(functional.pad(mel, (0, hift.config.look_right)))
        spectrum, _ = hift._spectrum(known, excitations, FromSilence(), is_first=True)
        sound = hift.fourier.inverse(polar_to_rectangular(spectrum))[:, half:-half]
        return sound.clamp(-hift.config.audio_limit, hift.config.audio_limit)


class FromSilence(Contexts):
    """Stateless convolutions that start from silence."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(1, 0))

    def convolve(self, conv: nn.Module, x: Tensor) -> Tensor:
        """# [batch, channel, time]"""
        convolved: Tensor = conv(x)
        return convolved


def speech_graphs(speech: FlowSpeech) -> Iterator[OnnxExport]:
    """Flow and vocoder of CosyVoice 2 or 3."""
    flow, vocoder = speech.flow, speech.vocoder
    assert isinstance(flow, FlowDecoder | CosyVoice3Flow)
    yield _conditions_graph(flow)
    yield _step_graph(flow)
    yield vocoder_graph(vocoder if isinstance(vocoder, CausalHiFT) else cast(HiFTStream, vocoder).hift)


def codec_graphs(codec: MossSpeechCodec) -> Iterator[OnnxExport]:
    """Speech encoder, flow and vocoder of a codec."""
    flow = codec.flow
    yield speech_encoder_graph(codec.speech_encoder.encoder)
    yield _conditions_graph(flow)
    yield _step_graph(flow)
    yield vocoder_graph(codec.vocoder.hift)


def speech_encoder_graph(encoder: SpeechEncoder) -> OnnxExport:
    """mel → codes."""
    bins = encoder.config.num_mel_bins
    mels = [{"mel": torch.randn(batch, bins, frames)} for batch, frames in ((3, 61), (1, 8), (2, 100))]
    axes = {"mel": {0: "batch", 2: "frame"}}
    return OnnxExport(
        "speech_encoder", SpeechEncoderGraph(encoder), mels[0], axes, ("codes",), tuple(mels[1:]), CODE_TOLERANCE
    )


def vocoder_graph(hift: HiFT | CausalHiFT) -> OnnxExport:
    """mel, seed → sound."""

    def example(batch: int, frames: int) -> dict[str, Tensor]:
        return {"mel": torch.randn(batch, hift.config.mels, frames), "seed": torch.arange(batch)}

    axes = {"mel": {0: "batch", 2: "frame"}, "seed": {0: "batch"}}
    checks = (example(1, 7), example(2, 40))
    module = VocoderGraph(hift) if isinstance(hift, HiFT) else CausalVocoder(hift)
    return OnnxExport("vocoder", module, example(3, 11), axes, ("sound",), checks, SOUND_TOLERANCE)


def _conditions_graph(flow: FlowDecoder | CosyVoice3Flow) -> OnnxExport:
    config = flow.config

    def example(streams: int, codes: int) -> dict[str, Tensor]:
        given = torch.randint(0, config.vocabulary, (streams, codes))
        return {"codes": given, "speaker": torch.randn(streams, config.speaker_dim)}

    axes = {"codes": {0: "stream", 1: "code"}, "speaker": {0: "stream"}}
    outputs = ("features", "voice", "noise")
    return OnnxExport(
        "flow_conditions", FlowConditions(flow), example(3, 11), axes, outputs, (example(1, 7), example(2, 30))
    )


def _step_graph(flow: FlowDecoder | CosyVoice3Flow) -> OnnxExport:
    config = flow.config

    def example(streams: int, codes: int, step: int) -> dict[str, Tensor]:
        shape = (streams, codes * config.ratio, config.mel_bands)
        named = {name: torch.randn(shape) for name in ("x", "features", "voice", "prompt_mel")}
        return named | {"voice": torch.randn(streams, config.mel_bands), "step": torch.tensor(step)}

    wide = {0: "stream", 1: "frame"}
    axes = {"x": wide, "features": wide, "voice": {0: "stream"}, "prompt_mel": wide}
    checks = (example(1, 7, 0), example(2, 30, config.euler_steps - 1))
    return OnnxExport("flow_step", FlowStep(flow), example(3, 11, 1), axes, ("mel",), checks)


def _features(flow: StreamingFlow, codes: Tensor) -> Tensor:
    """Encoder features of the whole reply.  # [stream, code] → [stream, frame, band]"""
    embedded, time, ratio = flow.input_embedding(codes), codes.shape[1], flow.config.ratio
    if isinstance(flow, CosyVoice3Flow):
        padded = functional.pad(embedded, (0, 0, 0, flow.config.lookahead))
        seen: Tensor = flow.pre_lookahead_layer(padded, Silence())
        return seen.repeat_interleave(ratio, dim=1)
    assert isinstance(flow, FlowDecoder)
    nowhere = torch.zeros(1, dtype=torch.int64, device=codes.device)
    code_bias, frame_bias = _chunk_bias(flow, time), _chunk_bias(flow, time * ratio, ratio)
    span = KeySpan(nowhere, time, nowhere)
    encoded = flow.encoder(embedded, span, code_bias, frame_bias, Silence(), Silence())
    return flow.encoder_proj(encoded)


def _past(flow: StreamingFlow, frames: int) -> Past:
    """An empty streaming state; CosyVoice 3 also needs its rotary angles."""
    if not isinstance(flow, CosyVoice3Flow):
        return Silence()
    positions = torch.arange(frames, device=flow.device)[None]
    return RotatedPast(Silence(), *rotary_angles(positions, flow.config.estimator.head_dim))


def _chunk_bias(flow: StreamingFlow, positions: int, per_code: int = 1) -> Tensor:
    """Chunk-causal attention bias.  # [1, 1, position, position]"""
    chunks = torch.arange(positions, device=flow.device).div(flow.config.chunk * per_code, rounding_mode="floor")
    return torch.where(chunks <= chunks[:, None], 0.0, -torch.inf)[None, None]
