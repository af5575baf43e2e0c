"""MOSS-Audio-Tokenizer-Nano as three ONNX graphs, with the names and shapes of the published ONNX folder.

Windows of the streaming graph have a fixed size; a position of −1 marks an empty slot.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.export.onnx_graph import OnnxExport, StreamCheck
from vivavoce.models.moss_audio_tokenizer.model import CodecLayer, CodecStage, MossAudioTokenizerNano
from vivavoce.nn.attention import rotate_pairs, rotation

CODE_TOLERANCE = 0.02  # share of codes that may differ, as two may be equally near
SOUND_TOLERANCE = 1e-3
STREAMED_FRAMES = (2, 1, 3, 1, 1)  # frames of each call in the streaming check


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """# [batch, new, head, dim], [batch, row, head, dim] twice, bool [batch, new, row] → [batch, new, head · dim]"""
    scores = (queries * queries.shape[-1] ** -0.5).transpose(1, 2) @ keys.permute(0, 2, 3, 1)
    probabilities = torch.where(visible[:, None], scores, torch.finfo(scores.dtype).min).softmax(-1)
    return (probabilities @ values.transpose(1, 2)).transpose(1, 2).flatten(2)


def rotated_qkv(packed: Tensor, heads: int, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values.  # [batch, new, 3 · head · dim], turns [batch, new, dim / 2]"""
    parts = packed.unflatten(-1, (3 * heads, -1))
    query, key = rotate_pairs(parts[:, :, : 2 * heads], *angles).split(heads, dim=2)
    return query, key, parts[:, :, 2 * heads :]


def _run_layer(
    layer: nn.Module, x: Tensor, angles: tuple[Tensor, Tensor], visible: Tensor, past: tuple[Tensor, ...]
) -> Any:
    """A codec layer over explicit keys and values.  # x [batch, time, d_model], past [batch, head, slot, dim]"""
    assert isinstance(layer, CodecLayer)
    attention = layer.self_attn
    query, key, value = rotated_qkv(attention.in_proj(layer.norm1(x)), attention.heads, angles)
    if past:
        key = torch.cat([past[0].transpose(1, 2), key], dim=1)
        value = torch.cat([past[1].transpose(1, 2), value], dim=1)
    x = x + layer.layer_scale_1(attention.out_proj(attend(query, key, value, visible)))
    return x + layer.layer_scale_2(layer.ffn(layer.norm2(x))), key, value


class CodecChain(nn.Module):
    """Encoder or decoder of the codec over a whole sequence."""

    def __init__(self, codec: MossAudioTokenizerNano, is_decoder: bool) -> None:
        super().__init__()
        self.codec = codec
        self.chain = codec.decoder if is_decoder else codec.encoder

    def run_chain(self, x: Tensor) -> Tensor:
        """# [batch, time, channel]"""
        for module in self.chain:
            x = self.stage(module, x) if isinstance(module, CodecStage) else module(x)
        return x

    def stage(self, stage: CodecStage, x: Tensor) -> Tensor:
        """A windowed transformer stage over the whole sequence."""
        positions = torch.arange(x.shape[1], device=x.device)
        distance = positions[:, None] - positions
        visible = ((distance >= 0) & (distance < stage.window))[None]
        angles = _angles(stage, positions[None])
        x = stage.input_proj(x)
        for layer in stage.transformer.layers:
            x, _, _ = _run_layer(layer, x, angles, visible, ())
        projected: Tensor = stage.output_proj(x)
        return projected


def _angles(stage: CodecStage, positions: Tensor) -> tuple[Tensor, Tensor]:
    head_dim = stage.config.d_model // stage.config.num_heads
    return rotation(positions, head_dim, stage.config.max_period)


class Encode(CodecChain):
    """Sound to codes."""

    def __init__(self, codec: MossAudioTokenizerNano) -> None:
        super().__init__(codec, is_decoder=False)

    def forward(self, waveform: Tensor, input_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """# [batch, 2, sample], [batch] → [batch, frame, codebook], [batch]"""
        hidden = self.run_chain(waveform.transpose(1, 2).flatten(1)[..., None])
        codes = self.codec.quantizer.encode(hidden).transpose(1, 2)
        return codes.to(torch.int32), (input_lengths // self.codec.config.frame_samples).to(torch.int32)


class DecodeFull(CodecChain):
    """Codes to sound."""

    def __init__(self, codec: MossAudioTokenizerNano) -> None:
        super().__init__(codec, is_decoder=True)

    def forward(self, audio_codes: Tensor, audio_code_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """# [batch, frame, codebook], [batch] → [batch, 2, sample], [batch]"""
        sound = self.run_chain(self.codec.quantizer.decode(audio_codes.long().transpose(1, 2)))
        return _split(sound, self.codec), (audio_code_lengths * self.codec.config.frame_samples).to(torch.int32)


def _split(interleaved: Tensor, codec: MossAudioTokenizerNano) -> Tensor:
    """# [batch, 2 · sample, 1] → [batch, 2, sample]"""
    return interleaved[..., 0].unflatten(1, (-1, codec.config.channels)).transpose(1, 2)


class CodecDecodeStep(CodecChain):
    """The next frames of a stream, with its windows as inputs and outputs."""

    def __init__(self, codec: MossAudioTokenizerNano) -> None:
        super().__init__(codec, is_decoder=True)

    def forward(self, audio_codes: Tensor, audio_code_lengths: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """State: one offset per stage, then offset, keys, values and positions of each layer."""
        stages = [module for module in self.chain if isinstance(module, CodecStage)]
        offsets, layers = state[: len(stages)], state[len(stages) :]
        next_offsets, next_layers = list[Tensor](), list[Tensor]()
        x = self.codec.quantizer.decode(audio_codes.long().transpose(1, 2))
        number = 0
        for module in self.chain:
            if not isinstance(module, CodecStage):
                x = module(x)
                continue
            offset = offsets[len(next_offsets)]
            positions = offset[:, None] + torch.arange(x.shape[1], device=x.device, dtype=offset.dtype)
            next_offsets.append(offset + x.shape[1])
            angles = _angles(module, positions)
            x = module.input_proj(x)
            for layer in module.transformer.layers:
                layer_offset, keys, values, cached_positions = layers[4 * number : 4 * number + 4]
                all_positions = torch.cat([cached_positions, positions], dim=1)
                distance = positions[:, :, None] - all_positions[:, None]
                visible = (all_positions[:, None] >= 0) & (distance >= 0) & (distance < module.window)
                x, new_keys, new_values = _run_layer(layer, x, angles, visible, (keys, values))
                window = slice(positions.shape[1], None)
                next_layers += [
                    layer_offset + positions.shape[1],
                    new_keys[:, window].transpose(1, 2),
                    new_values[:, window].transpose(1, 2),
                    all_positions[:, window],
                ]
                number += 1
            x = module.output_proj(x)
        lengths = (audio_code_lengths * self.codec.config.frame_samples).to(torch.int32)
        return _split(x, self.codec), lengths, *next_offsets, *next_layers


def codec_graphs(codec: MossAudioTokenizerNano) -> Iterator[OnnxExport]:
    """The three graphs of the codec."""
    config, noise = codec.config, torch.Generator().manual_seed(0)
    books, entries = config.quantizer.num_quantizers, config.quantizer.codebook_size

    def sound(frames: int) -> dict[str, Tensor]:
        samples = frames * config.frame_samples
        return {
            "waveform": 0.1 * torch.randn(1, config.channels, samples, generator=noise),
            "input_lengths": torch.tensor([samples], dtype=torch.int32),
        }

    def codes(frames: int) -> dict[str, Tensor]:
        return {
            "audio_codes": torch.randint(entries, (1, frames, books), generator=noise).int(),
            "audio_code_lengths": torch.tensor([frames], dtype=torch.int32),
        }

    yield OnnxExport(
        "moss_audio_tokenizer_encode", Encode(codec), sound(4), {"waveform": {2: f"{config.frame_samples}*frame"}},
        ("audio_codes", "audio_code_lengths"), (sound(7),), CODE_TOLERANCE,
    )  # fmt: skip
    yield OnnxExport(
        "moss_audio_tokenizer_decode_full", DecodeFull(codec), codes(4), {"audio_codes": {1: "frame"}},
        ("audio", "audio_lengths"), (codes(9),), SOUND_TOLERANCE,
    )  # fmt: skip
    state = empty_state(codec)
    outputs = {name: f"{name}_out" for name in state}
    first, *following = (codes(frames) for frames in STREAMED_FRAMES)
    yield OnnxExport(
        "moss_audio_tokenizer_decode_step", CodecDecodeStep(codec), codes(3) | state, {"audio_codes": {1: "frame"}},
        ("audio", "audio_lengths", *outputs.values()), (), SOUND_TOLERANCE,
        StreamCheck(first | state, tuple(following), outputs),
    )  # fmt: skip


def empty_state(codec: MossAudioTokenizerNano) -> dict[str, Tensor]:
    """The streaming decoder's state before the first frame, by the published names; no two entries share a tensor."""
    stages = [module for module in codec.decoder if isinstance(module, CodecStage)]
    state = {f"transformer_offset_{number}": torch.zeros(1, dtype=torch.int32) for number in range(len(stages))}
    layers = [stage for stage in stages for _ in range(stage.config.num_layers)]
    for number, stage in enumerate(layers):
        heads = stage.config.num_heads
        size = (1, heads, stage.window, stage.config.d_model // heads)
        state |= {
            f"attn_offset_{number}": torch.zeros(1, dtype=torch.int32),
            f"attn_cached_keys_{number}": torch.zeros(size),
            f"attn_cached_values_{number}": torch.zeros(size),
            f"attn_cached_positions_{number}": torch.full((1, stage.window), -1, dtype=torch.int32),
        }
    return state
