"""Codes → mel: the flow-matching decoder of MOSS-Speech and CosyVoice 2, a conformer encoder before a UNet estimator.

Streaming is inherited from `flow/stream.py`. `FlowSpeech` joins a flow and a vocoder: codes → sound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.flow.estimator import FlowEstimator, FlowEstimatorConfig, FlowMatching, fixed_noise
from vivavoce.models.flow.state import FlowPass, FlowState, FlowVoice
from vivavoce.models.flow.stream import FlowSizes, StreamingFlow, load_flow
from vivavoce.nn.attention import KeySpan, RelativeAttention, distance_encoding, segment_distances
from vivavoce.nn.streaming import Past
from vivavoce.nn.vocoder import CausalConv1d

LAYER_NORM_EPS = 1e-12


@dataclass(frozen=True)
class FlowEncoderConfig:
    """Sizes of the encoder; the published ones are the same for all models of the family."""

    ratio: int  # mel frames per code
    dim: int = 512
    heads: int = 8
    feed_forward: int = 2048
    code_layers: int = 6
    frame_layers: int = 4
    lookahead: int = 3

    @property
    def contexts(self) -> tuple[int, ...]:
        """Past inputs of each causal convolution, in forward order."""
        return 2, 2 * self.ratio


class InputLayer(nn.Module):
    """Linear, norm and the √dim scale of relative position encoding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim, eps=1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """# [row, time, dim]"""
        return self.out(x) * math.sqrt(x.shape[-1])


class LookaheadLayer(nn.Module):
    """Convolution over the next `lookahead` codes, then a causal one over three; residual add."""

    def __init__(self, dim: int, lookahead: int, channels: int | None = None) -> None:
        """`channels` is the width between the two convolutions; None: `dim`."""
        super().__init__()
        self.conv1 = nn.Conv1d(dim, channels or dim, lookahead + 1)
        self.conv2 = CausalConv1d(channels or dim, dim, 3)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """The look-ahead codes give no output.  # [row, time + lookahead, dim] → [row, time, dim]"""
        convolved = functional.leaky_relu(self.conv1(x.transpose(1, 2))).transpose(1, 2)
        y = past.convolve(self.conv2, convolved)
        return y + x[:, : y.shape[1]]


def pad_lookahead(x: Tensor, span: KeySpan, lookahead: int) -> Tensor:
    """Embedded codes, zero-padded where look-ahead is missing, and zero after the end of each reply.

    # [row, time (+ lookahead), dim] → [row, time + lookahead, dim]
    """
    x = functional.pad(x, (0, 0, 0, span.time + lookahead - x.shape[1]))
    if span.ends is None:
        return x
    positions = span.starts[:, None] + torch.arange(x.shape[1], device=x.device)
    return x.masked_fill((positions >= span.ends[:, None])[..., None], 0.0)


class Upsampler(nn.Module):
    """Repeat each code `ratio` times, then convolve causally over two codes and one frame."""

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.conv = CausalConv1d(dim, dim, 2 * ratio + 1)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """# [row, time, dim] → [row, time × ratio, dim]"""
        return past.convolve(self.conv, x.repeat_interleave(self.ratio, dim=1))


class ConformerFeedForward(nn.Module):
    """Two linears with a swish between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(dim, hidden)
        self.w_2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """# [row, time, dim]"""
        y: Tensor = self.w_2(functional.silu(self.w_1(x)))
        return y


class ConformerLayer(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: FlowEncoderConfig) -> None:
        super().__init__()
        self.self_attn = RelativeAttention(config.dim, config.heads)
        self.feed_forward = ConformerFeedForward(config.dim, config.feed_forward)
        self.norm_mha = nn.LayerNorm(config.dim, eps=LAYER_NORM_EPS)
        self.norm_ff = nn.LayerNorm(config.dim, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor, encodings: Sequence[Tensor], bias: Tensor | None, past: Past) -> Tensor:
        """# [row, time, dim]"""
        x = x + self.self_attn(self.norm_mha(x), encodings, bias, past)
        return x + self.feed_forward(self.norm_ff(x))


class FlowEncoder(nn.Module):
    """Embedded codes → features at mel rate."""

    def __init__(self, config: FlowEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = InputLayer(config.dim)
        self.pre_lookahead_layer = LookaheadLayer(config.dim, config.lookahead)
        self.encoders = nn.ModuleList(ConformerLayer(config) for _ in range(config.code_layers))
        self.up_layer = Upsampler(config.dim, config.ratio)
        self.up_embed = InputLayer(config.dim)
        self.up_encoders = nn.ModuleList(ConformerLayer(config) for _ in range(config.frame_layers))
        self.after_norm = nn.LayerNorm(config.dim, eps=1e-5)

    def forward(
        self,
        codes: Tensor,  # embedded: [row, time (+ lookahead), dim]
        span: KeySpan,  # positions of the codes
        code_bias: Tensor | None,  # [row, 1, time, key]; None: everything is visible
        frame_bias: Tensor | None,
        code_past: Past,
        frame_past: Past,
    ) -> Tensor:
        """Features at mel rate; missing look-ahead is zero.

        # → [row, time × ratio, dim]
        """
        x = self.pre_lookahead_layer(pad_lookahead(self.embed(codes), span, self.config.lookahead), code_past)
        encodings = self._encodings(span, x.dtype)
        for layer in self.encoders:
            x = layer(x, encodings, code_bias, code_past)
        x = self.up_embed(self.up_layer(x, frame_past))
        encodings = self._encodings(span.scaled(self.config.ratio), x.dtype)
        for layer in self.up_encoders:
            x = layer(x, encodings, frame_bias, frame_past)
        normed: Tensor = self.after_norm(x)
        return normed

    def _encodings(self, span: KeySpan, dtype: torch.dtype) -> list[Tensor]:
        """Encodings of the distances to the prefix, which starts at position 0, and to window and new positions."""
        to_window = torch.full((1,), span.window_slots, device=span.starts.device)
        distances = [segment_distances(to_window, span.time, span.window_slots + span.time)]
        if span.prefix_slots:
            distances.insert(0, segment_distances(span.starts, span.time, span.prefix_slots))
        return [distance_encoding(run, self.config.dim).to(dtype) for run in distances]


@dataclass(frozen=True, kw_only=True)
class FlowConfig(FlowSizes):
    """Sizes of the conformer and the UNet."""

    encoder: FlowEncoderConfig
    estimator: FlowEstimatorConfig = field(default_factory=FlowEstimatorConfig)

    @classmethod
    def moss_speech(cls, chunk: int = 5) -> "FlowConfig":
        """12.5 codes and 50 mel frames per second; chunks of 5 or of 25 codes, by the checkpoint."""
        return cls(vocabulary=20_480, chunk=chunk, encoder=FlowEncoderConfig(ratio=4))

    @classmethod
    def cosyvoice2(cls) -> "FlowConfig":
        """25 codes and 50 mel frames per second."""
        return cls(vocabulary=6_561, chunk=25, encoder=FlowEncoderConfig(ratio=2))


class FlowDecoder(StreamingFlow):
    """Token-to-mel decoder with a voice prompt."""

    config: FlowConfig

    def __init__(self, config: FlowConfig) -> None:
        embedding = nn.Embedding(config.vocabulary, config.encoder.dim)
        super().__init__(config, embedding, nn.Linear(config.speaker_dim, config.mel_bands))
        self.encoder = FlowEncoder(config.encoder)
        self.encoder_proj = nn.Linear(config.encoder.dim, config.mel_bands)
        self.decoder = FlowMatching(FlowEstimator(config.estimator), config.euler_steps, config.guidance)

    @classmethod
    def load(
        cls,
        source: str | Path,
        config: FlowConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "FlowDecoder":
        """The decoder of a published `flow*.pt` file."""
        return load_flow(lambda: cls(config), source, device, dtype)

    @torch.no_grad()
    def decode(self, flow_pass: FlowPass) -> Tensor:
        """The whole model: embed, encode, solve the flow.  # → float32 [stream, frame, band]"""
        ratio, pasts = self.config.ratio, flow_pass.pasts
        embedded = self.input_embedding(flow_pass.codes.to(self.device))
        code_bias, frame_bias = (flow_pass.bias(positions, embedded.dtype) for positions in (1, ratio))
        encoded = self.encoder(embedded, flow_pass.span, code_bias, frame_bias, pasts.codes, pasts.frames)
        features = self.encoder_proj(encoded)
        noise = fixed_noise(self.config.mel_bands, self.device)[flow_pass.span.scaled(ratio).query_positions()]
        mel: Tensor = self.decoder(noise, features, flow_pass.speaker, flow_pass.prompt_mel, frame_bias, pasts.mel_at)
        return mel


VocoderState = TypeVar("VocoderState")


class StreamingVocoder(Protocol[VocoderState]):
    """A streaming vocoder: mel → sound in pieces of any size."""

    @property
    def delay_frames(self) -> int:
        """Mel frames of delay."""
        ...

    def initial_state(self, seed: int | None = 0, batch: int = 1) -> VocoderState:
        """The state before the first frame; `seed` draws the excitation's noise, None omits it."""
        ...

    def step_batch(
        self, states: Sequence[VocoderState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[VocoderState]]:
        """Step several streams.  # mels [1, mel, frame] → [1, sample]"""
        ...


@dataclass(frozen=True)
class SpokenState:
    """State of a reply. A step of a single state reuses its memory: make a `copy()` to step from it again."""

    flow: FlowState
    vocoder: Any  # the state type of the vocoder

    def copy(self) -> "SpokenState":
        """A deep copy of the flow's state that shares the voice."""
        return SpokenState(self.flow.copy(), self.vocoder)

    @property
    def nbytes(self) -> int:
        """Memory of the flow cache; the vocoder's few frames are not counted."""
        return 0 if self.flow.cache is None else self.flow.cache.nbytes


class FlowSpeech:
    """A flow and a vocoder in series: codes → mel → sound."""

    def __init__(self, flow: StreamingFlow, vocoder: StreamingVocoder[Any]) -> None:
        self.flow, self.vocoder = flow, vocoder

    def start(self, voice: FlowVoice, left_chunks: int | None = None, seed: int = 0) -> SpokenState:
        """The state of a new reply. `left_chunks` bounds the attention window of the flow, hence its memory."""
        return SpokenState(self.flow.start(voice, left_chunks), self.vocoder.initial_state(seed))

    def step(self, state: SpokenState, codes: Tensor, final: bool = False) -> tuple[Tensor, SpokenState]:
        """Sound completed by these codes.  # [code] → [sample]"""
        (sound,), (new_state,) = self.step_batch([state], [codes], [final])
        return sound, new_state

    @torch.no_grad()
    def step_batch(
        self, states: Sequence[SpokenState], codes: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[SpokenState]]:
        """Step several replies, those of equal size as one batch; if there are several, the input states stay valid."""
        mels, flows = self.flow.step_batch([state.flow for state in states], codes, final)
        sounds = [mel.new_zeros(0) for mel in mels]
        vocoders = [state.vocoder for state in states]
        # Streams without new frames are skipped, unless they end.
        active = [index for index, mel in enumerate(mels) if mel.shape[1] or final[index]]
        if active:
            rendered, next_states = self.vocoder.step_batch(
                [vocoders[index] for index in active],
                [mels[index][None] for index in active],
                [final[index] for index in active],
            )
            for index, sound, vocoder in zip(active, rendered, next_states, strict=True):
                sounds[index], vocoders[index] = sound[0], vocoder
        return sounds, [SpokenState(flow, vocoder) for flow, vocoder in zip(flows, vocoders, strict=True)]
