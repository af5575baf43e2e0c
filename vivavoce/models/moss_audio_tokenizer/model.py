"""MOSS-Audio-Tokenizer-Nano: 48 kHz stereo sound to sixteen codes every 80 ms and back, with no look-ahead.

Encoder and decoder are chains of causal transformers with windows of 4 to 10 seconds, between patches that trade time
for channels. A frame is a whole number of positions of every stage, so the state of a stream is the transformers' keys
and values, and a whole sound is a stream taken in large steps.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from vivavoce.audio.io import Sound
from vivavoce.errors import InputError
from vivavoce.models.checkpoint import Checkpoint, fold_weight_norm, load_weights
from vivavoce.models.moss_audio_tokenizer.config import Chain, MossAudioTokenizerConfig, StageConfig, reference_samples
from vivavoce.nn.attention import pair_rotation, rotation
from vivavoce.nn.linear import Linear
from vivavoce.nn.modules import allocating
from vivavoce.nn.streaming import StreamCache, extend
from vivavoce.nn.vq import ProjectedResidualVQ

OFFLINE_FRAMES = 16  # the attention scores of a step of this size fit the CPU cache
Run = Callable[[Sequence["CodecState"], Tensor], tuple[Tensor, list["CodecState"]]]


class Streams(Protocol):
    """Attention over the windows of a batch of streams."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of new positions to their windows, themselves included.  # [stream, head, new, head_dim]"""
        ...


class LayerScale(nn.Module):
    """A learned gain per channel."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """# [.., channel]"""
        return x * self.scale


class CodecAttention(nn.Module):
    """Sliding-window self-attention with rotary positions."""

    def __init__(self, config: StageConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.in_proj = Linear(config.d_model, 3 * config.d_model)
        self.out_proj = Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, layer: int, streams: Streams, cos: Tensor, sin: Tensor) -> Tensor:
        """# [stream, time, d_model], of new positions"""
        packed = self.in_proj(x).unflatten(-1, (3 * self.heads, -1))
        rotated, value = pair_rotation(cos, sin)(packed[:, :, : 2 * self.heads]), packed[:, :, 2 * self.heads :]
        query, key = rotated.chunk(2, dim=2)
        mixed = streams.attend(layer, *(each.transpose(1, 2) for each in (query, key, value)))
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class CodecLayer(nn.Module):
    """A pre-norm layer with LayerScale."""

    def __init__(self, config: StageConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model)
        self.self_attn = CodecAttention(config)
        self.layer_scale_1 = LayerScale(config.d_model)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.ffn = nn.Sequential(
            Linear(config.d_model, config.dim_feedforward), nn.GELU(), Linear(config.dim_feedforward, config.d_model)
        )
        self.layer_scale_2 = LayerScale(config.d_model)

    def forward(self, x: Tensor, layer: int, streams: Streams, cos: Tensor, sin: Tensor) -> Tensor:
        """# [stream, time, d_model]"""
        x = x + self.layer_scale_1(self.self_attn(self.norm1(x), layer, streams, cos, sin))
        return x + self.layer_scale_2(self.ffn(self.norm2(x)))


class LayerStack(nn.Module):
    """The layers of a stage; one level of the published tensor names."""

    def __init__(self, config: StageConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CodecLayer(config) for _ in range(config.num_layers))


class CodecStage(nn.Module):
    """A causal transformer at one rate; `window` is in positions."""

    def __init__(self, config: StageConfig, window: int) -> None:
        super().__init__()
        self.config = config
        self.window = window
        self.input_proj = Linear(config.input_dimension, config.d_model)
        self.transformer = LayerStack(config)
        self.output_proj = Linear(config.d_model, config.output_dimension)

    def initial_state(self) -> StreamCache:
        """The cache of one stream before its first position."""
        config = self.config
        head_dim = config.d_model // config.num_heads
        like = self.input_proj.weight
        return StreamCache.empty(config.num_layers, config.num_heads, head_dim, 1, like, self.window)

    def step(self, caches: Sequence[StreamCache], x: Tensor) -> tuple[Tensor, list[StreamCache]]:
        """Step several streams.  # [stream, time, input] → [stream, time, output]"""
        streams = extend(caches, x.shape[1])
        return self.advance(x, streams.positions, streams), streams.after

    def advance(self, x: Tensor, positions: Tensor, streams: Streams) -> Tensor:
        """Step a batch of streams over the windows of `streams`.  # positions [stream, time]"""
        head_dim = self.config.d_model // self.config.num_heads
        cos, sin = rotation(positions, head_dim, self.config.max_period)
        x = self.input_proj(x)
        for index, layer in enumerate(self.transformer.layers):
            x = layer(x, index, streams, cos, sin)
        projected: Tensor = self.output_proj(x)
        return projected


class Patch(nn.Module):
    """Join `size` positions into one; channel d·size + r holds position r."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """# [stream, time, channel] → [stream, time / size, channel · size]"""
        return x.unflatten(1, (-1, self.size)).transpose(2, 3).flatten(2)


class Unpatch(Patch):
    """The inverse of `Patch`."""

    def forward(self, x: Tensor) -> Tensor:
        """# [stream, time, channel · size] → [stream, time · size, channel]"""
        return x.unflatten(2, (-1, self.size)).transpose(2, 3).flatten(1, 2)


@dataclass(frozen=True)
class CodecState:
    """State of one encoder or decoder stream; immutable, so a stream can be continued from it more than once."""

    caches: tuple[StreamCache, ...]
    frames: int = 0

    def copy(self) -> "CodecState":
        """A deep copy, no larger than the windows."""
        return CodecState(tuple(cache.copy() for cache in self.caches), self.frames)


class MossAudioTokenizerNano(nn.Module):
    """The codec. `encode` and `decode` take whole sounds; `encode_step` and `decode_step` are streams."""

    def __init__(self, config: MossAudioTokenizerConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or MossAudioTokenizerConfig()
        rate = config.sample_rate * config.channels
        self.encoder = _chain(config.encoder, Patch, rate, is_decoder=False)
        self.quantizer = ProjectedResidualVQ(**asdict(config.quantizer)).float()
        self.decoder = _chain(config.decoder, Unpatch, config.frame_rate, is_decoder=True)
        self.requires_grad_(False)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        progress: Callable[[int, int], None] | None = None,
    ) -> "MossAudioTokenizerNano":
        """A published checkpoint; its codebooks stay in float32."""
        config = MossAudioTokenizerConfig.read(folder)
        with fold_weight_norm(Checkpoint(folder)) as checkpoint:
            with allocating(device, dtype):
                codec = cls(config)
            load_weights(codec, checkpoint, progress=progress)
        return codec.eval()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.quantizer.input_proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the decoder."""
        return next(self.decoder.parameters()).dtype

    @property
    def mark(self) -> str:
        """Identifies the codec that codes belong to: rate, codebooks, and a checksum of the first codebook."""
        sizes = self.config.quantizer
        first = self.quantizer.get_parameter("quantizers.0.codebook.weight").float().cpu().numpy()
        sum_of_first = zlib.crc32(first.tobytes())
        return f"{self.config.sample_rate} Hz, {sizes.num_quantizers} x {sizes.codebook_size}, {sum_of_first:08x}"

    @torch.inference_mode()
    def encode(self, sound: Tensor) -> Tensor:
        """Codes of whole frames; the rest is dropped.  # [stream, 2, sample] → [stream, codebook, frame]"""
        self._check_sound(sound)
        frames = sound.shape[-1] // self.config.frame_samples
        if frames == 0:
            raise InputError(f"a frame has {self.config.frame_samples} samples, but the sound has {sound.shape[-1]}")
        states = [self.encoder_state() for _ in sound]
        whole = sound[..., : frames * self.config.frame_samples].to(self.device)
        codes = []
        for piece in whole.split(OFFLINE_FRAMES * self.config.frame_samples, dim=-1):
            new, states = self._encode(states, piece)
            codes.append(new)
        return torch.cat(codes, dim=-1)

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        """Sound of codes; the last codebooks may be omitted.  # [stream, codebook, frame] → [stream, 2, sample]"""
        if codes.ndim != 3:
            raise InputError(f"codes have the shape [stream, codebook, frame], not {list(codes.shape)}")
        self.check_codes(codes)
        states = [self.decoder_state() for _ in codes]
        sounds = []
        for piece in codes.to(self.device).split(OFFLINE_FRAMES, dim=-1):
            new, states = self._decode(states, piece)
            sounds.append(new)
        return torch.cat(sounds, dim=-1)

    def encoder_state(self) -> CodecState:
        """The state before the first sample."""
        return _initial_state(self.encoder)

    def decoder_state(self) -> CodecState:
        """The state before the first frame."""
        return _initial_state(self.decoder)

    def encode_step(self, state: CodecState, sound: Tensor) -> tuple[Tensor, CodecState]:
        """Codes of the next whole frames of a sound.  # [2, sample] → [codebook, frame]"""
        (codes,), (new_state,) = self.encode_step_batch([state], [sound])
        return codes, new_state

    def decode_step(self, state: CodecState, codes: Tensor) -> tuple[Tensor, CodecState]:
        """Sound of the next frames.  # [codebook, frame] → [2, sample]"""
        (sound,), (new_state,) = self.decode_step_batch([state], [codes])
        return sound, new_state

    @torch.inference_mode()
    def encode_step_batch(
        self, states: Sequence[CodecState], sounds: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[CodecState]]:
        """`encode_step` of several streams; those of equal length run as one batch."""
        for sound in sounds:
            self._check_sound(sound[None])
            if sound.shape[-1] == 0 or sound.shape[-1] % self.config.frame_samples:
                raise InputError(
                    f"a step takes whole frames of {self.config.frame_samples} samples, not {sound.shape[-1]} samples"
                )
        return self._run_grouped(self._encode, states, sounds)

    @torch.inference_mode()
    def decode_step_batch(
        self, states: Sequence[CodecState], codes: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[CodecState]]:
        """`decode_step` of several streams; those of equal shape run as one batch."""
        for each in codes:
            if each.ndim != 2:
                raise InputError(f"codes of a stream have the shape [codebook, frame], not {list(each.shape)}")
            self.check_codes(each[None])
        return self._run_grouped(self._decode, states, codes)

    def reference(self, sound: Sound) -> Tensor:
        """Codes of a reference recording of any rate and number of channels.  # [codebook, frame]"""
        samples = reference_samples(sound, self.config.sample_rate, self.config.channels)
        return self.encode(torch.from_numpy(samples.copy())[None])[0]

    def samples_of(self, interleaved: Tensor) -> Tensor:
        """De-interleave the output of the decoder's last patch.  # [stream, time, 1] → [stream, channel, sample]"""
        return interleaved[..., 0].unflatten(1, (-1, self.config.channels)).transpose(1, 2).float()

    def _encode(self, states: Sequence[CodecState], sounds: Tensor) -> tuple[Tensor, list[CodecState]]:
        interleaved = sounds.transpose(1, 2).flatten(1)[..., None].to(self.dtype)
        hidden, new_states = _run(self.encoder, states, interleaved, sounds.shape[-1] // self.config.frame_samples)
        return self.quantizer.encode(hidden), new_states

    def _decode(self, states: Sequence[CodecState], codes: Tensor) -> tuple[Tensor, list[CodecState]]:
        hidden = self.quantizer.decode(codes).to(self.dtype)
        interleaved, new_states = _run(self.decoder, states, hidden, codes.shape[-1])
        return self.samples_of(interleaved), new_states

    def _run_grouped(
        self, run: Run, states: Sequence[CodecState], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[CodecState]]:
        """Run streams with inputs of equal shape as one batch."""
        groups: dict[torch.Size, list[int]] = {}
        for index, each in enumerate(tensors):
            groups.setdefault(each.shape, []).append(index)
        results: dict[int, tuple[Tensor, CodecState]] = {}
        for members in groups.values():
            inputs = torch.stack([tensors[index] for index in members]).to(self.device)
            outputs, new_states = run([states[index] for index in members], inputs)
            results |= dict(zip(members, zip(outputs, new_states, strict=True), strict=True))
        ordered = [results[index] for index in range(len(tensors))]
        return [output for output, _ in ordered], [state for _, state in ordered]

    def _check_sound(self, sound: Tensor) -> None:
        if sound.ndim != 3 or sound.shape[1] != self.config.channels or not sound.is_floating_point():
            raise InputError(
                f"the codec takes float samples of {self.config.channels} channels, "
                f"not {sound.dtype} of shape {list(sound.shape)}"
            )
        if not torch.isfinite(sound).all():
            raise InputError("the sound has NaN or infinite samples")

    def check_codes(self, codes: Tensor) -> None:
        """Raise `InputError` for invalid codes.  # [stream, codebook, frame]"""
        max_codebooks, entries = self.config.quantizer.num_quantizers, self.config.quantizer.codebook_size
        if codes.is_floating_point() or not 1 <= codes.shape[1] <= max_codebooks or codes.shape[2] == 0:
            raise InputError(
                f"the codec takes integer codes of 1 to {max_codebooks} codebooks in one or more frames, "
                f"not {codes.dtype} of shape {list(codes.shape)}"
            )
        low, high = (int(bound) for bound in codes.aminmax())
        if low < 0 or high >= entries:
            raise InputError(f"code {low if low < 0 else high} is not in 0…{entries - 1}")


def _chain(parts: Chain, patch: type[Patch], rate: float, is_decoder: bool) -> nn.ModuleList:
    """The modules of encoder or decoder; a stage's window is its duration in positions at its rate."""
    modules = nn.ModuleList()
    for part in parts:
        if isinstance(part, int):
            rate = rate * part if is_decoder else rate / part
            modules.append(patch(part))
        else:
            modules.append(CodecStage(part, round(part.context_duration * rate)))
    return modules


def _initial_state(chain: nn.ModuleList) -> CodecState:
    return CodecState(tuple(module.initial_state() for module in chain if isinstance(module, CodecStage)))


def _run(chain: nn.ModuleList, states: Sequence[CodecState], x: Tensor, frames: int) -> tuple[Tensor, list[CodecState]]:
    """Step several streams through a chain.  # [stream, time, channel]"""
    caches_by_stage = zip(*(state.caches for state in states), strict=True)
    new_caches: list[list[StreamCache]] = []
    for module in chain:
        if isinstance(module, CodecStage):
            x, caches = module.step(next(caches_by_stage), x)
            new_caches.append(caches)
        else:
            x = module(x)
    by_stream = zip(*new_caches, strict=True)
    return x, [CodecState(caches, state.frames + frames) for caches, state in zip(by_stream, states, strict=True)]
